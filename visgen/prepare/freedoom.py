"""Builds the sets that `freedoom` reads: views, or clips, rendered by ViZDoom from the game data of Freedoom.

    pip install 'visgen[freedoom]'
    python -m visgen.prepare.freedoom --out data_cache/freedoom64
    python -m visgen.prepare.freedoom --out data_cache/freedoom64_clips --kind clips

A set is made of chunks, each by an engine of its own, and a chunk is a function of its job. The jobs follow from the
settings and from what earlier chunks hold, never from time, so a set is the same at any number of workers, and a build
that was killed goes on with the chunks that it has.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from visgen import arrays
from visgen.checks import Natural, Positive, Range, Seed
from visgen.config import UserError, load, run_program
from visgen.controls.seg import colours
from visgen.data import freedoom as sets
from visgen.files import read_json
from visgen.launch import Progress, cpus, writable
from visgen.prepare import _freedoom_engine as engine
from visgen.prepare import _freedoom_frames as frames
from visgen.prepare._freedoom_engine import Draws, Job, Made

PHASE2 = tuple(f"MAP{i:02d}" for i in range(1, 33))  # of Freedoom: Phase 2
PHASE1 = tuple(f"E{e}M{m}" for e in range(1, 5) for m in range(1, 10))  # of Freedoom: Phase 1
HELD_OUT = frozenset(("MAP05", "MAP11", "MAP17", "MAP23", "MAP29", "E1M5", "E2M3", "E3M4", "E4M6"))
CHUNK = {"views": 216, "clips": 8}  # samples that a chunk is asked for at most
LATER = 4  # a chunk of a later round is asked for so many times less
SHARD = {"views": 4096, "clips": 64}
COUNTS = {"views": (60_000, 10_000, 10_000), "clips": (4_000, 400, 400)}  # train, held_out, same_maps


@dataclass(frozen=True)
class Config:
    """Renders a set of Freedoom views or clips.

    Attributes:
        out: folder to write; the splits become sub-folders. What is there of the same settings is kept.
        kind: views: single pictures without weapon. clips: walks with the keys that were held.
        samples: of the split train; default 60,000 views or 4,000 clips.
        held_out: of maps that train lacks; default 10,000 views or 400 clips.
        same_maps: others of the maps of train; default 10,000 views or 400 clips.
        size: height and width in pixels.
        length: frames of a clip.
        frame_skip: tics from one frame of a clip to the next, of 35 a second.
        maps: keep depth and segmentation; default for views, not for clips, where they are a quarter of the bytes.
        levels: maps of the game to use, such as MAP07 or E1M2; default all that the game data hold.
        seed: another seed gives other pictures.
        workers: engines at once; 0: as many as CPU cores.
        wad: game data of Doom II in place of Freedoom's; pictures of those are not free.
    """

    out: Path = Path("data_cache/freedoom64")
    kind: Literal["views", "clips"] = "views"
    samples: Natural | None = None
    held_out: Natural | None = None
    same_maps: Natural | None = None
    size: tuple[Annotated[int, Range(16, 240)], Annotated[int, Range(16, 320)]] = (64, 64)
    length: Annotated[int, Range(2, 4096)] = 64
    frame_skip: Positive = 4
    maps: bool | None = None
    levels: tuple[str, ...] = ()
    seed: Seed = 0
    workers: Natural = 0
    wad: Path | None = None


def main(argv: Sequence[str]) -> None:
    config = load(Config, argv, prog="python -m visgen.prepare.freedoom")
    vizdoom = engine.import_vizdoom()
    data = game_data(config.wad, Path(vizdoom.__path__[0]))
    out = writable(config.out, "out")
    builds = [Build(out.resolve(), index, data) for index in _indices(config, data, vizdoom.__version__)]
    if not builds:
        raise UserError("samples, held_out and same_maps are all 0; ask for something")
    workers = config.workers or cpus()
    with ended_by_sigterm():
        build_all(builds, workers)
    for build in builds:
        print(f"{build.folder}: {build.index.samples} {config.kind} of {len(build.levels)} maps")


# ----------------------------------------------------------------------------------------------------- game data


@dataclass(frozen=True)
class GameData:
    """WAD files, and the maps of the game in them."""

    iwad: Path
    overlay: Path | None
    levels: tuple[str, ...]


def game_data(wad: Path | None, package: Path) -> GameData:
    """Return the game data of the user, or those of Freedoom that vizdoom brings.

    E1M1 to E4M9 run on the data of Phase 2 too, with those of Phase 1 laid over them: alone these lack 7 of the 15
    monsters, and what a map looks like would say what stands in it.

    Raises:
        UserError: a file is no WAD, or holds no map of Doom II.
    """
    iwad = package / "freedoom2.wad" if wad is None else wad.expanduser().resolve()
    found = set(lumps(iwad))
    levels = tuple(name for name in PHASE2 if name in found)
    if not levels:
        raise UserError(f"wad {iwad} holds no map of Doom II (MAP01 to MAP32); pass a DOOM2.WAD or freedoom2.wad")
    if wad is not None:
        return GameData(iwad, None, levels)
    overlay = package / "freedoom1.wad"
    found = set(lumps(overlay))
    return GameData(iwad, overlay, levels + tuple(name for name in PHASE1 if name in found))


def lumps(wad: Path) -> list[str]:
    """Return the names in the directory of a WAD file.

    Raises:
        UserError: it is none.
    """
    try:
        with open(wad, "rb") as file:
            head = np.frombuffer(file.read(12), "<i4")
            if len(head) != 3 or head[0].tobytes() not in (b"IWAD", b"PWAD"):
                raise ValueError("it does not begin with IWAD")
            file.seek(int(head[2]))
            entries = np.frombuffer(file.read(16 * int(head[1])), [("place", "<i4", (2,)), ("name", "S8")])
        if len(entries) != head[1]:
            raise ValueError("it is truncated")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"wad {wad} is no game data ({reason}); pass a DOOM2.WAD or freedoom2.wad, or leave it out"
        ) from None
    return [bytes(name).decode("ascii", "replace") for name in entries["name"]]


def _indices(config: Config, data: GameData, version: str) -> Iterator[sets.Index]:
    """The index of each split that is asked for."""
    chosen = config.levels or data.levels
    unknown = [name for name in chosen if name not in data.levels]
    if unknown:
        raise UserError(f"levels {' '.join(unknown)} are not in the game data; allowed: {' '.join(data.levels)}")
    wads = [data.iwad, *([data.overlay] if data.overlay else [])]
    settings: dict[str, Any] = {
        "vizdoom": version,
        "wads": {path.name: _sha256(path) for path in wads},
        "frame_skip": config.frame_skip if config.kind == "clips" else 0,
        "engine": engine.settings(),
        "frames": frames.settings(),
    }
    asked = (config.samples, config.held_out, config.same_maps)
    for split, count, default in zip(SPLITS, asked, COUNTS[config.kind], strict=True):
        count = default if count is None else count
        levels = [name for name in dict.fromkeys(chosen) if (name in HELD_OUT) == (split == "held_out")]
        if not count:
            continue
        if not levels:
            one = "one of " + " ".join(sorted(HELD_OUT)) if split == "held_out" else "one that is not held out"
            raise UserError(f"levels {' '.join(chosen)} leave none for {split}; add {one}, or ask for 0 of {split}")
        yield sets.Index(
            split=split,
            kind=config.kind,
            samples=count,
            frames=config.length if config.kind == "clips" else 1,
            image_size=list(config.size),
            has_maps=config.kind == "views" if config.maps is None else config.maps,
            classes=list(frames.SUBJECTS if config.kind == "views" else frames.SCENERY),
            parts=list(frames.PARTS),
            colours=colours()[: len(frames.PARTS)].tolist(),
            actions=list(engine.ACTIONS),
            levels=levels,
            seed=config.seed,
            shard_samples=SHARD[config.kind],
            settings=json.loads(json.dumps(settings)),
        )


SPLITS: tuple[sets.Part, ...] = ("train", "held_out", "same_maps")


@functools.cache
def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------------------- plan


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
        self.chunks, self.levels = self.folder / "chunks", index.levels
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
        first, size = not self.jobs, CHUNK[self.index.kind]
        count = len(self.levels) * -(-total // (len(self.levels) * size)) if first else -(-total // -(-size // LATER))
        jobs: list[Job] = []
        for asked in chunks(self.wanted, count):
            number = len(self.jobs) + len(jobs)
            if sum(asked):
                jobs.append(self._job(number, asked))
        self.jobs += jobs
        return jobs

    def _job(self, number: int, asked: list[int]) -> Job:
        level, index = self.levels[number % len(self.levels)], self.index
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
            overlay=str(self.data.overlay or "") if level in PHASE1 else "",
        )

    def take(self, jobs: Sequence[Job]) -> None:
        """Count what the chunks of a round hold.

        Raises:
            UserError: nothing at all was found.
        """
        made = [record for job in jobs if (record := read_record(job)) is not None]
        self.made += made
        if jobs:
            asked, got = (np.array([getattr(m, name) for m in made]).sum(0).tolist() for name in ("asked", "got"))
            left = remaining(self.wanted, asked, got)
            if left is None:
                raise UserError(f"no {self.index.kind} can be found on {' '.join(self.levels)}; pass other --levels")
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


def chunk_path(job: Job) -> Path:
    return Path(job.folder) / f"{job.name}.npy"


def read_record(job: Job) -> Made | None:
    """Return what was made of a job; None where its chunk is absent, damaged or of another job."""
    path = chunk_path(job)
    try:
        made = Made(**read_json(path.with_suffix(".json"), "build again"))
        rows = arrays.read(path, "build again", "build again", mapped=True)
        arrays.verify(path, rows, "build again", made.crc)
    except (UserError, TypeError):
        return None
    fits = rows.dtype == engine.row_type(job.frames, job.size) and made.asked == job.asked
    return made if fits and len(rows) == sum(made.got) else None


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


# ------------------------------------------------------------------------------------------------------- workers


def build_all(builds: Sequence[Build], workers: int) -> None:
    """Build all splits, their chunks side by side."""
    for build in builds:
        build.start()
    total = sum(build.index.samples for build in builds if not build.complete)
    done = 0
    with Progress("rendering", total > 0) as shown:
        while any(jobs := [build.next_round() for build in builds]):
            for made in run([job for part in jobs for job in part], workers):
                done += sum(made.got)
                shown(done, total)
            for build, part in zip(builds, jobs, strict=True):
                build.take(part)
    done = 0

    with Progress("writing", total > 0) as shown:
        for build in builds:

            def step(count: int) -> None:
                nonlocal done
                done += count
                shown(done, total)

            build.finish(step)


def run(jobs: Sequence[Job], workers: int) -> Iterator[Made]:
    """Run jobs, `workers` at once, and yield what they made as they end; jobs that were run before are not run again.

    Raises:
        UserError: one of them fails; the others are ended first.
    """
    waiting = []
    for job in jobs:
        made = read_record(job)
        if made is None:
            waiting.append(job)
        else:
            yield made
    if waiting:
        check_shared_memory(min(workers, len(waiting)))
    waiting.reverse()
    running: list[Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(Worker(waiting.pop()))
            ended = [worker for worker in running if worker.process.poll() is not None]
            for worker in ended:
                running.remove(worker)
                yield worker.result()
            if not ended:
                time.sleep(0.02)
    finally:
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.end()


class Worker:
    """A process that makes one chunk. It has a session of its own, so that Ctrl-C reaches only the builder, which ends
    it; it ends by itself when the builder does."""

    def __init__(self, job: Job) -> None:
        self.job, self.errors = job, tempfile.TemporaryFile()  # noqa: SIM115
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", engine.__name__, json.dumps(dataclasses.asdict(job))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, **threads},
            start_new_session=True,
        )

    def result(self) -> Made:
        """Return what it made.

        Raises:
            UserError: it has failed.
        """
        code, made = self.process.returncode, read_record(self.job) if not self.process.returncode else None
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        self.errors.close()
        if made is not None:
            return made
        why = f"signal {signal.Signals(-code).name}" if code < 0 else lines[-1] if lines else f"exit code {code}"
        raise UserError(
            f"rendering {self.job.level} failed ({why}; /dev/shm has {shared_memory() >> 20} MiB free); "
            "what is rendered is kept, run the same command again"
        )

    def end(self) -> None:
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its engine is killed with it
            self.process.wait()
        self.errors.close()


def shared_memory() -> int:
    """Return how many bytes of /dev/shm are free; 0 where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def check_shared_memory(workers: int) -> None:
    """Refuse more engines than /dev/shm has room for.

    Raises:
        UserError: it is too small or too full.
    """
    free, each = shared_memory(), engine.SHARED
    if free < workers * each:
        fewer = f"pass --workers {free // each}, " if free >= each else ""
        raise UserError(
            f"/dev/shm has {free >> 20} MiB free, {workers} engines need {workers * each >> 20}; {fewer}empty it, or "
            "enlarge it (docker run --shm-size 1g)"
        )


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does, so that no worker is left."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
