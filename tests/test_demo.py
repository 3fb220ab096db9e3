"""`make demo`: its commands with and without a control file in assets/, and the canny example that it draws."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sample_program import settings_of

from visgen.sample import main

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "sample" / "demo_canny.yaml"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("shipped", [True, False])
def test_the_canny_example_is_drawn_where_a_control_is_shipped(shipped: bool, tmp_path: Path) -> None:
    if shipped:
        (tmp_path / "config.yaml").touch()
    said = subprocess.run(
        ["make", "-n", "demo", f"CONTROL={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    commands = [line for line in said if "sample.py" in line]
    assert commands[0].endswith("python sample.py configs/sample/demo.yaml --out out/demo")
    assert len(commands) == (2 if shipped else 1)
    if shipped:
        assert commands[1].endswith(f"{CONFIG.relative_to(ROOT)} --checkpoint {tmp_path} --out out/demo/canny")


def test_it_is_one_row_of_edges_and_images(
    make_control_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_control_run(tmp_path / "run")
    monkeypatch.chdir(ROOT)
    main(
        [
            str(CONFIG),
            "--checkpoint",
            str(run),
            "--label",
            "disc",
            "--out",
            str(tmp_path / "out"),
            "--engine.device",
            "cpu",
        ]
    )
    with Image.open(tmp_path / "out" / "grid.png") as grid:
        pixels = np.asarray(grid)
    gap, cell = 16, 144  # pixels of 16 px images that are shown eight times larger
    assert pixels.shape == (cell + gap, 8 * cell + gap, 3), "one row: edges and 7 images"
    assert set(np.unique(pixels[gap:cell, gap:cell])) == {0, 255}, "begins with the edges"
    assert len(np.unique(pixels[gap:cell, cell + gap :])) > 2
    assert settings_of(tmp_path / "out" / "grid.png")["control"]["kind"] == "canny"
