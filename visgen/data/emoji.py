"""Emoji: colour pictures on white, with 9 categories, sub-categories and names, in one to three styles.

The bundled set `assets/emoji64` holds Microsoft's Fluent 3D emoji (3,011 pictures, MIT) at 64 pixels. It was built by
the first of these commands; the second builds the three-style set (10,573 pictures, 130 MB of memory):

    python -m visgen.data.emoji --out assets/emoji64
    python -m visgen.data.emoji --out data_cache/emoji3 --styles fluent noto twemoji --quality 90

A set is a folder of sheets and an `index.json`, see `_emoji_build`; provenance and licences stand in `assets/NOTICE`.
The split goes by concept: all skin tones, genders, directions and colours of one thing lie on one side of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visgen.checks import Share
from visgen.config import REPOSITORY, UserError, run_program
from visgen.data import Data, Split, Views
from visgen.data._emoji_build import Style, main, read_sheets
from visgen.data._emoji_concepts import CATEGORIES, TONES, toned
from visgen.files import from_home, read_json
from visgen.image_files import Unreadable

# A mirror image of these is wrong: lettering, numbers, clocks, maps, flags.
UNMIRRORED_CATEGORIES = frozenset({"Symbols", "Flags"})
UNMIRRORED_SUBCATEGORIES = frozenset(
    {"emotion", "time", "place-map", "place-building", "award-medal", "game", "music", "book-paper", "money", "office"}
)


@dataclass(frozen=True)
class Config:
    root: Path = Path("assets/emoji64")
    """Folder of a built set; a relative path that does not exist here is looked up in the repository of visgen."""
    styles: tuple[Style, ...] = ()
    """Styles of the set to use; none means all of them."""
    classes: Literal["category", "style_category", "subcategory"] = "category"
    """What a label is. style_category: the categories of each style are classes of their own."""
    variants: Literal["all", "base"] = "all"
    """base: one picture per concept and style, without skin tone and of neutral gender where there is one."""
    concepts_of: Style | None = None
    """Leave out what this style of the set does not draw: country flags and families, of `fluent`."""
    evenly: bool = False
    """Train on every concept equally often, whatever the number of its variants: a training picture is a random variant
    of its concept in its style. Otherwise people, with their skin tones and professions, are most of the pictures."""
    base_share: Share = 0.0
    """With `evenly`: the share of pictures that are their concept's base, what `variants: base` keeps, in any case."""
    hflip: bool = False
    """Mirror half of the training images, except flags, symbols and others that a mirror makes wrong."""
    shift: int = 0
    """Move training images by up to this many pixels in x and y; the gap is white."""
    scale: float = 0.0
    """Zoom training images by a factor in [1 - scale, 1 + scale]."""
    jitter: float = 0.0
    """Multiply contrast against white, and saturation, of training images by factors in [1 - jitter, 1 + jitter]."""


