"""Distilled Decoding 1: the targets, where they come from, and toy problems whose law is known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import visgen
from visgen import checkpoint, run_files, trajectories
from visgen.config import UserError, build, plugin_config
from visgen.data import pairs
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.exactness import TableEngine, rows
from visgen.generate import Generator
from visgen.model import Model, ModelConfig
from visgen.nn.mixture import scale_of
from visgen.objectives.dd1 import DD1, Config, StudentNet, inputs
from visgen.sample import describe
from visgen.samplers._teacher import codes_of, make_pairs, noise_of
from visgen.samplers.one_step import Config as SamplerConfig
from visgen.samplers.one_step import OneStep
from visgen.sampling import EngineConfig, SamplingConfig
from visgen.train.main import train

BACKBONE = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16, "channels": 3}
TOLD: dict[str, Any] = {"guidance": Guidance(1.5), "warp": Warp(top_k=9)}
CPU = EngineConfig(device="cpu", batch=4)
BATCH: Any = {"label": torch.tensor([0, 1, 2, 0])}


def settings(teacher: Path | None, backbone: dict[str, Any] | None = None, **values: Any) -> Config:
    student = plugin_config("visgen.backbones", "one_step", **{**BACKBONE, **TOLD, **(backbone or {})})
    model = ModelConfig((1, 4, 4), 16, student, plugin_config("visgen.conditions", "label", classes=3, dropout=0.0))
    return Config(**{"model": model, "teacher": teacher, **values})


def shapes(classes: int = 3) -> Any:
    return build(plugin_config("visgen.data", "synthetic", n=8, n_held_out=8, image_size=8, classes=classes), "train")


def ready(teacher: Path, data: Any = None, backbone: Any = None, **values: Any) -> DD1:
    torch.manual_seed(0)
    objective = DD1(settings(teacher, backbone, **values))
    objective.setup(data or shapes())
    return objective


@pytest.fixture(scope="module")
def twenty(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty written pairs, to be read only."""
    return Path(written(teacher_dir, tmp_path_factory.mktemp("twenty")).config.root)


def written(teacher: Path, out: Path, **values: Any) -> Any:
    config = trajectories.Config(
        **{"teacher": teacher, "out": out, "pairs": 20, "shard": 8, "engine": CPU} | TOLD | values
    )
    trajectories.write(config)
    return build(pairs.Config(out), config.split)


# ------------------------------------------------------------------------------------------------------- targets


