"""The control that ships in assets/: its base untouched without it, its edges followed with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

import visgen
from visgen.config import build, plugin_config
from visgen.controls import as_map
from visgen.generate import Generator
from visgen.nn.control import Hint

ASSETS = Path(__file__).parents[1] / "assets"
ASKED = {"labels": ["Food & Drink"] * 2, "seeds": [0, 1], "guidance": 2.0}


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Generator:
    """From another directory than the repository's: the base is found by its hash and its place beside the control."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        return visgen.load(str(ASSETS / "emoji64_edges"), device="cpu")


def test_without_a_control_it_is_the_shipped_model_bit_for_bit(controlled: Generator) -> None:
    plain = visgen.load(str(ASSETS / "emoji64"), device="cpu").sample(**ASKED)
    null = controlled.sample(**ASKED)
    assert torch.equal(null.tokens, plain.tokens) and torch.equal(null.pixels, plain.pixels)


def test_it_follows_the_edges_that_it_is_given(controlled: Generator) -> None:
    canny = build(plugin_config("visgen.controls", "canny"))
    with Image.open(ASSETS / "figures" / "cupcake.png") as picture:
        asked = canny.extract(as_map(picture).float()[None, None] / 127.5 - 1)
    drawn = controlled.sample(**ASKED, control=[Hint(asked)])
    found = canny.extract(drawn.pixels.unsqueeze(1))[:, 0, 0] > 0
    wanted = asked[0, 0, 0] > 0
    for one in found:
        assert 2 * (one & wanted).sum() / (one.sum() + wanted.sum()) > 0.4, "another picture's edges score 0.16"
