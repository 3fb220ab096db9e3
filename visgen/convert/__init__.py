"""Foreign weights -> ours, one file per origin: `python -m visgen.convert ORIGIN IN OUT [options]`.

`visgen/convert/ORIGIN.py` defines `Config`, whose first fields are `source` and `out`, and `convert(config) -> str`,
which writes `out` and returns a line saying what was written. A new origin is one new file. Key maps are strict: every
tensor of the source is used, or named as dropped, and every tensor of ours is found with its shape (`audit`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from visgen import tensors as stored
from visgen.config import UserError

Precision = Literal["fp32", "fp16", "bf16"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def audit(found: Mapping[str, Any], wanted: Mapping[str, Sequence[int]], source: str) -> None:
    """Compares the tensors of a source (values with `.shape`) with the wanted names and shapes.

    Raises:
        UserError: naming what is missing, unexpected or of another shape.
    """
    missing = [k for k in wanted if k not in found]
    unexpected = [k for k in found if k not in wanted]
    shapes = [
        f"{k} {tuple(found[k].shape)} instead of {tuple(wanted[k])}"
        for k in wanted
        if k in found and tuple(found[k].shape) != tuple(wanted[k])
    ]
    problems = [("missing", missing), ("unexpected", unexpected), ("other shape", shapes)]
    told = [f"{len(names)} {word}: {_some(names)}" for word, names in problems if names]
    if told:
        raise UserError(f"{source} does not hold the expected weights ({'; '.join(told)}); fetch the file again")


def check_sha256(content: bytes, wanted: str, source: str) -> None:
    """Raises UserError unless `content` has the wanted checksum."""
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        raise UserError(
            f"{source}: sha256 is {found}, expected {wanted} ({len(content):,} bytes read); "
            "the file is truncated or another version, fetch it again"
        )


def save(tensors: Mapping[str, Tensor], metadata: dict[str, str], out: str, dtype: Precision) -> str:
    """Write safetensors, all tensors in `dtype`; return a line for the user."""
    path = Path(out)
    if path.suffix != ".safetensors":
        raise UserError(f"OUT is {out}; it must end in .safetensors")
    cast = {k: v.to(DTYPES[dtype]).contiguous() for k, v in tensors.items()}
    broken = [k for k, v in cast.items() if not stored.is_finite(v)]
    if broken:
        raise UserError(f"{_some(broken)}: not finite in {dtype}; use --dtype fp32")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stored.write(path, cast, {**metadata, "dtype": dtype})
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    count = sum(v.numel() for v in cast.values())
    return f"{path}: {len(cast)} tensors, {count:,} parameters, {dtype}, {path.stat().st_size / 2**20:.1f} MiB"


def _some(names: Sequence[str], shown: int = 3) -> str:
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
