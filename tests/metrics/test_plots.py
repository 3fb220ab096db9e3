"""Curves as a picture: every point is drawn, the same numbers give the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visgen.config import UserError
from visgen.metrics.plots import COLOURS, Panel, save_panels

CURVES = {"a": [(5.0, 3.0, 0.2), (50.0, 1.0, None), (10.0, 2.0, 0.1)], "b": [(5.0, 4.0, None), (50.0, 2.5, None)]}


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def shown(picture: np.ndarray, colour: str) -> int:
    """Pixels of about that colour."""
    wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.abs(picture - wanted).max(-1) < 20).sum())


def test_panels_hold_their_curves(tmp_path: Path) -> None:
    panels = [Panel("steps", "fd", CURVES, "x"), Panel("steps", "kid", {"b": CURVES["b"]})]
    save_panels(panels, tmp_path / "a.png")
    save_panels(panels, tmp_path / "b.png")
    picture = pixels(tmp_path / "a.png")
    half = picture.shape[1] // 2
    left, right = picture[:, :half], picture[:, half:]
    assert shown(left, COLOURS[0]) > 50 and shown(left, COLOURS[1]) > 50
    assert shown(right, COLOURS[0]) > 50 and shown(right, COLOURS[1]) == 0
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    more = {**CURVES, "a": [*CURVES["a"], (25.0, 9.0, None)]}
    save_panels([Panel("steps", "fd", more, "x"), panels[1]], tmp_path / "c.png")
    assert (pixels(tmp_path / "c.png")[:, :half] != left).any()


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be written"):
        save_panels([Panel("x", "y", CURVES)], tmp_path / "none" / "a.png")
