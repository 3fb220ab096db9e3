"""The repeated blocks of a net: what is compiled, sharded and recomputed one by one."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def blocks_of(net: nn.Module) -> list[nn.Module]:
    """The outermost modules of `net` that are repeated: lists of two or more of one class, with parameters."""
    found: list[nn.Module] = []
    for child in net.children():
        alike = isinstance(child, nn.ModuleList) and len(child) > 1 and len({type(m) for m in child}) == 1
        if alike and any(True for _ in child.parameters()):
            found += child.children()
        else:
            found += blocks_of(child)
    return found


def recompute(net: nn.Module) -> None:
    """Keeps no activation inside a block; the backward pass computes them again, dropout included."""
    for block in blocks_of(net):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(net: nn.Module) -> bool:
    """Compiles each block, the same code once for all that are alike, and the `regions` that modules name: methods
    whose values are large, such as a loss over a vocabulary. False where `net` has no blocks."""
    blocks = blocks_of(net)
    limit: Any = torch._dynamo.config  # one entry a block, where these differ in a number such as their drop path
    limit.recompile_limit = max(limit.recompile_limit, len(blocks) + 8)
    for block in blocks:  # the forward alone, so that the hooks of FSDP run outside
        block.forward = torch.compile(block.forward)
    for module in net.modules() if blocks else ():
        for name in getattr(module, "regions", ()):
            setattr(module, name, torch.compile(getattr(module, name)))
    return bool(blocks)
