"""Every sampler: draws all tokens, alone or in company, and leaves the model as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visgen import checkpoint, run_files
from visgen.config import UserError, build, implementation, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp

PACKAGE = "samplers"
N, VOCAB, CHANNELS = 16, 16, 3
ANY_ORDER = ("masked",)  # whose tokens are drawn in an order of each image's own
LABELS, SEEDS = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([3, 1, 4, 15, 92])


@pytest.fixture(params=[(Guidance(), Warp()), (Guidance(2.0), Warp(0.8, 10, 0.9))], ids=["plain", "guided"])
def engine(
    request: pytest.FixtureRequest,
    kind: str,
    make_model: Callable[..., Any],
    make_blocks: Callable[..., Any],
    make_masked: Callable[..., Any],
    make_causal: Callable[..., Any],
    make_student: Callable[..., Any],
) -> Engine:
    guidance, warp = request.param
    if kind in ("masked", "causal", "cspec"):
        return Engine(make_masked() if kind == "masked" else make_causal(), guidance)
    if continuous(kind):
        return Engine(make_blocks(block=(1, 2, 4)), guidance)
    if implementation(plugin_config("visgen.samplers", kind)).whole:  # type: ignore[attr-defined]
        return Engine(make_student(guidance=guidance, warp=warp))
    return Engine(make_model(), guidance, warp)


def continuous(kind: str) -> bool:
    """Whether its tokens are vectors."""
    return implementation(plugin_config("visgen.samplers", kind)).continuous  # type: ignore[attr-defined]


def same(a: Tensor, b: Tensor) -> bool:
    """Ids are equal; vectors differ by the rounding of products of another shape."""
    if a.is_floating_point():
        return bool((a - b).abs().max() < 1e-4 * b.abs().max())
    return torch.equal(a, b)


@pytest.fixture(scope="module")
def made(
    small: Callable[..., Any], make_model: Callable[..., Any], make_causal: Callable[..., Any], tmp_path_factory: Any
) -> Callable[[str], Any]:
    """Builds a sampler; one that asks for a draft model gets one of other weights."""
    drafts = {}
    for vectors, model in ((False, make_model(layers=1, width=16, seed=1)), (True, make_causal(seed=1))):
        drafts[vectors] = tmp_path_factory.mktemp("draft")
        step = drafts[vectors] / run_files.step_name(1)
        step.mkdir()
        checkpoint.save_module(step / run_files.WEIGHTS, model, model.config)
        (step / run_files.META).write_text("{}")
    return lambda kind: build(small(PACKAGE, kind, draft=drafts[continuous(kind)], steps=3))


def draw(sampler: Any, engine: Engine, rows: list[int], known: Any = None) -> Tensor:
    engine.begin({"label": LABELS[rows]}, known)
    return engine.run(sampler, Noise(SEEDS[rows])).tokens


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Names, identities and values of everything the modules hold."""
    out: dict[str, Any] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                for inner, part in value.items():
                    kept = part.clone() if isinstance(part, Tensor) else None
                    out[f"{name}.{inner}"] = (id(part), kept)
            elif key.endswith("_hooks") or isinstance(value, dict):
                out[f"{name}.{key}"] = (id(value), dict(value))
            else:
                out[f"{name}.{key}"] = (id(value), value)
    return out


