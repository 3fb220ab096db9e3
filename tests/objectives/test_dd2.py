"""Distilled Decoding 2: three stages, their losses by hand, what is refused, and toy problems whose law is known."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

import visgen
from visgen import checkpoint, run_files
from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model, ModelConfig
from visgen.objectives import dd2, dd2_teacher, dd2_tuning
from visgen.objectives._distilled import features
from visgen.objectives.dd2 import DD2, generated
from visgen.objectives.dd2_teacher import DD2Teacher
from visgen.objectives.dd2_tuning import DD2Tuning
from visgen.samplers._teacher import codes_of, make_pairs, noise_of
from visgen.samplers.one_step import Config as SamplerConfig
from visgen.samplers.one_step import OneStep
from visgen.train.main import train

TRUNK = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16}
TOLD: dict[str, Any] = {"guidance": Guidance(1.5), "warp": Warp(top_k=9)}
BATCH: Any = {"label": torch.tensor([0, 1, 2, 0])}
TIMES = (0.04, 0.98)


def student(backbone: dict[str, Any] | None = None, **head: Any) -> ModelConfig:
    return ModelConfig(
        (1, 4, 4),
        16,
        plugin_config("visgen.backbones", "flow_step", **{**TRUNK, "channels": 3, **TOLD, **(backbone or {})}),
        plugin_config("visgen.conditions", "label", classes=3, dropout=0.0),
        plugin_config("visgen.heads", "diffusion", **{"layers": 2, "width": 24, "predicts": "velocity", **head}),
    )


def shapes(classes: int = 3) -> Any:
    return build(plugin_config("visgen.data", "synthetic", n=8, n_held_out=8, image_size=8, classes=classes), "train")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stirred(model: Any) -> None:
    """Random weights everywhere: a head of zeros has nothing to say."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.2)


def tuning(teacher: Path, **values: Any) -> DD2Tuning:
    torch.manual_seed(0)
    objective = DD2Tuning(dd2_tuning.Config(**{"model": student(), "teacher": teacher, **values}))
    objective.setup(shapes())
    return objective


@pytest.fixture(scope="module")
def tuned(teacher_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of stage 1, not trained."""
    run = tmp_path_factory.mktemp("tuned")
    objective = tuning(teacher_dir)
    stirred(objective.exported())
    save(run, objective)
    return run


def save(run: Path, objective: Any) -> None:
    folder, model = run / run_files.step_name(1), objective.exported()
    folder.mkdir(parents=True)
    tokenizer = objective.frozen["tokenizer"]
    names = '["disc", "square", "triangle"]'
    facts = {**objective.facts, "tokenizer": checkpoint.tokenizer_hash(tokenizer), "classes": names}
    checkpoint.save_module(folder / run_files.WEIGHTS, model, model.config, extra_metadata=facts)
    (folder / run_files.META).write_text("{}")
    checkpoint.save_module(run / run_files.TOKENIZER, tokenizer, tokenizer.config)


def ready(teacher: Path, start: Path, **values: Any) -> DD2:
    torch.manual_seed(0)
    objective = DD2(dd2.Config(**{"model": student(), "teacher": teacher, "start": start, **values}))
    objective.setup(shapes())
    return objective


# ------------------------------------------------------------------------------------------------------- stage 0


def test_a_teacher_learns_to_read_vectors(teacher_dir: Path, tmp_path: Path) -> None:
    """First the table's rows are met by the MLP, then the laws by the whole model."""
    told = checkpoint.load_model(teacher_dir)
    model = dataclasses.replace(
        told.config, backbone=dataclasses.replace(told.config.backbone, code_channels=3, token_dropout=0.0)
    )
    torch.manual_seed(0)
    objective = DD2Teacher(dd2_teacher.Config(teacher=teacher_dir, model=model, fit_steps=400, **TOLD))
    objective.setup(shapes())
    net: Any = objective.nets["model"]
    own, table = objective.exported(), told.backbone.tok_embeddings.weight
    assert torch.equal(own.head.output.weight, told.head.output.weight)
    tokens = make_pairs(objective.make_engine(told), own.backbone.codes, BATCH, torch.arange(4))
    batch: Any = {**BATCH, "tokens": tokens, "seed": torch.arange(4)}
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    seen: list[dict[str, Tensor]] = []
    before = own.backbone.layers[0].attention.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    for step in range(401):
        loss, logs = objective.loss("model", objective.nets, batch, step, rng(0))
        if step < 400:
            assert torch.allclose(loss, logs["embedding_error"])
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
        seen.append(logs)
    assert float(seen[-1]["embedding_error"]) < 0.05 * float(seen[0]["embedding_error"])
    after = own.backbone.layers[0].attention.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items()), "the trunk waits"
    assert float(seen[-1]["excess"]) < 0.4 * float(seen[0]["excess"]), "the laws follow the embeddings"
    assert (own.backbone.tok_embeddings(torch.arange(16)) - table).square().mean() < 0.05 * table.square().mean()
    engine = Engine(own.eval(), *TOLD.values())
    by_id, by_vector = (engine.laws(BATCH, given).logits for given in (tokens, own.backbone.codes[tokens]))
    assert torch.equal(by_id, by_vector)
    moved = engine.laws(BATCH, own.backbone.codes[tokens] + 0.1).logits
    assert not torch.allclose(moved.softmax(-1), by_id.softmax(-1), atol=1e-3)
    save(tmp_path, objective)
    assert checkpoint.load_model(tmp_path).backbone.codes is not None


