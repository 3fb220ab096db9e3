"""Line drawings, given: ControlAR's `lineart` control (arXiv:2410.02705).

Its network draws dark lines on white. The released small checkpoint was trained on that, `edge_base` on the negative:
`polarity` is recorded for each checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from visgen.config import UserError
from visgen.controls._lines import Lines, LinesConfig


@dataclass(frozen=True)
class Config(LinesConfig):
    """Given line drawings."""

    polarity: Literal["light_on_dark", "dark_on_light"] = "dark_on_light"


class Lineart(Lines):
    """Line drawings made elsewhere."""

    def ready(self) -> None:
        raise UserError(
            "control lineart has given maps only, for visgen has no weights of a drawing network; make the drawing "
            "elsewhere and pass it as --control.map"
        )

    def extract(self, pixels: Tensor) -> Tensor:
        self.ready()
        return pixels
