"""Training under a control: over a frozen base or with it, from files to files, and what does not fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import Tensor

import visgen
from visgen import checkpoint, run_files
from visgen.config import UserError, build, plugin_config
from visgen.controls.canny import Config as CannyConfig
from visgen.data import to_batch
from visgen.data._mapped import Mapped
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise
from visgen.objectives._control import Maps
from visgen.objectives._sizes import resized, size_of_step
from visgen.samplers.ar import AR
from visgen.samplers.ar import Config as ARConfig
from visgen.train import main as program

SHARED = """--data.kind synthetic --data.image-size 16 --log.no-wandb --loop.workers 0 --loop.precision fp32
    --loop.batch 8 --loop.preview-every 0 --loop.log-every 1"""
TOKENIZER = """--objective.kind vq --objective.tokenizer.image-size 16 --objective.tokenizer.width 8
    --objective.tokenizer.multipliers 1 2 2 --objective.tokenizer.res-blocks 1 --objective.tokenizer.z-channels 8
    --objective.tokenizer.norm-groups 4 --objective.tokenizer.quantizer.codes 16 --objective.losses.adversarial 0"""
MODEL = """--objective.kind next_token --objective.model.grid 1 4 4 --objective.model.vocab 16
    --objective.model.backbone.layers 3 --objective.model.backbone.heads 2 --objective.model.backbone.width 16
    --objective.model.condition.classes 4"""
ENCODER = "--objective.model.control.encoder.{}"
CONTROL = """--objective.model.control.kind canny --objective.model.control.encoder.width 16
    --objective.model.control.encoder.layers 1 --objective.model.control.encoder.heads 2
    --objective.model.control.encoder.patch 4 --objective.model.control.encoder.side 4"""


def train(out: Path, flags: str, *more: str) -> Path:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    program.train([*SHARED.split(), *flags.split(), "--loop.out", str(out), *more])
    return out


def step_of(run: Path, step: int = 2) -> Path:
    return run / run_files.step_name(step) / run_files.WEIGHTS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, a plain model of it saved as bf16, and a control over that."""
    root = tmp_path_factory.mktemp("runs")
    train(root / "vq", TOKENIZER, "--loop.steps", "1")
    train(
        root / "base", MODEL, "--objective.tokenizer", str(root / "vq"), "--loop.steps", "3", "--ema.save-dtype", "bf16"
    )
    only = ("--objective.init", str(root / "base"), "--objective.train", "control_only", "--loop.steps", "2")
    train(
        root / "control",
        f"{MODEL} {CONTROL}",
        "--objective.tokenizer",
        str(root / "vq"),
        *only,
        "--loop.save-every",
        "1",
    )
    return root


def batch(rows: int = 4) -> dict[str, Tensor]:
    maps = torch.rand(rows, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"label": torch.arange(rows) % 4, "map": maps}


def tokens_of(model: Any, asked: dict[str, Tensor]) -> Tensor:
    engine = Engine(model)
    engine.begin(asked)
    return engine.run(AR(ARConfig()), Noise(torch.arange(len(asked["label"])))).tokens


def test_the_file_holds_the_control_alone_and_names_its_base(runs: Path) -> None:
    names = set(load_file(step_of(runs / "control")))
    assert names and all(name.startswith("control.") for name in names)
    facts, base = checkpoint.read_metadata(step_of(runs / "control")), checkpoint.load_model(runs / "base")
    assert facts["part"] == "control" and facts["base_path"] == str(runs / "base")
    assert facts["base"] == checkpoint.weights_hash(base)


def test_null_control_is_the_shipped_base_bit_for_bit(runs: Path) -> None:
    base, model = checkpoint.load_model(runs / "base"), checkpoint.load_model(runs / "control")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in base.state_dict().items())
    tokens, asked = torch.randint(16, (4, 16)), batch()
    plain = {"label": asked["label"]}
    assert torch.equal(model.loss(tokens, plain, None), base.loss(tokens, plain, None))
    every = torch.ones(4, dtype=torch.bool)
    assert torch.equal(model.loss(tokens, asked, None, every), base.loss(tokens, plain, None))
    assert torch.equal(tokens_of(model, plain), tokens_of(base, plain))
    assert not torch.equal(model.loss(tokens, asked, None), base.loss(tokens, plain, None)), "it has learned something"


