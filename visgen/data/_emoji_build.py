"""Builds the sets that `emoji` reads: npm packages -> sheets of pictures and `index.json`.

A set is one folder. A sheet is a WebP image of up to 32 x 32 tiles, one picture each, in the order of `index.json`.
Pictures that come larger than needed are tiled at twice the wanted size: the halved chroma of lossy WebP then has full
resolution after the reduction (+1 dB at equal bytes, +3.5 dB for the worst percentile). The others are lossless.
Of Fluent only what Microsoft released under the MIT licence is taken, see `_emoji_concepts.WITHHELD`.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from visgen.config import UserError, load
from visgen.data._emoji_concepts import CATEGORIES, normalise, read_labels, toned
from visgen.image_files import LARGEST, Unreadable, read_image

Style = Literal["fluent", "noto", "twemoji"]
COLUMNS = 32  # tiles in a row of a sheet, and rows in a sheet


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    folder: str
    licence: str

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"


PACKAGES: dict[str, Package] = {
    "fluent": Package("@lobehub/fluent-emoji-3d", "1.1.0", "assets", "MIT (Microsoft Fluent Emoji, LobeHub)"),
    "noto": Package("emoji-datasource-google", "16.0.0", "img/google/64", "Apache-2.0 (Google Noto Emoji)"),
    "twemoji": Package("emoji-datasource-twitter", "16.0.0", "img/twitter/64", "CC-BY-4.0 (Twitter, Twemoji)"),
}
LABELS = PACKAGES["noto"]  # its emoji.json names and sorts the pictures of every style


@dataclass(frozen=True)
class BuildConfig:
    """Builds a set of emoji from npm packages."""

    out: Path = Path("data_cache/emoji64")
    """Folder to write; it must not hold a set yet."""
    styles: tuple[Style, ...] = ("fluent",)
    size: int = 64
    """Side of the pictures in pixels."""
    quality: int = 57
    """WebP quality, 0..100, of pictures that are larger than `size` in their package."""
    source: Path | None = None
    """Folder of unpacked packages (a node_modules); by default `npm pack` fetches them."""


def main(argv: Sequence[str]) -> None:
    config = load(BuildConfig, argv, prog="python -m visgen.data.emoji")
    if not config.styles or not 0 <= config.quality <= 100 or not 8 <= config.size <= 256:
        raise UserError(
            f"styles {config.styles}, quality {config.quality}, size {config.size}: "
            f"allowed are at least one style, a quality of 0..100 and a size of 8..256"
        )
    if (config.out / "index.json").exists():
        raise UserError(f"{config.out} already holds a set; delete it or pass another --out")
    with tempfile.TemporaryDirectory() as temporary:
        needed = {package.name: package for package in (*(PACKAGES[s] for s in config.styles), LABELS)}
        roots = {name: _package(package, config.source, Path(temporary)) for name, package in needed.items()}
        config.out.mkdir(parents=True, exist_ok=True)
        build_set(config, roots)


def build_set(config: BuildConfig, roots: dict[str, Path]) -> None:
    """Writes the sheets and the index; `roots` maps package names to unpacked packages."""
    rows, held_out = read_labels(roots[LABELS.name] / "emoji.json")
    files = {}
    for style in (name for name in PACKAGES if name in config.styles):
        known = {code for row in rows for code in row["codes"] if not (style == "fluent" and row["withheld"])}
        files[style] = _files(roots[PACKAGES[style].name] / PACKAGES[style].folder, known)
    for row in rows:
        row["codes"] = [code for code in row["codes"] if any(code in found for found in files.values())]
    rows = [row for row in rows if row["codes"]]
    order = [code for row in rows for code in row["codes"]]
    subcategories = list(dict.fromkeys(row["subcategory"] for row in sorted(rows, key=lambda row: row["rank"])))
    styles = {}
    for style, found in files.items():
        numbers = [i for i, code in enumerate(order) if code in found]
        sheets = _write_sheets(config, style, [found[order[i]] for i in numbers])
        source = {"source": str(PACKAGES[style]), "licence": PACKAGES[style].licence}
        some = {} if numbers == list(range(len(order))) else {"pictures": numbers}
        styles[style] = {**source, **sheets, **some}
    index = {
        "size": config.size,
        "labels": f"{LABELS}, MIT",
        "subcategories": subcategories,
        "held_out": held_out,
        "emoji": [_row(row, subcategories) for row in rows],
        "styles": styles,
    }
    lines = (f"{json.dumps(key)}:{_compact(value)}" for key, value in index.items())
    (config.out / "index.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")  # last: no index, no set


def _row(row: dict[str, Any], subcategories: Sequence[str]) -> list[Any]:
    """[name, category, subcategory, concept, codes]: a list, or one that stands for itself and its five skin tones."""
    category, codes = CATEGORIES.index(row["category"]), row["codes"]
    short = codes[0] if codes == toned(codes[0]) else codes
    return [row["name"], category, subcategories.index(row["subcategory"]), row["concept"], short]


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


# --------------------------------------------------------------------------------------------------- pictures


def read_sheets(files: Sequence[Path], tile: int, size: int, count: int) -> np.ndarray:
    """The pictures of a style: uint8 [count, size, size, 3].

    Raises:
        Unreadable: a sheet, or its size is not what `count` tiles need.
    """
    out = np.empty((count, size, size, 3), np.uint8)
    for start, file in zip(range(0, count, COLUMNS**2), files, strict=True):
        n = min(COLUMNS**2, count - start)
        sheet = read_image(file)
        if sheet.size != (COLUMNS * tile, -(-n // COLUMNS) * tile):
            reason = f"its size {sheet.size} is not that of {n} tiles of {tile} pixels"
            raise Unreadable(f"sheet {file} cannot be used: {reason}", reason)
        for i in range(n):
            left, top = i % COLUMNS * tile, i // COLUMNS * tile
            out[start + i] = _resize(sheet.crop((left, top, left + tile, top + tile)), size)
    return out


def _write_sheets(config: BuildConfig, style: str, files: Sequence[Path]) -> dict[str, Any]:
    """Writes one style and says what it costs: bytes, and PSNR against the pictures before compression."""
    if not files:
        raise UserError(f"style '{style}': package {PACKAGES[style]} holds no picture that {LABELS} has a label for")
    native = min(_picture(file).width for file in files)
    tile = 2 * config.size if native >= 2 * config.size else config.size
    how: dict[str, Any] = {"quality": config.quality} if tile > config.size else {"lossless": True}
    names: list[str] = []
    wanted: list[np.ndarray] = []
    size = 0
    for start in range(0, len(files), COLUMNS**2):
        pictures = [_picture(file) for file in files[start : start + COLUMNS**2]]
        wanted += [_resize(picture, config.size) for picture in pictures]
        sheet = Image.new("RGB", (COLUMNS * tile, -(-len(pictures) // COLUMNS) * tile), "white")
        for i, picture in enumerate(pictures):
            sheet.paste(Image.fromarray(_resize(picture, tile)), (i % COLUMNS * tile, i // COLUMNS * tile))
        names.append(f"{style}_{len(names)}.webp")
        sheet.save(config.out / names[-1], "WEBP", method=6, **how)
        size += (config.out / names[-1]).stat().st_size
    stored = read_sheets([config.out / name for name in names], tile, config.size, len(files))
    error = ((np.stack(wanted).astype(np.float32) - stored) ** 2).mean((1, 2, 3))
    psnr = 10 * np.log10(255**2 / np.maximum(error, 1e-5))
    loss = f"PSNR {psnr.mean():.1f} dB, 1 % below {np.percentile(psnr, 1):.1f}" if tile > config.size else "lossless"
    print(f"{style}: {len(files)} pictures, {len(names)} sheets, {size / 2**20:.2f} MiB, {loss}")
    return {"tile": tile, "sheets": names}


def _files(folder: Path, known: set[str]) -> dict[str, Path]:
    """Picture files by code point; of two spellings of one code the first by name. Others than `known` are left out."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: the package is incomplete; delete it and unpack it again")
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.*")):
        if file.suffix in (".png", ".webp") and (code := normalise(file.stem)) in known:
            found.setdefault(code, file)
    return found


