"""The Fashion-MNIST checkpoints that ship in assets/ draw what they are asked for, each by its own way of drawing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import visgen
from visgen.config import plugin_config

ASSETS = Path(__file__).parents[1] / "assets"


@pytest.mark.parametrize(
    ("name", "sampler"),
    [
        ("fashion32", {"kind": "ar"}),
        ("fashion32_dd1", {"kind": "one_step"}),
        ("fashion32_acdit", {"kind": "blockwise", "steps": 5}),
    ],
)
def test_trousers_are_tall_and_sneakers_are_wide(name: str, sampler: dict[str, object]) -> None:
    values = dict(sampler)
    config = plugin_config("visgen.samplers", str(values.pop("kind")), **values)
    drawn = visgen.load(str(ASSETS / name), device="cpu").sample(
        labels=["Trouser"] * 4 + ["Sneaker"] * 4, seeds=range(8), sampler=config
    )
    lit = drawn.pixels.amax(1) > 64  # [8, 32, 32]
    height, width = lit.any(2).sum(1).double(), lit.any(1).sum(1).double()  # [8] rows, columns that are lit
    assert (height[:4] > 1.3 * width[:4]).all() and (width[4:] > 1.3 * height[4:]).all(), torch.stack([height, width])
