"""What enters the first layer: the condition's vector in a prefix slot, the code's embedding elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from visgen.nn.fused.chain import chained, follow


def embed(tokens: Tensor, pos: Tensor, table: Tensor, prefix: Tensor, out: Tensor) -> Tensor:
    """tokens, pos [B] int64; table [V, D]; prefix [R, P, D] in table's type -> out [R, D]; row r is image r mod B."""
    rows, slots, width = prefix.shape
    _embed[(rows,)](
        tokens,
        pos,
        table,
        prefix,
        out,
        tokens.shape[0],
        slots,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        CHAIN=(chain := chained(out.device)),
        launch_pdl=chain,
    )
    return out


@triton.jit
def _embed(
    tokens, pos, table, prefix, out, images, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr
):
    follow(CHAIN)
    row = tl.program_id(0)
    image = row % images
    slot = tl.load(pos + image)
    token = tl.load(tokens + image)
    lane = tl.arange(0, BLOCK)
    source = table + token * WIDTH
    if slot < slots:
        source = prefix + (row * slots + slot) * WIDTH
    tl.store(out + row * WIDTH + lane, tl.load(source + lane, mask=lane < WIDTH), mask=lane < WIDTH)