def test_the_loss_is_the_surprise_at_the_teachers_tokens(teacher_dir: Path) -> None:
    objective = ready(teacher_dir, backbone={"second": 6})
    teacher = Engine(checkpoint.load_model(teacher_dir), *TOLD.values())
    model: Any = objective.exported()
    codes = codes_of(checkpoint.load_tokenizer(teacher_dir))
    assert torch.equal(model.backbone.codes, codes)
    seen: list[Any] = []

    class Spy(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            seen.append(given)
            return objective.nets["student"](*given)

    loss, logs = objective.loss("student", {"student": Spy()}, BATCH, 0, torch.Generator().manual_seed(3))
    values, level, tokens, _ = seen[0]
    rng = torch.Generator().manual_seed(3)
    seeds = torch.randint(1 << 62, (4,), generator=rng)
    late = torch.rand(4, generator=rng) < 0.5
    assert torch.equal(tokens, make_pairs(teacher, codes, BATCH, seeds))
    assert late.any() and not late.all()
    noise = noise_of(Noise(seeds), torch.arange(16).expand(4, -1), 3)
    total, count = 0.0, 0
    for i in range(4):
        start = 6 if late[i] else 0
        assert torch.equal(values[i, start:], noise[i, start:]) and torch.equal(
            values[i, :start], codes[tokens[i, :start]]
        )
        assert level[i].tolist() == [0.0] * start + [1.0] * (16 - start)
        cond = model.condition({"label": BATCH["label"][i : i + 1]})
        h = model.backbone(values[i : i + 1], None, cond=cond, level=level[i : i + 1])[:, 1:]
        surprise = -model.head.output(h)[0].log_softmax(-1).gather(1, tokens[i, :, None])
        total, count = total + float(surprise.detach()[start:].sum()), count + 16 - start
    assert abs(float(logs["nats_per_token"]) - total / count) < 1e-5
    assert abs(float(loss.detach()) - total / (4 * (16 - 0.5 * 6))) < 1e-5  # over the mean count, whoever has the rows


def test_the_second_output_learns_the_codes(teacher_dir: Path) -> None:
    objective = ready(teacher_dir, backbone={"regress": True}, regression=0.5)
    loss, logs = objective.loss("student", objective.nets, BATCH, 0, torch.Generator().manual_seed(3))
    assert torch.allclose(loss, logs["nats_per_token"] + 0.5 * logs["mse"])
    model: Any = objective.exported()
    seeds = torch.randint(1 << 62, (4,), generator=torch.Generator().manual_seed(3))
    tokens = make_pairs(objective.make_engine(objective.frozen["teacher"]), model.backbone.codes, BATCH, seeds)
    cond = model.condition(BATCH)
    h = model.backbone(
        noise_of(Noise(seeds), torch.arange(16).expand(4, -1), 3), None, cond=cond, level=torch.ones(4, 16)
    )
    far = (model.backbone.vectors(h[:, 1:], cond) - model.backbone.codes[tokens]).square().mean()
    assert torch.allclose(logs["mse"], far, atol=1e-5)


def test_known_tokens_have_no_part_in_the_losses(teacher_dir: Path) -> None:
    objective = ready(teacher_dir, backbone={"regress": True, "second": 6}, regression=0.5)
    net, model = objective.nets["student"], objective.exported()
    tokens, seeds = torch.randint(16, (4, 16), generator=torch.Generator().manual_seed(0)), torch.arange(4)
    start = torch.tensor([0, 6, 6, 0])
    values, level = inputs(model, tokens, seeds, start)
    _, logs = net(values, level, tokens, BATCH)
    cond = model.condition(BATCH)
    h = model.backbone(values, None, cond=cond, level=level)[:, 1:]
    far = (model.backbone.vectors(h, cond) - model.backbone.codes[tokens]).square().mean(-1)  # [B, N]
    fresh = torch.arange(16) >= start.unsqueeze(1)
    assert torch.allclose(logs["mse"], far[fresh].sum() / net.expected(4), atol=1e-5)
    changed = torch.where(fresh, tokens, (tokens + 1) % 16)  # known tokens are wrong, what is read of them is not
    assert all(torch.equal(value, logs[name]) for name, value in net(values, level, changed, BATCH)[1].items())


def test_a_student_starts_from_its_teacher(teacher_dir: Path) -> None:
    objective, teacher = ready(teacher_dir), checkpoint.load_model(teacher_dir).state_dict()
    own = objective.exported().state_dict()
    same = {name for name in own if name in teacher and torch.equal(own[name], teacher[name])}
    new = set(own) - same
    assert new == {"backbone.codes", "backbone.input.weight", "backbone.input.bias", "backbone.known.weight"}
    scratch = ready(teacher_dir, start="scratch").exported().state_dict()
    assert not torch.equal(scratch["condition.embedding_table.weight"], own["condition.embedding_table.weight"])
    assert objective.facts["teacher"] == checkpoint.weights_hash(checkpoint.load_model(teacher_dir))
    with pytest.raises(UserError, match=r"objective.start teacher: .* set objective.start to scratch"):
        ready(teacher_dir, backbone={"layers": 3})
    assert ready(teacher_dir, backbone={"layers": 3}, start="scratch")


def test_held_out_values_are_the_same_every_time(teacher_dir: Path) -> None:
    objective = ready(teacher_dir)
    model = objective.exported().eval()
    with torch.no_grad():
        first, again = objective.held_out(model, BATCH), objective.held_out(model, BATCH)
        assert first == again and 0 <= float(first["agreement"]) < 1
        seeds = (1 << 62) + torch.arange(4)
        tokens = objective.tokens(BATCH, seeds)
        engine = Engine(model)
        engine.begin(BATCH)
        drawn = engine.run(OneStep(SamplerConfig()), Noise(seeds)).tokens
    assert torch.allclose(first["agreement"], (drawn == tokens).float().mean())


# --------------------------------------------------------------------------------------------------------- pairs


def test_written_pairs_are_those_of_training(teacher_dir: Path, tmp_path: Path) -> None:
    data = written(teacher_dir, tmp_path / "a", pairs=10, shard=4)
    assert len(data) == 10 and data.index.shard_count == 3 and data.classes == ["disc", "square", "triangle"]
    engine = Engine(checkpoint.load_model(teacher_dir), *TOLD.values())
    batch = data.get_many(range(10))
    assert batch["label"].tolist() == [i % 3 for i in range(10)]
    assert batch["seed"].tolist() == [(1 << 40) + i for i in range(10)]
    codes = codes_of(checkpoint.load_tokenizer(teacher_dir))
    assert torch.equal(batch["tokens"], make_pairs(engine, codes, {"label": batch["label"]}, batch["seed"]))
    for size in (1, 7, 10):  # S10
        other = written(
            teacher_dir, tmp_path / f"b{size}", engine=dataclasses.replace(CPU, batch=size), pairs=10, shard=10
        )
        assert torch.equal(other.get_many(range(10))["tokens"], batch["tokens"])
    held_out = written(teacher_dir, tmp_path / "a", split="held_out", pairs=5)
    assert not torch.equal(held_out.get_many(range(5))["tokens"], batch["tokens"][:5])


def test_writing_goes_on_after_the_last_whole_shard(teacher_dir: Path, tmp_path: Path) -> None:
    data = written(teacher_dir, tmp_path)
    before = data.get_many(range(20))["tokens"]
    kept, lost = (pairs.shard_path(data.folder, i) for i in (0, 1))
    stamp = kept.stat().st_mtime_ns
    lost.write_bytes(lost.read_bytes()[:90])
    with pytest.raises(UserError, match="is truncated or damaged"):
        build(pairs.Config(tmp_path), "train")
    lost.unlink()
    with pytest.raises(UserError, match=r"is missing; run the same `python -m visgen.trajectories` again"):
        build(pairs.Config(tmp_path), "train")
    assert torch.equal(written(teacher_dir, tmp_path).get_many(range(20))["tokens"], before)
    assert kept.stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="were written with pairs 20, now it is 21"):
        written(teacher_dir, tmp_path, pairs=21)
    with pytest.raises(UserError, match="no pairs at"):
        build(pairs.Config(tmp_path / "nowhere"), "train")


