"""Images in files: the ADM suite's `.npz` (one array `arr_0`, uint8 [N, H, W, 3]) and folders, read as a stream."""

from __future__ import annotations

import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visgen.config import UserError
from visgen.files import publishing
from visgen.image_files import SUFFIXES, Unreadable, decoding, find_files, open_image, opened, warn_once

KEY = "arr_0"
LOSSY = frozenset({".jpg", ".jpeg", ".jfif", ".avif", ".gif"})
NO_SAMPLE = re.compile(r"grid(-[0-9a-f]{6})?\.png|control_[a-z0-9-]+-[0-9a-f]{8}\.png")  # as `pictures` names them


class NpzImages:
    """The images of an .npz; they are never all in memory.

    Raises:
        UserError: no such file, no `arr_0`, not uint8 [N, H, W, 3] in C order.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise UserError(f"{path} is no file; pass a folder, or an .npz with uint8 images [N, H, W, 3] as '{KEY}'")
        if not zipfile.is_zipfile(path):
            raise UserError(f"{path} is no .npz (a zip of arrays); write it with numpy.savez, or `eval/fid.py --npz`")
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if KEY not in names:
                raise UserError(f"{path} holds {', '.join(names)}, but no images under '{KEY}'")
            try:
                with archive.open(f"{KEY}.npy") as file:
                    shape, fortran, dtype = _header(file)
            except (zipfile.BadZipFile, zlib.error, ValueError) as error:
                raise UserError(f"{path} is damaged ({error}); copy it again") from None
        if dtype != np.uint8 or len(shape) != 4 or shape[-1] != 3 or fortran:
            order = " in Fortran order" if fortran else ""
            raise UserError(
                f"{path}: '{KEY}' is {dtype} {list(shape)}{order}; expected uint8 [N, H, W, 3], values 0 to 255"
            )
        self.n, self.size = shape[0], shape[1:3]
        self.shape = shape

    def rows(self, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """(uint8 [B, 3, H, W], index [B]) in file order; this process's batches of them."""
        each = int(np.prod(self.shape[1:]))
        with zipfile.ZipFile(self.path) as archive, archive.open(f"{KEY}.npy") as file:
            for turn, start in enumerate(range(0, self.n, batch)):
                count = min(batch, self.n - start)
                try:
                    if start == 0:
                        _header(file)
                    data = file.read(count * each)
                except (zipfile.BadZipFile, zlib.error) as error:
                    raise UserError(f"{self.path} is damaged near image {start} ({error}); copy it again") from None
                if len(data) < count * each:
                    raise UserError(f"{self.path} ends within image {start + len(data) // each}; copy it again")
                if turn % world == rank:
                    pixels = np.frombuffer(data, np.uint8).reshape(count, *self.shape[1:])
                    yield torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2), torch.arange(start, start + count)


class FolderImages:
    """The images of a folder and its sub-folders, by sorted path; what `sample.py` writes beside its samples (grids,
    control maps) is left out, and a line says so.

    Args:
        lossy: take .jpg and the like too: scoring what JPEG has changed moves FID (2.50 to 5.80 in one published case).

    Raises:
        UserError: no such folder, no images, lossy ones without `lossy`.
    """

    size: tuple[int, int] | None = None  # may differ from image to image

    def __init__(self, path: Path, lossy: bool = False) -> None:
        if not path.is_dir():
            raise UserError(f"{path} is no folder; pass a folder of PNG images, or an .npz")
        found = find_files(path)
        files = []
        for name in found.paths:
            file = path / os.fsdecode(name)
            if _is_no_sample(file):
                found.leave_out(name, "grids and control maps of sample.py")
            else:
                files.append(file)
        told = f"; {found.told}" if found.left_out else ""
        bad = next((p for p in files if p.suffix.lower() in LOSSY), None)
        if bad is not None and not lossy:
            raise UserError(f"{bad} is lossy ({bad.suffix}), which changes what is scored; save PNG, or --allow-lossy")
        if not files:
            raise UserError(f"folder {path} holds no image ({' '.join(sorted(SUFFIXES - LOSSY))}){told}")
        if told:
            warn_once(f"{path}: {found.told}")
        self.files, self.n = sorted(files), len(files)

    def rows(self, batch: int, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """(uint8 [B, 3, H, W], index [B]): this process's images, in batches of equal size in pixels."""
        held: list[Tensor] = []
        where: list[int] = []
        for i in range(rank, self.n, world):
            image = self._read(i)
            if held and (len(held) == batch or image.shape != held[0].shape):
                yield torch.stack(held), torch.tensor(where)
                held, where = [], []
            held.append(image)
            where.append(i)
        if held:
            yield torch.stack(held), torch.tensor(where)

    def _read(self, i: int) -> Tensor:
        image = open_image(self.files[i])
        _require_plain(image, self.files[i])
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def _is_no_sample(file: Path) -> bool:
    """Whether a file is a grid or a control map of `sample.py`, by its name or by the settings that it carries: those
    of a sample name one seed."""
    if NO_SAMPLE.fullmatch(file.name):
        return True
    if file.suffix.lower() != ".png":
        return False
    try:
        with decoding(file), open(file, "rb") as beginning:
            if b"visgen\0" not in beginning.read(4096):  # where the settings stand; Pillow takes ten times as long
                return False
        with decoding(file), opened(file) as image:
            settings = json.loads(image.info.get("visgen", '{"seed": 0}'))
            return isinstance(settings, dict) and "seed" not in settings
    except Unreadable:
        return False  # what is wrong with it is said when it is read


def _require_plain(image: Image.Image, path: Path) -> None:
    """Refuses what has no one meaning as 8-bit RGB."""
    if image.mode[0] in "IF":
        raise UserError(f"image {path} has more than 8 bits a channel (mode {image.mode}); save it as 8-bit RGB")
    if image.has_transparency_data and np.asarray(image.convert("RGBA"))[..., 3].min() < 255:
        raise UserError(f"image {path} is transparent in places; save it on the background that it shall be scored on")


def open_images(path: Path, lossy: bool = False) -> NpzImages | FolderImages:
    """The images of an .npz or a folder."""
    return FolderImages(path, lossy) if path.is_dir() else NpzImages(path)


def write_npz(path: Path, n: int, size: tuple[int, int], batches: Iterable[Tensor]) -> None:
    """Write n uint8 images, in batches [B, 3, H, W], into one .npz with `arr_0`; constant memory.

    Args:
        size: (H, W).

    Raises:
        UserError: images of another type or size, another number than n, or a file that cannot be written. A file that
            is not complete never stands at `path`.
    """
    written = 0
    with publishing(path) as unfinished:
        with (
            zipfile.ZipFile(unfinished, "w", zipfile.ZIP_STORED, allowZip64=True) as archive,
            archive.open(f"{KEY}.npy", "w", force_zip64=True) as member,
        ):
            header = {"descr": "|u1", "fortran_order": False, "shape": (n, *size, 3)}
            np.lib.format.write_array_header_1_0(member, header)
            for images in batches:
                if images.dtype != torch.uint8 or images.shape[1:] != (3, *size):
                    found = f"images {images.dtype} {list(images.shape)}"
                    raise UserError(f"{found} do not fit {path}; expected uint8 [B, 3, {size[0]}, {size[1]}]")
                member.write(images.permute(0, 2, 3, 1).contiguous().numpy().tobytes())
                written += len(images)
        if written != n:
            raise UserError(f"{path}: {written} of {n} images were written; not kept")


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    stream: BinaryIO = file
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return shape, fortran, dtype