def unchanged(before: dict[str, Any], after: dict[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, tuple) and len(a) == 2 and isinstance(a[1], Tensor):
            return a[0] == b[0] and torch.equal(a[1], b[1])
        return a == b

    return before.keys() == after.keys() and all(same(before[k], after[k]) for k in before)


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_draws_every_token(kind: str, made: Callable[[str], Any], engine: Engine) -> None:
    sampler = made(kind)
    tokens = draw(sampler, engine, [0, 1, 2])
    if continuous(kind):
        assert tokens.shape == (3, N, CHANNELS) and tokens.dtype == torch.float32 and tokens.isfinite().all()
        assert tokens.std() > 0.1
    else:
        assert tokens.shape == (3, N) and tokens.dtype == torch.int64
        assert tokens.min() >= 0 and tokens.max() < VOCAB and tokens.unique().numel() > 3
    assert isinstance(sampler.iterations(engine), int) and sampler.iterations(engine) > 0


def test_counts_its_evaluations(kind: str, made: Callable[[str], Any], engine: Engine) -> None:
    sampler = made(kind)
    engine.begin({"label": LABELS})
    result = engine.run(sampler, Noise(SEEDS))
    assert result.rounds.shape == (5, N) and result.rounds.min() == (3 if kind == "blockwise" else 1)
    assert (result.rounds.diff(dim=1) >= 0).all() != (kind in ANY_ORDER), "from left to right"
    assert result.nfe_per_image.max() == result.nfe <= sampler.iterations(engine)
    assert torch.equal(result.accepted, N - result.nfe_per_image)


def test_says_of_every_iteration_which_graph_serves_it_or_of_none(
    kind: str, made: Callable[[str], Any], engine: Engine
) -> None:
    sampler = made(kind)
    engine.begin({"label": LABELS})
    with torch.inference_mode():
        state = sampler.init(engine, Noise(SEEDS))
    stages = sampler.stages(state)
    assert len(stages) == (sampler.iterations(engine) if stages else 0)
    assert bool(stages) == (getattr(state, "turn", None) == 0), "by its `turn` it chooses"


def test_a_complete_row_stays_as_it_is(kind: str, made: Callable[[str], Any], engine: Engine) -> None:
    sampler, noise = made(kind), Noise(SEEDS)
    engine.begin({"label": LABELS})
    with torch.inference_mode():
        state = sampler.init(engine, noise)
        if sampler.done(state) is None:
            assert not sampler.ragged
            return
        while not sampler.done(state).all():
            sampler.iterate(state, engine.forward, noise)
        before = state.tokens.clone(), state.rounds.clone()
        for _ in range(3):
            sampler.iterate(state, engine.forward, noise)
    assert torch.equal(state.tokens, before[0]) and torch.equal(state.rounds, before[1]) and sampler.done(state).all()


def test_an_image_does_not_depend_on_its_company(kind: str, made: Callable[[str], Any], engine: Engine) -> None:
    sampler = made(kind)
    together = draw(sampler, engine, [0, 1, 2, 3, 4])
    assert same(torch.cat([draw(sampler, engine, [i]) for i in range(5)]), together)
    assert same(draw(sampler, engine, [4, 2, 0]), together[[4, 2, 0]])
    assert not same(together[0], together[3]), "same label, another seed"


def test_sets_no_attribute_of_any_module(kind: str, made: Callable[[str], Any], engine: Engine) -> None:
    sampler = made(kind)
    before = snapshot(engine.model)
    draw(sampler, engine, [0, 1])
    assert unchanged(before, snapshot(engine.model))


def test_keeps_nothing_between_decodes(kind: str, made: Callable[[str], Any], engine: Engine) -> None:
    sampler = made(kind)
    first = draw(sampler, engine, [0, 1])
    draw(sampler, engine, [2, 3, 4])
    assert torch.equal(draw(sampler, engine, [0, 1]), first)
    assert dataclasses.is_dataclass(sampler.config)


def test_known_tokens_are_kept(kind: str, made: Callable[[str], Any], engine: Engine) -> None:
    mask = torch.rand(3, N, generator=torch.Generator().manual_seed(1)) < 0.4
    tokens = torch.randint(VOCAB, (3, N), generator=torch.Generator().manual_seed(2))
    if continuous(kind):
        tokens = torch.randn(3, N, CHANNELS, generator=torch.Generator().manual_seed(2))
    drawn = draw(made(kind), engine, [0, 1, 2], (tokens, mask))
    assert torch.equal(drawn[mask], tokens[mask])


def test_the_snapshot_sees_changes(make_model: Callable[..., Any]) -> None:
    model = make_model()
    changes: list[Callable[[], Any]] = [
        lambda: setattr(model.backbone, "cache", 1),
        lambda: setattr(model.backbone, "forward", print),
        lambda: model.backbone.coords.add_(1),
        lambda: model.head.register_forward_hook(print),
        lambda: model.train(),
    ]
    for change in changes:
        before = snapshot(model)
        assert unchanged(before, snapshot(model))
        change()
        assert not unchanged(before, snapshot(model))
        model = make_model()


def fresh(engine: Engine) -> Engine:
    return Engine(engine.model, engine.guidance, engine.warp)


@pytest.mark.parametrize("which", [0, -1], ids=["first weight", "last weight"])
def test_values_that_are_not_finite_are_refused_and_forgotten(
    kind: str, which: int, made: Callable[[str], Any], engine: Engine
) -> None:
    sampler, rows = made(kind), [0, 1, 2]
    expected = draw(sampler, fresh(engine), rows)
    weight = list(engine.model.backbone.parameters() if which == 0 else engine.model.head.parameters())[which]
    kept = weight.clone()
    for value in (torch.nan, torch.inf):
        weight.fill_(value)
        try:
            with pytest.raises(UserError, match=r"not finite.*engine\.precision fp32"):
                draw(sampler, engine, rows)
        finally:
            weight.copy_(kept)
        assert torch.equal(draw(sampler, engine, rows), expected)


def test_a_decode_that_was_cut_off_leaves_nothing_behind(
    kind: str, made: Callable[[str], Any], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, rows = made(kind), [0, 1, 2]
    expected = draw(sampler, fresh(engine), rows)

    def interrupted(state: Any, *given: Any) -> None:
        if engine._cache is not None:
            engine._cache.keys.fill_(torch.nan)
            engine._cache.values.fill_(torch.inf)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sampler, "iterate", interrupted)
        draw(sampler, engine, rows)
    assert torch.equal(draw(sampler, engine, rows), expected)
