"""`eval/speed_blocks.py`: operations against torch's count, the twin without a cache, small runs, refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import program
from torch.utils.flop_counter import FlopCounterMode

from visgen import speed, speed_blocks
from visgen.config import UserError, build, load, plugin_config, run_program
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.model import Model
from visgen.objectives.acdit import error
from visgen.train.main import TrainConfig

ROOT = Path(__file__).parents[1]
MakeBlocks = Callable[..., Model]
CLIPS = ((4, 2, 2), (1, 2, 2))
CPU = torch.device("cpu")


def sampler(**values: Any) -> Any:
    return plugin_config("visgen.samplers", "blockwise", **{"steps": 3, **values})


def drawn(engine: Engine, guidance: float, known: Any = None, **values: Any) -> torch.Tensor:
    engine.begin({"label": torch.tensor([0, 2])}, known)
    return engine.run(build(sampler(**values)), Noise(torch.tensor([3, 1]))).tokens


def products(counter: FlopCounterMode) -> int:
    """Operations of linear maps; attention, which torch does not count on every device, apart."""
    return sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))


def of_time(model: Model, levels: int) -> int:
    """Operations of embedding that many times."""
    return 2 * sum(p.numel() for p in model.backbone.time.parameters() if p.ndim == 2) * levels  # type: ignore[union-attr]


@pytest.mark.parametrize(("grid", "block"), [((1, 4, 4), (1, 2, 2)), CLIPS, ((1, 4, 4), (1, 4, 4))])
def test_operations_of_a_training_pass(make_blocks: MakeBlocks, grid: Any, block: Any) -> None:
    model, images = make_blocks(grid, block), 3
    layout = model.backbone.layout
    tokens, time = torch.randn(images, layout.tokens, 3), torch.full((images, layout.tokens // layout.block), 5.0)
    with FlopCounterMode(display=False) as counter:
        error(model, tokens, {"label": torch.zeros(images, dtype=torch.int64)}, None, time, tokens)
    slots = layout.doubled()
    seen = int(slots.visible(torch.arange(slots.slots)).sum())
    attention = 2 * 4 * 32 * seen * images  # layers, products with keys and with values
    assert speed_blocks.training_work(model, images) == 3 * (
        products(counter) + attention - of_time(model, time.numel())
    )


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("cached", [True, False])
def test_operations_of_a_decode(make_blocks: MakeBlocks, guidance: float, cached: bool) -> None:
    model, branches, steps, blocks, images = make_blocks(*CLIPS), 1 + (guidance != 1), 3, 4, 2
    engine = Engine(model, Guidance(guidance)) if cached else speed_blocks.Uncached(model, Guidance(guidance))
    with FlopCounterMode(display=False) as counter:
        drawn(engine, guidance)
    wide, size, pairs = 32, 4, 0  # width, tokens of a block, products of attention
    for block in range(blocks):
        for _ in range(steps):
            pairs += branches * size * size * (block + 1)
            pairs += 0 if cached else sum(size * size * (j + 1) for j in range(block))
        pairs += size * size * (block + 1) if cached and block < blocks - 1 else 0
    evaluations = steps * blocks + (blocks - 1 if cached else 0)
    done = products(counter) - of_time(model, evaluations)
    if cached:  # the engine commits in every branch, and runs modulation and head of what is committed
        one = speed_blocks.work(model, size, 0, 0, 0) * (branches - 1)
        rest = branches * (speed_blocks.work(model, 0, size, 1, 0) - speed_blocks.work(model, size, 0, 0, 0))
        done -= images * (blocks - 1) * (one + rest)
    wanted = done + 2 * 4 * wide * pairs * images
    assert speed_blocks.decode_work(model, images, branches, blocks, steps, cached=cached) == wanted


def test_a_context_bounds_the_work(make_blocks: MakeBlocks) -> None:
    model = make_blocks(*CLIPS)
    work = [speed_blocks.decode_work(model, 1, 2, n, 3, context=2) for n in (8, 9, 10)]
    assert work[2] - work[1] == work[1] - work[0], "linear in the length"
    free = [speed_blocks.decode_work(model, 1, 2, n, 3) for n in (8, 9, 10)]
    assert free[2] - free[1] > free[1] - free[0] > work[1] - work[0]


@pytest.mark.parametrize("guidance", [1.0, 1.7])
@pytest.mark.parametrize(("grid", "block", "frames"), [((1, 4, 4), (1, 2, 2), 1), (*CLIPS, 4), (*CLIPS, 7)])
def test_the_twin_without_a_cache_draws_the_same(
    make_blocks: MakeBlocks, grid: Any, block: Any, frames: int, guidance: float
) -> None:
    model = make_blocks(grid, block)
    with_cache = drawn(Engine(model, Guidance(guidance)), guidance, frames=frames)
    without = drawn(speed_blocks.Uncached(model, Guidance(guidance)), guidance, frames=frames)
    assert torch.allclose(with_cache, without, rtol=1e-4, atol=1e-4 * float(with_cache.abs().max()))
    other = drawn(speed_blocks.Uncached(model, Guidance(guidance + 1)), guidance, frames=frames)
    assert not torch.allclose(other, without, rtol=1e-2)


def test_the_twin_reads_the_clean_blocks(make_blocks: MakeBlocks) -> None:
    """Given other first frames it draws other later ones, and those of the engine with a cache."""
    model, found = make_blocks(*CLIPS), []
    for seed in (0, 1):
        known = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(seed))
        given = known, (torch.arange(16) < 8).expand(2, -1)
        found.append(drawn(speed_blocks.Uncached(model, Guidance(2.0)), 2.0, given))
        assert torch.allclose(found[-1], drawn(Engine(model, Guidance(2.0)), 2.0, given), rtol=1e-3, atol=1e-2)
    assert (found[0][:, 8:] - found[1][:, 8:]).abs().max() > 0.1


def test_without_a_cache_there_is_no_context(make_blocks: MakeBlocks) -> None:
    engine = speed_blocks.Uncached(make_blocks(*CLIPS))
    with pytest.raises(UserError, match=r"sampler\.context 2"):
        speed_blocks.decode(engine, sampler(context=2), 1, 1e9, 1)


def test_a_measured_decode(make_blocks: MakeBlocks) -> None:
    model = make_blocks(*CLIPS)
    row, tokens = speed_blocks.decode(Engine(model, Guidance(2.0)), sampler(frames=6), 2, 1e9, repeats=2)
    assert (row.batch, row.frames, row.way, row.nfe, row.peak_bytes) == (2, 6, "cached", 6 * 3 + 5, None)
    assert row.flops == speed_blocks.decode_work(model, 2, 2, 6, 3)
    assert row.images_per_s == pytest.approx(2 / row.seconds) and tokens.shape == (2, 24, 3)
    assert row.fraction == pytest.approx(row.flops / row.seconds / 1e9)
    known, _ = speed_blocks.decode(Engine(model), sampler(solver="euler"), 1, 1e9, repeats=1)
    assert known.flops == speed_blocks.decode_work(model, 1, 1, 4, 3)


@pytest.mark.parametrize("predicts", ["epsilon", "velocity"])
def test_evaluations_of_every_solver_are_counted(make_blocks: MakeBlocks, predicts: str) -> None:
    model = make_blocks(*CLIPS, predicts=predicts)
    solver, each = ("heun", 5) if predicts == "velocity" else ("dpmpp_2m", 3)
    row, _ = speed_blocks.decode(Engine(model), sampler(solver=solver), 1, 1e9, repeats=1)
    assert row.nfe == 4 * each + 3 and row.flops == speed_blocks.decode_work(model, 1, 1, 4, each)


def test_a_measured_step(tiny: Path) -> None:
    objective = load(TrainConfig, [str(tiny)]).objective
    found = speed_blocks.training(objective, "dense", 2, 1e9, CPU, torch.float32, repeats=1)
    again = speed_blocks.training(objective, "dense", 2, 1e9, CPU, torch.float32, repeats=1)
    assert found.loss == again.loss > 0, "the same weights, batch and draws"
    model = build(objective).exported()
    assert found.flops == speed_blocks.training_work(model, 2) and found.images_per_s == pytest.approx(
        2 / found.seconds
    )


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    backbone = "{block: [1, 2, 2], layers: 2, heads: 2, width: 32}"
    path.write_text(
        f"base: {ROOT}/configs/acdit/sprites.yaml\n"
        f"objective: {{model: {{grid: [4, 2, 2], channels: 3, backbone: {backbone}}}}}\n"
    )
    return path


@pytest.mark.parametrize("measure", ["decode", "cache", "training"])
def test_the_program(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measure: str) -> None:
    monkeypatch.setattr(speed, "matmul_rate", lambda device, dtype: 1e9)
    flags = ["--measure", measure, "--batches", "1", "2", "--repeats", "1", "--engine.device", "cpu"]
    flags += ["--sampler.steps", "2", "--guidance.scale", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["speed_blocks.py", "--config", str(tiny), *flags])
    program("speed_blocks").main()
    found = json.loads((tmp_path / "out" / "speed_blocks.json").read_text())
    ways = {"decode": ["cached"], "cache": ["cached", "uncached"], "training": ["dense"]}[measure]
    assert [(row["batch"], row["way"]) for row in found["rows"]] == [(b, way) for b in (1, 2) for way in ways]
    assert found["matmul_flops_per_s"] == 1e9 and found["precision"] == "float32"
    with torch.device("meta"):
        model = Model(load(TrainConfig, [str(tiny)]).objective.model)
    assert found["parameters"] == sum(p.numel() for p in model.parameters())
    assert sorted(found["differences"]) == (["1", "2"] if measure == "cache" else [])
    assert all(value < 1e-3 for value in found["differences"].values())
    text = (tmp_path / "out" / "speed_blocks.md").read_text()
    assert all(f"| {way} |" in text for way in ways) and f"--measure {measure}" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "--config is missing"),
        ("--config configs/debug/next_token.yaml", "eval/speed.py times the others"),
        ("--config configs/debug/acdit.yaml --sampler.kind ar", "draws no blocks"),
        ("--config configs/debug/acdit.yaml --measure training --engine.kind captured", "runs eagerly"),
        ("--config configs/debug/acdit.yaml --engine.kind captured", "--engine.kind eager"),
        ("--config configs/debug/acdit.yaml --batches 0", "batches"),
    ],
)
def test_refused(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(speed, "matmul_rate", lambda device, dtype: 1e9)
    given = [*flags.split(), "--engine.device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["speed_blocks.py", *given])
    with pytest.raises(SystemExit) as stopped:
        run_program(program("speed_blocks").main)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_product_has_a_rate() -> None:
    assert 1e6 < speed.matmul_rate(CPU, torch.float32, side=64, repeats=2) < 1e15


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_and_dense_steps_agree_on_a_gpu(tiny: Path, compiled: bool) -> None:
    objective, device = load(TrainConfig, [str(tiny)]).objective, torch.device("cuda")
    flex, dense = (
        speed_blocks.training(objective, way, 2, 1e12, device, torch.float32, repeats=1, compiled=compiled)
        for way in ("flex", "dense")
    )
    assert flex.loss == pytest.approx(dense.loss, rel=1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_twin_without_a_cache_agrees_on_a_gpu(make_blocks: MakeBlocks) -> None:
    model = make_blocks(*CLIPS).cuda()
    engines = (make(model, Guidance(2.0)) for make in (Engine, speed_blocks.Uncached))
    rows = [speed_blocks.decode(engine, sampler(), 2, 1e12, 1)[1] for engine in engines]
    assert torch.allclose(*rows, rtol=1e-2, atol=1e-2 * float(rows[0].abs().max()))
