"""Layout: slots in raster order, and who sees whom."""

from __future__ import annotations

import pytest
import torch

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
