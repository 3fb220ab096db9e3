"""The nets built without memory, before anything is read or written: their sizes, and whether they can be trained."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from visgen import config as configs
from visgen.config import UserError
from visgen.objectives import Objective

TRAINED = 4 * 4  # bytes of a trained weight: fp32, its gradient and Adam's two moments
KEPT = 4  # of one that is only held: frozen, or in the average


def rehearse(config: Any) -> Objective:
    """The objective of `config` with its nets on the meta device.

    Raises:
        UserError: nets that cannot be built.
    """
    with allocating(config), torch.device("meta"):
        return configs.build(config)


def parameters(objective: Objective) -> dict[str, int]:
    """Number of parameters of every net."""
    return {name: sum(p.numel() for p in net.parameters()) for name, net in objective.nets.items()}


def require_memory(objective: Objective, config: Any, available: int) -> None:
    """Refuses the nets of `config` if weights, gradients, optimisers and average take more than `available` bytes.

    Raises:
        UserError: it names the largest tensor, and the field that makes it so.
    """
    need, tensors = 0, dict[str, torch.Tensor]()
    for name, net in objective.nets.items():
        tensors |= {f"{name}.{key}": tensor for key, tensor in (*net.named_parameters(), *net.named_buffers())}
        need += sum(p.numel() * (TRAINED if p.requires_grad else KEPT) for p in net.parameters())
    need += sum(p.numel() * KEPT for p in objective.exported().parameters())
    need += sum(b.nbytes for module in (*objective.nets.values(), objective.exported()) for b in module.buffers())
    if need > available:
        name, largest = max(tensors.items(), key=lambda item: item[1].numel())
        raise UserError(
            f"training these nets takes {need / 1e9:,.0f} GB and more, there are {available / 1e9:,.0f} GB of memory; "
            f"the largest tensor is {name} {list(largest.shape)}: lower {_field(config, largest.shape)}"
        )


@contextlib.contextmanager
def allocating(config: Any) -> Iterator[None]:
    """Within it, memory that cannot be had for the objective of `config` is one line.

    Raises:
        UserError: in place of torch's error.
    """
    try:
        yield
    except (RuntimeError, TypeError, MemoryError) as error:  # TypeError: a size of more than 64 bits
        reason = str(error).partition("\n")[0]
        if not isinstance(error, MemoryError) and not re.search(
            "overflow|allocat|out of memory", reason, re.IGNORECASE
        ):
            raise
        raise UserError(f"no memory for the nets ({reason}); lower {_field(config)}") from error


def _field(config: Any, shape: torch.Size | None = None) -> str:
    """The field of the objective's `config` that sets the largest axis of a tensor, else its largest whole number."""
    sizes = {}
    for key, value in configs.flat(configs.dump(config), "objective").items():
        whole = [v for v in (value if isinstance(value, list) else [value]) if type(v) is int and v > 0]
        if whole:
            sizes[key] = max(whole)
    fitting = {
        k: v for k, v in sizes.items() if any(n % v == 0 or n - 1 == v for n in shape or ())
    }  # n - 1: null class
    key, value = max((fitting or sizes).items(), key=lambda item: item[1])
    return f"{key} ({value})"
