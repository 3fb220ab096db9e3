"""One chunk of a Freedoom set, by an engine process of its own: `python -m visgen.prepare._freedoom_chunk JOB`.

A chunk is a function of its job alone (seed, kind, split, level, number, what is asked for). The engine has a state,
awake monsters and random numbers of its own, so only a whole chunk can be made again. The process ends its engine
however it ends, and leaves nothing in /dev/shm.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from visgen import arrays
from visgen.checks import UserError
from visgen.files import write_json
from visgen.prepare import _freedoom_frames as frames
from visgen.prepare._freedoom_engine import ACTIONS, KEYS, STAY, USE, Draws, Engine, Job, Seen
from visgen.prepare._freedoom_frames import MONSTERS

SHARES = (4, 32, 5, 12, 12, 6, 6, 7, 8, 8)  # how often, in percent, an action of a clip is drawn
FORWARD = (1, 8, 9)  # actions that a wall ahead stops
WIDE = ("Arachnotron", "Fatso", "Cyberdemon", "ChaingunGuy")  # summoned in a narrow place they do not appear
TRIES = (4, 8)  # for each subject: so many times what is asked for, and so many more


Row = tuple[np.ndarray | int | tuple[float, ...], ...]  # the fields of `row_type`, of one frame


@dataclass
class Made:
    """What became of a chunk: how many of each subject there are, and of how many shots; `refused` counts the others
    by the names in `frames.FILTERS`."""

    asked: list[int]
    got: list[int]
    shots: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    crc: str = ""

    def refuse(self, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1


def row_type(frame_count: int, size: Sequence[int]) -> np.dtype:
    """Return the type of a sample in a chunk's file; a pose is x, y, z and the angle in degrees."""
    pictures, one = (frame_count, *size), (frame_count,)
    return np.dtype(
        [
            ("pixels", np.uint8, (*pictures, 3)),
            ("depth", np.uint8, pictures),
            ("seg", np.uint8, pictures),
            ("label", "<i2", one),
            ("level", "<i2", one),
            ("action", np.uint8, one),
            ("pose", "<f4", (frame_count, 4)),
        ]
    )


# -------------------------------------------------------------------------------------------------- views, clips


def limit(asked: int) -> int:
    """Return how often so many samples are tried for; not at all for 0 of them."""
    return TRIES[0] * asked + TRIES[1] if asked else 0


def views(engine: Engine, draws: Draws, made: Made) -> Iterator[list[Row]]:
    """Yield rows of one frame until there are as many of each subject as asked for, or it was tried too often."""
    left, names = list(made.asked), list(MONSTERS)
    tries = [limit(n) for n in made.asked]
    while any(open_ := [n if t else 0 for n, t in zip(left, tries, strict=True)]):
        made.shots += 1
        wanted = draws.weighted(open_)
        tries[wanted] -= 1
        summoned = names[wanted] if wanted < len(names) else None
        engine.go(draws)
        if fault := _too_narrow(engine.frame(), wide=summoned in WIDE):  # before the work of summoning
            made.refuse(fault)
            continue
        if summoned:
            engine.summon(summoned)
            back = draws.whole(0, 22)
            turn = draws.between(-24, 24) / max(back, 1)
            if back:
                engine.run((0.0, 1.0, 0.0, 0.0, 0.0, 0.0, turn), back)
        engine.run(STAY, draws.whole(2, 12), look=True)
        seen = engine.frame()
        if summoned:
            engine.game.send_game_command(f"remove {summoned}")
        label, why = _judged(seen)
        if label is not None and not left[label]:
            why = "surplus"
        if seen is None or label is None or why:
            made.refuse(why or "void")
            continue
        left[label] -= 1
        made.got[label] += 1
        yield [_row(engine.job, seen, label, 0)]


def _too_narrow(seen: Seen | None, wide: bool) -> str:
    if seen is None or seen[1][2] < -30000:
        return "void"
    levels = seen[0].levels
    narrow = wide and frames.percentile(frames.middle(levels), 0.5) < 12
    return "close" if narrow or frames.is_close(levels, 5, 14) else ""


def _judged(seen: Seen | None) -> tuple[int | None, str]:
    """Return the subject of a view, or None and why it is refused."""
    if seen is None or seen[1][2] < -30000:
        return None, "void"
    if fault := seen[0].fault():
        return None, fault
    label = seen[0].subject()
    return label, "" if label is not None else "mixed"


