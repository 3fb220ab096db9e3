"""The static cache: writes where it is told, forgets nothing, decides nothing."""

from __future__ import annotations

import torch

from visgen.nn.cache import KVCache


def test_writes_at_the_positions_of_every_row() -> None:
    torch.manual_seed(0)
    cache = KVCache(layers=2, rows=3, heads=2, slots=5, head_dim=4)
    key, value = torch.randn(3, 2, 2, 4), torch.randn(3, 2, 2, 4)
    pos = torch.tensor([[0, 1], [4, 2], [3, 0]])
    keys, values = cache.update(1, key, value, pos)
    for row in range(3):
        for slot in range(5):
            written = pos[row].tolist().index(slot) if slot in pos[row].tolist() else None
            for table, given in ((keys, key), (values, value)):
                expected = torch.zeros(2, 4) if written is None else given[row, :, written]
                assert torch.equal(table[row, :, slot], expected), (row, slot)
    assert (cache.keys[0] == 0).all() and (cache.values[0] == 0).all(), "another layer"


def test_a_second_write_replaces_the_first_and_leaves_the_rest() -> None:
    cache = KVCache(1, 1, 1, 3, 2)
    one = torch.ones(1, 1, 2, 2)
    cache.update(0, one, one, torch.tensor([[0, 1]]))
    keys, values = cache.update(0, 5 * one[:, :, :1], 7 * one[:, :, :1], torch.tensor([[1]]))
    assert keys[0, 0, :, 0].tolist() == [1, 5, 0]
    assert values[0, 0, :, 0].tolist() == [1, 7, 0]


def test_keeps_its_own_precision_and_place() -> None:
    cache = KVCache(1, 1, 1, 2, 2, dtype=torch.bfloat16)
    before = cache.keys.data_ptr()
    keys, _ = cache.update(0, torch.full((1, 1, 1, 2), 1.001), torch.zeros(1, 1, 1, 2), torch.tensor([[0]]))
    assert keys.dtype == torch.bfloat16 and keys.data_ptr() == before, "static: nothing is allocated again"
