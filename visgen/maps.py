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

from visgen.checks import printable
from visgen.config import UserError, build, load, plugin, run_program
from visgen.controls import Control, as_map
from visgen.files import publishing
from visgen.image_files import SUFFIXES, Unreadable, decoding, find_files, read_image, require_resizable
from visgen.launch import Progress, device_of, writable
from visgen.metrics.images import to_uint8

SIDE = 512  # pixels of the shorter side of what a network is shown, at most


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
    found = find_files(config.root)
    images = [config.root / os.fsdecode(path) for path in found.paths]
    if not images:
        told = f"; {found.told}" if found.left_out else ""
        raise UserError(f"root {config.root} holds no image ({' '.join(sorted(SUFFIXES))}){told}")
    of: dict[Path, Path] = {}
    for path in images:
        other = of.setdefault(path.with_suffix(""), path)
        if other is not path:
            raise UserError(f"{other} and {path} would have one map, {path.stem}.png; rename one of them")
    if found.left_out:
        print(f"{printable(config.root)}: {printable(found.told)}", file=sys.stderr)
    made, unreadable = 0, []
    with Progress("maps") as step:
        for i, path in enumerate(images):
            target = out / path.relative_to(config.root).with_suffix(".png")
            if not target.is_file():
                try:
                    write_map(control, path, target, device)
                    made += 1
                except Unreadable as error:
                    unreadable.append(str(error))
            step(i + 1, len(images))
    for said in unreadable:
        print(f"{said}; it has no map", file=sys.stderr)
    there = len(images) - made - len(unreadable)
    print(f"{printable(out)}: {made} maps made, {there} were there, {len(unreadable)} unreadable")


def write_map(control: Control, path: Path, target: Path, device: torch.device) -> None:
    """The map of one image."""
    picture = read_image(path)
    with decoding(path):
        require_resizable(picture.size, SIDE)
    pixels = as_map(picture).to(device).float() / 127.5 - 1
    values = to_uint8(control.extract(pixels[None, None])[0, 0]).cpu().permute(1, 2, 0).contiguous().numpy()
    target.parent.mkdir(parents=True, exist_ok=True)
    with publishing(target) as unfinished:
        Image.fromarray(values).save(unfinished, format="PNG")


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
