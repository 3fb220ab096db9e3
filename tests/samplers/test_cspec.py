"""Speculation over vectors: against a twin without cache, its limits, its telemetry, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from no_host import NoHost
from torch import Tensor

from visgen import checkpoint, run_files
from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine, Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.model import Model
from visgen.nn.ancestral import walk

LABELS, SEEDS, N, C, STEPS = torch.tensor([0, 2, 1]), torch.tensor([3, 1, 4]), 16, 3, 4
KNOWN = torch.randn(3, N, C, generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(3, N, generator=torch.Generator().manual_seed(1)) < 0.3
GUIDED = Guidance(1.7, schedule="linear")
Make = Callable[..., Model]


@pytest.fixture(scope="module")
def model(make_causal: Make) -> Model:
    return make_causal()


@pytest.fixture(scope="module")
def near(make_causal: Make) -> Model:
    """A draft model that is often right: the model with a little noise on its head."""
    made = make_causal()
    rng = torch.Generator().manual_seed(7)
    made.head.output.weight.add_(0.002 * torch.randn(made.head.output.weight.shape, generator=rng))
    return made


def sampler(kind: str = "cspec", **values: Any) -> Any:
    return build(plugin_config("visgen.samplers", kind, **{"steps": STEPS, **values}))


def decode(
    model: Model, drafter: Model | None, guidance: Guidance = GUIDED, known: Any = None, rows: Any = None, **values: Any
) -> Generation:
    engine, rows = Engine(model, guidance), [0, 1, 2] if rows is None else rows
    if drafter is not None:
        engine.once(("draft", None), lambda: Engine(drafter, guidance))
    engine.begin({"label": LABELS[rows]}, None if known is None else tuple(x[rows] for x in known))
    return engine.run(sampler(**values), Noise(SEEDS[rows]))


def plain(model: Model, guidance: Guidance = GUIDED, known: Any = None, **values: Any) -> Tensor:
    """The model alone, by the same chain."""
    engine = Engine(model, guidance)
    engine.begin({"label": LABELS}, known)
    rule = {"variance": 1.0, "end_noise": True, **values}
    return engine.run(sampler("causal", **rule), Noise(SEEDS)).tokens


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 2e-3 * b.abs().max())


def naive(model: Any, draft: Any, row: int, length: int, variance: float = 1.0) -> tuple[Tensor, list[int]]:
    """One image by the formulas: every hidden state by the training pass, one chain after another."""
    noise, steps = Noise(SEEDS[row : row + 1]), walk(model.head.path, "ancestral", STEPS)
    spread = (variance * steps.high + (1 - variance) * steps.low).div(2).exp()
    tokens, rounds, at, cycle = torch.zeros(1, N, C), [0] * N, 0, 0

    def predictor(of: Any, k: int) -> Callable[[int, Tensor], Tensor]:
        w = float(GUIDED.weights(torch.tensor([[k]]), N)[1])
        conditions = [of.condition({"label": LABELS[row : row + 1]}, torch.tensor([d])) for d in (True, False)]
        hs = [of.backbone(tokens[:, :-1], None, cond=c)[0, k] for c in conditions]

        def mean(j: int, x: Tensor) -> Tensor:
            time, _, _, p, q, a, b, *_ = steps.rows[j].tolist()
            out = [of.head.predict(x, of.head.about(torch.tensor(time)), of.head.condition(h))[0] for h in hs]
            return a * x + b * (p * x + q * (out[0] + w * (out[1] - out[0])))

        return mean

    def z(k: int, j: int) -> Tensor:
        return noise.normal(torch.tensor([[k]]), C, Stream.DENOISE, j)[0, 0]

    while at < N:
        cycle += 1
        paths = []
        for k in range(at, min(at + length, N)):
            mean, x, path = predictor(draft, k), z(k, 0), []
            for j in range(STEPS):
                center = mean(j, x)
                x = center + spread[j] * z(k, j + 1)
                path.append((center, x))
            tokens[0, k] = x
            paths.append(path)
        for k in range(at, min(at + length + 1, N)):
            mean, x = predictor(model, k), z(k, 0)
            path = paths[k - at] if k - at < len(paths) else None
            stays = path is not None
            for j in range(STEPS):
                own, draw = mean(j, x), z(k, j + 1)
                x = own + spread[j] * draw
                if path is not None:
                    d = (path[j][0] - own) / spread[j]
                    u = noise.uniform(torch.tensor([[k]]), STEPS, Stream.ACCEPT)[0, 0, j]
                    stays = bool(u.log() <= -(draw @ d) - d @ d / 2)
                    x = path[j][1] if stays else own + spread[j] * (draw - 2 * d * (d @ draw) / (d @ d))
            tokens[0, k], rounds[k] = x, cycle
            if not stays:
                break
        at = k + 1
    return tokens[0], rounds


@pytest.mark.parametrize(("length", "variance"), [(1, 1.0), (3, 0.4), (40, 1.0)])
def test_it_is_the_naive_loop(model: Model, near: Model, length: int, variance: float) -> None:
    found = decode(model, near, length=length, variance=variance)
    for row in range(3):
        tokens, rounds = naive(model, near, row, length, variance)
        assert found.rounds[row].tolist() == rounds and close(found.tokens[row], tokens)
    assert 1 < found.nfe < N, "some drafts stay and some do not"


def test_a_perfect_draft_model_is_never_refused(model: Model) -> None:
    found = decode(model, model, length=3)
    assert found.nfe == 4 and found.notes["acceptance"] == [1.0] * 3 and found.notes["first_failure"] == 1.0
    assert found.notes["tokens_per_cycle"] == 4.0 and found.notes["head_steps"] == 4 * STEPS
    assert max(found.notes["distance"]) < 1e-3 and close(found.tokens, plain(model))


def test_the_gate_is_the_model_at_radius_0_and_the_draft_model_at_any_distance(model: Model, near: Model) -> None:
    closed = decode(model, near, mode="distance", radius=0.0, length=2)
    assert closed.notes["acceptance"][0] == 0.0 and closed.nfe == N and close(closed.tokens, plain(model))
    opened = decode(model, near, mode="distance", radius=1e9, length=N)
    assert opened.nfe == 1 and close(opened.tokens, plain(near))
    between = decode(model, near, mode="distance", radius=closed.notes["distance"][-1], length=2)
    assert 0 < between.notes["acceptance"][0] < 1 and between.notes["lossless"] is False


def test_the_heads_time_speculates_alone(model: Model) -> None:
    found = decode(model, None, mode="head_time", length=3, steps=20)
    assert found.nfe == N and N < found.notes["head_steps"] < 20 * N and found.notes["steps_per_call"] > 1
    alone = decode(model, None, mode="head_time", length=3, steps=20, rows=[1])
    assert close(alone.tokens[0], found.tokens[1])
    assert decode(model, None, mode="head_time", length=1, steps=20).notes["head_steps"] == 20 * N
    kept = decode(model, None, mode="head_time", known=(KNOWN, KEEP), steps=20).tokens
    assert torch.equal(kept[KEEP], KNOWN[KEEP])


def test_a_certain_prediction_is_drafted_whole(make_causal: Make) -> None:
    """Where x0 is predicted alike at all times, the old prediction is the new one."""
    model = make_causal()
    for parameter in model.head.output.parameters():
        parameter.zero_()  # no noise is predicted: x0 = x / alpha moves, by little once x is nearly clean
    many = decode(model, None, Guidance(), mode="head_time", length=5, steps=20)
    assert many.notes["steps_per_call"] > 1.3


def test_known_tokens_are_kept_and_do_not_count(model: Model, near: Model) -> None:
    found = decode(model, near, known=(KNOWN, KEEP), length=3)
    assert torch.equal(found.tokens[KEEP], KNOWN[KEEP])
    whole = decode(model, model, known=(KNOWN, KEEP), length=3)
    assert whole.notes["tokens_per_cycle"] == round((~KEEP).sum().item() / len(KEEP) / 4, 3)
    assert close(whole.tokens, plain(model, known=(KNOWN, KEEP))) and whole.nfe == 4
    every = decode(model, near, known=(KNOWN, torch.ones_like(KEEP)), length=3)
    assert torch.equal(every.tokens, KNOWN) and every.nfe == 4 and every.notes["acceptance"] == [0.0] * 3


def test_the_temperature_scales_the_noise_of_both_chains(model: Model) -> None:
    found = decode(model, model, temperature=0.5, variance=0.2, length=3)
    assert found.nfe == 4 and close(found.tokens, plain(model, temperature=0.5, variance=0.2))


def test_bfloat16_bodies(model: Model, near: Model) -> None:
    found = decode(copy.deepcopy(model).bfloat16(), copy.deepcopy(near).bfloat16(), length=3)
    assert found.tokens.dtype == torch.float32 and found.tokens.isfinite().all()


@pytest.mark.parametrize("values", [{}, {"mode": "distance", "radius": 1.0}])
@pytest.mark.parametrize("known", [None, (KNOWN, KEEP)])
def test_an_iteration_asks_the_host_for_nothing(model: Model, near: Model, values: Any, known: Any) -> None:
    engine, noise, made = Engine(model, GUIDED), Noise(SEEDS), sampler(**values)
    engine.once(("draft", None), lambda: Engine(near, GUIDED))
    engine.begin({"label": LABELS}, known)
    with torch.inference_mode():
        state = made.init(engine, noise)
        buffers = {k: v.data_ptr() for k, v in vars(state).items() if isinstance(v, Tensor)}
        with NoHost():
            made.iterate(state, engine.forward, noise)
    assert buffers == {k: v.data_ptr() for k, v in vars(state).items() if isinstance(v, Tensor)}, "static buffers"


# --------------------------------------------------------------------------------------------------- refusals


def written(path: Path, model: Model, **facts: str) -> Path:
    step = path / run_files.step_name(3)
    step.mkdir()
    checkpoint.save_module(step / run_files.WEIGHTS, model, model.config, extra_metadata=facts)
    (step / run_files.META).write_text("{}")
    return path


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"grid": (1, 2, 8)}, r"its grid is \(1, 2, 8\), the model's is \(1, 4, 4\); pass a draft model"),
        ({"channels": 4}, "its channels is 4, the model's is 3; pass a draft model"),
        (
            {"schedule": "linear"},
            r"its head is diffusion \(predicts epsilon, schedule linear\), the model's is diffusion \(predicts "
            r"epsilon, schedule squaredcos_cap_v2\); both must walk the same path",
        ),
        ({"predicts": "velocity"}, r"its head is diffusion \(predicts velocity\), the model's is .* the same path"),
    ],
    ids=["grid", "channels", "schedule", "predicts"],
)
def test_a_draft_model_of_another_chain_is_refused(
    model: Model, make_causal: Make, tmp_path: Path, made: dict[str, Any], said: str
) -> None:
    draft = written(tmp_path, make_causal(**made))
    with pytest.raises(UserError, match=said) as refused:
        decode(model, None, draft=draft)
    assert str(refused.value).startswith(f"sampler.draft {draft}") and "\n" not in str(refused.value)


def test_a_draft_model_of_other_latents_is_refused(model: Model, tmp_path: Path) -> None:
    draft = written(tmp_path, model, tokenizer="b" * 64)
    engine = Engine(model, tokenizer="a" * 12)
    engine.begin({"label": LABELS})
    with pytest.raises(UserError, match="its tokenizer is bbbbbbbbbbbb, the model's is aaaaaaaaaaaa; pass a draft"):
        engine.run(sampler(draft=draft), Noise(SEEDS))


def test_a_draft_model_of_the_same_latents_drafts_at_other_sizes(model: Model, tmp_path: Path) -> None:
    draft, engine = written(tmp_path, model, tokenizer="b" * 64), Engine(model.at((1, 4, 3)), tokenizer="b" * 12)
    engine.begin({"label": LABELS})
    found = engine.run(sampler(draft=draft), Noise(SEEDS))
    assert found.tokens.shape[1] == 12 and set(found.notes["acceptance"]) == {1.0}, "it is the model itself"


def test_a_draft_model_that_cannot_be_guided_alike_is_refused(model: Model, make_causal: Make, tmp_path: Path) -> None:
    engine = Engine(model, GUIDED)
    engine.once(("draft", None), lambda: Engine(model, Guidance(2.0)))
    engine.begin({"label": LABELS})
    with pytest.raises(UserError, match=r"its guidance is Guidance\(scale=2\.0.*must be guided as the one that tests"):
        engine.run(sampler(), Noise(SEEDS))
    config = make_causal().config
    lone = dataclasses.replace(config, condition=dataclasses.replace(config.condition, dropout=0.0))
    bare = Model(lone).eval()
    with pytest.raises(UserError, match=r"was trained without a null class; set guidance\.scale to 1"):
        decode(model, None, draft=written(tmp_path, bare))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "distance"}, r"sampler\.mode distance needs radius; it is None"),
        ({"radius": 1.0}, r"sampler\.mode exact has no radius; it is 1\.0"),
        ({"last": 999}, r"sampler\.last 999: the step from there multiplies .* use at most 989"),
        (
            {"mode": "head_time", "draft": Path("x")},
            r"draft x is of no use to mode head_time; pass --sampler\.draft None",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        sampler(**values)


def test_what_it_cannot_do_is_refused(model: Model, make_causal: Make, make_masked: Make, make_model: Make) -> None:
    with pytest.raises(UserError, match="predicts velocity, whose steps draw none, so that two chains never meet"):
        decode(make_causal(predicts="velocity"), None)
    with pytest.raises(UserError, match=r"sampler cspec is not for this model's backbone; use --sampler\.kind masked"):
        decode(make_masked(), None)
    with pytest.raises(UserError, match="sampler cspec is not for this model, whose tokens are codes"):
        decode(make_model(), None)
    with pytest.raises(UserError, match=r"sampler\.draft is needed"):
        decode(model, None)
    engine = type("Captured", (Engine,), {"fused": True})(model)
    engine.begin({"label": LABELS})
    with pytest.raises(UserError, match=r"mode head_time runs eagerly alone; add --engine\.kind eager"):
        engine.run(sampler(mode="head_time"), Noise(SEEDS))


def test_causal_refuses_what_only_ancestral_steps_have(model: Model, make_causal: Make) -> None:
    with pytest.raises(UserError, match=r"sampler\.variance 0\.5 is for ancestral steps"):
        plain(model, solver="euler", variance=0.5, end_noise=False)
    with pytest.raises(UserError, match=r"sampler\.end_noise True is for ancestral steps"):
        plain(make_causal(predicts="velocity"), variance=None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("order", ["raster", "random"])
@pytest.mark.parametrize("values", [{}, {"mode": "distance", "radius": 0.0}], ids=["exact", "distance"])
def test_a_captured_decode_is_the_eager_one(make_causal: Make, values: Any, order: str) -> None:
    captured: Any = pytest.importorskip("visgen.decode.captured")
    target, draft = (make_causal(order=order).to("cuda") for _ in range(2))
    draft.head.output.weight.add_(1e-3)
    found = []
    for kind in (captured.CapturedEngine, Engine):
        engine = kind(target, GUIDED)
        engine.once(("draft", None), lambda kind=kind: kind(draft, GUIDED))
        for first in (0, 8):  # the second batch in the buffers of the first
            engine.begin({"label": LABELS.to("cuda")})
            seeds = torch.arange(first, first + 3, device="cuda")
            found.append(engine.run(sampler(length=3, **values), Noise(seeds)))
    for fast, slow in zip(found[:2], found[2:], strict=True):
        assert torch.equal(fast.rounds, slow.rounds) and close(fast.tokens, slow.tokens)
        assert fast.notes["acceptance"] == slow.notes["acceptance"]
