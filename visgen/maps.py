"""A folder of images -> a folder of their control maps, as `data.maps` wants them.

    python -m visgen.maps --root photos --out photo_depths --control.kind depth --control.network Intel/dpt-large

Maps are PNGs of the images' own size, under the same paths. What is there is left alone, so a killed run goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from visgen.config import UserError, build, load, plugin, run_program
from visgen.controls import Control, as_map
from visgen.data._images import SUFFIXES, UNREADABLE, read_image, walk_links
from visgen.launch import Progress, device_of, writable
from visgen.metrics.images import to_uint8


@dataclass(frozen=True)
class Config:
    """Makes control maps.

    Attributes:
        root: folder of images, of any layout.
        out: folder of the maps.
        control: what they are (its encoder does not matter here).
        device: a torch device; "auto" takes a GPU when there is one.
    """

    root: Path = Path("data")
    out: Path = Path("data_maps")
    control: Any = plugin("visgen.controls", "canny")
    device: str = "auto"


def main(argv: Sequence[str]) -> None:
    config = load(Config, argv, prog="python -m visgen.maps")
    if not config.root.is_dir():
        raise UserError(f"root {config.root} is no folder; pass a folder of images")
    out, device = writable(config.out, "out"), device_of(config.device, "device")
    control: Control = build(config.control)
    control.ready()
    walked = (
        Path(os.fsdecode(os.path.join(where, name))) for where, names in walk_links(config.root) for name in names
    )
    images = sorted(p for p in walked if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    if not images:
        raise UserError(f"root {config.root} holds no image ({' '.join(sorted(SUFFIXES))})")
    of: dict[Path, Path] = {}
    for path in images:
        other = of.setdefault(path.with_suffix(""), path)
        if other is not path:
            raise UserError(f"{other} and {path} would have one map, {path.stem}.png; rename one of them")
    made, unreadable = 0, []
    with Progress("maps") as step:
        for i, path in enumerate(images):
            target = out / path.relative_to(config.root).with_suffix(".png")
            if not target.is_file():
                try:
                    write_map(control, path, target, device)
                    made += 1
                except UNREADABLE:
                    unreadable.append(path)
            step(i + 1, len(images))
    for path in unreadable:
        print(f"{path} cannot be read; it has no map", file=sys.stderr)
    print(f"{out}: {made} maps made, {len(images) - made - len(unreadable)} were there, {len(unreadable)} unreadable")


def write_map(control: Control, path: Path, target: Path, device: torch.device) -> None:
    """The map of one image; written under a temporary name first."""
    pixels = as_map(read_image(path)).to(device).float() / 127.5 - 1
    values = to_uint8(control.extract(pixels[None, None])[0, 0]).cpu().permute(1, 2, 0).contiguous().numpy()
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    Image.fromarray(values).save(temporary, format="PNG")
    os.replace(temporary, target)


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