class Emoji(Data):
    """Held in memory; augmentation applies to the train split only.

    Attributes:
        names: per image, such as `man judge, dark skin tone`.
        codes: per image, Unicode code points such as `1f468-1f3ff-200d-2696`.
        styles: per image.
        concepts: [n] int64, equal for the variants of one thing in all styles; split and statistics go by it.
    """

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        _check(config)
        self.config, self.split = config, split
        root = _find(config.root)
        index = _read_index(root)
        side = index["size"]
        if not 0 <= config.shift <= side // 2:
            raise UserError(f"data.shift {config.shift} must lie in 0..{side // 2}, half of the picture")
        self.image_size = (side, side)
        styles = config.styles or tuple(index["styles"])
        wanted = (*styles, *([config.concepts_of] if config.concepts_of else ()))
        missing = [style for style in wanted if style not in index["styles"]]
        if missing:
            raise UserError(
                f"data.styles: {root} holds {', '.join(index['styles'])}, not {', '.join(missing)}; build another set: "
                f"python -m visgen.data.emoji --out data_cache/emoji3 --styles {' '.join(dict.fromkeys(wanted))}"
            )
        table = _Table(index)
        drawn = {style: table.drawn_by(index["styles"][style]) for style in dict.fromkeys(wanted)}
        chosen = {style: self._choose(drawn[style], table, drawn.get(config.concepts_of)) for style in styles}
        pictures = [_pictures(root, style, index, len(drawn[style]))[chosen[style][0]] for style in styles]
        self._pixels = torch.from_numpy(np.concatenate(pictures).transpose(0, 3, 1, 2).copy())  # [n, 3, H, W] uint8
        numbers = np.concatenate([chosen[style][1] for style in styles])  # [n] positions in the table
        style_of = np.repeat(np.arange(len(styles)), [len(chosen[style][1]) for style in styles])
        self.names, self.codes = [table.names[i] for i in numbers], [table.codes[i] for i in numbers]
        self.styles = [styles[i] for i in style_of]
        self.concepts = torch.from_numpy(table.concepts[numbers])
        self._mirror = torch.from_numpy(table.mirror[numbers])
        self._variants = _groups(style_of, self.concepts.numpy())
        self._label(config.classes, styles, style_of, table, numbers)

    def _choose(self, pictures: np.ndarray, table: _Table, allowed: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Of the pictures of a style, those of this split, and of concepts of `allowed` ones: places in its sheets, and
        positions in the table."""
        keep = table.held_out[pictures] == (self.split == "held_out")
        if allowed is not None:
            keep &= np.isin(table.concepts[pictures], table.concepts[allowed])
        if self.config.variants == "base":
            keep &= _firsts(table.concepts[pictures])
        return np.flatnonzero(keep), pictures[keep]

    def _label(
        self, kind: str, styles: Sequence[str], style_of: np.ndarray, table: _Table, numbers: np.ndarray
    ) -> None:
        labels = table.subcategories[numbers] if kind == "subcategory" else table.categories[numbers]
        self.classes = list(table.subcategory_names if kind == "subcategory" else CATEGORIES)
        if kind == "style_category":
            labels = labels + len(CATEGORIES) * style_of
            self.classes = [f"{style} {category}" for style in styles for category in CATEGORIES]
        self.labels = torch.from_numpy(labels.astype(np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        if rng is not None and self.split == "train" and self.config.evenly:
            variants = self._variants[index % len(self._variants)]
            index = int(variants[0] if rng.random() < self.config.base_share else rng.choice(variants))
        pixels = self._pixels[index]
        if rng is not None and self.split == "train":
            pixels = self._augment(pixels, bool(self._mirror[index]), rng)
        return {"pixels": pixels[None].clone(), "label": int(self.labels[index])}

    def get_many(self, indices: Sequence[int]) -> dict[str, Tensor]:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return {"pixels": self._pixels[chosen][:, None], "label": self.labels[chosen]}

    def views(self, indices: Sequence[int], kind: Views, ranges: Sequence[float] = (1.1,)) -> dict[str, Tensor]:
        """As the contract says, but the mirror views of what must not be mirrored are the picture's own."""
        many = super().views(indices, kind, ranges)
        half = many["pixels"].shape[1] // 2
        if half:
            kept = ~self._mirror[torch.as_tensor(indices, dtype=torch.int64)]
            many["pixels"][kept, half:] = many["pixels"][kept, :half]
        return many

    def bases(self) -> list[int]:
        """Index of one picture per concept and style of this split: what `variants: base` keeps. For evaluation, whose
        errors suppose unrelated pictures."""
        first: dict[tuple[str, int], int] = {}
        for i, key in enumerate(zip(self.styles, self.concepts.tolist(), strict=True)):
            first.setdefault(key, i)
        return list(first.values())

    def _augment(self, pixels: Tensor, mirror: bool, rng: np.random.Generator) -> Tensor:
        """[3, H, W] uint8 -> the same; draws only what the config turns on."""
        config = self.config
        if config.hflip and mirror and rng.random() < 0.5:
            pixels = pixels.flip(-1)
        if config.jitter:
            contrast, saturation = rng.uniform(1 - config.jitter, 1 + config.jitter, 2)
            ink = (255 - pixels.float()) * contrast  # white stays white
            grey = ink.mean(0, keepdim=True)
            pixels = (255 - (grey + saturation * (ink - grey))).round().clamp(0, 255).to(torch.uint8)
        zoom = rng.uniform(1 - config.scale, 1 + config.scale) if config.scale else 1.0
        x, y = rng.integers(-config.shift, config.shift + 1, 2) if config.shift else (0, 0)
        return _move(pixels, zoom, int(x), int(y))


def _groups(styles: np.ndarray, concepts: np.ndarray) -> list[np.ndarray]:
    """The indices of each concept's variants in one style, its base first."""
    _, group, counts = np.unique(np.stack([styles, concepts]), axis=1, return_inverse=True, return_counts=True)
    return np.split(np.argsort(group, kind="stable"), np.cumsum(counts)[:-1])


def _move(pixels: Tensor, zoom: float, x: int, y: int) -> Tensor:
    """Zooms [3, H, W] about its centre, then moves it by (x, y); what comes in from outside is white."""
    if zoom == 1:
        height, width = pixels.shape[1:]
        out = torch.full_like(pixels, 255)
        to_y, to_x = (slice(max(d, 0), n + min(d, 0)) for d, n in ((y, height), (x, width)))
        from_y, from_x = (slice(max(-d, 0), n + min(-d, 0)) for d, n in ((y, height), (x, width)))
        out[:, to_y, to_x] = pixels[:, from_y, from_x]
        return out
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    side = round(image.width * zoom)
    image = image.resize((side, side), Image.Resampling.BICUBIC)
    out_image = Image.new("RGB", (pixels.shape[2], pixels.shape[1]), "white")
    out_image.paste(image, ((pixels.shape[2] - side) // 2 + x, (pixels.shape[1] - side) // 2 + y))
    return torch.from_numpy(np.array(out_image)).permute(2, 0, 1).contiguous()


class _Table:
    """The labels of an index, one entry per code: an emoji without skin tone, then its skin tones."""

    def __init__(self, index: dict[str, Any]) -> None:
        codes = [toned(row[4]) if isinstance(row[4], str) else row[4] for row in index["emoji"]]
        rows = [(*row[:4], code) for row, each in zip(index["emoji"], codes, strict=True) for code in each]
        self.subcategory_names: list[str] = index["subcategories"]
        self.codes = [code for *_, code in rows]
        self.names = [name + _tone(code) for name, *_, code in rows]
        numbers = np.array([row[1:4] for row in rows], dtype=np.int64)
        self.categories, self.subcategories, self.concepts = numbers.T
        self.held_out = np.isin(self.concepts, index["held_out"])
        fixed = [CATEGORIES[c] in UNMIRRORED_CATEGORIES for c in self.categories]
        also = [self.subcategory_names[s] in UNMIRRORED_SUBCATEGORIES for s in self.subcategories]
        self.mirror = ~(np.array(fixed) | np.array(also))

    def drawn_by(self, style: dict[str, Any]) -> np.ndarray:
        """The entries that a style of the index has pictures of: `pictures`, or all."""
        return np.array(style.get("pictures", range(len(self.codes))))


def _tone(code: str) -> str:
    tones = [TONES[point] for point in code.split("-") if point in TONES]
    return f", {' and '.join(tones)} skin tone{'s' * (len(tones) > 1)}" if tones else ""


def _firsts(keys: np.ndarray) -> np.ndarray:
    """Whether each of `keys` occurs for the first time."""
    first = np.zeros(len(keys), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def _check(config: Config) -> None:
    for name in ("scale", "jitter"):
        if not 0 <= (value := getattr(config, name)) <= 0.5:
            raise UserError(f"data.{name} {value} must lie in [0, 0.5]")
    if config.base_share and not config.evenly:
        raise UserError(f"data.base_share {config.base_share} acts on concepts drawn evenly; add --data.evenly true")
    if len(set(config.styles)) < len(config.styles):
        raise UserError(f"data.styles {' '.join(config.styles)} names a style twice")


def _find(root: Path) -> Path:
    root = from_home(root)
    found = next((path for path in (root, REPOSITORY / root) if (path / "index.json").is_file()), None)
    if found is None:
        raise UserError(
            f"data.root {root} holds no set of emoji (index.json); build one: python -m visgen.data.emoji --out {root}"
        )
    return found


def _read_index(root: Path) -> dict[str, Any]:
    index = read_json(root / "index.json", _rebuild(root))
    if not {"size", "subcategories", "held_out", "emoji", "styles"} <= set(index):
        raise UserError(f"{root / 'index.json'} cannot be read (keys are missing); {_rebuild(root)}")
    return index


def _pictures(root: Path, style: str, index: dict[str, Any], count: int) -> np.ndarray:
    """All `count` pictures of a style: uint8 [count, H, W, 3]."""
    entry = index["styles"][style]
    files = [root / name for name in entry["sheets"]]
    try:
        return read_sheets(files, entry["tile"], index["size"], count)
    except Unreadable as error:
        raise UserError(
            f"{root}: the sheets of style '{style}' cannot be read ({error.reason}); {_rebuild(root)}"
        ) from None


def _rebuild(root: Path) -> str:
    return f"delete {root} and build it again: python -m visgen.data.emoji --out {root}"


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