def test_the_export_of_a_frozen_base_never_moves(runs: Path, tmp_path: Path) -> None:
    """Not even in the average, which previews and held-out losses are taken of."""
    objective = build(program_config(runs).objective)
    objective.setup(build(program_config(runs).data, "train"))
    model = objective.exported().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all(n.startswith("control.") for n in trained)
    from visgen.train.ema import Ema

    average = Ema(model, 0.9)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for step in range(4):
        given = {**batch(), "tokens": torch.randint(16, (4, 16))}
        loss, _ = objective.loss("model", objective.nets, given, step, torch.Generator().manual_seed(step))
        loss.backward()
        without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not without, without
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    for state in (model.state_dict(), average.module.state_dict()):
        moved = {k for k in state if not torch.equal(state[k], before[k])}
        assert moved and all(k.startswith("control.") for k in moved)


def program_config(runs: Path, *more: str) -> Any:
    from visgen.config import load

    flags = f"{SHARED} {MODEL} {CONTROL} --objective.train control_only --objective.init {runs / 'base'}"
    return load(program.TrainConfig, [*flags.split(), "--objective.tokenizer", str(runs / "vq"), *more])


def test_a_run_goes_on_exactly(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "control", tmp_path / "again", ignore=shutil.ignore_patterns("step_0000002"))
    only = ("--objective.init", str(runs / "base"), "--objective.train", "control_only", "--loop.steps", "2")
    train(
        tmp_path / "again",
        f"{MODEL} {CONTROL}",
        "--objective.tokenizer",
        str(runs / "vq"),
        *only,
        "--loop.save-every",
        "1",
    )
    assert step_of(tmp_path / "again").read_bytes() == step_of(runs / "control").read_bytes()


def test_the_base_is_found_beside_or_named_and_another_one_is_refused(runs: Path, tmp_path: Path) -> None:
    for name in ("base", "control"):
        shutil.copytree(runs / name, tmp_path / name)
    (tmp_path / "control" / run_files.TOKENIZER).unlink()
    generator = visgen.load(tmp_path / "control", device="cpu")
    assert torch.equal(generator.sample([0, 1]).tokens, visgen.load(runs / "base", device="cpu").sample([0, 1]).tokens)
    other = train(tmp_path / "other", MODEL, "--objective.tokenizer", str(runs / "vq"), "--loop.steps", "1")
    with pytest.raises(
        UserError, match=r"holds control alone, over the weights of .*other is [0-9a-f]{12}: pass that run as"
    ):
        visgen.load(tmp_path / "control", device="cpu", base=other)
    assert visgen.load(tmp_path / "control", device="cpu", base=runs / "base").meta["step"] == 2
    with pytest.raises(UserError, match="is a whole model, which has no base"):
        checkpoint.load_model(runs / "base", base=runs / "base")
    with pytest.raises(UserError, match="holds the control of a model alone"):
        checkpoint.load_module(step_of(runs / "control"))


