"""One chunk of a Freedoom set, by an engine process of its own: `python -m visgen.prepare._freedoom_engine JOB`.

A chunk is a function of its job alone (seed, kind, split, level, number, what is asked for). The engine has a state,
awake monsters and random numbers of its own, so only a whole chunk can be made again. This is the one file that imports
vizdoom. The process ends its engine however it ends, and leaves nothing in /dev/shm.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from visgen import arrays
from visgen.checks import UserError
from visgen.files import write_json
from visgen.prepare import _freedoom_frames as frames
from visgen.prepare._freedoom_frames import MONSTERS, Frame, Object

FIRST_VERSION, LAST_VERSION = (1, 3), (1, 4)  # of vizdoom: from the first up to, without, the last
SHARED = 11 << 20  # bytes that an engine takes of /dev/shm
ACTIONS = (
    "stay",
    "forward",
    "back",
    "turn left",
    "turn right",
    "strafe left",
    "strafe right",
    "shoot",
    "forward left",
    "forward right",
)
SHARES = (4, 32, 5, 12, 12, 6, 6, 7, 8, 8)  # how often, in percent, an action of a clip is drawn
TURN = 3.5  # degrees a tic
STAY = (0.0,) * 7  # forward, back, strafe left, strafe right, attack, use, turn to the right in degrees a tic
USE = 5  # its place among these
KEYS = (
    STAY,
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -TURN),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, TURN),
    (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0),
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, -TURN),
    (1.0, 0.0, 0.0, 0.0, 0.0, 0.0, TURN),
)
FORWARD = (1, 8, 9)  # actions that a wall ahead stops
TINTS = ("InvulnerabilitySphere", "RadSuit", "Berserk", "BlurSphere", "Infrared")  # picked up, they colour the picture
PLACES = ("Monster", "Health", "Armor", "Ammo", "Weapon", "Key", "Self", "Item")  # categories of things to stand at
WIDE = ("Arachnotron", "Fatso", "Cyberdemon", "ChaingunGuy")  # summoned in a narrow place they do not appear
VISIBILITY = 20  # of the engine's light
TRIES = (4, 8)  # for each subject: so many times what is asked for, and so many more


@dataclass
class Job:
    """What a chunk is made of.

    Attributes:
        name: of its files, `<name>.npy` and `<name>.json`, in `folder`.
        kind: views or clips.
        level: the engine's name of the map, `number` its number in the index.
        seed: text that all random numbers come from.
        asked: how many views of each subject; of clips, one number.
        frames, frame_skip: of a clip, and tics from one frame to the next.
        iwad, overlay: game data, and a WAD laid over it or "".
    """

    name: str
    folder: str
    kind: str
    level: str
    number: int
    seed: str
    asked: list[int]
    size: list[int]
    frames: int
    frame_skip: int
    iwad: str
    overlay: str


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


def import_vizdoom() -> ModuleType:
    """Return the package vizdoom.

    Raises:
        UserError: it is absent, cannot be loaded, or is of a version whose frames differ.
    """
    wanted = "pip install 'visgen[freedoom]', or without its viewer: pip install --no-deps 'vizdoom>=1.3,<1.4'"
    try:
        import vizdoom
    except ImportError as error:
        raise UserError(f"Freedoom needs the package vizdoom ({error}); {wanted}") from None
    version = tuple(int(part) for part in vizdoom.__version__.split(".")[:2])
    if not FIRST_VERSION <= version < LAST_VERSION:
        raise UserError(f"vizdoom {vizdoom.__version__} was not tested and draws other frames; {wanted}")
    return vizdoom


class Draws(random.Random):
    """Random numbers made of `random()` alone, which gives the same numbers in every version of Python."""

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def whole(self, low: int, high: int) -> int:
        """Return a number from `low` up to, without, `high`."""
        return low + int(self.random() * (high - low))

    def weighted(self, weights: Sequence[int]) -> int:
        """Return an index, drawn in proportion to whole weights."""
        left = self.whole(0, sum(weights))
        for index, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return index
        raise ValueError("no weight is above 0")


# -------------------------------------------------------------------------------------------------------- engine


class Engine:
    """A running game on one level.

    Args:
        folder: where the engine may write.
    """

    def __init__(self, job: Job, seed: int, folder: Path) -> None:
        self.job, self.size = job, (job.size[0], job.size[1])
        self.clips = job.kind == "clips"
        self.game = _game(job, seed, folder, weapon=self.clips)
        self.game.init()
        forget_shared_memory()
        self.prepare()
        self.places = [(o.position_x, o.position_y) for o in self.game.get_state().objects if o.category in PLACES]

    def prepare(self) -> None:
        """Give a new episode its rules: nobody dies, nothing tints the picture; in clips monsters stay asleep."""
        for item in TINTS:
            self.game.send_game_command(f"remove {item}")
        self.game.send_game_command("god")
        self.run(STAY)
        if self.clips:
            self.game.send_game_command("notarget")
            self.run(STAY)
            self.game.send_game_command("give ammo")
        self.run(STAY, look=True)

    def run(self, keys: Sequence[float], tics: int = 1, look: bool = False) -> None:
        """Hold keys for some tics; only a tic that is looked at is drawn."""
        self.game.set_action(list(keys))
        self.game.advance_action(tics, look)

    def summon(self, name: str) -> None:
        self.game.send_game_command(f"summon {name}")
        self.run(STAY)

    def go(self, draws: Draws) -> None:
        """Move to a random thing of the level, and turn anywhere."""
        if self.game.is_episode_finished() or self.game.get_state() is None:
            self.game.new_episode()
            self.prepare()
        x, y = self.places[draws.whole(0, len(self.places))]
        x, y = x + draws.between(-48, 48), y + draws.between(-48, 48)
        self.game.send_game_command(f"warp {int(x)} {int(y)}")
        self.run((*STAY[:6], draws.between(-180, 180)), look=True)

    def frame(self) -> tuple[Frame, tuple[float, ...]] | None:
        """Return the frame and the pose of what was looked at last; None after an exit or a death."""
        state = self.game.get_state()
        if state is None:
            return None
        objects = [Object(o.value, o.object_name, o.object_category) for o in state.labels]
        made = Frame(state.screen_buffer, state.depth_buffer, state.labels_buffer, objects, self.size)
        return made, tuple(float(value) for value in state.game_variables)


def _game(job: Job, seed: int, folder: Path, weapon: bool) -> Any:
    """Return a game that is not started."""
    vizdoom = import_vizdoom()
    button, variable = vizdoom.Button, vizdoom.GameVariable
    game = vizdoom.DoomGame()
    game.set_vizdoom_path(str(_mortal(Path(vizdoom.__path__[0]) / "vizdoom", folder)))
    game.set_doom_game_path(job.iwad)
    if job.overlay:
        game.set_doom_scenario_path(job.overlay)
    game.set_doom_map(job.level)
    game.set_doom_config_path(str(folder / "engine.ini"))  # or it writes one into the working directory
    game.set_screen_resolution(vizdoom.ScreenResolution.RES_320X240)
    game.set_screen_format(vizdoom.ScreenFormat.RGB24)
    game.set_depth_buffer_enabled(True)
    game.set_labels_buffer_enabled(True)
    game.set_objects_info_enabled(True)
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_mode(vizdoom.Mode.PLAYER)
    game.set_render_weapon(weapon)
    for off in ("hud", "crosshair", "screen_flashes", "messages", "decals"):
        getattr(game, f"set_render_{off}")(False)
    names = ("MOVE_FORWARD", "MOVE_BACKWARD", "MOVE_LEFT", "MOVE_RIGHT", "ATTACK", "USE", "TURN_LEFT_RIGHT_DELTA")
    game.set_available_buttons([getattr(button, name) for name in names])
    poses = (variable.POSITION_X, variable.POSITION_Y, variable.POSITION_Z, variable.ANGLE)
    game.set_available_game_variables(list(poses))
    game.set_episode_timeout(0)
    game.set_seed(seed)
    game.set_doom_skill(3)
    game.set_ticrate(35)
    game.add_game_args(f"+cl_showsecretmessage 0 +r_visibility {VISIBILITY}")  # else the message is in the picture
    return game


def _mortal(engine: Path, folder: Path) -> Path:
    """Return a program that starts the engine so that it is killed when this process ends in any way (prctl 1)."""
    path = folder / "engine.sh"
    start = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
    path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -ISc '{start}' '{engine}' \"$@\"\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def forget_shared_memory() -> None:
    """Remove the names of this process's shared memory: it is freed when the last process that has it open ends."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith("/dev/shm/ViZDoom"):
            Path(path).unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------- views, clips


