"""A model is sampled with the tokenizer that it was trained on, or not at all."""

import shutil

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import visgen
from visgen import checkpoint, run_files
from visgen.config import UserError
from visgen.train import main as program

SHARED = """--data.kind synthetic --data.image-size 16 --log.no-wandb --loop.workers 0 --loop.precision fp32
    --loop.steps 1 --loop.batch 4 --loop.preview-every 0"""
TOKENIZER = """--objective.kind vq --objective.tokenizer.image-size 16 --objective.tokenizer.width 8
    --objective.tokenizer.multipliers 1 2 --objective.tokenizer.res-blocks 1 --objective.tokenizer.z-channels 8
    --objective.tokenizer.norm-groups 4 --objective.tokenizer.quantizer.codes 16 --objective.losses.adversarial 0"""
MODEL = """--objective.kind next_token --objective.model.grid 1 8 8 --objective.model.vocab 16
    --objective.model.backbone.layers 1 --objective.model.backbone.heads 2 --objective.model.backbone.width 16
    --objective.model.condition.classes 4"""


def train(out, flags, *more):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    program.train([*SHARED.split(), *flags.split(), "--loop.out", str(out), *more])
    return out


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def runs(request, tmp_path_factory):
    """Two tokenizers of one shape, saved in a precision, and a model on the tokens of the first."""
    root = tmp_path_factory.mktemp(request.param)
    for seed in "01":
        train(root / f"vq{seed}", TOKENIZER, "--ema.save-dtype", request.param, "--loop.seed", seed)
    train(root / "ar", MODEL, "--objective.tokenizer", str(root / "vq0"), "--ema.save-dtype", request.param)
    return root


def weights(runs, name):
    return runs / name / "step_0000001" / run_files.WEIGHTS


def test_the_kept_tokenizer_is_the_recorded_one(runs):
    said = checkpoint.read_metadata(weights(runs, "ar"))["tokenizer"]
    assert said == checkpoint.tokenizer_hash(checkpoint.load_tokenizer(runs / "vq0"))
    assert visgen.load(runs / "ar", device="cpu").meta["tokenizer"] == said[:12]


def test_the_tokenizer_may_be_copied_in_the_precision_of_its_own_run(runs, tmp_path):
    run = shutil.copytree(runs / "ar", tmp_path / "ar")
    shutil.copy(weights(runs, "vq0"), run / run_files.TOKENIZER)
    dtypes = {t.dtype for t in load_file(run / run_files.TOKENIZER).values() if t.is_floating_point()}
    assert (torch.bfloat16 in dtypes) == ("bf16" in runs.name)
    assert visgen.load(run, device="cpu").sample([0]).pixels.shape == (1, 3, 16, 16)


def test_another_tokenizer_of_the_same_shape_is_refused(runs, tmp_path):
    run = shutil.copytree(runs / "ar", tmp_path / "ar")
    shutil.copy(weights(runs, "vq1"), run / run_files.TOKENIZER)
    hashes = [checkpoint.tokenizer_hash(checkpoint.load_tokenizer(runs / f"vq{i}"))[:12] for i in (1, 0)]
    with pytest.raises(UserError) as found:
        visgen.load(run, device="cpu")
    assert f"({hashes[0]}) is not the tokenizer" in str(found.value) and f"({hashes[1]})" in str(found.value)
    assert "copy that one here" in str(found.value) and "\n" not in str(found.value)

    path = run / "step_0000001" / run_files.WEIGHTS  # a file from before the hash was recorded says nothing
    model, info = checkpoint.load_model(path), checkpoint.read_metadata(path)
    checkpoint.save_module(path, model, model.config, extra_metadata={"step": info["step"]})
    assert visgen.load(run, device="cpu").meta["tokenizer"] == hashes[0]


@pytest.mark.parametrize("place", ["its directory", "another"])
def test_a_model_goes_on_with_its_own_tokenizer_alone(runs, tmp_path, place):
    tokenizer = shutil.copytree(runs / "vq0", tmp_path / "vq")
    first = train(tmp_path / "ar", MODEL, "--objective.tokenizer", str(tokenizer))

    def go_on():
        flags = (MODEL, "--objective.tokenizer", str(tokenizer))
        if place == "its directory":
            return train(first, *flags)
        return train(tmp_path / "on", *flags, "--loop.steps", "2", "--loop.resume", str(first))

    assert len(run_files.find_steps(go_on())) == 1
    shutil.rmtree(tmp_path / "on", ignore_errors=True)
    shutil.rmtree(tokenizer)
    shutil.copytree(runs / "vq1", tokenizer)
    hashes = [checkpoint.tokenizer_hash(checkpoint.load_tokenizer(runs / f"vq{i}"))[:12] for i in (0, 1)]
    with pytest.raises(UserError) as found:
        go_on()
    assert f"trained on tokenizer {hashes[0]}, which is not the tokenizer of this config ({hashes[1]})" in str(
        found.value
    )
    assert not (tmp_path / "on" / run_files.TOKENIZER).exists()


def test_an_objective_does_not_continue_another(runs, tmp_path):
    for out, more in ((runs / "vq0", ()), (tmp_path / "out", ("--loop.resume", str(runs / "vq0")))):
        with pytest.raises(UserError) as found:
            train(out, MODEL, "--objective.tokenizer", str(runs / "vq0"), *more)
        said = str(found.value)
        assert "of objective vq, this config trains next_token; " in said and len(said) < 300 and "remove" not in said