def test_the_whole_model_under_control_and_with_a_prefix(runs: Path, tmp_path: Path) -> None:
    start = ("--objective.init", str(runs / "base"), "--objective.tokenizer", str(runs / "vq"), "--loop.steps", "2")
    train(tmp_path / "all", f"{MODEL} {CONTROL}", *start, "--objective.model.control.dropout", "0.5")
    prefill = CONTROL.replace("model.control", "model.condition.control").replace(
        "--objective.model.condition.control.kind",
        "--objective.model.condition.kind prefill --objective.model.condition.grid 1 4 4 "
        "--objective.model.condition.classes 4 --objective.model.condition.control.kind",
    )
    plain = MODEL.replace("--objective.model.condition.classes 4", "")
    train(tmp_path / "prefix", f"{plain} {prefill}", *start)
    base = checkpoint.load_model(runs / "base").state_dict()
    for name in ("all", "prefix"):
        model = checkpoint.load_model(tmp_path / name)
        moved = [k for k, v in base.items() if not torch.equal(model.state_dict()[k], v)]
        assert len(moved) == len(base), "all of the base trains"
        assert (
            model.state_dict()["backbone.tok_embeddings.weight"] - base["backbone.tok_embeddings.weight"]
        ).abs().max() < 0.02
        first, second = (tokens_of(model, {**batch(), "map": batch()["map"].flip(dim)}) for dim in (-1, -2))
        assert first.shape == second.shape == (4, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--objective.train control_only", "trains a control over a base: set objective.init"),
        (
            "{plain} --objective.train control_only --objective.init x",
            "set objective.model.control",
        ),
        (
            "--objective.model.backbone.rope-base 99.0 --objective.init {base}",
            r"rope_base 10000.0 instead of 99.0\); give objective",
        ),
        ("--objective.model.backbone.layers 4 --objective.init {base}", "layers 3 instead of 4"),
        ("--objective.model.condition.classes 5 --objective.init {base}", "the data has 4 classes"),
        ("--objective.init {base}/none", "none does not exist"),
        ("--objective.model.control.kind depth", "control depth needs a depth network"),
        ("--objective.model.control.kind softedge", "control softedge: needs weights"),
        ("--objective.model.control.kind hed", "control hed has given maps only"),
        ("--objective.model.control.encoder.weights x.pth", "belong to a ViT of timm"),
        ("--objective.model.control.low 300", "control.low 300 must be at most"),
        ("--objective.model.control.encoder.heads 3", "width 16 must be a multiple of its heads 3"),
    ],
)
def test_what_does_not_fit_is_refused(runs: Path, tmp_path: Path, flags: str, message: str) -> None:
    model = MODEL if "{plain}" in flags else f"{MODEL} {CONTROL}"
    given = flags.format(base=runs / "base", plain="").split()
    with pytest.raises(UserError, match=message):
        train(tmp_path / "x", model, "--objective.tokenizer", str(runs / "vq"), "--loop.steps", "1", *given)
    assert not (tmp_path / "x").exists()


# -------------------------------------------------------------------------------------------------------- maps


def test_maps_are_made_of_the_augmented_pixels_where_they_are_read() -> None:
    import numpy as np

    data = build(plugin_config("visgen.data", "synthetic", image_size=16), "train")
    canny = build(CannyConfig(low=20, high=40))
    mapped = Mapped(data, canny.extract)
    rng = lambda: np.random.default_rng(3)  # noqa: E731
    sample, plain = mapped.get(5, rng()), data.get(5, rng())
    assert torch.equal(torch.as_tensor(sample["pixels"]), torch.as_tensor(plain["pixels"]))
    wanted = canny.extract(torch.as_tensor(plain["pixels"])[None].float() / 127.5 - 1)[0]
    assert sample["map"].dtype == torch.uint8 and torch.equal(sample["map"] > 127, wanted > 0) and sample["map"].any()
    many = mapped.get_many([5, 7])
    assert torch.equal(many["map"][1], mapped.get(7)["map"]) and len(mapped) == len(data)
    assert (mapped.classes, mapped.image_size, mapped.skipped) == (data.classes, data.image_size, 0)


class Constant:
    """An extractor of one grey."""

    in_worker = False

    def __init__(self, level: float) -> None:
        self.level = level

    def extract(self, pixels: Tensor) -> Tensor:
        return torch.full_like(pixels, self.level)


def test_two_kinds_share_the_rows() -> None:
    maps = Maps(CannyConfig())
    maps.kinds = {"a": Constant(0.25), "b": Constant(0.5)}  # type: ignore[dict-item]
    given: Any = {"pixels": torch.zeros(400, 1, 3, 4, 4)}
    drawn = maps.batch(given, torch.Generator().manual_seed(0))["map"][:, 0, 0, 0, 0]
    assert 150 < (drawn == 0.25).sum() < 250 and set(drawn.tolist()) == {0.25, 0.5}
    assert torch.equal(maps.batch(given, torch.Generator().manual_seed(0))["map"][:, 0, 0, 0, 0], drawn)
    assert maps.batch(given)["map"][:4, 0, 0, 0, 0].tolist() == [0.25, 0.5, 0.25, 0.5], "held-out rows in turn"
    read: Any = {**given, "map": torch.full_like(given["pixels"], 0.75)}
    assert set(maps.batch(read)["map"].unique().tolist()) == {0.75, 0.5}, "the first kind's are already there"


