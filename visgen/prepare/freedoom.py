"""Builds the sets that `freedoom` reads: views, or clips, rendered by ViZDoom from the game data of Freedoom.

    pip install 'visgen[freedoom]'
    python -m visgen.prepare.freedoom --out data_cache/freedoom64
    python -m visgen.prepare.freedoom --out data_cache/freedoom64_clips --kind clips

A set is made of chunks, each by an engine of its own, and a chunk is a function of its job. The jobs follow from the
settings and from what earlier chunks hold, never from time, so a set is the same at any number of workers, and a build
that was killed goes on with the chunks that it has.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from visgen.checks import Natural, Positive, Range, Seed
from visgen.config import UserError, load, run_program
from visgen.controls.seg import colours
from visgen.data import freedoom as sets
from visgen.launch import cpus, writable
from visgen.prepare import _freedoom_chunk as chunk
from visgen.prepare import _freedoom_engine as engine
from visgen.prepare import _freedoom_frames as frames
from visgen.prepare._freedoom_build import Build, build_all
from visgen.prepare._freedoom_wads import GameData, game_data
from visgen.prepare._freedoom_workers import ended_by_sigterm

HELD_OUT = frozenset(("MAP05", "MAP11", "MAP17", "MAP23", "MAP29", "E1M5", "E2M3", "E3M4", "E4M6"))
SPLITS: tuple[sets.Part, ...] = ("train", "held_out", "same_maps")
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
        print(f"{build.folder}: {build.index.samples} {config.kind} of {len(build.index.levels)} maps")


def _indices(config: Config, data: GameData, version: str) -> Iterator[sets.Index]:
    """The index of each split that is asked for."""
    chosen = config.levels or data.levels
    unknown = [name for name in chosen if name not in data.levels]
    if unknown:
        raise UserError(f"levels {' '.join(unknown)} are not in the game data; allowed: {' '.join(data.levels)}")
    settings: dict[str, Any] = {
        "vizdoom": version,
        "wads": data.files(),
        "frame_skip": config.frame_skip if config.kind == "clips" else 0,
        "engine": engine.settings(),
        "chunks": chunk.settings(),
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


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