def clips(engine: Engine, draws: Draws, made: Made) -> Iterator[list[Row]]:
    """Yield rows of all frames of a clip, until there are as many clips as asked for or too many were refused."""
    while made.got[0] < made.asked[0] and made.shots < limit(made.asked[0]):
        made.shots += 1
        engine.go(draws)
        engine.run(STAY, 3, look=True)
        seen = engine.frame()
        fault = "void" if seen is None or seen[1][2] < -30000 else seen[0].fault()
        if seen is None or fault:
            made.refuse(fault or "void")
            continue
        rows, why = _clip(engine, draws, seen)
        if why:
            made.refuse(why)
            continue
        made.got[0] += 1
        yield rows


def _clip(engine: Engine, draws: Draws, seen: Seen | None) -> tuple[list[Row], str]:
    """Return the rows of a walk that begins with `seen`, and why it is refused or "". The action of a row is what was
    held before its frame."""
    rows: list[Row] = []
    before, action, left, stuck, close = 0, 1, 0, 0, 0
    for _ in range(engine.job.frames):
        if seen is None:
            return [], "lost"
        frame, pose = seen
        rows.append(_row(engine.job, seen, frame.scenery(), before))
        close += frames.is_close(frame.levels, 4, 10)
        if left <= 0:
            action, left = draws.weighted(SHARES), draws.whole(2, 8)
        ahead = frames.percentile(frames.middle(frame.levels), 0.5)
        if action in FORWARD and (ahead < 6 or stuck >= 2):
            action, left, stuck = _deeper_side(frame.levels), draws.whole(4, 9), 0
        keys = list(KEYS[action])
        keys[USE] = float(draws.random() < 0.1)  # opens doors; a part of no action
        engine.run(keys, engine.job.frame_skip, look=True)
        before, left = action, left - 1
        seen = engine.frame()
        if seen is not None:
            moved = (seen[1][0] - pose[0]) ** 2 + (seen[1][1] - pose[1]) ** 2
            stuck = stuck + 1 if action in FORWARD and moved < 36 else 0
    return (rows, "") if 4 * close <= len(rows) else ([], "dull")


def _deeper_side(levels: np.ndarray) -> int:
    """Return the turn to the side that is further away."""
    third, sums = levels.shape[1] // 3, levels.astype(np.int64)
    side = "turn left" if sums[:, :third].sum() > sums[:, -third:].sum() else "turn right"
    return ACTIONS.index(side)


def _row(job: Job, seen: Seen, label: int, action: int) -> Row:
    frame, pose = seen
    return frame.pixels, frame.depth, frame.seg, label, job.number, action, pose


# --------------------------------------------------------------------------------------------------------- chunk


def write_chunk(job: Job, folder: Path) -> Made:
    """Write the rows of a chunk, and last its record; `folder` is one for the engine's own files."""
    draws = Draws(f"{job.seed} {job.kind} {job.level}")
    made = Made(job.asked, [0] * len(job.asked))
    engine = Engine(job, draws.whole(0, 1 << 31), folder)
    try:
        make = clips if job.kind == "clips" else views
        samples = list(make(engine, draws, made))
    finally:
        engine.game.close()
    rows = np.zeros(len(samples), row_type(job.frames, job.size))
    for row, sample in zip(rows, samples, strict=True):
        for name, values in zip(rows.dtype.names or (), zip(*sample, strict=True), strict=True):
            row[name] = values
    return publish(job, rows, made)


def publish(job: Job, rows: np.ndarray, made: Made) -> Made:
    """Write the rows of a chunk, and last what says that it is whole."""
    made.refused = dict(sorted(made.refused.items()))
    made.crc = arrays.write(Path(job.folder) / f"{job.name}.npy", rows)
    write_json(Path(job.folder) / f"{job.name}.json", asdict(made))
    return made


def die_with_the_builder() -> None:
    """Turn SIGTERM into an exit that closes the engine, and get one when the process that started this one ends."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    """Make the chunk of a job, JSON; print one line and return 2 where that fails."""
    job = Job(**json.loads(argv[0]))
    die_with_the_builder()
    folder = Path(tempfile.mkdtemp(prefix="engine_", dir=job.folder))
    os.chdir(folder)  # the engine writes into it
    try:
        write_chunk(job, folder)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except Exception as error:  # the engine's own are of many classes
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def settings() -> dict[str, object]:
    """Return what an index says about this file."""
    return {"tries": list(TRIES), "shares": list(SHARES)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
