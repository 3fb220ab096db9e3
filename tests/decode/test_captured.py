"""The captured engine: its fused step against the eager engine, and on a GPU its graph, memory and silence."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.checks import UserError
from visgen.conditions import Prefix
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.samplers import Sampler, one_step, sjd
from visgen.samplers.ar import AR, Config
from visgen.sampling import EngineConfig

pytest.importorskip("triton")
from visgen.decode.captured import CapturedEngine

MakeModel = Callable[..., Model]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
BATCH = 4 if ON_GPU else 3  # the interpreter is slow
LABELS = torch.tensor([0, 1, 2, 0], device=DEVICE)[:BATCH]
gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


class Stepped(CapturedEngine):
    """The fused step without a graph, so that it runs on a CPU in Triton's interpreter."""

    prepared = Engine.prepared
    stepper = Engine.stepper


FAST = CapturedEngine if ON_GPU else Stepped


def decoded(
    engine: Engine, seeds: Tensor, labels: Tensor = LABELS, known: Any = None, sampler: Sampler | None = None
) -> Tensor:
    engine.begin({"label": labels}, known)
    return engine.run(sampler or AR(Config()), Noise(seeds.to(DEVICE))).tokens


@pytest.mark.parametrize(
    ("guidance", "warp", "kv_heads"),
    [
        (Guidance(), Warp(), None),
        (Guidance(3.0, (0.2, 0.8), "cosine"), Warp(0.7, 10, 0.9), 1),
    ],
    ids=str,
)
def test_the_same_tokens_as_the_eager_engine(
    make_model: MakeModel, guidance: Guidance, warp: Warp, kv_heads: int | None
) -> None:
    model = make_model((1, 4, 4) if ON_GPU else (1, 1, 3), kv_heads=kv_heads, layers=1).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    known = [torch.randint(0, n, (BATCH, model.tokens), generator=generator).to(DEVICE) for n in (5, 2)]
    slow, fast = Engine(model, guidance, warp), FAST(model, guidance, warp)
    for given in (None, (known[0], known[1].bool())):
        for first in (0, 40):  # the second batch runs in the buffers of the first
            seeds = torch.arange(first, first + BATCH)
            wanted = decoded(slow, seeds, known=given)
            assert len(wanted.unique()) > 2
            assert torch.equal(decoded(fast, seeds, known=given), wanted)
    labels, seeds = torch.tensor([2, 1], device=DEVICE), torch.arange(2)  # another batch size
    assert torch.equal(decoded(fast, seeds, labels), decoded(slow, seeds, labels))


@pytest.mark.parametrize(
    ("guidance", "drafting"),
    [(Guidance(3.0), "coupled"), (Guidance(2.0, schedule="linear"), "pure_gumbel")],
    ids=str,
)
def test_wide_windows_give_the_same_tokens_too(make_model: MakeModel, guidance: Guidance, drafting: Any) -> None:
    model = make_model((1, 4, 4) if ON_GPU else (1, 2, 3), kv_heads=2, layers=1).to(DEVICE)
    slow, fast = Engine(model, guidance, Warp(0.8, 12)), FAST(model, guidance, Warp(0.8, 12))
    sampler, mask = sjd.SJD(sjd.Config(drafting, window=4)), torch.arange(model.tokens, device=DEVICE) == 2
    known = (torch.full((BATCH, model.tokens), 3, device=DEVICE), mask.expand(BATCH, -1))
    for given in (None, known):
        wanted = decoded(slow, torch.arange(BATCH), known=given, sampler=sampler)
        assert len(wanted.unique()) > 2
        assert torch.equal(decoded(fast, torch.arange(BATCH), known=given, sampler=sampler), wanted)


@pytest.mark.parametrize("settings", [{"kv_heads": 2}, {"second": 3, "regress": True}], ids=str)
def test_students_pass_over_all_slots_gives_the_same_tokens(make_student: MakeModel, settings: dict[str, Any]) -> None:
    model, passes = make_student((1, 2, 4), layers=1, **settings).to(DEVICE), 2 if settings.get("second") else 1
    sampler = one_step.OneStep(one_step.Config(passes, split=5 if settings.get("regress") else None))
    slow, fast = Engine(model), FAST(model)
    mask = (torch.arange(model.tokens, device=DEVICE) % 5 == 2).expand(4, -1)
    labels = torch.arange(4, device=DEVICE) % 3
    for known in (None, (torch.full((4, model.tokens), 3, device=DEVICE), mask)):
        for first in (0, 40):  # the second batch runs in the buffers of the first
            seeds = torch.arange(first, first + 4)
            wanted = decoded(slow, seeds, labels, known, sampler)
            assert len(wanted.unique()) > 2
            assert torch.equal(decoded(fast, seeds, labels, known, sampler), wanted)


