"""Blockwise denoising against a naive loop over the training pass, and what it does with known and later frames."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from no_host import NoHost
from torch import Tensor

from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine, Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.nn.diffusion import rows
from visgen.sampling import EngineConfig

LABELS, SEEDS = torch.tensor([0, 2, 1]), torch.tensor([3, 1, 4])
C = 3


def made(**values: Any) -> Any:
    return build(plugin_config("visgen.samplers", "blockwise", **{"steps": 3, **values}))


def decode(model: Any, guidance: float = 1.0, known: Any = None, **values: Any) -> Generation:
    engine = Engine(model, Guidance(guidance))
    engine.begin({"label": LABELS}, known)
    return engine.run(made(**values), Noise(SEEDS))


def naive(model: Any, guidance: float, solver: Any, steps: int, known: Tensor | None = None, blocks: int = 0) -> Tensor:
    """The same by the doubled training pass alone, one step of one block after another: [B, N, C] raster order."""
    layout = model.backbone.layout
    size, count, order = layout.block, layout.tokens // layout.block, model.backbone.raster(torch.arange(layout.tokens))
    clean = torch.zeros(len(SEEDS), layout.tokens, C)
    if known is not None:
        clean[:, : blocks * size] = known[:, order][:, : blocks * size]
    given = model.condition({"label": LABELS})
    for i in range(blocks, count):
        here = slice(i * size, (i + 1) * size)
        x = Noise(SEEDS).normal(order[here].unsqueeze(0), C, Stream.DENOISE)
        before, kept = torch.zeros_like(x), torch.zeros_like(x)
        for row in rows(model.head.path, solver, steps):
            noised = clean.clone()
            noised[:, here] = x
            streams = torch.cat([clean[:, :-size], noised], 1)
            level = torch.full((len(SEEDS), count), row.time)
            out = []
            for cond in (given, model.condition.null(given)):
                h = model.backbone(streams, None, cond=cond, level=level)[:, here]
                out.append(model.head.output(h))
            guided = out[1] + guidance * (out[0] - out[1])
            now = row.p * x + row.q * guided
            new = row.a * x + row.b * now + row.c * before + row.k * kept
            before, kept, x = now, x if row.keep else kept, new
        clean[:, here] = x
    return torch.empty_like(clean).index_copy_(1, order, clean)


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-3 * b.abs().max())


@pytest.mark.parametrize(
    ("grid", "block"),
    [((1, 4, 4), (1, 2, 2)), ((1, 4, 4), (1, 4, 4)), ((1, 2, 2), (1, 1, 1)), ((4, 2, 2), (2, 2, 2))],
)
@pytest.mark.parametrize(
    ("predicts", "solver"),
    [("epsilon", "dpmpp_2m"), ("epsilon", "euler"), ("velocity", "euler"), ("velocity", "heun")],
)
def test_it_is_the_naive_loop(
    make_blocks: Callable[..., Any], grid: Any, block: Any, predicts: str, solver: Any
) -> None:
    model = make_blocks(grid, block, predicts=predicts)
    found = decode(model, 1.7, solver=solver)
    assert close(found.tokens, naive(model, 1.7, solver, 3))
    evaluations, blocks = 5 if solver == "heun" else 3, found.notes["blocks"]
    assert found.nfe == blocks * evaluations + blocks - 1, "and a commit of every block but the last"
    assert found.rounds.unique().tolist() == [evaluations + i * (evaluations + 1) for i in range(blocks)]


def test_a_block_is_guided_by_its_place(make_blocks: Callable[..., Any]) -> None:
    model, sampler = make_blocks(block=(1, 2, 4)), made()

    def drawn(*guidance: Any) -> Tensor:
        engine = Engine(model, Guidance(*guidance))
        engine.begin({"label": LABELS})
        return engine.run(sampler, Noise(SEEDS)).tokens

    plain, late, constant = drawn(1.0), drawn(3.0, (0.9, 1.0)), drawn(3.0)
    first = model.backbone.raster(torch.arange(8))
    assert torch.allclose(late[:, first], plain[:, first], rtol=1e-4) and not torch.allclose(late, plain, rtol=1e-2)
    assert not torch.allclose(drawn(3.0, (0.0, 1.0), "linear"), constant, atol=1e-2)


def test_without_guidance_one_branch_is_computed(make_blocks: Callable[..., Any]) -> None:
    model = make_blocks()
    assert close(decode(model, 1.0).tokens, naive(model, 1.0, "auto", 3))


@pytest.mark.parametrize(
    ("predicts", "scheduler", "twin"),
    [
        ("epsilon", "DPMSolverMultistepScheduler", True),
        ("epsilon", "UniPCMultistepScheduler", False),
        ("velocity", "FlowMatchEulerDiscreteScheduler", False),  # its last time is 1, ours 0
    ],
)
def test_a_scheduler_of_diffusers_walks_instead(
    make_blocks: Callable[..., Any], predicts: str, scheduler: Any, twin: bool
) -> None:
    model = make_blocks(predicts=predicts)
    theirs, ours = decode(model, 1.5, scheduler=scheduler), decode(model, 1.5)
    assert theirs.nfe == ours.nfe and theirs.tokens.isfinite().all()
    assert close(theirs.tokens, ours.tokens) == twin
    again = decode(model, 1.5, scheduler=scheduler)
    assert torch.equal(again.tokens, theirs.tokens)


def test_known_blocks_are_committed_as_they_are(make_blocks: Callable[..., Any]) -> None:
    model = make_blocks((4, 2, 2), (1, 2, 2))
    known = torch.randn(3, 16, C, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(16) < 8).expand(3, -1)
    found = decode(model, 1.5, (known, mask))
    assert torch.equal(found.tokens[:, :8], known[:, :8])
    assert close(found.tokens, naive(model, 1.5, "auto", 3, known, blocks=2))
    assert found.nfe == 2 + 3 + 1 + 3 and found.rounds[0, ::4].tolist() == [1, 2, 5, 9]


def test_known_tokens_within_a_block_steer_the_others(make_blocks: Callable[..., Any]) -> None:
    model = make_blocks()
    known = torch.randn(3, 16, C, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(16) % 5 == 0).expand(3, -1)
    found, free = decode(model, known=(known, mask)).tokens, decode(model).tokens
    assert torch.equal(found[mask], known[mask])
    assert not torch.allclose(found[~mask], free[~mask], atol=1e-2)


def test_known_tokens_within_a_block_are_read_at_its_time(make_blocks: Callable[..., Any]) -> None:
    model = make_blocks()
    known = torch.randn(3, 16, C, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(16) % 3 == 0).expand(3, -1)
    engine, seen = Engine(model), []
    denoise = engine.denoise

    def spied(values: Tensor, index: Tensor, level: Tensor) -> Tensor:
        seen.append((values.clone(), model.backbone.raster(index), level.clone()))
        return denoise(values, index, level)

    engine.denoise = spied  # type: ignore[method-assign]
    engine.begin({"label": LABELS}, (known, mask))
    engine.run(made(), Noise(SEEDS))
    noised = [(values, at, level) for values, at, level in seen if level >= 0]
    assert len(noised) == 4 * 3, "four blocks, three steps"
    for values, at, level in noised:
        kept = mask[:, at[0]]
        wanted = model.head.path.noised(known[:, at[0]], Noise(SEEDS).normal(at, C, Stream.DENOISE), level)
        assert kept.any() and torch.allclose(values[kept], wanted[kept], atol=1e-5)


def test_a_clip_goes_on_past_the_trained_length(make_blocks: Callable[..., Any]) -> None:
    model = make_blocks((4, 2, 2), (2, 2, 2))
    short, long = decode(model, 1.5), decode(model, 1.5, frames=12)
    assert long.tokens.shape == (3, 48, C) and long.notes["blocks"] == 6 and long.tokens.isfinite().all()
    assert close(long.tokens[:, :16], short.tokens), "what comes later changes nothing"
    odd = decode(model, 1.5, frames=6)
    assert close(odd.tokens, long.tokens[:, :24])


def test_a_context_window_bounds_the_cache(make_blocks: Callable[..., Any]) -> None:
    model = make_blocks((4, 2, 2), (1, 2, 2))
    slots, tokens = {}, {}
    for frames in (8, 16):
        for context in (None, 2):
            engine = Engine(model, Guidance(1.5))
            engine.begin({"label": LABELS})
            tokens[frames, context] = engine.run(made(frames=frames, context=context), Noise(SEEDS)).tokens
            assert engine._cache is not None
            slots[frames, context] = engine._cache.keys.shape[3]
    assert slots == {(8, None): 36, (8, 2): 16, (16, None): 68, (16, 2): 16}  # and a block of the second branch
    wide = decode(model, 1.5, frames=8, context=7)
    assert close(wide.tokens, tokens[8, None])
    assert close(tokens[8, 2][:, :12], tokens[8, None][:, :12]), "three blocks fit the window"
    assert not close(tokens[8, 2][:, 12:], tokens[8, None][:, 12:])


@pytest.mark.parametrize(
    "given",
    [
        {"grid": (4, 2, 2), "block": (1, 2, 2), "layers": 3},
        {"grid": (2, 8, 16), "block": (1, 8, 16), "layers": 2, "attention": "flex"},
    ],
    ids=["dense", "flex"],
)
def test_compiled_blocks_draw_the_same_and_are_compiled_once(
    make_blocks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """Whatever block is at work, and however many there are: no position is a constant of the code."""
    frames = 2 * given["grid"][0]
    wanted, run = decode(make_blocks(**given), 2.0, frames=frames, context=3).tokens, torch.compile
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda method: run(method, backend=counting, fullgraph=True))
    model = make_blocks(**given)
    for _ in range(2):  # made twice, compiled once
        engine = EngineConfig("eager", "cpu", compile=True).make(model, Guidance(2.0))
    engine.begin({"label": LABELS})
    found = engine.run(made(frames=frames, context=3), Noise(SEEDS)).tokens
    assert torch.allclose(found, wanted, atol=1e-5)
    assert len(graphs) == 1, "the same code for all layers"
    before = len(graphs)
    engine.begin({"label": LABELS.flip(0)})
    engine.run(made(frames=frames, context=3), Noise(SEEDS + 1))
    assert len(graphs) == before


def test_one_cache_serves_batches_of_one_shape(make_blocks: Callable[..., Any]) -> None:
    engine = Engine(make_blocks(), Guidance(1.5))
    found, caches = [], []
    for _ in range(2):
        engine.begin({"label": LABELS})
        found.append(engine.run(made(), Noise(SEEDS)).tokens)
        caches.append(engine._cache)
    assert torch.equal(*found) and caches[0] is caches[1]
    engine.begin({"label": LABELS[:2]})
    assert torch.allclose(engine.run(made(), Noise(SEEDS[:2])).tokens, found[0][:2], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("known", [False, True])
def test_an_iteration_asks_the_host_for_nothing(make_blocks: Callable[..., Any], known: bool) -> None:
    engine, noise = Engine(make_blocks((4, 2, 2), (2, 2, 2)), Guidance(1.5)), Noise(SEEDS)
    mask = (torch.arange(16) < 6).expand(3, -1)
    engine.begin({"label": LABELS}, (torch.zeros(3, 16, C), mask) if known else None)
    sampler = made(frames=8, context=2)
    with torch.inference_mode():
        state = sampler.init(engine, noise)
        buffers = {k: v.data_ptr() for k, v in vars(state).items() if isinstance(v, Tensor)}
        for _ in range(sampler.iterations(engine)):
            with NoHost():
                sampler.iterate(state, engine.forward, noise)
    assert buffers == {k: v.data_ptr() for k, v in vars(state).items() if isinstance(v, Tensor)}, "static buffers"
    for asks in (lambda: state.step.item(), lambda: state.x[[0, 1]], lambda: bool(state.step > 0)):
        with pytest.raises(AssertionError), NoHost():
            asks()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_blocks_of_whole_tiles_are_drawn_alike_captured_or_not(make_blocks: Callable[..., Any], attention: str) -> None:
    from visgen.decode.captured import CapturedEngine
    from visgen.speed_blocks import Uncached

    sizes: Any = {"width": 128, "heads": 2, "attention": attention}  # heads of 64
    model = make_blocks((4, 8, 16), (1, 8, 16), **sizes).cuda()
    found = []
    for kind in (Engine, CapturedEngine, Uncached):
        engine = kind(model, Guidance(1.5))
        for seed in (7, 3):  # the second one replays the first one's graph
            engine.begin({"label": LABELS.cuda()})
            noise = Noise(SEEDS.cuda() + seed)
            drawn = engine.run(made(frames=6), noise).tokens
        found.append(drawn)
    spread = float(found[0].abs().max())
    assert all(torch.allclose(found[0], other, rtol=1e-2, atol=1e-2 * spread) for other in found[1:])


def test_what_it_cannot_do_is_refused(make_blocks: Callable[..., Any], make_model: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"sampler\.frames 3 are not whole blocks of this model; leave it out"):
        decode(make_blocks(), frames=3)
    with pytest.raises(UserError, match=r"sampler\.frames 5 are not whole blocks of this model; a multiple of 2 fits"):
        decode(make_blocks((4, 2, 2), (2, 2, 2)), frames=5)
    with pytest.raises(UserError, match=r"sampler blockwise is not for this model, .* codes, drawn one by one; use"):
        decode(make_model())
    with pytest.raises(UserError, match="UniPCMultistepScheduler is not for a model of velocity"):
        decode(make_blocks(predicts="velocity"), scheduler="UniPCMultistepScheduler")
    with pytest.raises(UserError, match=r"steps by its own rule, not by sampler\.solver heun"):
        decode(make_blocks(predicts="velocity"), scheduler="FlowMatchEulerDiscreteScheduler", solver="heun")
    with pytest.raises(UserError, match="solver heun is for a model of velocity"):
        decode(make_blocks(), solver="heun")
