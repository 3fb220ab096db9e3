"""What training under a control adds: the maps of a batch, and a base model to start from or to leave as it is."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.config import UserError
from visgen.controls import Control, kinds_of
from visgen.data import Batch, Data
from visgen.data._mapped import Mapped
from visgen.model import Model
from visgen.nn.control import ControlEncoder
from visgen.nn.keyed import Rng, uniform, whole

NEW = ("control.", "condition.control.")  # what a model under control has and its base lacks


class Maps:
    """The control maps of batches: given by the data, made by the processes that read them, or made here.

    Args:
        config: of a control, perhaps with others `beside` it.
    """

    def __init__(self, config: Any) -> None:
        self.kinds: dict[str, Control] = {kind: configs.build(each) for kind, each in kinds_of(config).items()}

    def setup(self, data: Data) -> None:
        """Loads what the extractors need.

        Raises:
            UserError: no maps, and nothing to make them of.
        """
        if getattr(data, "has_maps", False):
            if len(self.kinds) > 1:
                raise UserError(
                    f"data.maps are of one kind, the control knows {' and '.join(self.kinds)}; train it on one"
                )
            return
        if hasattr(data, "grid"):
            raise UserError(
                f"data.kind '{configs.kind_of(data.config)}' gives cached codes, without the pixels of which "
                f"{' and '.join(self.kinds)} maps are made; train on their source, whose pixels are encoded on the fly"
            )
        for control in self.kinds.values():
            try:
                control.ready()
            except UserError as error:
                raise UserError(
                    f"{error} (in a training: objective.model.control.network or .weights, or ready maps as data.maps)"
                ) from None

    @property
    def read(self) -> Control | None:
        """The control whose maps the processes that read data make: the first kind, if it is meant for them."""
        first = next(iter(self.kinds.values()))
        return first if first.in_worker else None

    def reading(self, data: Data) -> Data:
        if getattr(data, "has_maps", False):
            first = next(iter(self.kinds.values()))
            data.read_map = functools.partial(first.read, flag="control map")  # type: ignore[attr-defined]
            return data
        return data if self.read is None else Mapped(data, self.read.extract)

    def batch(self, batch: Batch, rng: Rng | None = None) -> Batch:
        """The batch with a map [B, T, 3, H, W] for each row: of a kind drawn by `rng`, or of all kinds in turn."""
        made = [
            batch["map"] if "map" in batch and i == 0 else control.extract(batch["pixels"])
            for i, control in enumerate(self.kinds.values())
        ]
        if len(made) == 1:
            return {**batch, "map": made[0]}
        rows, device = len(made[0]), made[0].device
        if rng is None:
            kind = torch.arange(rows, device=device) % len(made)
        else:
            kind = whole(len(made), rows, rng, device)
        return {**batch, "map": torch.stack(made)[kind, torch.arange(rows, device=device)]}


def start_from(model: Model, base: Model, where: str) -> bool:
    """Copies the weights of `base` into `model`; whether that includes its control.

    Raises:
        UserError: it is another model than `model` without its control.
    """
    mine, its = _described(model), _described(base)
    other = [f"{k} {its.get(k)} instead of {mine.get(k)}" for k in sorted({*mine, *its}) if mine.get(k) != its.get(k)]
    given, wanted = base.state_dict(), model.state_dict()
    unfit = [k for k in given if k not in wanted or given[k].shape != wanted[k].shape]
    unfit += [k for k in wanted if k not in given and not k.startswith(NEW)]
    if other or unfit:
        raise UserError(
            f"{where} is another model than objective.model ({', '.join(other[:3] or unfit[:3])}); give objective.model"
            " its settings, as `base:` with its config does, or start from another"
        )
    model.load_state_dict(wanted | given)
    return any(k.startswith(NEW) for k in given)


def _described(model: Model) -> dict[str, Any]:
    """What a model computes, by its config: control, condition and dropout apart."""
    values = configs.flat(configs.dump(model.config))
    return {k: v for k, v in values.items() if not k.startswith(("control", "condition")) and "drop" not in k}


def freeze_base(model: Model) -> None:
    """Lets only what is new under control train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(NEW))


def encoders(model: nn.Module) -> list[Any]:
    """The encoders of control maps in a model."""
    return [module for module in model.modules() if isinstance(module, ControlEncoder)]


def drops(rate: float, rows: int, rng: Rng, device: torch.device) -> Tensor | None:
    """Rows [B] whose control alone is dropped; None, and no number drawn, where that is off."""
    return uniform((rows,), rng, device) < rate if rate else None
