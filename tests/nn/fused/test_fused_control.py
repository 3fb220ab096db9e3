"""The fused addition of control against the eager lookup, at odd sizes and in ring order."""

from __future__ import annotations

import pytest
import torch

from visgen.nn.control import at_slots

fused = pytest.importorskip("visgen.nn.fused.control")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter rounds bfloat16 its own way


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("branches", "images", "window", "width"), [(1, 2, 1, 20), (2, 3, 4, 48), (3, 1, 5, 64)])
def test_equals_the_lookup(branches: int, images: int, window: int, width: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    rows, count, prefix = branches * images, 7, 3
    control = torch.randn(2, rows, count, width, generator=rng).to(DEVICE, dtype)
    x = torch.randn(rows, window, width, generator=rng).to(DEVICE, dtype)
    wide = torch.randint(count, (images, 2 * window), generator=rng).to(DEVICE)
    for index in (wide[:, :window], wide[:, ::2]):
        wanted = x + at_slots(control, index.repeat(branches, 1) + prefix - 1, prefix, window)[1]
        found = x.clone()
        fused.add_control(found, control[1], index)
        assert torch.equal(found, wanted) and not torch.equal(found, x)


def test_other_types_are_refused() -> None:
    x = torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="of one type"):
        fused.add_control(x, torch.zeros(1, 2, 4, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64))
