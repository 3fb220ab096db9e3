"""Networks of transformers that make maps, from a directory or the Hub."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from visgen.config import UserError, kind_of
from visgen.controls import Control
from visgen.metrics.images import to_uint8


class NetworkControl(Control):
    """A control whose maps, where they are not given, a network of transformers makes: `config.network`.

    Attributes:
        auto: the class of transformers.
        needs: what an image cannot be read without, and what else can be passed.
    """

    auto: str
    needs: str

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._loaded: tuple[Any, Any] | None = None  # (processor, network)

    def ready(self) -> None:
        if self._loaded is not None:
            return
        kind = kind_of(self.config)
        if not self.config.network:
            raise UserError(f"control {kind} needs {self.needs} as --control.map")
        self._loaded = load_network(kind, self.auto, self.config.network)

    def outputs(self, pixels: Tensor) -> Any:
        """The network's of images [B, T, 3, H, W] in [-1, 1], one after another."""
        assert self._loaded is not None, "ready comes first"
        processor, network = self._loaded
        network.to(pixels.device)
        images = list(to_uint8(pixels.flatten(0, 1)).permute(0, 2, 3, 1).cpu().numpy())
        return network(**processor(images=images, return_tensors="pt").to(pixels.device))


def load_network(kind: str, auto: str, name: str) -> tuple[Any, Any]:
    """(processor, network in eval mode) of `transformers`' class `auto`.

    Args:
        kind: the control that needs it.
        name: directory or Hub id.

    Raises:
        UserError: no transformers, or no such network.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(f"control {kind} needs transformers ({error}); pip install 'visgen[text]'") from None
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name)
        network = getattr(transformers, auto).from_pretrained(name).eval().requires_grad_(False)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"control.network {name} is no {kind} network of transformers ({reason})") from None
    return processor, network
