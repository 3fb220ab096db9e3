"""Multi-head attention with grouped key/value heads, rotary positions and an optional cache."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from visgen.checks import UserError
from visgen.nn.cache import KVCache
from visgen.nn.dropout import Dropout
from visgen.nn.heads import split_heads


class Attention(nn.Module):
    """softmax(q k / sqrt(d)) v without biases; `kv_heads < heads` shares each key/value head among a group.

    `wqkv` packs [queries | keys | values] along its output, `wo` projects back.
    """

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        check_heads(width, heads, kv_heads)
        kv_heads = kv_heads or heads
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.wqkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,  # [B, W, D]
        rotation: Tensor,  # [B or 1, W, d/2, 2]
        mask: Tensor | None,  # [B or 1, 1, W, S] bool, None: causal over the window itself
        pos: Tensor | None = None,  # [B, W] slots of the window, needed with a cache
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = split_heads(self.wqkv(x), rotation, sizes)  # [B, H, W, d]
        if cache is not None:
            assert pos is not None
            k, v = cache.update(layer, k, v, pos)
            k, v = k.to(q.dtype), v.to(q.dtype)
        grouped = self.kv_heads != self.heads
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        return self.dropout(self.wo(out.transpose(1, 2).flatten(2)))


def check_heads(width: int, heads: int, kv_heads: int | None = None) -> None:
    """Raises `UserError` where the heads do not share the width, or the key/value heads, evenly."""
    if width % heads or heads % (kv_heads or heads):
        kv = "" if kv_heads is None else f", and heads of kv_heads {kv_heads}"
        raise UserError(f"width {width} must be a multiple of heads {heads}{kv}; change one of them")
