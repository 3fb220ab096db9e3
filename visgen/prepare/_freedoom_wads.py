"""Game data: WAD files, and the maps of the game in them."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from visgen.config import UserError
from visgen.files import from_home

PHASE2 = tuple(f"MAP{i:02d}" for i in range(1, 33))  # of Freedoom: Phase 2
PHASE1 = tuple(f"E{e}M{m}" for e in range(1, 5) for m in range(1, 10))  # of Freedoom: Phase 1


@dataclass(frozen=True)
class GameData:
    """WAD files, and the maps of the game in them."""

    iwad: Path
    overlay: Path | None
    levels: tuple[str, ...]

    def overlay_of(self, level: str) -> str:
        """Return the file that is laid over the game data for a map, or ""."""
        return str(self.overlay) if self.overlay and level in PHASE1 else ""

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of each file, by name."""
        return {path.name: _sha256(path) for path in (self.iwad, self.overlay) if path}


def game_data(wad: Path | None, package: Path) -> GameData:
    """Return the game data of the user, or those of Freedoom that vizdoom brings.

    E1M1 to E4M9 run on the data of Phase 2 too, with those of Phase 1 laid over them: alone these lack 7 of the 15
    monsters, and what a map looks like would say what stands in it.

    Raises:
        UserError: a file is no WAD, or holds no map of Doom II.
    """
    iwad = package / "freedoom2.wad" if wad is None else from_home(wad).resolve()
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
            head = file.read(12)
            if len(head) < 12 or not head.startswith(b"IWAD"):
                raise ValueError("it does not begin with IWAD")
            count, place = (int.from_bytes(head[i : i + 4], "little") for i in (4, 8))
            file.seek(place)
            entries = file.read(16 * count)  # of 4 bytes place, 4 bytes size, 8 bytes name
        if len(entries) < 16 * count:
            raise ValueError("it is truncated")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"wad {wad} is no game data ({reason}); pass a DOOM2.WAD or freedoom2.wad, or leave it out"
        ) from None
    return [entries[i + 8 : i + 16].rstrip(b"\0").decode("ascii", "replace") for i in range(0, len(entries), 16)]


@functools.cache
def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