def test_tokens_that_are_no_codes_are_refused(teacher_dir: Path, tmp_path: Path) -> None:
    data = written(teacher_dir, tmp_path)
    path = pairs.shard_path(data.folder, 1)
    good = np.load(path)
    bad = good.copy()
    bad[-1, 3] = 16
    for tokens, said in ((bad, "it holds token 16, codes are 0 to 15"), (good.astype(np.float64), "it holds float64")):
        np.save(path, tokens)
        with pytest.raises(UserError, match=f"tokens_00001.npy is damaged: {said}"):
            build(pairs.Config(tmp_path), "train")
    with pytest.raises(UserError, match="leaves no seeds for 20 pairs"):
        written(teacher_dir, tmp_path / "late", first_seed=(1 << 63) - 2)


def test_pairs_of_other_settings_are_refused(teacher_dir: Path, twenty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = build(pairs.Config(twenty), "train")
    assert ready(teacher_dir, data).frozen.keys() == {"tokenizer"}
    other = {"teacher": "0" * 64, "tokenizer": "0" * 64, "map_steps": 3, "guidance": {}, "warp": {"top_k": 1}}
    for name, value in other.items():
        with monkeypatch.context() as patch:
            patch.setattr(data.index, name, value)
            with pytest.raises(UserError, match=f"were made with {name} "):
                ready(teacher_dir, data)


def test_pairs_and_fresh_ones_give_the_same_loss(teacher_dir: Path, twenty: Path) -> None:
    data: Any = build(pairs.Config(twenty), "train")
    batch, rng = data.get_many(range(8)), torch.Generator()
    read, made = ready(teacher_dir, data), ready(teacher_dir)
    losses = [read.loss("student", read.nets, batch, 0, rng.manual_seed(1))[0]]
    tokens = made.tokens({"label": batch["label"]}, batch["seed"])  # type: ignore[typeddict-item]
    values, level = inputs(made.exported(), tokens, batch["seed"], torch.zeros(8, dtype=torch.int64))
    losses.append(made.nets["student"](values, level, tokens, {"label": batch["label"]})[0])
    assert torch.allclose(losses[0], losses[1], atol=1e-6)


@pytest.mark.parametrize(
    ("backbone", "values", "said"),
    [
        ({"regress": True}, {}, "objective.regression is 0.0, objective.model.backbone.regress is True"),
        ({}, {"regression": 1.0}, "set both, or none"),
        ({"second": 16}, {}, "backbone.second 16 must be below the number of tokens, 16"),
        ({"channels": 4}, {}, "its backbone.channels is 3, objective.model has 4"),
        ({}, {"teacher": None}, "objective.teacher is needed"),
        ({}, {"teacher": Path("nowhere")}, "objective.teacher: checkpoint nowhere does not exist"),
    ],
)
def test_what_does_not_fit_is_refused(teacher_dir: Path, backbone: Any, values: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        ready(values.pop("teacher", teacher_dir), backbone=backbone, **values)


def test_parts_that_do_not_fit_are_refused(teacher_dir: Path) -> None:
    model = settings(teacher_dir).model
    with pytest.raises(UserError, match=r"trains a one-step student, objective.model.backbone is ar"):
        DD1(Config(model=dataclasses.replace(model, backbone=plugin_config("visgen.backbones", "ar"))))
    dropped = dataclasses.replace(model.condition, dropout=0.1)
    with pytest.raises(UserError, match=r"condition.dropout is 0.1, .* set it to 0"):
        DD1(Config(model=dataclasses.replace(model, condition=dropped)))
    with pytest.raises(UserError, match="the data has 2 classes"):
        ready(teacher_dir, shapes(2))


# --------------------------------------------------------------------------------------------------- from end to end


def test_a_student_from_its_teacher_to_images(teacher_dir: Path, tmp_path: Path) -> None:
    for split, count in (("train", 24), ("held_out", 8)):
        written(teacher_dir, tmp_path / "pairs", split=split, pairs=count)
    config = {
        "objective": {
            "kind": "dd1",
            "teacher": str(teacher_dir),
            "model": {
                "grid": [1, 4, 4],
                "vocab": 16,
                "backbone": {
                    "kind": "one_step",
                    **BACKBONE,
                    "second": 6,
                    "guidance": {"scale": 1.5},
                    "warp": {"top_k": 9},
                },
                "condition": {"classes": 3, "dropout": 0.0},
            },
            "preview": {"images": 4},
        },
        "data": {"kind": "pairs", "root": str(tmp_path / "pairs")},
        "optim": {"warmup": 0, "lr": 3e-3},
        "ema": {"decay": 0.5},
        "log": {"wandb": False},
        "loop": {
            "out": str(tmp_path / "run"),
            "steps": 6,
            "batch": 8,
            "precision": "fp32",
            "workers": 0,
            "save_every": 3,
            "preview_every": 6,
            "preview_images": 4,
            "eval_every": 6,
            "eval_samples": 8,
        },
    }
    (tmp_path / "dd1.yaml").write_text(json.dumps(config))
    train([str(tmp_path / "dd1.yaml")])
    generator = visgen.load(tmp_path / "run", device="cpu", batch=2)
    assert generator.model.backbone.taught == (Guidance(1.5), Warp(top_k=9))
    assert torch.equal(generator.model.backbone.codes, codes_of(checkpoint.load_tokenizer(teacher_dir)))
    images = generator.sample(["disc", "triangle", 1], seeds=[5, 6, 7])
    assert images.pixels.shape == (3, 3, 8, 8) and images.nfe_per_image == [1, 1, 1]
    assert torch.equal(generator.sample([1], seeds=[7]).tokens[0], images.tokens[2])
    helped = plugin_config("visgen.samplers", "one_step", passes=2, teacher=teacher_dir, first=3)
    assert generator.sample([1], seeds=[7], sampler=helped).nfe_per_image == [5]
    told = describe(SamplingConfig(), generator)
    assert told["guidance"]["scale"] == 1.5 and told["warp"]["top_k"] == 9, "what was learned"
    wide = generator.sample([1], seeds=[7], sampler=helped, size=(8, 16))
    assert wide.pixels.shape == (1, 3, 8, 16) and wide.nfe_per_image == [5]
    facts = checkpoint.read_metadata(run_files.find_step(tmp_path / "run") / run_files.WEIGHTS)
    assert facts["teacher"] == checkpoint.weights_hash(checkpoint.load_model(teacher_dir))
    assert json.loads(facts["classes"]) == ["disc", "square", "triangle"]


def test_a_controlled_teacher_makes_a_controlled_student(
    make_control_run: Callable[..., Path], small: Callable[..., Any], tmp_path: Path
) -> None:
    teacher_run = make_control_run(tmp_path / "teacher")
    teacher = checkpoint.load_model(teacher_run)
    student = plugin_config("visgen.backbones", "one_step", **{**BACKBONE, "layers": 3, "channels": 8, **TOLD})
    model = dataclasses.replace(settings(None).model, grid=(1, 8, 8), backbone=student, control=teacher.config.control)
    data = build(plugin_config("visgen.data", "synthetic", n=4, n_held_out=4, image_size=16, classes=3), "train")
    objective = DD1(Config(model=model, teacher=teacher_run))
    objective.setup(data)
    own: Any = objective.exported()
    assert torch.equal(
        own.control.state_dict()[name := next(iter(own.control.state_dict()))], teacher.control.state_dict()[name]
    )
    many = data.get_many(range(4))
    batch: Any = {"label": many["label"], "pixels": many["pixels"].float() / 127.5 - 1}
    mapped = objective.maps.batch(batch)  # type: ignore[union-attr]
    seeds = torch.arange(4)
    pairs_of = {name: objective.tokens(given, seeds) for name, given in (("map", mapped), ("none", batch))}
    assert not torch.equal(pairs_of["map"], pairs_of["none"])
    turned = {**mapped, "map": mapped["map"].flip(0)}
    for given, made in ((mapped, pairs_of["map"]), (turned, objective.tokens(turned, seeds))):
        engine = Engine(teacher, *TOLD.values())
        wanted = make_pairs(engine, own.backbone.codes, {"label": given["label"], "map": given["map"]}, seeds)
        assert torch.equal(made, wanted)
    loss, _ = objective.loss("student", objective.nets, batch, 0, torch.Generator().manual_seed(0))
    loss.backward()
    assert all(p.grad is not None for p in own.control.parameters())
    with torch.no_grad():
        assert 0 <= float(objective.held_out(own, batch)["agreement"]) <= 1
        engine = Engine(own.eval())
        drawn = []
        for given in (mapped, batch):
            engine.begin(given)
            drawn.append(engine.run(OneStep(SamplerConfig()), Noise(seeds)).tokens)
        assert not torch.equal(*drawn)
    with pytest.raises(UserError, match="is a student that learned nothing without a map; give it one"):
        Generator(own, checkpoint.load_tokenizer(teacher_run), EngineConfig(device="cpu")).sample([0], [1])
    plain = dataclasses.replace(model, control=None)
    DD1(Config(model=plain, teacher=teacher_run)).setup(data)  # may leave the control out
    other = DD1(Config(model=dataclasses.replace(model, control=small("controls", "hed")), teacher=teacher_run))
    with pytest.raises(UserError, match=r"its control is canny, objective.model has hed"):
        other.setup(data)


# ------------------------------------------------------------------------------------------------- known toy problems


def toy(logits: Tensor, vocab: int, count: int, steps: int, batch: int, rate: float, **backbone: Any) -> Tensor:
    """A student of a table's law, trained on fresh pairs; the tokens that it draws for 20,000 new seeds."""
    torch.manual_seed(0)
    student = plugin_config("visgen.backbones", "one_step", **{**BACKBONE, "channels": 4, **backbone})
    model: Any = Model(
        ModelConfig((1, 1, count), vocab, student, plugin_config("visgen.conditions", "label", classes=1, dropout=0.0))
    )
    codes = torch.randn(vocab, 4, generator=torch.Generator().manual_seed(7))
    model.backbone.codes.copy_(codes * scale_of(codes))
    net, engine = StudentNet(model, 0.0), TableEngine(logits, (1, 1, count))
    optimiser = torch.optim.AdamW(net.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.1)
    for step in range(steps):
        seeds = (1 << 40) + step * batch + torch.arange(batch)
        tokens = make_pairs(engine, model.backbone.codes, rows(batch), seeds)
        values, level = inputs(model, tokens, seeds, torch.zeros_like(seeds))
        net(values, level, tokens, {"label": torch.zeros_like(seeds)})[0].backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
    student_engine = Engine(model.eval())
    student_engine.begin({"label": torch.zeros(20_000, dtype=torch.int64)})
    return student_engine.run(OneStep(SamplerConfig()), Noise(torch.arange(20_000))).tokens


def test_two_tokens_that_are_always_equal_stay_so() -> None:  # S16: the joint law {(0, 0), (1, 1)}
    certain = 60.0
    logits = torch.tensor([[0.0, 0.0], [certain, 0.0], [0.0, certain]], dtype=torch.float64)
    tokens = toy(logits, 2, 2, steps=150, batch=256, rate=3e-3)
    assert float((tokens[:, 0] != tokens[:, 1]).float().mean()) < 0.02, "of independent tokens half differ"
    assert abs(float(tokens.float().mean()) - 0.5) < 0.03


@pytest.mark.slow
def test_one_token_reaches_the_given_law() -> None:  # S15
    vocab = 32
    logits = 1.2 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens = toy(logits, vocab, 1, steps=4000, batch=512, rate=2e-3, width=64)
    p = logits[0].softmax(0)
    seen = torch.bincount(tokens[:, 0], minlength=vocab).double() / len(tokens)
    assert 0.5 * float((seen - p).abs().sum()) < 0.02