def test_cached_codes_have_no_maps(make_model: Callable[..., Any]) -> None:
    class Codes:
        grid = (1, 4, 4)
        config = plugin_config("visgen.data", "codes")

    with pytest.raises(UserError, match=r"'codes' gives cached codes.*canny maps are made; train on their source"):
        Maps(CannyConfig()).setup(Codes())  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------- many resolutions


def test_a_step_has_one_size_and_its_own_grid(runs: Path) -> None:
    sizes = ("--objective.sizes.sides", "8", "12", "16", "24", "--objective.sizes.most-tokens", "18")
    config = program_config(runs, *sizes, "--objective.model.condition.dropout", "0.5")
    objective = build(config.objective)
    data = build(config.data, "train")
    objective.setup(data)
    drop = torch.rand(3, generator=torch.Generator().manual_seed(1)) < 0.5
    assert drop.any() and not drop.all()
    assert objective.reading(data) is data, "maps are made of the resized images"
    every = {(h, w) for h in (8, 12, 16, 24) for w in (8, 12, 16, 24) if h * w // 16 <= 18}
    assert set(objective.sizes) == every and (24, 12) in every and (24, 16) not in every
    model, seen = objective.exported().eval(), set()
    samples = to_batch(data.get_many(range(3)), "cpu")
    for step in range(60):
        size = size_of_step(objective.sizes, step)
        loss, _ = objective.loss("model", objective.nets, samples, step, torch.Generator().manual_seed(1))
        if size in seen:
            continue
        seen.add(size)
        pixels = resized(samples["pixels"], size, step)
        assert pixels.shape == (3, 1, 3, *size)
        tokens = objective.frozen["tokenizer"].encode(pixels)
        maps = objective.maps.kinds["canny"].extract(pixels)
        made = model.at((1, size[0] // 4, size[1] // 4))
        given = {"label": samples["label"], "map": maps}
        assert torch.equal(loss, made.loss(tokens, given, drop).mean())  # type: ignore[arg-type]
        assert not torch.equal(loss, made.loss(tokens, given, ~drop).mean())  # type: ignore[arg-type]
    assert seen == every
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_crop_keeps_the_aspect_and_maps_their_values() -> None:
    columns = torch.arange(32.0).expand(1, 1, 3, 32, 32) / 31
    wide = resized(columns, (8, 16), 3)
    assert torch.allclose(wide[0, 0, 0].diff(dim=-1), torch.tensor(2 / 31), atol=2e-2), "twice as wide as high, whole"
    tall = resized(columns, (16, 8), 3)
    assert torch.allclose(tall[0, 0, 0, :, 1:-1].diff(dim=-1), torch.tensor(2 / 31), atol=2e-2)
    places = {float(resized(columns, (16, 8), step)[0, 0, 0, 0, 4]) for step in range(20)}
    assert len(places) > 5, "the place of the crop changes"
    edges = (columns > 0.5).float()
    assert set(resized(edges, (12, 20), 1, exact=True).unique().tolist()) == {0.0, 1.0}
    assert torch.equal(resized(columns, (32, 32), 5), columns)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--objective.sizes.sides 16 18", r"sizes\.sides has 18, which is no multiple of the tokenizer's stride 4"),
        ("--objective.sizes.sides 16 --objective.sizes.most-tokens 3", "most_tokens 3 is less than any size has"),
    ],
)
def test_sizes_that_cannot_be_are_refused(runs: Path, flags: str, message: str) -> None:
    config = program_config(runs, *flags.split())
    with pytest.raises(UserError, match=message):
        build(config.objective).setup(build(config.data, "train"))


def test_a_run_of_many_sizes(runs: Path, tmp_path: Path) -> None:
    only = ("--objective.init", str(runs / "base"), "--objective.train", "control_only", "--loop.steps", "4")
    sizes = ("--objective.sizes.sides", "8", "16", "24", "--loop.eval-every", "2", "--loop.eval-samples", "8")
    train(tmp_path / "x", f"{MODEL} {CONTROL}", "--objective.tokenizer", str(runs / "vq"), *only, *sizes)
    generator = visgen.load(tmp_path / "x", device="cpu")
    assert generator.sample([1], control=torch.zeros(1, 3, 24, 8), size=(24, 8)).pixels.shape == (1, 3, 24, 8)