def test_laws_in_one_pass_are_those_of_decoding(teacher_dir: Path) -> None:
    model = checkpoint.load_model(teacher_dir)
    engine = Engine(model, *TOLD.values())
    engine.begin(BATCH)
    codes = codes_of(checkpoint.load_tokenizer(teacher_dir))
    tokens = make_pairs(engine, codes, BATCH, torch.arange(4))
    whole = engine.laws(BATCH, tokens).logits.log_softmax(-1)
    engine.begin(BATCH)
    for k in range(16):
        with torch.inference_mode():
            law = engine.forward(tokens, torch.full((4, 1), k)).logits[:, 0].log_softmax(-1)
        assert torch.equal(law == -torch.inf, whole[:, k] == -torch.inf)
        finite = law > -torch.inf
        assert torch.allclose(law[finite], whole[:, k][finite], atol=1e-4)


# ------------------------------------------------------------------------------------------------------- stage 1


def test_tuning_learns_the_velocity_of_the_teachers_mixture(teacher_dir: Path) -> None:
    objective = tuning(teacher_dir)
    seen: list[Any] = []

    class Spy(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            seen.append(given)
            return objective.nets["student"](*given)

    loss, _ = objective.loss("student", {"student": Spy()}, BATCH, 0, rng(3))
    clean, x, t, exact, _ = seen[0]
    model = objective.exported()
    codes = model.backbone.codes
    seeds = torch.randint(1 << 62, (4,), generator=rng(3))
    engine = Engine(checkpoint.load_model(teacher_dir), *TOLD.values())
    tokens = make_pairs(engine, codes, BATCH, seeds)
    assert torch.equal(clean, codes[tokens]) and x.shape == (4, 4, 16, 3) and t.shape == (4, 4, 16, 1)
    assert TIMES[0] <= t.min() < 0.15 and 0.85 < t.max() <= TIMES[1], "spread over the span"
    logp = engine.laws(BATCH, tokens).logits.log_softmax(-1)
    for r, i, k in ((0, 0, 0), (3, 2, 15), (1, 3, 7)):
        time = float(t[r, i, k])
        w = reference.mixture_posterior(x[r, i, k].double(), time, logp[i, k].double().exp().tolist(), codes.double())
        mean = torch.tensor(w, dtype=torch.float64) @ codes.double()
        assert torch.allclose(exact[r, i, k].double(), (x[r, i, k].double() - mean) / time, atol=1e-3)
    h = features(model, clean, BATCH)
    found = model.head.predict(x, model.head.about(1000 * t[..., 0]), model.head.condition(h))[0]
    assert torch.allclose(loss, (found - exact).square().mean())


def test_tuning_starts_from_the_trunk_of_the_teacher(teacher_dir: Path) -> None:
    own, teacher = tuning(teacher_dir).exported().state_dict(), checkpoint.load_model(teacher_dir).state_dict()
    new = {name for name in own if name not in teacher or not torch.equal(own[name], teacher[name])}
    assert {name.split(".")[0] for name in new} == {"backbone", "head"}
    assert all(name.startswith(("head.", "backbone.tok_embeddings.")) for name in new)


# ------------------------------------------------------------------------------------------------------- stage 2


def test_both_networks_start_from_the_tuned_one(teacher_dir: Path, tuned: Path) -> None:
    objective, found = ready(teacher_dir, tuned), checkpoint.load_model(tuned).state_dict()
    for net in objective.nets.values():
        own: Any = net.model
        assert all(torch.equal(value, found[name]) for name, value in own.state_dict().items())
    assert objective.nets["student"].model is not objective.nets["critic"].model


def test_the_generator_moves_each_token_by_its_own_noise(teacher_dir: Path, tuned: Path) -> None:  # S11
    for start in (1.0, 0.7):
        model: Any = ready(teacher_dir, tuned, model=student({"start": start})).exported()
        noise = torch.randn(4, 16, 3, generator=rng())
        with torch.no_grad():
            plain = generated(model, noise, BATCH)
            h = features(model, noise, BATCH)
            x = noise * math.sqrt(start**2 + (1 - start) ** 2)
            v = model.head.predict(x, model.head.about(torch.tensor([1000 * start])), model.head.condition(h))[0]
            assert torch.allclose(plain, x - start * v, atol=1e-6)
            for k in (0, 5, 15):
                changed = noise.clone()
                changed[:, k] += 1
                after = generated(model, changed, BATCH)
                assert torch.equal(after[:, :k], plain[:, :k])
                assert not torch.allclose(after[:, k], plain[:, k], atol=1e-3)
                assert k == 15 or not torch.allclose(after[:, k + 1], plain[:, k + 1], atol=1e-5)


@pytest.mark.parametrize("divergence", ["sid", "dmd"])
@pytest.mark.parametrize("prefix", ["snapped", "continuous"])
def test_the_loss_of_the_generator_by_hand(
    teacher_dir: Path, tuned: Path, divergence: Any, prefix: Any, make_model: Any
) -> None:
    objective = ready(teacher_dir, tuned, divergence=divergence)
    objective.config = dataclasses.replace(objective.config, prefix=prefix, alpha=0.8)
    if prefix == "continuous":
        objective.frozen["teacher"] = make_model(code_channels=3)
        objective.frozen["teacher"].backbone.codes.copy_(objective.exported().backbone.codes)
    codes = objective.exported().backbone.codes
    q = generated(objective.exported(), torch.randn(4, 16, 3, generator=rng(5)), BATCH).detach().requires_grad_()
    loss, logs = objective.judged(q, BATCH, rng(9))
    slope = torch.autograd.grad(loss, q)[0]

    generator = rng(9)
    t = TIMES[0] + (TIMES[1] - TIMES[0]) * torch.rand(1, 4, 16, 1, generator=generator)[0]
    e = torch.randn(1, 4, 16, 3, generator=generator)[0]
    own = q.detach().clone().requires_grad_()
    ids = (own.detach().unsqueeze(2) - codes).square().sum(-1).argmin(-1)
    given: Any = ids if prefix == "snapped" else own.detach()
    logp = Engine(objective.frozen["teacher"], *TOLD.values()).laws(BATCH, given).logits
    x = (1 - t) * own + t * e
    z = logp - (x.unsqueeze(2) - (1 - t).unsqueeze(2) * codes).square().sum(-1) / (2 * t.square())
    x_phi = z.softmax(-1) @ codes  # by autograd through the sum over codes
    critic: Any = objective.nets["critic"].model
    read = codes[ids] if prefix == "snapped" else own.detach()
    h = features(critic, read, BATCH).detach()
    x_psi = x - t * critic.head.predict(x, critic.head.about(1000 * t[..., 0]), critic.head.condition(h))[0]
    w = 1 / (own - x_phi).abs().mean(-1, keepdim=True).detach().clamp(min=0.1)
    gap = x_phi - x_psi
    if divergence == "sid":
        wanted = (w * gap * (x_phi - own - 0.8 * gap)).sum(-1).mean()
    else:
        wanted = ((w * -gap).detach() * own).sum(-1).mean()
    assert torch.allclose(loss, wanted, rtol=1e-4, atol=1e-5)
    expected = torch.autograd.grad(wanted, own)[0]
    assert (slope - expected).norm() < 1e-3 * expected.norm()
    assert torch.allclose(logs["gap"], gap.detach().square().sum(-1).mean(), rtol=1e-4)
    assert all(p.grad is None for p in critic.parameters()) and all(p.requires_grad for p in critic.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU, and its kernel, with the CPU")
def test_a_gpu_gives_the_same_loss(teacher_dir: Path, tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q, e = (torch.randn(4, 16, 3, generator=rng(seed)) for seed in (1, 2))
    t = TIMES[0] + (TIMES[1] - TIMES[0]) * torch.rand(4, 16, 1, generator=rng(3))
    found = []
    for device in ("cpu", "cuda"):
        objective = ready(teacher_dir, tuned)
        for module in (*objective.nets.values(), *objective.frozen.values()):
            module.to(device)
        monkeypatch.setattr(dd2, "draws", lambda *_, at=device: (t[None].to(at), e[None].to(at)))
        own = q.to(device).requires_grad_()
        loss, _ = objective.judged(own, {"label": BATCH["label"].to(device)}, rng())
        found.append((loss.detach().cpu(), torch.autograd.grad(loss, own)[0].cpu()))
    (loss, slope), (other, its) = found
    assert torch.allclose(loss, other, rtol=1e-3) and (slope - its).norm() < 5e-3 * slope.norm()


def test_no_token_is_moved_by_the_loss_of_a_later_one(teacher_dir: Path, tuned: Path) -> None:  # S12
    objective = ready(teacher_dir, tuned)
    q = torch.randn(4, 16, 3, generator=rng(1), requires_grad=True)
    slopes = []
    for scale in (1.0, 3.0):  # another last token: the slopes of all others stay
        moved = torch.cat([q[:, :-1], scale * q[:, -1:]], 1)
        slopes.append(torch.autograd.grad(objective.judged(moved, BATCH, rng(2))[0], q)[0])
    assert torch.equal(slopes[0][:, :-1], slopes[1][:, :-1]) and not torch.equal(slopes[0][:, -1], slopes[1][:, -1])


def test_the_critic_learns_the_velocity_of_the_generators_tokens(teacher_dir: Path, tuned: Path) -> None:
    objective = ready(teacher_dir, tuned)
    seen: list[Any] = []

    class Spy(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            seen.append(given)
            return objective.nets["critic"](*given)

    loss, _ = objective.loss("critic", {"critic": Spy()}, BATCH, 0, rng(4))
    q, given, t, e, _ = seen[0]
    noise = torch.randn(4, 16, 3, generator=rng(4))
    assert torch.allclose(q, generated(objective.exported(), noise, BATCH).detach())
    codes, critic = objective.exported().backbone.codes, objective.nets["critic"].model
    assert torch.equal(given, codes[(q.unsqueeze(2) - codes).square().sum(-1).argmin(-1)])
    x = (1 - t) * q + t * e
    h = features(critic, given, BATCH)
    found = critic.head.predict(x, critic.head.about(1000 * t[..., 0]), critic.head.condition(h))[0]  # type: ignore[union-attr]
    assert torch.allclose(loss, (found - (e - q)).square().mean()) and not q.requires_grad


def test_turns_and_alignment(teacher_dir: Path, tuned: Path) -> None:
    objective = ready(teacher_dir, tuned, critic_steps=3, align_at=5, align_steps=2, critic_steps_after=1)
    assert objective.turns(4) == ["critic"] * 3 + ["student"]
    assert objective.turns(5) == objective.turns(6) == ["critic"] * 3
    assert objective.turns(7) == ["critic", "student"]
    assert ready(teacher_dir, tuned).turns(10**6) == ["critic"] * 5 + ["student"]
    model = objective.exported()
    average = Model(model.config)
    before = [p.clone() for p in model.parameters()]
    for step in (4, 6):
        objective.begin_step(step, average)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    objective.begin_step(5, average)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), average.parameters(), strict=True))


def test_what_does_not_fit_is_refused(teacher_dir: Path, tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its backbone.warp.top_k is 9, objective.model has 8; all stages have"):
        ready(teacher_dir, tuned, model=student({"warp": Warp(top_k=8)}))
    with pytest.raises(UserError, match=r"its backbone.guidance.scale is 1.5, objective.model has 2.0"):
        ready(teacher_dir, tuned, model=student({"guidance": Guidance(2.0)}))
    with pytest.raises(UserError, match=r"objective.start is needed: .* objective dd2_tuning"):
        ready(teacher_dir, Path())
    with pytest.raises(UserError, match=r"objective.start: checkpoint nowhere does not exist"):
        ready(teacher_dir, Path("nowhere"))
    with pytest.raises(
        UserError, match=r"reads codes by a table; make one that reads vectors by objective dd2_teacher"
    ):
        ready(teacher_dir, tuned, prefix="continuous")
    with pytest.raises(UserError, match=r"objective.times \(0.5, 0.5\) must satisfy 0 < first < last <= 1"):
        ready(teacher_dir, tuned, times=(0.5, 0.5))
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=r"trains backbone flow_step, objective.model.backbone is ar"),
    ):
        DD2(dd2.Config(model=ModelConfig()))
    with pytest.raises(UserError, match=r"set model.head to kind diffusion, predicts velocity"):
        DD2(dd2.Config(model=student(predicts="epsilon")))
    with torch.device("meta"), pytest.raises(UserError, match=r"trains a model that reads code vectors"):
        DD2Teacher(dd2_teacher.Config(model=ModelConfig()))
    objective = tuning(teacher_dir)
    kept = objective.facts
    objective.facts = {**kept, "objective": "dd2"}
    save(tmp_path / "second", objective)
    with pytest.raises(UserError, match=r"was trained by objective dd2; pass a run of objective dd2_tuning"):
        ready(teacher_dir, tmp_path / "second")
    objective.facts = {**kept, "teacher": "0" * 64}
    save(tmp_path, objective)
    with pytest.raises(UserError, match=r"learned from teacher 000000000000, objective.teacher is"):
        ready(teacher_dir, tmp_path)