def _picture(file: Path) -> Image.Image:
    """A picture on a white square."""
    try:
        image = read_image(file)
    except Unreadable as error:
        raise UserError(f"{file} cannot be read ({error.reason}); unpack its package again") from None
    side = max(image.size)
    if side * side > LARGEST:
        raise UserError(f"{file} is {image.width} x {image.height} pixels, too large; unpack its package again")
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def _resize(image: Image.Image, size: int) -> np.ndarray:
    return np.asarray(image.resize((size, size), Image.Resampling.LANCZOS))  # which widens its kernel when it reduces


# ---------------------------------------------------------------------------------------------------- packages


def _package(package: Package, source: Path | None, temporary: Path) -> Path:
    """The folder of an unpacked package: under `source`, or fetched."""
    if source is None:
        return _fetch(package, temporary)
    root = source / package.name
    try:
        version = json.loads((root / "package.json").read_text())["version"]
    except (OSError, ValueError, KeyError):
        raise UserError(f"--source {source} has no package at {root}; {_remedy(package)}") from None
    if version != package.version:
        raise UserError(f"{root} is version {version}, needed is {package.version}; {_remedy(package)}")
    return root


def _fetch(package: Package, folder: Path) -> Path:
    try:
        done = subprocess.run(["npm", "pack", "--silent", str(package)], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"npm, which fetches {package}, is not installed; install it, or {_remedy(package)}") from None
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).split())[-300:]
        raise UserError(f"npm cannot fetch {package} ({reason or 'offline?'}); {_remedy(package)}")
    root = folder / package.name
    with tarfile.open(folder / done.stdout.split()[-1]) as archive:
        for member in archive:
            path = Path(*Path(member.name).parts[1:])  # below the archive's folder package/
            wanted = path.name in ("package.json", "emoji.json") or path.parent == Path(package.folder)
            if member.isfile() and wanted and ".." not in path.parts:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(archive.extractfile(member).read())  # type: ignore[union-attr]
    return root


def _remedy(package: Package) -> str:
    return f"where npm works run `npm install --prefix DIR {package}` and pass --source DIR/node_modules"
