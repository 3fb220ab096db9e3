"""The diffusion head by kernels against the head itself: its predictions, its walks, and every sampler of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.config import build, plugin_config
from visgen.decode.engine import Engine, Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.heads.diffusion import Config, DiffusionHead
from visgen.nn.ancestral import walk
from visgen.samplers._walk import along, denoised, tables

pytest.importorskip("triton")
from visgen.decode.captured import CapturedEngine
from visgen.nn.fused import denoise

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter multiplies no bfloat16
EXACT = 3e-5  # largest difference over the largest value, float32, of one prediction
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


def made(width: int = 40, channels: int = 5, dtype: torch.dtype = torch.float32, **values: Any) -> DiffusionHead:
    torch.manual_seed(0)
    head = DiffusionHead(Config(layers=2, width=width, **values), 16, channels)
    for name, parameter in head.named_parameters():
        torch.nn.init.normal_(parameter, float("norm.weight" in name), 0.2)
    return head.to(DEVICE, dtype).eval().requires_grad_(False)


def laws(head: DiffusionHead, branches: int, tokens: tuple[int, int]) -> tuple[Any, Any]:
    """The same law twice: as the head gives it, and by kernels."""
    rng = torch.Generator().manual_seed(1)
    h = torch.randn(branches, *tokens, 16, generator=rng).to(DEVICE, head.input.weight.dtype)
    weights = torch.randn(branches, *tokens, generator=rng).to(DEVICE)
    weights[-1] += 1 - weights.sum(0)
    return head.dist(h, weights), head.fused()(h, weights)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


SIZES = [  # width, channels, branches, images and tokens of each
    (40, 5, 2, (2, 2)),  # few rows: the norm goes with the product
    (33, 20, 1, (1, 1)),  # more channels than a program holds
    (100, 16, 2, (2, 4)),  # as many as few can be, and more tiles than one
    (40, 3, 3, (3, 4)),  # more rows
    (40, 3, 2, (5, 13)),  # more than 128
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_predictions_are_the_heads(size: Any) -> None:
    width, channels, branches, tokens = size
    values = {"variance": "fixed_large"} if branches == 3 else {}
    head = made(width, channels, **values)
    slow, fast = laws(head, branches, tokens)
    about = head.about(torch.tensor([900.0, 20.0], device=DEVICE))
    x = torch.randn(*tokens, channels, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    predict = along(fast, about)
    for step in (0, 0, 1):
        (wanted, place), (found, share) = slow.predict(x, about[step]), predict(x, step)
        assert found.dtype == torch.float32 and apart(found, wanted) < EXACT, step
        assert (place is None) == (share is None) == bool(values)
        assert share is None or apart(share, place) < EXACT
    assert x.equal(torch.randn(*tokens, channels, generator=torch.Generator().manual_seed(2)).to(DEVICE))


@pytest.mark.parametrize("tokens", [(2, 3), (3, 6)], ids=["few", "more"])
def test_some_of_the_tokens_have_their_own_law(tokens: tuple[int, int]) -> None:
    head = made()
    slow, fast = (law.at(slice(1, 3)) for law in laws(head, 2, tokens))
    about = head.about(torch.tensor([300.0], device=DEVICE))
    x = torch.randn(tokens[0], 2, 5, device=DEVICE)
    assert apart(along(fast, about)(x, 0)[0], along(slow, about)(x, 0)[0]) < EXACT


@pytest.mark.parametrize("few", [True, False])
def test_a_half_precision_body_is_as_near_as_the_heads(few: bool) -> None:
    """Kernels round less than modules do, and stay as near to float32."""
    exact, half = made(64), made(64, dtype=HALF)
    tokens = (2, 3) if few else (4, 5)
    wanted, _ = laws(exact, 2, tokens)
    slow, fast = laws(half, 2, tokens)
    x, time = torch.randn(*tokens, 5, device=DEVICE), torch.tensor([400.0], device=DEVICE)
    truth = wanted.predict(x, exact.about(time)[0])[0]
    bound = apart(slow.predict(x, half.about(time)[0])[0], truth)
    found = along(fast, half.about(time))(x, 0)[0]
    assert found.dtype == torch.float32 and 0 < apart(found, truth) < 1.5 * bound


@pytest.mark.parametrize(
    ("values", "solver", "rule"),
    [
        ({}, "ancestral", {}),
        ({}, "ancestral", {"temperature": 0.9, "variance": 0.3}),
        ({"variance": "fixed_small"}, "ancestral", {}),
        ({"variance": "fixed_large"}, "ancestral", {}),
        ({}, "dpmpp_2m", {}),
        ({"predicts": "velocity"}, "heun", {}),
    ],
    ids=str,
)
def test_walks_end_where_the_heads_do(
    values: dict[str, Any], solver: Any, rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    head = made(**values)
    slow, fast = laws(head, 2, (2, 3))
    path = walk(head.path, solver, 2 if solver == "heun" else 4)  # four evaluations, or three
    table, bounds, about, _ = tables([path], head, DEVICE)
    state = SimpleNamespace(**{k: torch.cat([v[:1], v]) for k, v in (("table", table), ("bounds", bounds))})
    state.about = torch.cat([about[:1], about])  # the walk begins at row 1
    told = SimpleNamespace(**{"temperature": 1.0, "variance": None, **rule})
    at, noise = torch.tensor([[4, 0, 2], [1, 3, 5]], device=DEVICE), Noise(torch.tensor([7, 9], device=DEVICE))
    wanted = denoised(slow, at, noise, 5, state, 1, path.noisy, told)
    for room in (1 << 29, 12 * 8 * 40 * 4 * 3):  # all steps at once, three
        monkeypatch.setattr(denoise, "ROOM", room)
        assert apart(denoised(fast, at, noise, 5, state, 1, path.noisy, told), wanted) < 20 * EXACT, room
    assert denoise.steps_at_once(12, 8 * 40, 4) == 3


def test_the_room_bounds_what_is_made_at_once() -> None:
    outputs = 20 * 1024  # MAR-B's
    assert denoise.steps_at_once(14, outputs, 2) > 100
    for rows in (128, 512, 896, 5000):
        steps = denoise.steps_at_once(rows, outputs, 2)
        assert steps == 1 or steps * rows * outputs * 2 <= denoise.ROOM


def test_the_moments_of_a_row_do_not_depend_on_its_mean() -> None:
    """Squares about the mean of a tile: rows that lie far from zero keep their precision."""
    head = made(64)
    head.input.bias += 100
    slow, fast = laws(head, 2, (2, 2))
    about, x = head.about(torch.tensor([300.0], device=DEVICE)), torch.randn(2, 2, 5, device=DEVICE)
    assert apart(along(fast, about)(x, 0)[0], along(slow, about)(x, 0)[0]) < 20 * EXACT


# ----------------------------------------------------------------------------------------------------- in an engine


class Stepped(CapturedEngine):
    """The kernels without a graph, so that they run on a CPU in Triton's interpreter."""

    prepared = Engine.prepared
    stepper = Engine.stepper


