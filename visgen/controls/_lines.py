"""What maps of lines share: grey pictures of one polarity, light on dark or dark on light."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from visgen.config import UserError, kind_of
from visgen.controls import Control, ControlConfig

COLOURED = 12  # mean difference of a pixel's largest and smallest channel above which a picture is no map of lines
FULL = 0.5  # share of full brightness at which lines cannot be told from their background any more


@dataclass(frozen=True)
class LinesConfig(ControlConfig):
    """A control by lines.

    Attributes:
        polarity: of the maps that the model knows; a given map of the other one is refused, or inverted on demand.
    """

    polarity: Literal["light_on_dark", "dark_on_light"] = "light_on_dark"


class Lines(Control):
    """Maps of lines, the same value in all channels."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.background = "black" if config.polarity == "light_on_dark" else "white"

    def polar(self, lines: Tensor) -> Tensor:
        """Light lines on dark [..., H, W] in [-1, 1] -> the model's polarity."""
        return lines if self.config.polarity == "light_on_dark" else -lines

    def checked(self, values: Tensor, name: str) -> Tensor:
        kind = kind_of(self.config)
        spread = (values.amax(0).int() - values.amin(0).int()).float().mean()
        if spread > COLOURED:
            raise UserError(
                f"{name} is a colour picture, a {kind} map is grey; to have the map made from it, pass it as "
                "--control.image"
            )
        light = float(values.float().mean()) / 255
        dark_wanted = self.config.polarity == "light_on_dark"
        if light > FULL if dark_wanted else light < 1 - FULL:
            wanted, found = (
                ("light lines on dark", "dark lines on light")
                if dark_wanted
                else ("dark lines on light", "light lines on dark")
            )
            other = "dark_on_light" if dark_wanted else "light_on_dark"
            raise UserError(
                f"{name} looks like {found}, this checkpoint knows {wanted}; pass --control.invert (in a training: "
                f"control.polarity {other})"
            )
        return values
