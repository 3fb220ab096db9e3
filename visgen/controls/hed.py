"""Maps of ControlNet's HED network, given: ControlAR's `hed` control (arXiv:2410.02705).

The sigmoid of the mean of the side outputs, light on dark. visgen has no weights of that network; `softedge.py`
extracts maps of the original HED, which are of another look.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from visgen.config import UserError
from visgen.controls._lines import Lines, LinesConfig


@dataclass(frozen=True)
class Config(LinesConfig):
    """Given soft edges."""


class GivenHED(Lines):
    """Soft edges made elsewhere."""

    def ready(self) -> None:
        raise UserError(
            "control hed has given maps only, for visgen has no weights of ControlNet's HED; make the map elsewhere "
            "and pass it as --control.map, or use a checkpoint of control softedge"
        )

    def extract(self, pixels: Tensor) -> Tensor:
        self.ready()
        return pixels
