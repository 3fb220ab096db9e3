"""Every control: its map of an image or the reason why there is none, and how it reads given maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from visgen.config import UserError, build, plugin_config
from visgen.controls import Control, kinds_of
from visgen.controls._lines import LinesConfig
from visgen.nn.control import ConditionalDecoding

PACKAGE = "controls"
NEEDING = {"depth", "hed", "lineart", "seg", "softedge"}  # a network or a given map
SIDE = 32


def picture() -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), "white")
    ImageDraw.Draw(image).ellipse((6, 8, 24, 27), fill=(200, 30, 60))
    return image


def pixels() -> torch.Tensor:
    values = torch.from_numpy(np.array(picture())).permute(2, 0, 1).float() / 127.5 - 1
    return values.expand(2, 1, 3, SIDE, SIDE)


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)
    control = build(plugin_config("visgen.controls", kind))
    assert isinstance(control, Control) and not list(control.parameters()), "it reads no file when it is built"


def test_it_extracts_or_says_what_it_needs(kind: str) -> None:
    control = build(plugin_config("visgen.controls", kind))
    if kind in NEEDING:
        with pytest.raises(UserError, match=f"control {kind}.* pass"):
            control.ready()
        return
    control.ready()
    found = control.extract(pixels())
    assert found.shape == (2, 1, 3, SIDE, SIDE) and found.min() >= -1 and found.max() <= 1
    assert found.unique().numel() > 1 and torch.equal(found[0], found[1])


def test_a_map_of_its_own_kind_is_read_and_what_is_none_is_refused(kind: str, tmp_path: Path) -> None:
    control = build(plugin_config("visgen.controls", kind))
    lines = Image.new("L", (SIDE, 24), 0)
    ImageDraw.Draw(lines).line((3, 3, 20, 20), fill=255, width=1)
    if isinstance(control.config, LinesConfig) and control.config.polarity == "dark_on_light":
        lines = lines.point(lambda v: 255 - v)
    path = tmp_path / "map.png"
    lines.save(path)
    values = control.read(path)
    assert values.shape == (3, 24, SIDE) and values.dtype == torch.uint8 and values.unique().numel() > 1
    with pytest.raises(UserError, match=r"--control\.map .*gone\.png does not exist"):
        control.read(tmp_path / "gone.png")
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(UserError, match=r"--control\.map .*text\.png is not a readable picture"):
        control.read(tmp_path / "text.png")


def test_its_config_makes_the_learned_part(kind: str, small: Callable[..., Any]) -> None:
    with torch.device("meta"):
        default = ConditionalDecoding(plugin_config("visgen.controls", kind), 64, (1, 16, 16))
    assert len(default.layers) == 3
    config = small(PACKAGE, kind)
    assert kinds_of(config) == {kind: config}
    torch.manual_seed(0)
    made = ConditionalDecoding(config, 32, (1, 8, 8))
    assert made.features(pixels()).shape == (2, 64, 32)
