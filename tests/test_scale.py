"""Evaluation in chunks: the same number from any number of processes, after a kill, and from the program itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import program
from safetensors.torch import load_file, save_file

from visgen import scale
from visgen.config import UserError, run_program
from visgen.evaluate import World
from visgen.metrics.chunks import ChunkStore
from visgen.metrics.features import build_extractor
from visgen.metrics.frechet import Moments
from visgen.metrics.protocol import SamplePlan
from visgen.tally import Bundle, Tally, make_bundle

N, CHUNK = 200, 16
SMALL = """--data.kind synthetic --data.image-size 16 --data.classes 3 --data.n 90 --data.n-held-out 70
    --extractor fd_debug --n 24 --allow-small --groups 6 --engine.device cpu --engine.batch 5 --chunk 10"""


def pictures(index: Any) -> torch.Tensor:
    """An image that depends on its index alone."""
    return torch.stack(
        [(torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(i)) * 255).to(torch.uint8) for i in index]
    )


def draw(part: range) -> Any:
    for i in part:
        yield pictures([i]), torch.tensor([i]), torch.tensor([i % 5 + 1])


def reference() -> Bundle:
    rows = iter([(pictures(range(1000, 1150)), torch.arange(150))])
    return make_bundle("set", rows, 150, build_extractor("fd_debug"), World(), {})


def evaluate(folder: Path, world: World, draw: Callable[[range], Any] = draw, **identity: str) -> dict[str, Any]:
    extractor = build_extractor("fd_debug", batch=4)
    store = ChunkStore(folder, {"model": "m", **identity}, N, CHUNK, world.rank)
    tally, whole = Tally(extractor, reference(), N, 5, world), scale.Whole(N, 10, (16, 16))
    for part, chunk in scale.fill(scale.Work(draw, extractor, N, 10), store, world):
        tally.update(scale.outputs(chunk), torch.arange(part.start, part.stop))
        whole.add(part, chunk)
    whole.reduce(world)
    scores = tally.scores()
    assert torch.equal(whole.pixels, pictures(range(10))) and whole.nfe.tolist() == [i % 5 + 1 for i in range(N)]
    values = {name: score.value for name, score in scores.items()} | {"se": scores["fd"].se}
    return {**values, "hash": whole.audit.hash, **whole.audit.checks()}


def test_what_was_refused_before_its_first_chunk_binds_nothing(tmp_path: Path) -> None:
    ChunkStore(tmp_path / "chunks", {"model": "other", "sampling": '{"a": {"b": 1}}'}, N, CHUNK)
    evaluate(tmp_path / "chunks", World(), sampling='{"a": {"b": 2, "c": 0}}')
    with pytest.raises(UserError, match=r"holds chunks of sampling a\.b 2, this run has a\.b 3"):
        ChunkStore(tmp_path / "chunks", {"model": "m", "sampling": '{"a": {"b": 3, "c": 0}}'}, N, CHUNK)


def processes(size: int, work: Callable[[World], Any], folder: Path) -> list[Any]:
    """What `work` gives in each of several gloo processes; None where one was killed."""
    context = multiprocessing.get_context("fork")

    def run(rank: int, back: Any) -> None:
        torch.set_num_threads(1)
        if size > 1:
            store = f"file://{folder}/store_{size}"
            torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
        back.send(work(World(rank, size)))
        back.close()

    pipes = [context.Pipe(False) for _ in range(size)]
    started = [context.Process(target=run, args=(rank, pipes[rank][1])) for rank in range(size)]
    for process in started:
        process.start()
    for _, back in pipes:
        back.close()
    out = []
    for get, _ in pipes:
        try:
            out.append(get.recv() if get.poll(60) else None)
        except EOFError:
            out.append(None)
    for process in started:
        process.join(60)
    return out


def test_one_two_and_three_processes_give_the_same_numbers(tmp_path: Path) -> None:
    alone = evaluate(tmp_path / "one", World())
    assert alone["fd"] > 0 and alone["unique_images"] == N and {"kid", "precision", "recall"} <= set(alone)
    for size in (2, 3):
        found = processes(size, lambda w, size=size: evaluate(tmp_path / f"of_{size}", w), tmp_path)
        for mine in found:
            assert mine is not None and mine.keys() == alone.keys()
            for name, value in alone.items():
                assert mine[name] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-9)), name


def test_a_kill_in_the_middle_costs_one_chunk(tmp_path: Path) -> None:
    whole, folder = evaluate(tmp_path / "whole", World()), tmp_path / "killed"

    def deadly(part: range) -> Any:
        for i, row in zip(part, draw(part), strict=True):
            if i == 61:
                os.kill(os.getpid(), signal.SIGKILL)
            yield row

    assert processes(1, lambda w: evaluate(folder, w, deadly), tmp_path) == [None]
    assert len(list(folder.glob("chunk_*.safetensors"))) == 3
    seen: list[range] = []

    def counted(part: range) -> Any:
        seen.append(part)
        return draw(part)

    damaged = folder / "chunk_00001.safetensors"
    tensors = load_file(damaged)
    tensors["feature.pool"][0, 0] += 1
    save_file(tensors, damaged, {"sha256": "0"})  # as a disk might change it
    again = evaluate(folder, World(), counted)
    assert seen == [range(16, 32), *(range(i, min(i + 16, N)) for i in range(48, N, 16))]
    assert again == whole
    with pytest.raises(UserError, match=r"killed holds chunks of model m, this run has other; delete it"):
        evaluate(folder, World(), model="other")


def test_chunks_of_another_evaluation_are_made_again_though_the_manifest_is_gone(tmp_path: Path) -> None:
    tensors = {"x": torch.arange(3.0)}
    one, other = (ChunkStore(tmp_path / "a", {"model": name}, 3, 3) for name in ("one", "other"))
    one.save(0, tensors)
    assert torch.equal(one.load(0)["x"], tensors["x"])
    manifest = tmp_path / "a" / "manifest.json"
    manifest.unlink()
    for store in (other, ChunkStore(tmp_path / "a", {"model": "one"}, 3, 2)):
        assert store.shares(0, 1, lambda x: x)[0] == []
    assert ChunkStore(tmp_path / "a", {"model": "one"}, 3, 3).shares(0, 1, lambda x: x)[0] == [0]
    manifest.write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"manifest\.json is damaged .*; delete .* to begin anew"):
        ChunkStore(tmp_path / "a", {"model": "one"}, 3, 3)


def test_a_nan_is_named_before_it_is_kept(tmp_path: Path) -> None:
    class Poisoned(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.float().flatten(1)[:, :8]
            return torch.where(x[:, :1, 0, :1].flatten(1) == pictures([11])[0, 0, 0, 0], torch.nan, y)

    work = scale.Work(draw, build_extractor(Poisoned()), N)
    with pytest.raises(UserError, match=r"pool of image 11 are not finite; look at that image"):
        scale.make_chunk(work, range(8, 16))


def test_moments_need_the_same_memory_for_any_n() -> None:
    few, many = Moments(16, 1000, 5), Moments(16, 50_000, 5)
    for index in torch.arange(50_000).split(5000):
        many.update(torch.randn(5000, 16), index)
    size = [
        sum(t.numel() * t.element_size() for t in vars(m).values() if isinstance(t, torch.Tensor)) for m in (few, many)
    ]
    assert size[0] == size[1] and many.stats().n == 50_000


@pytest.fixture
def fid(shapes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def run(*flags: str) -> dict[str, Any]:
        words = ["fid", "--checkpoint", str(shapes_dir), *SMALL.split(), "--out", str(tmp_path / "out"), *flags]
        monkeypatch.setattr(sys, "argv", words)
        run_program(program("fid").main)
        return json.loads((tmp_path / "out/generated/report.json").read_text())

    return run


def test_the_program_goes_on_and_writes_the_suites_npz(
    fid: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, drawn = fid("--neighbours"), scale.drawn
    assert {"fd", "kid", "precision", "recall"} == set(whole["metrics"])

    def stopped(*given: Any) -> Any:
        if given[3].start == 20:
            raise KeyboardInterrupt
        return drawn(*given)

    monkeypatch.setattr(scale, "drawn", stopped)
    with pytest.raises(SystemExit):
        fid("--neighbours", "--npz")
    monkeypatch.setattr(scale, "drawn", drawn)
    with pytest.raises(SystemExit):
        fid("--neighbours", "--npz", "--guidance.scale", "1.5")
    again = fid("--neighbours", "--npz")
    assert again["metrics"] == whole["metrics"] and not (tmp_path / "out/generated/chunks").exists()
    with np.load(tmp_path / "out/generated/samples.npz") as arrays:
        assert arrays["arr_0"].shape == (24, 16, 16, 3) and arrays["arr_0"].dtype == np.uint8


def test_a_reference_in_a_file(fid: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "set.safetensors"
    reference().save(path)
    found = fid("--reference", str(path))
    assert found["protocol"]["reference"] == "set" and found["metrics"]["fd"]["n_ref"] == 150


def test_the_classes_of_a_reference_in_a_file_are_those_of_the_training_split(
    fid: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path, flags = tmp_path / "set.safetensors", ("--labels", "source", "--data.n", "91")
    reference().save(path)
    held_out, counts = SamplePlan(24, 3, 0, "source", (24, 23, 23)), (31, 30, 30)  # of 70 and of 91 images
    train = SamplePlan(24, 3, 0, "source", counts)
    assert held_out.hash != train.hash
    found = fid(*flags, "--reference", str(path))
    assert found["protocol"]["labels"] == "source" and found["sampling"]["plan"] == train.hash
    shutil.rmtree(tmp_path / "out")
    assert fid(*flags)["sampling"]["plan"] == held_out.hash
