"""Objectives: what is trained. The loop is one and knows none of them.

Every net in `nets` is one module whose *forward returns the loss* `(loss, logs)`, since the hooks of DDP and FSDP fire
only there; each has its own optimizer. The net named by `export` holds in its attribute `model` what gets the EMA and
is saved for sampling; that module's `config` says how to build it again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from visgen.data import Batch, Data
from visgen.nn.keyed import Rng

Logs = dict[str, Tensor]


class Objective(ABC):
    """Built as `Objective(config)`: constructs `nets` (also on the meta device) and reads no file.

    Attributes:
        nets: trained modules by name; forward returns `(loss, logs)`.
        frozen: modules that are only moved to the device, filled by `setup`.
        export: the net whose `.model` gets the EMA and is saved for sampling.
        part: the sub-module of the exported one that is saved, over frozen weights that `facts` name; empty: all of it.
        shards: whether its one net may be sharded (FSDP2): no weights of it are read outside of its forward.
        facts: further metadata of the saved file, filled by `setup`.
        held_out_values: names of the values of `held_out`.
        larger_is_better: those of them whose largest is the best; of the others it is the smallest.
    """

    part: str = ""
    shards: bool = False
    facts: Mapping[str, str] = MappingProxyType({})
    held_out_values: tuple[str, ...] = ()
    larger_is_better: tuple[str, ...] = ()
    nets: dict[str, nn.Module]
    frozen: dict[str, nn.Module]
    export: str

    def check_steps(self, steps: int) -> None:
        """Refuse, before anything is read, a training of so few steps that a part of it never begins.

        Raises:
            UserError: it names a value that fits.
        """

    def setup(self, data: Data) -> None:
        """Before training: reads frozen weights, checks that data and config agree.

        Raises:
            UserError: naming what does not fit and the remedy.
        """

    def reading(self, data: Data) -> Data:
        """What the loop reads instead of `data`: the same samples, perhaps with more in them. After `setup`."""
        return data

    def turns(self, step: int) -> list[str]:
        """Names of the nets whose optimizers step at `step` (counted from 0), in order; they share one batch."""
        return list(self.nets)

    def begin_step(self, step: int, average: nn.Module) -> None:
        """Before the turns of `step`; `average` is the EMA of the exported module, which may be read."""

    @abstractmethod
    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        """Loss of `name`'s turn and detached scalars to log, means over rows. Random numbers are drawn from `rng` by
        `visgen.nn.keyed`, so that they belong to rows and not to processes. `nets` are the prepared (wrapped) modules:
        call `nets[name](...)` once; other nets enter through their parameters only. May keep detached tensors between
        the turns of one step."""

    def check_preview(self) -> None:
        """Refuses settings of previews that do not fit the model; after `setup`, before the first step."""

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> Tensor | None:
        """Images [B, 3, H, W] in [-1, 1] for the logger, made with `model` (the EMA of the exported module)."""
        return None

    def held_out(self, model: nn.Module, batch: Batch) -> Logs:
        """Means over a held-out batch, named `held_out_values`, with `model` (the EMA of the exported module)."""
        return {}

    def exported(self) -> Any:
        """The module that is saved for sampling; it has `.config`."""
        return self.nets[self.export].model