def test_a_pass_over_all_slots_is_the_trunks(make_student: MakeModel) -> None:
    """Under a prefix that is padded, and a control; not only its likeliest tokens."""
    model = make_student().to(DEVICE)
    backbone, rng = model.backbone, torch.Generator().manual_seed(0)
    noise, added = (torch.randn(s, generator=rng).to(DEVICE) for s in ((3, 16, 3), (2, 3, 16, 32)))
    level = (torch.arange(48, device=DEVICE).view(3, 16) % 3).float()
    with torch.inference_mode():
        vectors = model.condition({"label": torch.arange(3, device=DEVICE)}).vectors
        for visible in (None, torch.tensor([[True], [False], [True]], device=DEVICE)):
            for control in (None, added):
                given: Any = {"cond": Prefix(vectors, visible), "level": level, "control": control}
                wanted = backbone(noise, None, **given)
                assert torch.allclose(backbone.fused_pass()(noise, None, **given), wanted, atol=2e-5), (
                    visible,
                    control,
                )


def test_auto_is_eager_without_a_gpu_and_captured_is_refused(make_model: MakeModel) -> None:
    model = make_model().to("cpu")
    assert type(EngineConfig().make(model)) is Engine
    with pytest.raises(UserError, match=r"engine.kind captured needs a CUDA GPU.*--engine.kind eager"):
        EngineConfig(kind="captured").make(model)


def test_blocks_with_kernels_of_their_own_are_not_compiled(make_model: MakeModel) -> None:
    with pytest.raises(UserError, match=r"engine\.compile true: this backbone has kernels of its own.*leave it out"):
        EngineConfig(compile=True)._compile(make_model().backbone, "captured")


def test_without_triton_the_eager_engine_is_the_remedy(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match=r"needs Triton.*--engine.kind eager"):
        CapturedEngine(make_model())


@gpu
def test_the_decode_loop_waits_for_nothing_and_compiles_nothing(make_model: MakeModel) -> None:
    model = make_model().to(DEVICE)
    engine, sampler = CapturedEngine(model, Guidance(2.0)), AR(Config())
    noise = Noise(torch.arange(BATCH, device=DEVICE))
    engine.begin({"label": LABELS})
    engine.run(sampler, noise)
    with torch.inference_mode():
        _, step, _ = engine.prepared(sampler, noise)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(sampler.iterations(engine)):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.inference_mode():
        _, step, _ = engine.prepared(sampler, noise)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    for _ in range(sampler.iterations(engine)):
        step()
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before


@gpu
def test_garbage_of_an_earlier_engine_does_not_spoil_a_capture(make_model: MakeModel) -> None:
    """A graph that nothing but a cycle refers to is freed by the collector, which may run at any time."""
    model, sampler = make_model().to(DEVICE), AR(Config())
    engine = CapturedEngine(model)
    decoded(engine, torch.arange(BATCH), sampler=sampler)
    cycle: list[Any] = [engine]
    cycle.append(cycle)
    del engine, cycle
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        found = decoded(CapturedEngine(model), torch.arange(BATCH), sampler=sampler)
    finally:
        gc.set_threshold(*threshold)
    assert torch.equal(found, decoded(Engine(model), torch.arange(BATCH), sampler=sampler))


@gpu
def test_half_precision_logits_are_near(make_model: MakeModel) -> None:
    model = make_model().to(DEVICE, torch.bfloat16)
    laws = []
    for kind in (Engine, CapturedEngine):
        engine = kind(model, Guidance(2.0))
        engine.begin({"label": LABELS})
        index = torch.zeros(BATCH, 1, dtype=torch.int64, device=DEVICE)
        with torch.inference_mode():
            laws.append(engine.forward(index, index).logits)
    assert (laws[0] - laws[1]).abs().max() <= 0.02 * laws[0].abs().max()


@gpu
@pytest.mark.parametrize("sampler", [AR(Config()), sjd.SJD(sjd.Config("coupled", 4))], ids=["ar", "sjd"])
def test_values_that_are_not_finite_are_refused_and_forgotten(make_model: MakeModel, sampler: Any) -> None:
    model = make_model().to(DEVICE)
    engine, seeds = CapturedEngine(model, Guidance(2.0)), torch.arange(BATCH)
    expected = decoded(engine, seeds, sampler=sampler)
    for weight in (model.head.output.weight, next(model.backbone.parameters())):
        kept = weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(UserError, match="not finite"):
            decoded(engine, seeds, sampler=sampler)
        weight.copy_(kept)
        assert torch.equal(decoded(engine, seeds, sampler=sampler), expected)
