"""Every objective on two processes: equal weights on both, and the loss curve of one process.

Dropout is 0; noise belongs to samples (`nn/keyed.py`). What is left is the order of float32 sums, so losses agree to
1e-4 of their value over the first steps, and weights to 1e-4 with a learning rate of 1e-3.
"""

from types import SimpleNamespace

import every
import pytest
import torch
import yaml
from pair import launch_pair
from safetensors.torch import load_file
from toy import HERE, metrics

from visgen import checkpoint
from visgen.config import UserError, build, load
from visgen.train.loop import prepare
from visgen.train.main import TrainConfig

TRUNK = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16}
STILL = {"token_dropout": 0.0, "residual_dropout": 0.0, "mlp_dropout": 0.0}
LABEL = {"kind": "label", "classes": 3, "dropout": 0.3}
PLAIN = {"kind": "label", "classes": 3, "dropout": 0.0}
HEAD = {"kind": "diffusion", "layers": 2, "width": 24}
STUDENT = {"grid": [1, 4, 4], "vocab": 16, "condition": PLAIN}
LOOP = {"steps": 4, "batch": 8, "precision": "fp32", "log_every": 1, "save_every": 2, "workers": 0, "preview_every": 0}
SHARDED = ("acdit", "masked", "next_token")
LOSS = "model/loss"
RATIOS = ("_t0", "_t250", "_t500", "_t750", "nats_per_token")  # logged means over what a process has, not over rows


def objectives(teacher, kl, runs):
    """The objective of every file of the package, and of next tokens that are vectors."""
    of, kl_path = {"teacher": str(teacher)}, str(runs / "kl.safetensors")
    conv = {"image_size": 8, "width": 8, "multipliers": [1, 2], "res_blocks": 1, "z_channels": 8, "norm_groups": 4}
    ar = {"kind": "ar", **TRUNK, **STILL}
    blocks = {"kind": "acdit", "block": [1, 2, 2], "layers": 2, "heads": 2, "width": 32}
    mar = {"kind": "mar", "layers": 2, "heads": 2, "width": 32, "buffer": 3, "dropout": 0}
    one_step = {"kind": "one_step", **TRUNK, **STILL, "channels": 3, "second": 6, "regress": True}
    flow = {"kind": "flow_step", **TRUNK, **STILL, "channels": 3}
    distilled = {**STUDENT, "backbone": flow, "head": {**HEAD, "predicts": "velocity"}}

    def vectors(backbone, head):
        return {"grid": [1, 4, 4], "channels": kl.channels, "condition": LABEL, "backbone": backbone, "head": head}

    return {
        "acdit": {"model": vectors(blocks, {"kind": "denoiser"}), "tokenizer": kl_path, "times": "logit_normal"},
        "dd1": {**of, "model": {**STUDENT, "backbone": one_step}, "regression": 0.5},
        "dd2": {**of, "model": distilled, "critic_steps": 2, "start": str(runs / "stage1")},
        "dd2_teacher": {
            **of,
            "model": {**STUDENT, "condition": LABEL, "backbone": {**ar, "code_channels": 3}},
            "fit_steps": 2,
        },
        "dd2_tuning": {**of, "model": distilled},
        "masked": {"model": vectors(mar, HEAD), "tokenizer": kl_path},
        "next_token": {
            "model": {**STUDENT, "condition": LABEL, "backbone": ar},
            "tokenizer": str(teacher / "tokenizer.safetensors"),
        },
        "vectors": {
            "kind": "next_token",
            "model": vectors({**ar, "continuous": True, "order": "random"}, HEAD),
            "tokenizer": kl_path,
            "preview": {"sampler": {"kind": "causal"}},
        },
        "vq": {
            "tokenizer": {"kind": "conv_vq", **conv, "quantizer": {"kind": "vq", "codes": 16, "channels": 4}},
            "losses": {"perceptual": 0, "adversarial": 0.1},
            "discriminator": {"width": 8, "layers": 1},
            "discriminator_start": 1,
            "gan_start": 2,
        },
    }


