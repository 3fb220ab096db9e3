"""visgen: autoregressive image and video generation.

`visgen.load(directory).sample(labels=[3], seeds=[0])` draws images from a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visgen.generate import Generator

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def load(source: str, **options: Any) -> Generator:
    """A run directory, one of its steps, or a Hugging Face Hub id -> something that samples; see `visgen.loading`."""
    from visgen.loading import load

    return load(source, **options)
