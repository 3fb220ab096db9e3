"""Exponential moving average of the exported module, on its device.

W_t = d_t W_{t-1} + (1 - d_t) w_t with d_t = min(decay, (1 + t) / (10 + t)), t the number of updates before this one;
the first update copies. Buffers (norm statistics, a quantiser's counts) are copied, not averaged.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen.checks import Rate
from visgen.train.shards import full, is_sharded, like, local


@dataclass(frozen=True)
class EmaConfig:
    """Average that is previewed and saved.

    Attributes:
        decay: its limit; 0 keeps a plain copy of the weights.
        save_dtype: of the floating-point parameters in `model.safetensors`; the resume state is always fp32.
    """

    decay: Rate = 0.9999
    save_dtype: Literal["fp32", "bf16"] = "fp32"


class Ema:
    """The average of `live`, whose updates never wait for the device. If `live` is sharded afterwards, so is the
    average once `follow` is told.

    Attributes:
        module: a module with the average's weights, in eval mode; of a sharded one without memory, see `whole`.
        updates: how many there were.
    """

    def __init__(self, live: nn.Module, decay: float) -> None:
        self.live, self.decay, self.updates = live, decay, 0
        self.module = copy.deepcopy(live).requires_grad_(False).eval()
        self._shards: list[Tensor] | None = None

    def follow(self) -> None:
        """To be called once `live` is as it trains."""
        if is_sharded(self.live):
            self._shards = [local(p).detach().clone() for p in self.live.parameters()]
            self.module.to("meta")

    def decay_at(self, updates: int) -> float:
        """Weight of the old average in the update that follows `updates` earlier ones."""
        return min(self.decay, (1 + updates) / (10 + updates)) if updates else 0.0

    @torch.no_grad()
    def update(self) -> None:
        mean: list[Tensor] = list(self.module.parameters()) if self._shards is None else self._shards
        now = [local(p) for p in self.live.parameters()]
        if self.updates:
            torch._foreach_lerp_(mean, now, 1 - self.decay_at(self.updates))
        else:
            torch._foreach_copy_(mean, now)
        if self._shards is None:
            for old, new in zip(self.module.buffers(), self.live.buffers(), strict=True):
                old.copy_(new)
        self.updates += 1

    @torch.no_grad()
    def whole(self) -> nn.Module:
        """A module with the average's weights. Of a sharded one it is made now, by all processes together."""
        if self._shards is None:
            return self.module
        device = self._shards[0].device
        made = copy.deepcopy(self.module).to_empty(device=device)
        for parameter, shard, live in zip(made.parameters(), self._shards, self.live.parameters(), strict=True):
            parameter.copy_(full(like(shard, live)))
        for buffer, now in zip(made.buffers(), self.live.buffers(), strict=True):
            buffer.copy_(now)
        return made

    def state_dict(self) -> dict[str, Any]:
        """All of it, on every process."""
        return {
            "n_averaged": torch.tensor(self.updates),
            **{f"module.{k}": v for k, v in self.whole().state_dict().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        tensors = {k.removeprefix("module."): v for k, v in state.items() if k != "n_averaged"}
        self.updates = int(state["n_averaged"])
        if self._shards is None:
            self.module.load_state_dict(tensors)
            return
        missing = [n for n, _ in self.live.named_parameters() if n not in tensors]
        if missing:
            raise KeyError(f"the average lacks {missing[0]}")
        for shard, (name, live) in zip(self._shards, self.live.named_parameters(), strict=True):
            shard.copy_(local(like(tensors[name], live, whole=True)))
