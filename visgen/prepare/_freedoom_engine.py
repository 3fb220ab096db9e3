"""The engine: a running game on one level, without a window. This is the one file that imports vizdoom."""

from __future__ import annotations

import random
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from visgen.checks import UserError
from visgen.prepare._freedoom_frames import Frame, Object

FIRST_VERSION, LAST_VERSION = (1, 3), (1, 4)  # of vizdoom: from the first up to, without, the last
INSTANCE = "instance"  # file in an engine's folder: its name for shared memory
SHM = Path("/dev/shm")
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
TINTS = ("InvulnerabilitySphere", "RadSuit", "Berserk", "BlurSphere", "Infrared")  # picked up, they colour the picture
PLACES = ("Monster", "Health", "Armor", "Ammo", "Weapon", "Key", "Self", "Item")  # categories of things to stand at
VISIBILITY = 20  # of the engine's light
SKILL = 3  # of the game
Seen = tuple[Frame, tuple[float, ...]]  # a frame and its pose


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
        forget_shared_memory(folder)
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

    def frame(self) -> Seen | None:
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
    game.set_doom_skill(SKILL)
    game.set_ticrate(35)
    game.add_game_args(f"+cl_showsecretmessage 0 +r_visibility {VISIBILITY}")  # else the message is in the picture
    return game


def _mortal(engine: Path, folder: Path) -> Path:
    """Return a program that starts the engine so that it is killed when this process ends in any way (prctl 1), and
    that notes the engine's name of its shared memory."""
    path = folder / "engine.sh"
    start = (
        "import ctypes, os, sys; words = sys.argv[1:]; ctypes.CDLL(None).prctl(1, 9); "
        f'open("{folder / INSTANCE}", "w").write(words[words.index("+viz_instance_id") + 1]); os.execv(words[0], words)'
    )
    path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -ISc '{start}' '{engine}' \"$@\"\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def forget_shared_memory(folder: Path) -> None:
    """Remove the names of an engine's shared memory: it is freed when the last process that has it open ends.

    Args:
        folder: the engine's own.
    """
    note = folder / INSTANCE
    name = note.read_text() if note.is_file() else ""
    for path in SHM.glob(f"ViZDoom*{name}") if name.isalnum() else ():
        path.unlink(missing_ok=True)


def settings() -> dict[str, object]:
    """Return what an index says about this file."""
    return {"visibility": VISIBILITY, "skill": SKILL}
