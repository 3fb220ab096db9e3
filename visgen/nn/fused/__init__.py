"""Fused Triton kernels of decoding. Each file has one step and its launch; the eager twins are the modules of `nn/` and
`decode/verify.py`.

A decode step of a few rows moves weights and cache once and does little arithmetic, so what counts is the number of
kernels and that none of them waits for another's small result: five a layer. A pass over all slots of many sequences
(`dense.py`) leaves products to the library, and what counts is the bytes between them. Everything here is a function of
tensors that lie where they lie: no allocation depends on values and nothing is read back, so a step can be captured in
a graph.
"""

from __future__ import annotations

from visgen.checks import UserError

EAGER = "pass --engine.kind eager"


def check_available() -> None:
    """Raises `UserError` where Triton cannot be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError(f"engine.kind captured needs Triton ({error}); pip install triton, or {EAGER}") from None