@pytest.fixture(scope="module")
def plans(tmp_path_factory, teacher_dir, small):
    """Folders of YAMLs: `all`, and `shards` of what may be sharded."""
    folder = tmp_path_factory.mktemp("plans")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kl = build(small("tokenizers", "conv_kl", image_size=8, patch=1))
    checkpoint.save_module(folder / "kl.safetensors", kl, kl.config)
    for kind, values in objectives(teacher_dir, kl, folder).items():
        plan = {
            "objective": {"kind": kind, **values},
            "data": {"kind": "synthetic", "n": 24, "n_held_out": 8, "image_size": 8, "classes": 3},
            "optim": {"lr": 1e-3},
            "log": {"wandb": False},
            "loop": LOOP,
        }
        for name in ("all", *(["shards"] if kind in SHARDED else [])):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{kind}.yaml").write_text(yaml.safe_dump(plan))
    stage = yaml.safe_load((folder / "all" / "dd2_tuning.yaml").read_text())
    (folder / "first").mkdir()
    (folder / "first" / "stage1.yaml").write_text(yaml.safe_dump(stage))
    every.run_all(folder / "first", folder)
    return folder


@pytest.fixture(scope="module")
def one(plans):
    (plans / "one").mkdir()
    every.run_all(plans / "all", plans / "one")
    return plans / "one"


@pytest.fixture(scope="module")
def two(plans):
    (plans / "two").mkdir()
    launch_pair(HERE / "every.py", str(plans / "all"), str(plans / "two"))
    return plans / "two"


KINDS = sorted(objectives(HERE, SimpleNamespace(channels=4), HERE))


def test_none_is_forgotten():
    kinds = {p.stem for p in (HERE.parents[1] / "visgen" / "objectives").glob("[!_]*.py")}
    assert kinds | {"vectors"} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one(one, two, kind):
    first, second, alone = ((of / f"{kind}.{rank}").read_text() for of, rank in ((two, 0), (two, 1), (one, 0)))
    assert first == second and len(set(first.split())) == 8 == len(alone.split())
    curves = [
        [{k: v for k, v in line.items() if not k.endswith(RATIOS)} for line in metrics(r / kind)] for r in (one, two)
    ]
    assert len(curves[0]) == 4 and any(k.endswith("/loss") for k in curves[0][0])
    for a, b in zip(*curves, strict=True):
        assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    a, b = (load_file(r / kind / "step_0000004" / "model.safetensors") for r in (one, two))
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name].float(), b[name].float(), atol=1e-4), name


@pytest.fixture(scope="module")
def sharded(plans, one):
    """With runs that go on from those of one process, named *_on."""
    (plans / "sharded").mkdir()
    for kind in SHARDED:
        plan = yaml.safe_load((plans / "shards" / f"{kind}.yaml").read_text())
        plan["loop"] |= {"resume": str(one / kind / "step_0000002"), "recompute": True}
        (plans / "shards" / f"{kind}_on.yaml").write_text(yaml.safe_dump(plan))
    launch_pair(HERE / "every.py", str(plans / "shards"), str(plans / "sharded"), config="cpu2_fsdp.yaml")
    return plans / "sharded"


@pytest.mark.parametrize("kind", SHARDED)
def test_sharded_weights_train_alike(one, sharded, kind):
    assert (sharded / f"{kind}.sharded").exists() and not (one / f"{kind}.sharded").exists()
    first, second = ((sharded / f"{kind}.{rank}").read_text() for rank in (0, 1))
    assert first == second and len(set(first.split())) == 8
    for a, b in zip(metrics(one / kind), metrics(sharded / kind), strict=True):
        assert a[LOSS] == pytest.approx(b[LOSS], rel=1e-4)
        assert a["model/grad_norm"] == pytest.approx(b["model/grad_norm"], rel=1e-3)
    for name in ("model.safetensors", "state/model.safetensors"):
        a, b = (load_file(r / kind / "step_0000004" / name) for r in (one, sharded))
        assert a.keys() == b.keys() and all(torch.allclose(a[n].float(), b[n].float(), atol=1e-4) for n in a)


@pytest.mark.parametrize("kind", SHARDED)
def test_a_sharded_checkpoint_goes_on_in_one_process(one, sharded, plans, tmp_path, kind):
    plan = yaml.safe_load((plans / "shards" / f"{kind}.yaml").read_text())
    plan["loop"]["resume"] = str(sharded / kind / "step_0000002")
    (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(plan))
    every.run_all(tmp_path, tmp_path)
    for a, b in zip(metrics(one / kind)[2:], metrics(tmp_path / kind), strict=True):
        assert a["step"] == b["step"] and a[LOSS] == pytest.approx(b[LOSS], rel=1e-4)
    a, b = (load_file(r / kind / "step_0000004" / "model.safetensors") for r in (one, tmp_path))
    assert all(torch.allclose(a[n].float(), b[n].float(), atol=1e-4) for n in a)
    assert checkpoint.load_model(sharded / kind).tokens == 16