FAST = CapturedEngine if ON_GPU else Stepped
SEEDS = torch.tensor([3, 1], device=DEVICE)


def decode(engine: Engine, kind: str, known: Any = None, **values: Any) -> Generation:
    engine.begin({"label": torch.tensor([0, 2], device=DEVICE)}, known)
    return engine.run(build(plugin_config("visgen.samplers", kind, steps=3, **values)), Noise(SEEDS))


@pytest.mark.parametrize("known", [False, True])
def test_masked_decodes_the_same_vectors(make_masked: Callable[..., Any], known: bool) -> None:
    model = make_masked(grid=(1, 3, 3) if ON_GPU else (1, 2, 3)).to(DEVICE)
    given, n = None, model.tokens
    if known:
        given = torch.randn(2, n, 3, device=DEVICE), torch.arange(n, device=DEVICE).expand(2, -1) % 4 == 1
    guidance = Guidance(2.5, schedule="linear")
    wanted, found = (decode(kind(model, guidance), "masked", given, iterations=3) for kind in (Engine, FAST))
    assert apart(found.tokens, wanted.tokens) < 1e-3 and found.rounds.equal(wanted.rounds)
    assert not known or found.tokens[given[1]].equal(given[0][given[1]])


@pytest.mark.parametrize("order", ["raster", "random"])
def test_causal_decodes_the_same_vectors(make_causal: Callable[..., Any], order: str) -> None:
    model = make_causal(grid=(1, 1, 3), order=order).to(DEVICE)
    wanted, found = (decode(kind(model, Guidance(1.5)), "causal", end_noise=True) for kind in (Engine, FAST))
    assert apart(found.tokens, wanted.tokens) < 1e-3


@pytest.mark.parametrize("mode", ["exact", "distance"])
def test_cspec_walks_target_and_draft_by_kernels(
    make_causal: Callable[..., Any], mode: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft = (make_causal(grid=(1, 1, 3), seed=seed).to(DEVICE) for seed in (0, 1))
    monkeypatch.setattr(
        "visgen.samplers.cspec.load_draft", lambda path, engine: type(engine)(draft, engine.guidance, engine.warp)
    )
    values = {"mode": mode, "length": 2, "draft": tmp_path, "radius": 3.0 if mode == "distance" else None}
    wanted, found = (decode(kind(model, Guidance(1.5)), "cspec", **values) for kind in (Engine, FAST))
    assert apart(found.tokens, wanted.tokens) < 1e-3 and found.rounds.equal(wanted.rounds)


@gpu
def test_captured_walks_are_the_eager_ones_and_wait_for_nothing(make_masked: Callable[..., Any]) -> None:
    model = make_masked().to(DEVICE)
    guidance = Guidance(2.5, schedule="linear")
    engine, noise = CapturedEngine(model, guidance), Noise(SEEDS)
    sampler = build(plugin_config("visgen.samplers", "masked", steps=20, iterations=6))
    batch = {"label": torch.tensor([0, 2], device=DEVICE)}
    slow = Engine(model, guidance)
    slow.begin(batch)
    wanted = slow.run(sampler, noise).tokens
    engine.begin(batch)
    for _ in range(2):  # the second decode replays what the first has recorded
        assert apart(engine.run(sampler, noise).tokens, wanted) < 2e-3
    with torch.inference_mode():
        _, step, _ = engine.prepared(sampler, noise)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(sampler.iterations(engine)):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before
