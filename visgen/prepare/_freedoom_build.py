"""The plan of a set, and its files: rounds of chunks until it has what is wanted, then shards in a random order.

A round asks for what the rounds before have not found. The jobs follow from settings and from what earlier chunks hold,
never from time, so a set is the same at any number of workers and however often its build was killed.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from visgen import arrays
from visgen.config import UserError
from visgen.data import freedoom as sets
from visgen.launch import Progress
from visgen.prepare import _freedoom_frames as frames
from visgen.prepare._freedoom_chunk import Made
from visgen.prepare._freedoom_engine import Draws, Job
from visgen.prepare._freedoom_wads import GameData
from visgen.prepare._freedoom_workers import chunk_path, run

CHUNK = {"views": 216, "clips": 8}  # samples that a chunk is asked for at most
LATER = 9  # a chunk of a later round is asked for so many times less


def remaining(wanted: Sequence[int], asked: Sequence[int], got: Sequence[int]) -> list[int] | None:
    """Return what is still to be made of each subject after a round, or None where there is nothing to be found.

    A subject that the round asked for and found none of is rare on these maps; the others share what it lacks.

    Args:
        wanted: what was to be made before the round; its chunks were `asked` for so much and `got` so much.
    """
    left = [w - g for w, g in zip(wanted, got, strict=True)]
    found = [i for i, (a, g) in enumerate(zip(asked, got, strict=True)) if g or not a]
    if not found:
        return None
    spare = sum(n for i, n in enumerate(left) if i not in found)
    shares = dict(zip(found, spread(spare, len(found)), strict=True))
    return [left[i] + shares[i] if i in shares else 0 for i in range(len(left))]


def spread(total: int, parts: int, first: int = 0) -> list[int]:
    """Return `parts` whole numbers of the sum `total` that differ by at most one, the larger from place `first` on."""
    return [total // parts + ((i - first) % parts < total % parts) for i in range(parts)]


def chunks(wanted: Sequence[int], count: int) -> list[list[int]]:
    """Return what each of `count` chunks is asked for, so that they sum to `wanted` and are of one size."""
    columns, first = [], 0
    for total in wanted:
        columns.append(spread(total, count, first))
        first = (first + total) % count
    return [list(row) for row in zip(*columns, strict=True)]


class Build:
    """The chunks of one split: the jobs of the next round, and in the end the set.

    Args:
        out: absolute path of the folder of all splits.
    """

    def __init__(self, out: Path, index: sets.Index, data: GameData) -> None:
        self.folder, self.index, self.data = out / index.split, index, data
        self.chunks = self.folder / "chunks"
        self.jobs: list[Job] = []
        self.made: list[Made] = []
        self.wanted = spread(index.samples, len(index.classes) if index.kind == "views" else 1)
        self.complete = _agreed(self.folder, index)

    def start(self) -> None:
        """Mark the set as incomplete."""
        if not self.complete:
            self.chunks.mkdir(parents=True, exist_ok=True)
            sets.write_index(self.folder, self.index)

    def next_round(self) -> list[Job]:
        """Return the jobs of the next round; none where the set has all it wants."""
        total = sum(self.wanted)
        if self.complete or not total:
            return []
        size, levels = CHUNK[self.index.kind], self.index.levels
        count = len(levels) * -(-total // (len(levels) * size))
        if self.made:
            count, levels = -(-total // -(-size // LATER)), self._where_found()
        jobs: list[Job] = []
        for i, asked in enumerate(chunks(self.wanted, count)):
            if sum(asked):
                jobs.append(self._job(len(self.jobs) + len(jobs), levels[i % len(levels)], asked))
        self.jobs += jobs
        return jobs

    def _where_found(self) -> list[str]:
        """Return the better half of the levels where what is wanted has been found, best first; else all."""
        score = dict.fromkeys(self.index.levels, 0)
        for job, made in zip(self.jobs, self.made, strict=True):
            score[job.level] += sum(n * found for n, found in zip(self.wanted, made.got, strict=True))
        best = sorted((level for level in score if score[level]), key=lambda level: -score[level])
        return best[: -(-len(best) // 2)] or self.index.levels

    def _job(self, number: int, level: str, asked: list[int]) -> Job:
        index = self.index
        return Job(
            name=f"chunk_{number:05d}",
            folder=str(self.chunks),
            kind=index.kind,
            level=level,
            number=index.levels.index(level),
            seed=f"{index.seed} {index.split} {number}",
            asked=asked,
            size=index.image_size,
            frames=index.frames,
            frame_skip=index.settings["frame_skip"],
            iwad=str(self.data.iwad),
            overlay=self.data.overlay_of(level),
        )

    def take(self, made: Sequence[Made]) -> None:
        """Count what the chunks of a round hold, in the order of their jobs.

        Raises:
            UserError: nothing at all was found.
        """
        self.made += made
        if made:
            asked, got = (np.array(n).sum(0).tolist() for n in ([m.asked for m in made], [m.got for m in made]))
            left = remaining(self.wanted, asked, got)
            if left is None:
                raise UserError(
                    f"no {self.index.kind} can be found on {' '.join(self.index.levels)}; pass other --levels"
                )
            self.wanted = left

    def finish(self, step: Callable[[int], None]) -> None:
        """Write the set in a fixed random order, and delete the chunks."""
        if self.complete:
            return
        index = self.index
        rows = [arrays.read(chunk_path(job), "build again", "build again", mapped=True) for job in self.jobs]
        where = [(chunk, row) for chunk, part in enumerate(rows) for row in range(len(part))]
        draws = Draws(f"{index.seed} {index.split} order")
        keys = [draws.random() for _ in where]
        order = np.array(where)[sorted(range(len(where)), key=keys.__getitem__)]  # [samples, 2]

        def write(number: int) -> dict[str, str]:
            part = index.shard(number)
            record = write_shard(self.folder, index, number, rows, order[part.start : part.stop])
            step(len(part))
            return record

        with ThreadPoolExecutor(4) as pool:
            index.shards = list(pool.map(write, range(index.shard_count)))
        index.counts = {"shots": sum(m.shots for m in self.made)}
        for name in frames.FILTERS:
            index.counts[name] = sum(m.refused.get(name, 0) for m in self.made)
        index.complete = True
        sets.write_index(self.folder, index)
        shutil.rmtree(self.chunks, ignore_errors=True)


def _agreed(folder: Path, wanted: sets.Index) -> bool:
    """Return whether the folder holds the whole set.

    Raises:
        UserError: it holds one of other settings.
    """
    if not (folder / "index.json").is_file():
        return False
    found = sets.read_index(folder)
    for name in [f.name for f in dataclasses.fields(sets.Index)][:-3]:
        old, new = getattr(found, name), getattr(wanted, name)
        if isinstance(old, dict):
            name, old, new = next(((k, old.get(k), new[k]) for k in new if old.get(k) != new[k]), (name, 0, 0))
        if old != new:
            old, new = (text if len(text := str(value)) <= 120 else f"{text[:117]}..." for value in (old, new))
            raise UserError(f"{folder} was built with {name} {old}, now it is {new}; delete it or pass another --out")
    return found.complete


def write_shard(
    folder: Path, index: sets.Index, number: int, rows: Sequence[np.ndarray], order: np.ndarray
) -> dict[str, str]:
    """Write the shard of the samples at `order` [n, 2], chunk and row, and return its checksums."""
    values: dict[str, np.ndarray] = {}
    for name in ("pixels", *(("depth", "seg") if index.has_maps else ()), "about"):
        dtype, shape = index.array(name, number)
        values[name] = np.empty(shape, dtype)
    for chunk in np.unique(order[:, 0]):
        here = order[:, 0] == chunk
        part = rows[chunk][order[here, 1]]
        for name, array in values.items():
            if name != "about":
                array[here] = part[name]
        for name in values["about"].dtype.names or ():
            values["about"][name][here] = part[name]
    return sets.write_shard(folder, index, number, values)


def build_all(builds: Sequence[Build], workers: int) -> None:
    """Build all splits, their chunks side by side."""
    for build in builds:
        build.start()
    total = sum(build.index.samples for build in builds if not build.complete)
    done = 0
    with Progress("rendering", total > 0) as shown:
        while any(jobs := [build.next_round() for build in builds]):
            made: dict[Path, Made] = {}
            for job, chunk in run([job for part in jobs for job in part], workers):
                made[chunk_path(job)] = chunk
                done += sum(chunk.got)
                shown(done, total)
            for build, part in zip(builds, jobs, strict=True):
                build.take([made[chunk_path(job)] for job in part])
    done = 0

    with Progress("writing", total > 0) as shown:
        for build in builds:

            def step(count: int) -> None:
                nonlocal done
                done += count
                shown(done, total)

            build.finish(step)