def limit(asked: int) -> int:
    """Return how often so many samples are tried for; not at all for 0 of them."""
    return TRIES[0] * asked + TRIES[1] if asked else 0


def views(engine: Engine, draws: Draws, made: Made) -> Iterator[list[tuple[Any, ...]]]:
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


def _too_narrow(seen: tuple[Frame, tuple[float, ...]] | None, wide: bool) -> str:
    if seen is None or seen[1][2] < -30000:
        return "void"
    levels = seen[0].levels
    narrow = wide and frames.percentile(frames.middle(levels), 0.5) < 12
    return "close" if narrow or frames.is_close(levels, 5, 14) else ""


def _judged(seen: tuple[Frame, tuple[float, ...]] | None) -> tuple[int | None, str]:
    """Return the subject of a view, or None and why it is refused."""
    if seen is None or seen[1][2] < -30000:
        return None, "void"
    if fault := seen[0].fault():
        return None, fault
    label = seen[0].subject()
    return label, "" if label is not None else "mixed"


def clips(engine: Engine, draws: Draws, made: Made) -> Iterator[list[tuple[Any, ...]]]:
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


def _clip(
    engine: Engine, draws: Draws, seen: tuple[Frame, tuple[float, ...]] | None
) -> tuple[list[tuple[Any, ...]], str]:
    """Return the rows of a walk that begins with `seen`, and why it is refused or "". The action of a row is what was
    held before its frame."""
    rows: list[tuple[Any, ...]] = []
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


def _row(job: Job, seen: tuple[Frame, tuple[float, ...]], label: int, action: int) -> tuple[Any, ...]:
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
    made.refused = dict(sorted(made.refused.items()))
    made.crc = arrays.write(Path(job.folder) / f"{job.name}.npy", rows)
    write_json(Path(job.folder) / f"{job.name}.json", asdict(made))
    return made


@contextmanager
def dying_with_the_builder() -> Iterator[None]:
    """Turn SIGTERM into an exit that closes the engine, and get one when the process that started this one ends."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
    yield


def main(argv: Sequence[str]) -> int:
    """Make the chunk of a job, JSON; print one line and return 2 where that fails."""
    job = Job(**json.loads(argv[0]))
    with dying_with_the_builder():
        folder = Path(tempfile.mkdtemp(prefix="engine_", dir=job.folder))
        os.chdir(folder)
        try:
            write_chunk(job, folder)
        except UserError as error:
            print(error, file=sys.stderr)
            return 2
        except Exception as error:  # the engine's own are of many classes
            print(f"the engine fails on {job.level} ({type(error).__name__}: {error})", file=sys.stderr)
            return 2
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


def settings() -> dict[str, object]:
    """Return what an index says about this file."""
    return {"visibility": VISIBILITY, "skill": 3, "tries": list(TRIES)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
