"""Control as a user gives it: pictures to extract maps from, or maps; how strong, where, and of which polarity."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from visgen import config as configs
from visgen.checks import Range
from visgen.config import UserError
from visgen.controls import Control, as_map, kinds_of
from visgen.data._images import center_crop, read_picture
from visgen.nn.control import Hint, Resize, Strength

ELONGATED = 100  # a picture of more than this ratio is refused: its crop would show next to nothing
SMALLEST = 8  # pixels of a side


@dataclass(frozen=True)
class HintConfig:
    """Control of what is drawn where.

    Attributes:
        kind: a kind that the checkpoint was trained for; default: its only one, or the first.
        image: pictures to make the maps of.
        map: ready maps, instead of images: edges, depths (8- or 16-bit PNG, .npy), labels.
        strength: how much the control counts, 1 as in training; several numbers: one for each injection.
        region: a picture of any size, white where the control counts.
        invert: take the negative of a given map, which is of the other polarity.
        network: directory or Hub id of a network of transformers, for `depth` or `seg` of an image.
        weights: HED weights (`python -m visgen.convert hed`), for `softedge` of an image.
    """

    kind: str | None = None
    image: tuple[Path, ...] = ()
    map: tuple[Path, ...] = ()
    strength: Annotated[tuple[Strength, ...], Range(1)] = (1.0,)
    region: Path | None = None
    invert: bool = False
    network: str = ""
    weights: Path | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        return self.image or self.map


@dataclass
class Given:
    """Maps ready for a model.

    Attributes:
        maps: [C, 3, H, W] in [-1, 1].
        region: [N] or None.
        names: of each map, for files: the picture's name and a hash of what is in it.
        about: what an image's metadata say of it.
    """

    maps: Tensor
    strength: tuple[float, ...]
    region: Tensor | None
    names: list[str]
    about: dict[str, Any]

    def rows(self, index: Sequence[int]) -> Hint:
        """The maps at `index`, counted round, one a row (or one for all rows)."""
        strength = self.strength[0] if len(self.strength) == 1 else self.strength
        chosen = [i % len(self.maps) for i in index]
        chosen = chosen[:1] if len(set(chosen)) == 1 else chosen  # one map for all rows is encoded once
        return Hint(self.maps[chosen].unsqueeze(1), strength, None if self.region is None else self.region[None])


def check_asked(settings: HintConfig, flag: str) -> None:
    """Refuses what no checkpoint can be asked."""
    if settings.image and settings.map:
        raise UserError(
            f"--{flag}.image and --{flag}.map are both given; an image is what the map is made of, leave one out"
        )
    if settings != HintConfig() and not settings.files:
        raise UserError(
            f"--{flag} says how an image is controlled: give --{flag}.image or --{flag}.map, the path of a picture"
        )
    if settings.invert and settings.image:
        raise UserError(
            f"--{flag}.invert takes the negative of a given map; of --{flag}.image the map is made as it must be"
        )


def choose(settings: HintConfig, trained: Any, where: str, flag: str = "control") -> Control:
    """The control that is asked for, ready to extract if that is needed.

    Args:
        trained: `Model.controls` of the checkpoint.

    Raises:
        UserError: the checkpoint was not trained for it, or an extractor lacks what it needs.
    """
    known = kinds_of(trained)
    kind = settings.kind or next(iter(known), None)
    if kind is not None and kind not in configs.kinds("visgen.controls"):
        allowed = ", ".join(configs.kinds("visgen.controls"))
        raise UserError(f"--{flag}.kind '{kind}' is no control; there are {allowed}")
    if kind is None or not known:
        raise UserError(f"{where} was trained without control; leave --{flag} out, or choose another checkpoint")
    if kind not in known:
        raise UserError(
            f"{where} was trained for control {' and '.join(known)}, not for {kind}; choose another --{flag}.kind or "
            f"another checkpoint{_needs(kind) if settings.image else ''}"
        )
    config = known[kind]
    for name, value in (("network", settings.network), ("weights", settings.weights)):
        if value and not hasattr(config, name):
            raise UserError(f"--{flag}.{name} is nothing that control {kind} needs; leave it out")
        config = replace(config, **({name: value} if value else {}))
    if len(settings.strength) not in (1, trained.injections):
        raise UserError(
            f"--{flag}.strength has {len(settings.strength)} numbers, this checkpoint's control {trained.injections} "
            "injections; give one, or one for each"
        )
    control: Control = configs.build(config)
    if settings.image:
        with _options_of(flag):
            control.ready()
    return control


@contextlib.contextmanager
def _options_of(flag: str) -> Iterator[None]:
    """What a control refuses, which speaks of `--control`, in the options of `--second` where that is asked."""
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("--control.", f"--{flag}.")) from None


def _needs(kind: str) -> str:
    """What a control would need besides."""
    try:
        configs.build(configs.plugin_config("visgen.controls", kind)).ready()
    except UserError as error:
        return f"; and {error}"
    return ""


def read(
    settings: HintConfig, control: Control, size: tuple[int, int], grid: tuple[int, int, int], flag: str = "control"
) -> Given:
    """The maps of the given files, cropped to the middle and resized to `size` (H, W).

    Args:
        grid: of the tokens, which a region is taken on.

    Raises:
        UserError: a file that is missing, unreadable, tiny, very elongated or no such map.
    """
    made = []
    for path in settings.files:
        what = f"--{flag}.{'image' if settings.image else 'map'}"
        if settings.image:
            picture = _decode(path, what)
            pixels = as_map(fitted(picture, size)).float() / 127.5 - 1
            made.append(control.extract(pixels[None, None])[0, 0])
        else:
            with _options_of(flag):
                values = control.read(path, settings.invert, what)
            _check_sides(values.shape[-1], values.shape[-2], f"{what} {path}")
            made.append(fitted_map(values, size, control.config.resize).float() / 127.5 - 1)
    kind = configs.kind_of(control.config)
    region = None if settings.region is None else _region(settings.region, size, grid, f"--{flag}.region")
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in settings.files]
    names = [f"{_slug(path.stem)}-{h[:8]}" for path, h in zip(settings.files, hashes, strict=True)]
    about = {"kind": kind, "strength": list(settings.strength), "given": "image" if settings.image else "map"}
    about["files"] = [{"path": str(p), "sha256": h[:12]} for p, h in zip(settings.files, hashes, strict=True)]
    about |= {"region": str(settings.region)} if settings.region else {}
    return Given(torch.stack(made), settings.strength, region, names, about)


def fitted(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The middle of a picture at `size` (H, W): a square as training images are made, else one bicubic step."""
    height, width = size
    if height == width:
        return center_crop(picture, height)
    return ImageOps.fit(picture, (width, height), Image.Resampling.BICUBIC)