@pytest.mark.parametrize("kind", SHARDED)
def test_a_checkpoint_of_one_process_goes_on_sharded(one, sharded, kind):
    """Blocks are computed again in the backward pass here, which changes nothing."""
    for a, b in zip(metrics(one / kind)[2:], metrics(sharded / f"{kind}_on"), strict=True):
        assert a["step"] == b["step"] and a[LOSS] == pytest.approx(b[LOSS], rel=1e-4)
    for name in ("model.safetensors", "state/model.safetensors"):
        a, b = (load_file(r / "step_0000004" / name) for r in (one / kind, sharded / f"{kind}_on"))
        assert all(torch.allclose(a[n].float(), b[n].float(), atol=1e-4) for n in a)


def altered(plans, folder, kind, **loop):
    """The curve of `kind` under other settings of the loop, in this process."""
    folder.mkdir()
    plan = yaml.safe_load((plans / "all" / f"{kind}.yaml").read_text())
    plan["loop"] |= loop
    (folder / f"{kind}.yaml").write_text(yaml.safe_dump(plan))
    every.run_all(folder, folder)
    return [m[LOSS] for m in metrics(folder / kind)]


@pytest.mark.parametrize("kind", SHARDED)
def test_recomputed_blocks_and_micro_batches_change_nothing(one, plans, tmp_path, kind):
    curve = [m[LOSS] for m in metrics(one / kind)]
    assert altered(plans, tmp_path / "a", kind, recompute=True) == pytest.approx(curve, rel=1e-5)
    assert altered(plans, tmp_path / "b", kind, accumulation=4) == pytest.approx(curve, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "sampler", "said"),
    [
        ("acdit", {"kind": "blockwise", "frames": 3}, r"sampler\.frames 3 are not whole blocks"),
        ("masked", {"kind": "ar"}, "sampler ar is not for this model"),
        ("next_token", {"kind": "one_step"}, "sampler one_step is not for this model"),
        ("dd1", {"kind": "ar"}, "sampler ar is not for this model"),
    ],
)
def test_previews_that_do_not_fit_are_refused_before_the_first_step(plans, tmp_path, kind, sampler, said):
    plan = yaml.safe_load((plans / "all" / f"{kind}.yaml").read_text())
    plan["objective"]["preview"] = {"sampler": sampler}
    plan["loop"]["preview_every"] = 4
    (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(UserError, match=f"objective.preview does not fit: {said}"):
        every.run_all(tmp_path, tmp_path)
    assert not (tmp_path / f"{kind}.0").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARDED)
def test_compiled_blocks_change_nothing(one, plans, tmp_path, kind):
    curve = [m[LOSS] for m in metrics(one / kind)]
    assert altered(plans, tmp_path / "a", kind, compile=True) == pytest.approx(curve, rel=1e-4)
    assert altered(plans, tmp_path / "b", kind, compile=True, recompute=True) == pytest.approx(curve, rel=1e-4)


@pytest.mark.slow
def test_sharded_bf16_compiled_and_recomputed(one, plans, tmp_path):
    """All that a large model is trained with, at once, against float32 on one process."""
    for kind in SHARDED:
        plan = yaml.safe_load((plans / "all" / f"{kind}.yaml").read_text())
        plan["loop"] |= {"compile": True, "recompute": True, "precision": "bf16", "accumulation": 2}
        (tmp_path / f"{kind}.yaml").write_text(yaml.safe_dump(plan))
    launch_pair(HERE / "every.py", str(tmp_path), str(tmp_path), config="cpu2_fsdp.yaml")
    for kind in SHARDED:
        curves = [[m[LOSS] for m in metrics(r / kind)] for r in (one, tmp_path)]
        assert curves[0] == pytest.approx(curves[1], rel=2e-2)


@pytest.mark.parametrize(
    ("kind", "version", "said"),
    [("vq", "2", "objective vq reads weights outside"), ("next_token", "1", "fsdp_version 1 is not supported")],
)
def test_what_cannot_be_sharded_is_refused(plans, monkeypatch, kind, version, said):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    config = load(TrainConfig, [str(plans / "all" / f"{kind}.yaml")])
    launched = SimpleNamespace(num_processes=2)
    with pytest.raises(UserError, match=said):
        prepare(build(config.objective), plans, [], launched, config.loop, config.optim, config.ema)
