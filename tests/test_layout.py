"""Layout: slots in raster order, and who sees whom."""

from __future__ import annotations

import pytest
import torch

from visgen.config import UserError
from visgen.layout import Layout


def test_coordinates_are_in_raster_order() -> None:
    layout = Layout.raster((2, 2, 3))
    expected = [[t, y, x] for t in range(2) for y in range(2) for x in range(3)]
    assert layout.coords.tolist() == expected
    assert (layout.slots, layout.tokens, layout.prefix) == (12, 12, 0)


def test_prefix_slots_come_first_and_are_off_the_grid() -> None:
    layout = Layout.raster((1, 2, 2)).with_prefix(3)
    assert (layout.slots, layout.tokens, layout.prefix) == (7, 4, 3)
    assert layout.coords[:3].tolist() == [[-1, -1, -1]] * 3
    assert layout.coords[3:].tolist() == Layout.raster((1, 2, 2)).coords.tolist()


def test_a_second_prefix_is_refused() -> None:
    with pytest.raises(ValueError, match="has 2 prefix slots already"):
        Layout.raster((1, 2, 2)).with_prefix(2).with_prefix(1)


def test_raster_is_causal_with_and_without_prefix() -> None:
    for prefix in (0, 1, 3):
        layout = Layout.raster((1, 2, 3))
        layout = layout.with_prefix(prefix) if prefix else layout
        everything = torch.arange(layout.slots)
        assert torch.equal(layout.visible(everything), torch.ones(layout.slots, layout.slots).tril().bool())


def test_full_sees_all_tokens_and_the_prefix_does_not_look_ahead() -> None:
    layout = Layout.full((1, 2, 2)).with_prefix(2)
    seen = layout.visible(torch.arange(6))
    assert seen[2:].all()
    assert seen[:2].tolist() == [[True, False, False, False, False, False], [True, True, False, False, False, False]]


def test_visibility_of_chosen_queries_and_keys() -> None:
    layout = Layout.raster((1, 3, 3)).with_prefix(1)
    query, key = torch.tensor([[4, 0], [9, 2]]), torch.tensor([0, 3, 9])
    expected = [[[True, True, False], [True, False, False]], [[True, True, True], [True, False, False]]]
    assert layout.visible(query, key).tolist() == expected


def test_blocks_reach_from_one_token_to_the_whole_image() -> None:
    grid = (1, 4, 4)
    for block, twin in (((1, 1, 1), Layout.raster(grid)), (grid, Layout.full(grid))):
        layout = Layout.blocks(grid, block)
        assert torch.equal(layout.coords, twin.coords) and torch.equal(layout.group, twin.group)
        assert layout.block == twin.block


def test_square_blocks_stand_in_raster_order_and_so_do_their_tokens() -> None:
    """The published 16 x 16 blocks of a 32 x 32 image."""
    layout = Layout.blocks((1, 32, 32), (1, 16, 16))
    at = {0: (0, 0), 15: (0, 15), 16: (1, 0), 255: (15, 15), 256: (0, 16), 272: (1, 16), 512: (16, 0), 768: (16, 16)}
    assert {i: tuple(layout.coords[i, 1:].tolist()) for i in at} == at
    assert layout.group.tolist() == [i // 256 for i in range(1024)] and layout.block == 256


def test_blocks_of_frames_are_plain_raster_order() -> None:
    layout = Layout.blocks((4, 2, 3), (2, 2, 3))
    assert torch.equal(layout.coords, Layout.raster((4, 2, 3)).coords)
    assert layout.group.tolist() == [0] * 12 + [1] * 12
    tubes = Layout.blocks((4, 2, 2), (2, 1, 2))
    assert tubes.coords[:4].tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]


def test_a_block_that_does_not_divide_the_grid_is_refused() -> None:
    with pytest.raises(UserError, match=r"block \(1, 3, 2\) does not divide the grid \(1, 4, 4\).*1, 1/2/4, 1/2/4"):
        Layout.blocks((1, 4, 4), (1, 3, 2))


@pytest.mark.parametrize("block", [(1, 1, 1), (1, 2, 2), (1, 2, 4), (1, 4, 4)])
def test_who_sees_whom_in_the_doubled_layout(block: tuple[int, int, int]) -> None:
    """The rule in words, slot by slot; the last clean block is not there."""
    layout = Layout.blocks((1, 4, 4), block).doubled()
    size = block[1] * block[2]
    clean = 16 - size
    assert layout.slots == clean + 16 and layout.block == size
    seen = layout.visible(torch.arange(layout.slots))
    for i in range(layout.slots):
        for j in range(layout.slots):
            u, v = (i if i < clean else i - clean) // size, (j if j < clean else j - clean) // size
            if i < clean:
                expected = j < clean and v <= u
            else:
                expected = v < u if j < clean else v == u
            assert bool(seen[i, j]) == expected, (i, j)