# ------------------------------------------------------------------------------------------------------- sampling


def test_a_generator_is_sampled_in_one_pass_and_helped_by_its_teacher(teacher_dir: Path, tuned: Path) -> None:
    generator = visgen.load(tuned, device="cpu", batch=2)
    model = generator.model
    images = generator.sample(["disc", "triangle", 1], seeds=[5, 6, 7])
    assert images.nfe_per_image == [1, 1, 1]
    labels = torch.tensor([0, 2, 1])
    noise = noise_of(Noise(torch.tensor([5, 6, 7])), torch.arange(16).expand(3, -1), 3)
    q = generated(model, noise, {"label": labels})
    wanted = (q.unsqueeze(2) - model.backbone.codes).square().sum(-1).argmin(-1)  # type: ignore[operator]
    assert torch.equal(images.tokens, wanted)
    helped = plugin_config("visgen.samplers", "one_step", teacher=teacher_dir, first=12)
    found = generator.sample(["disc", "triangle", 1], seeds=[5, 6, 7], sampler=helped)
    assert torch.equal(found.tokens[:, :12], wanted[:, :12]) and found.nfe_per_image == [5, 5, 5]
    teacher = Engine(checkpoint.load_model(teacher_dir), *TOLD.values())
    whole = generator.sample(["disc", "triangle", 1], seeds=[5, 6, 7], sampler=dataclasses.replace(helped, first=0))
    assert torch.equal(
        whole.tokens, make_pairs(teacher, model.backbone.codes, {"label": labels}, torch.tensor([5, 6, 7]))
    )  # type: ignore[arg-type]
    with pytest.raises(UserError, match="passes 2: this student was trained for one pass"):
        generator.sample([0], [1], sampler=dataclasses.replace(helped, passes=2))
    with pytest.raises(UserError, match="is not what this student learned"):
        generator.sample([0], [1], guidance=3.0)