def fitted_map(values: Tensor, size: tuple[int, int], resize: Resize) -> Tensor:
    """The middle of a map uint8 [3, H, W] at `size`: `nearest` keeps its values, `bicubic` is antialiased."""
    height, width = size
    if tuple(values.shape[-2:]) == size:
        return values
    scale = min(values.shape[-2] / height, values.shape[-1] / width)
    rows, columns = (max(1, round(s * scale)) for s in size)
    top, left = (values.shape[-2] - rows) // 2, (values.shape[-1] - columns) // 2
    cut = values[None, :, top : top + rows, left : left + columns].float()
    if resize == "nearest":
        return F.interpolate(cut, size, mode="nearest-exact")[0].to(torch.uint8)
    smooth = F.interpolate(cut, size, mode="bicubic", align_corners=False, antialias=True)
    return smooth[0].round().clamp(0, 255).to(torch.uint8)


def _region(path: Path, size: tuple[int, int], grid: tuple[int, int, int], flag: str) -> Tensor:
    """[N]: the share of each token's pixels that is white."""
    picture = fitted(_decode(path, flag, "black").convert("RGB"), size)
    _, rows, columns = grid
    weight = F.adaptive_avg_pool2d(as_map(picture).float().mean(0)[None, None] / 255, (rows, columns)).flatten()
    if weight.max() < 0.5:
        raise UserError(
            f"{flag} {path} is black nearly everywhere, so the control would count nowhere; paint it white there"
        )
    return weight.repeat(grid[0])


def _decode(path: Path, flag: str, background: str = "white") -> Image.Image:
    picture = read_picture(path, flag, background)
    _check_sides(*picture.size, f"{flag} {path}")
    return picture


def _check_sides(width: int, height: int, name: str) -> None:
    if min(width, height) < SMALLEST:
        raise UserError(
            f"{name} is {width} x {height} px; a side of less than {SMALLEST} px shows nothing, pass a larger one"
        )
    if max(width, height) > ELONGATED * min(width, height):
        raise UserError(f"{name} is {width} x {height} px, of which the crop shows next to nothing; crop it closer")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:30].strip("-") or "map"
