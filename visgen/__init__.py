"""visgen: autoregressive image and video generation.

`visgen.load(directory).sample(labels=[3], seeds=[0])` draws images from a checkpoint.
"""

from __future__ import annotations

import visgen.interrupts  # noqa: F401 (first: guards the imports that follow)

# isort: split
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from visgen.generate import Generator

__version__ = "0.1.0"
__all__ = ["__version__", "load"]

# OpenMP's threads spin for some microseconds and then sleep, unless the user says otherwise. By default they spin for
# milliseconds: on a busy machine that makes every step several times slower. Without any spinning an idle machine of
# many cores is slower. The runtime reads these when torch loads, so programs import visgen before torch.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ |= {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}  # GNU's runtime, Intel's and LLVM's


def load(source: str, **options: Any) -> Generator:
    """A run directory, one of its steps, or a Hugging Face Hub id -> something that samples; see `visgen.loading`."""
    from visgen.loading import load

    return load(source, **options)