def test_a_controlled_teacher_makes_a_controlled_generator(
    make_control_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_control_run(tmp_path / "teacher")
    teacher = checkpoint.load_model(run)
    model = dataclasses.replace(student({"layers": 3, "channels": 8}), grid=(1, 8, 8), control=teacher.config.control)
    data = build(plugin_config("visgen.data", "synthetic", n=4, n_held_out=4, image_size=16, classes=3), "train")
    first = DD2Tuning(dd2_tuning.Config(model=model, teacher=run))
    first.setup(data)
    name = next(iter(teacher.control.state_dict()))  # type: ignore[union-attr]
    assert torch.equal(first.exported().control.state_dict()[name], teacher.control.state_dict()[name])  # type: ignore[union-attr]
    stirred(first.exported())
    save(tmp_path / "tuned", first)
    second = DD2(dd2.Config(model=model, teacher=run, start=tmp_path / "tuned"))
    second.setup(data)
    many = data.get_many(range(4))
    batch: Any = {"label": many["label"], "pixels": many["pixels"].float() / 127.5 - 1}
    seeds = {**batch, "tokens": torch.arange(256).view(4, 64) % 16, "seed": torch.arange(4)}
    for objective, names in ((first, ["student"]), (second, ["critic", "student"])):
        for net in names:
            loss, _ = objective.loss(net, objective.nets, seeds, 0, rng())
            loss.backward()
            slopes = [p.grad for p in objective.nets[net].model.control.parameters()]  # type: ignore[union-attr]
            assert all(slope is not None for slope in slopes) and any(slope.abs().sum() > 0 for slope in slopes), net
    mapped = second.mapped(batch)
    tokens = torch.arange(256).view(4, 64) % 16
    assert not torch.equal(second.laws(mapped, tokens), second.laws(batch, tokens)), "the teacher sees the map"
    engine, drawn = Engine(second.exported().eval()), []
    for given in (mapped, {**mapped, "map": mapped["map"].flip(0)}):
        engine.begin(given)
        drawn.append(engine.run(OneStep(SamplerConfig()), Noise(torch.arange(4))).tokens)
    assert not torch.equal(*drawn)
    plain = dd2_tuning.Config(model=dataclasses.replace(model, control=None), teacher=run)
    DD2Tuning(plain).setup(data)  # may leave the control out


# ------------------------------------------------------------------------------------------------ from end to end


def test_three_stages_from_a_teacher_to_images(teacher_dir: Path, tmp_path: Path) -> None:
    backbone = {"kind": "flow_step", **TRUNK, "channels": 3, "start": 0.7, "guidance": {"scale": 1.5}}
    model = {
        "grid": [1, 4, 4],
        "vocab": 16,
        "backbone": backbone,
        "condition": {"classes": 3, "dropout": 0.0},
        "head": {"kind": "diffusion", "layers": 2, "width": 24, "predicts": "velocity"},
    }
    reader = {
        "grid": [1, 4, 4],
        "vocab": 16,
        "backbone": {"kind": "ar", **TRUNK, "code_channels": 3},
        "condition": {"classes": 3},
    }
    stages: dict[str, dict[str, Any]] = {
        "dd2_teacher": {"teacher": str(teacher_dir), "model": reader, "fit_steps": 2, "guidance": {"scale": 1.5}},
        "dd2_tuning": {"teacher": str(tmp_path / "dd2_teacher"), "model": model, "preview": {"images": 4}},
        "dd2": {
            "teacher": str(tmp_path / "dd2_teacher"),
            "start": str(tmp_path / "dd2_tuning"),
            "model": model,
            "prefix": "continuous",
            "critic_steps": 2,
            "align_at": 2,
            "align_steps": 1,
            "preview": {"images": 4},
        },
    }
    for kind, objective in stages.items():
        config = {
            "objective": {"kind": kind, **objective},
            "data": {"kind": "synthetic", "image_size": 8, "classes": 3, "n": 24, "n_held_out": 8},
            "optim": {"warmup": 0, "lr": 1e-3},
            "ema": {"decay": 0.5},
            "log": {"wandb": False},
            "loop": {
                "out": str(tmp_path / kind),
                "steps": 4,
                "batch": 8,
                "precision": "fp32",
                "workers": 0,
                "save_every": 4,
                "preview_every": 4,
                "preview_images": 4,
                "eval_every": 4,
                "eval_samples": 8,
            },
        }
        (tmp_path / f"{kind}.yaml").write_text(json.dumps(config))
        train([str(tmp_path / f"{kind}.yaml")])
    generator = visgen.load(tmp_path / "dd2", device="cpu", batch=2)
    assert generator.model.backbone.taught == (Guidance(1.5), Warp())
    images = generator.sample([0, 2, 1], seeds=[5, 6, 7])
    assert images.pixels.shape == (3, 3, 8, 8) and images.nfe_per_image == [1, 1, 1]
    assert torch.equal(generator.sample([1], seeds=[7]).tokens[0], images.tokens[2])
    facts = checkpoint.read_metadata(run_files.find_step(tmp_path / "dd2") / run_files.WEIGHTS)
    assert facts["teacher"] == checkpoint.weights_hash(checkpoint.load_model(tmp_path / "dd2_teacher"))
