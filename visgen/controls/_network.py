"""Networks of transformers that make maps, from a directory or the Hub."""

from __future__ import annotations

from typing import Any

from visgen.config import UserError


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
