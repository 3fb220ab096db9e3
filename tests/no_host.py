"""What a captured graph cannot hold."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoHost(TorchDispatchMode):
    """Refuses what a captured graph cannot hold: values read by the host, or made from its numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::")
        assert name not in ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh", "equal"), name
        return func(*args, **(kwargs or {}))
