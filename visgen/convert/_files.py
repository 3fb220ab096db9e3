"""Foreign weight files in, run directories out: what the converters share."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import pickle
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visgen import checkpoint, run_files, tensors
from visgen.config import UserError
from visgen.convert import DTYPES, Precision
from visgen.tokenizers import Tokenizer


def require_new(out: Path) -> None:
    """Refuses a directory that holds something already."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT {out} exists and is not empty; choose a new directory")


def read_weights(path: Path) -> dict[str, Any]:
    """What a foreign weights file holds; large files are mapped, not read.

    Raises:
        UserError: truncated, holding pickled code, or no dictionary.
    """
    again = "the file is truncated or no weights file, fetch it again"
    if path.suffix == ".safetensors":
        return dict(tensors.read(path, again, finite=False)[0])
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # training files keep their arguments: plain data
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named is None:
            raise UserError(f"{path} cannot be read; {again}") from None
        raise UserError(
            f"{path} holds pickled code ({named[1]}), which is not run; get a file of tensors, such as safetensors"
        ) from None
    except Exception as error:  # bytes that are no pickle make the unpickler raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UserError(f"{path} cannot be read ({reason}); {again}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}, not a dictionary of tensors")
    return content


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state, without the prefixes that DDP and torch.compile put before every key."""
    found = {k: v.detach() for k, v in state.items() if isinstance(v, Tensor) and isinstance(k, str)}
    for prefix in ("module.", "_orig_mod.", "module."):
        if found and all(k.startswith(prefix) for k in found):
            found = {k.removeprefix(prefix): v for k, v in found.items()}
    return found


def check_finite(module: nn.Module, dtype: Precision) -> None:
    """Raises `UserError` where a weight is not finite in `dtype`."""
    broken = [k for k, v in module.named_parameters() if not tensors.is_finite(v.detach().to(DTYPES[dtype]))]
    if broken:
        raise UserError(f"{', '.join(broken[:3])}: not finite in {dtype}; use --dtype fp32 or fetch the file again")


def write_run(out: Path, module: Any, facts: dict[str, Any], dtype: Precision, beside: Tokenizer | None) -> None:
    """Writes a run directory `out` of one step: the module, its tokenizer beside it, what is known of its origin."""
    step = out / run_files.step_name(0)
    hidden = run_files.unfinished(step)
    try:
        hidden.mkdir(parents=True)
        if beside is not None:
            checkpoint.save_module(out / run_files.TOKENIZER, beside, beside.config)
        checkpoint.save_module(hidden / run_files.WEIGHTS, module, module.config, DTYPES[dtype], facts)
        run_files.write_meta(hidden, facts | {"dtype": dtype, "crc32": run_files.checksums(hidden)})
        run_files.publish(step)
    except (OSError, UserError) as error:
        shutil.rmtree(hidden, ignore_errors=True)  # so that the same command may be run again
        with contextlib.suppress(OSError):
            (out / run_files.TOKENIZER).unlink()
        raise UserError(f"OUT {out} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def sha256_of(path: Path) -> str:
    """Checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
