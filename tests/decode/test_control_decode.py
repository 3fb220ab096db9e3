"""Decoding under a control: the plain model when there is none, each token's own slot, every sampler, every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen import checkpoint, run_files
from visgen import exactness as ex
from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.nn.control import Hint
from visgen.samplers import sjd
from visgen.samplers.ar import AR, Config

MakeModel = Callable[..., Model]
LABELS = torch.tensor([0, 1, 2, 0])
GUIDANCES = [Guidance(), Guidance(2.0), Guidance(2.0, control=3.0), Guidance(1.0, control=0.5)]


def maps(rows: int = 4, seed: int = 0, cells: tuple[int, int] = (4, 4)) -> Tensor:
    shape = (rows, 1, 3, cells[0] * 4, cells[1] * 4)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def decoded(engine: Engine, batch: dict[str, Any], sampler: Any = None, seeds: Tensor | None = None) -> Tensor:
    engine.begin(batch)
    seeds = torch.arange(len(batch["label"])) if seeds is None else seeds
    return engine.run(sampler or AR(Config()), Noise(seeds)).tokens


def logits(model: Model, batch: dict[str, Any], tokens: Tensor, control: Tensor | None = None) -> Tensor:
    """Teacher-forced logits [B, N, V] by the training pass."""
    added = model.controlled(batch) if control is None else control
    h = model.backbone(tokens[:, :-1], None, cond=model.condition(batch), control=added)
    return model.head.output(h[:, model.condition.prefix - 1 :])


TOKENS = torch.randint(16, (4, 16), generator=torch.Generator().manual_seed(3))


def test_null_control_is_the_plain_model_bit_for_bit(make_model: MakeModel) -> None:
    controlled = make_model(control="canny", layers=4)
    plain = make_model(layers=4)
    state = controlled.state_dict()
    plain.load_state_dict({k: state[k] for k in plain.state_dict()})
    wanted = logits(plain, {"label": LABELS}, TOKENS)
    assert controlled.control is not None
    null = controlled.control.added(torch.zeros(4, 16, 32))
    for batch, control in (({"label": LABELS}, None), ({"label": LABELS}, null)):
        assert torch.equal(logits(controlled, batch, TOKENS, control), wanted)
    given = {"label": LABELS, "map": maps()}
    every = torch.ones(4, dtype=torch.bool)
    assert torch.equal(controlled.loss(TOKENS, given, every), plain.loss(TOKENS, given, every))
    for drop in (None, ~every):
        assert torch.equal(controlled.loss(TOKENS, given, drop, every), plain.loss(TOKENS, given, drop))
    assert not torch.allclose(controlled.loss(TOKENS, given, None), plain.loss(TOKENS, given, None), atol=0.05)
    for guidance in GUIDANCES:
        found = decoded(Engine(controlled, guidance), {"label": LABELS})
        assert torch.equal(found, decoded(Engine(plain, Guidance(guidance.scale)), {"label": LABELS}))
        assert torch.equal(
            decoded(Engine(controlled, guidance), {"label": LABELS, "hints": [Hint(maps(), 0.0)]}), found
        )


def test_control_k_changes_no_logits_before_token_k(make_model: MakeModel) -> None:
    model, batch = make_model(control="canny", layers=3), {"label": LABELS}
    control = model.controlled({**batch, "map": maps()})
    assert control is not None
    before = logits(model, batch, TOKENS, control)
    for k in range(16):
        changed = control.clone()
        changed[:, :, k] += 1
        after = logits(model, batch, TOKENS, changed)
        assert torch.equal(after[:, :k], before[:, :k]), k
        assert not torch.allclose(after[:, k], before[:, k], atol=1e-3), k


def test_a_row_that_is_dropped_loses_condition_and_control(make_model: MakeModel) -> None:
    model = make_model(control="canny", layers=3)
    drop, both = torch.tensor([True, False, True, False]), {"label": LABELS, "map": maps()}
    found = model.loss(TOKENS, both, drop, torch.zeros(4, dtype=torch.bool))
    uncontrolled = model.loss(TOKENS, {"label": LABELS}, drop)
    assert torch.allclose(found[drop], uncontrolled[drop], atol=1e-5)
    assert not torch.allclose(found[~drop], uncontrolled[~drop], atol=1e-3)


@pytest.mark.parametrize("guidance", GUIDANCES, ids=str)
@pytest.mark.parametrize("condition", [None, {"kind": "text", "tokens": 6, "channels": 8}], ids=["label", "text"])
def test_the_cached_path_equals_the_full_forward(make_model: MakeModel, guidance: Guidance, condition: Any) -> None:
    """Also that separate scales are u + s (l - u) + r (c - l)."""
    model = make_model(control="canny", layers=4, condition=condition)
    rng = torch.Generator().manual_seed(5)
    asked = {"label": LABELS}
    if condition:
        mask = torch.arange(6) >= torch.tensor([0, 2, 5, 3])[:, None]
        asked = {"text": torch.randn(4, 6, 8, generator=rng), "text_mask": mask}
    batch = {**asked, "map": maps()}
    given = model.condition(batch)
    added = model.controlled(batch)
    laws = []
    for cond, control in ((model.condition.null(given), None), (given, None), (given, added)):
        h = model.backbone(TOKENS[:, :-1], None, cond=cond, control=control)[:, model.condition.prefix - 1 :]
        laws.append(model.head.output(h))
    s, r = guidance.scale, guidance.scale if guidance.control is None else guidance.control
    wanted = laws[0] + s * (laws[1] - laws[0]) + r * (laws[2] - laws[1])
    engine = Engine(model, guidance)
    with torch.inference_mode():
        engine.begin(batch)
        parts = [
            engine.forward(TOKENS, torch.arange(16).expand(4, -1)[:, a:b]).logits for a, b in ((0, 1), (1, 5), (5, 16))
        ]
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=2e-4)


@pytest.mark.parametrize("guidance", [Guidance(), Guidance(2.0, control=3.0)], ids=str)
def test_every_sampler_draws_under_a_control(make_model: MakeModel, guidance: Guidance, tmp_path: Any) -> None:
    """Token equality where it is promised; the law itself is tested by simulation below."""
    model = make_model(control="canny", layers=3)
    draft = make_model(layers=1, width=16, seed=1)
    step = tmp_path / run_files.step_name(1)
    step.mkdir()
    checkpoint.save_module(step / run_files.WEIGHTS, draft, draft.config)
    (step / run_files.META).write_text("{}")
    batch, engine = {"label": LABELS, "map": maps()}, Engine(model, guidance)
    expected = decoded(engine, batch)
    for window in (1, 3, 16):
        assert torch.equal(decoded(engine, batch, sjd.SJD(sjd.Config("pure_gumbel", window))), expected)
    assert not torch.equal(decoded(engine, {**batch, "map": maps(seed=1)}), expected)
    assert not torch.equal(decoded(engine, {"label": LABELS}), expected)
    alone = torch.cat(
        [decoded(engine, {"label": LABELS[[i]], "map": maps()[[i]]}, seeds=torch.tensor([i])) for i in range(4)]
    )
    assert torch.equal(alone, expected), "an image does not depend on its company"
    one = {"label": LABELS, "map": maps(1)}
    assert torch.equal(decoded(engine, one), decoded(engine, {**one, "map": maps(1).expand(4, -1, -1, -1, -1)}))
    speculative = build(plugin_config("visgen.samplers", "speculative", draft=tmp_path, length=2))
    assert decoded(engine, batch, speculative).shape == (4, 16)
    for drafting in ("fresh", "coupled", "gumbel"):
        assert decoded(engine, batch, sjd.SJD(sjd.Config(drafting, 4))).shape == (4, 16)


@pytest.mark.parametrize("drafting", ["coupled", "gumbel"])
def test_speculative_jacobi_decoding_under_a_control_follows_the_models_law(
    make_model: MakeModel, drafting: Any
) -> None:
    """The shipped engine, 12,000 draws of three tokens, against every sequence's probability; another map is caught."""
    model = make_model(grid=(1, 1, 3), vocab=3, control="canny", layers=2, width=16)
    engine = Engine(model, Guidance(2.0, control=1.5), Warp(8.0))  # at 1 the random model is nearly certain

    def batch(which: Tensor, seed: int = 0) -> dict[str, Any]:
        return {"label": torch.ones_like(which), "map": maps(1, seed, (1, 3))}

    sampler, world = sjd.SJD(sjd.Config(drafting, 3)), ex.World(engine, batch=batch)
    fit = ex.simulate(sampler, world, 12_000, seed=7 << 32)
    assert fit.p > 1e-4 and fit.nfe < 3
    law, other = ex.joint(world)[0], ex.joint(ex.World(engine, batch=lambda which: batch(which, 6)))[0]
    assert (law - other).abs().sum() > 0.1
    seeds = torch.arange(4000)
    counts = torch.bincount(ex.place(decoded(engine, batch(seeds), sampler, seeds), 3), minlength=27)
    assert ex.g_test(counts.float(), law) > 1e-4 > ex.g_test(counts.float(), other)


