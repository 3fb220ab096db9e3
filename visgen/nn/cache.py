"""Static key/value cache. It is an *argument* of the attention, never a part of the model."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every slot, written at per-row positions.

    Which slots may be read is said by the layout's mask, never by the cache: taking back rejected drafts is doing
    nothing, since stale slots are masked and later overwritten.

    Attributes:
        keys, values: [layers, rows, kv heads, slots, head_dim].
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        slots: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (layers, rows, heads, slots, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def clear(self) -> None:
        """Forget everything. A mask hides stale slots, but zero times a stale NaN is NaN."""
        self.keys.zero_()
        self.values.zero_()

    def update(self, layer: int, key: Tensor, value: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key, value [rows, heads, W, d] at slots pos [rows, W]; returns those of all slots."""
        keys, values = self.keys[layer], self.values[layer]
        write(keys, values, key, value, pos)
        return keys, values


def write(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, pos: Tensor) -> None:
    """As `KVCache.update`, of one layer's keys and values [rows, heads, slots, d]."""
    index = pos[:, None, :, None].expand_as(key)
    keys.scatter_(2, index, key.to(keys.dtype))
    values.scatter_(2, index, value.to(values.dtype))
