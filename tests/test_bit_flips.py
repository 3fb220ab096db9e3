"""No flipped bit of a file that carries numbers goes unseen; `bit_flips.py` says how, and flips more of them."""

from __future__ import annotations

from pathlib import Path

import bit_flips
import pytest


@pytest.mark.parametrize("seed", [0, 1])
def test_no_flipped_bit_goes_unseen(tmp_path: Path, seed: int) -> None:
    counts = bit_flips.run(tmp_path, seed, 40)
    assert {name: found for name, found in counts.items() if found["silent"]} == {}
    assert sum(found["refused"] for found in counts.values()) >= 30 and len(counts) >= 25


def test_a_flip_that_is_read_counts_as_silent(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(bytes(100))
    case = bit_flips.Case(path, lambda: list(path.read_bytes()))
    assert bit_flips.flip(case, bit_flips.random.Random(0)) == "silent" and path.read_bytes() == bytes(100)