def test_guidance_names_its_branches() -> None:
    kinds = {(1.0, None): 1, (1.0, 1.0): 1, (2.0, None): 2, (2.0, 2.0): 2, (1.0, 2.0): 2, (2.0, 1.0): 3, (0.0, 0.0): 2}
    for (scale, control), count in kinds.items():
        guidance = Guidance(scale, control=control)
        weights = guidance.weights(torch.tensor([[0, 3]]), 4)
        assert guidance.branches == count == len(weights) and torch.allclose(weights.sum(0), torch.ones(1, 2))
    early = Guidance(3.0, (0.0, 0.5), control=5.0).weights(torch.tensor([[0, 3]]), 4)[:, 0]
    assert early.T.tolist() == [[-2, -2, 5], [0, 0, 1]], "outside the interval there is no guidance at all"
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"guidance\.control .* must be a finite number >= 0"):
            Guidance(control=wrong)


def test_the_fused_step_under_a_control(make_model: MakeModel) -> None:
    pytest.importorskip("triton")
    from visgen.decode.captured import CapturedEngine

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")

    class Stepped(CapturedEngine):
        """The fused step without a graph, so that it runs on a CPU in Triton's interpreter."""

        prepared = Engine.prepared
        stepper = Engine.stepper

    model = make_model((1, 1, 3), control="canny", kv_heads=1).to(device)
    cells, guidance = (1, 3), Guidance(2.0, control=3.0)
    slow, fast = (
        Engine(model, guidance, Warp(0.8, 12)),
        (CapturedEngine if on_gpu else Stepped)(model, guidance, Warp(0.8, 12)),
    )
    plain = decoded(slow, {"label": LABELS.to(device)}, seeds=torch.arange(4, device=device))
    for seed in (0, 1, None):  # the second batch runs in the buffers of the first, the third has no control
        batch = {"label": LABELS.to(device)} | ({} if seed is None else {"map": maps(4, seed, cells).to(device)})
        for sampler in (AR(Config()), sjd.SJD(sjd.Config("pure_gumbel", 2)))[: 2 if seed == 0 else 1]:
            wanted = decoded(slow, batch, sampler, torch.arange(4, device=device))
            assert torch.equal(decoded(fast, batch, sampler, torch.arange(4, device=device)), wanted)
        assert torch.equal(wanted, plain) == (seed is None)
