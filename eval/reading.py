"""How many samples a second a data set gives to training: read, augmented and collated, by worker processes.

python eval/reading.py --data.kind folder --data.root photos --data.image-size 256 --workers 16
python eval/reading.py --photos 6000 --workers 16           # made photographs of 500 x 375 pixels, about 105 KB each
python eval/reading.py --codes 16384 --workers 4            # made codes of ImageNet-256's form: 1,000 classes, 20 views
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from visgen import config as configs
from visgen.checks import Natural, Positive, Seed
from visgen.config import UserError, plugin, plugin_config
from visgen.data import Data, codes
from visgen.files import write_text
from visgen.launch import Progress, cpus, writable
from visgen.metrics.report import environment
from visgen.metrics.timing import Stopwatch
from visgen.train.order import MicroBatches, Order, check_batch, micro_batches


@dataclass(frozen=True)
class ReadingConfig:
    """Times the batches of `train.py` without a model, and writes OUT/reading.{json,md}.

    Attributes:
        data: the data set; its training split is read, in the order of a training.
        workers: processes that read, as `loop.workers`, at most one a CPU; 0: in this one.
        batch: samples of a step.
        samples: to be read, after a batch for each worker; 0: four times the data set.
        photos: make so many JPEGs in OUT/photos and read these, by `folder` at 256 pixels; those that are there stay.
        codes: write so many images of random codes to OUT/random_codes, as `visgen.encode` would, and read these; a
            training takes them by `--objective.tokenizer None --data.root OUT/random_codes`.
        seed: of the order and the augmentation.
        out: directory of the report.
    """

    data: Any = plugin("visgen.data", "folder")
    workers: Natural = 8
    batch: Positive = 256
    samples: Natural = 0
    photos: Natural = 0
    codes: Natural = 0
    seed: Seed = 0
    out: Path = Path("out/eval/reading")


@dataclass(frozen=True)
class Read:
    """What was measured; `bytes_a_file` of made photographs alone."""

    samples_per_s: float
    seconds: float
    samples: int
    size: int
    workers: int
    bytes_a_file: float | None = None


def main() -> None:
    settings = configs.load(ReadingConfig, sys.argv[1:], prog="eval/reading.py")
    out = writable(settings.out, "--out")
    chosen, weight = settings.data, None
    if settings.photos and settings.codes:
        raise UserError("--photos and --codes are one data set each; give one of them")
    if settings.codes:
        write_codes(out / "random_codes", settings.codes, settings.seed)
        chosen = plugin_config("visgen.data", "codes", root=out / "random_codes")
    if settings.photos:
        weight = write_photos(out / "photos", settings.photos)
        chosen = plugin_config(
            "visgen.data",
            "folder",
            root=out / "photos",
            image_size=256,
            on_error=getattr(chosen, "on_error", "stop"),
        )
    data = configs.build(chosen, "train")
    check_batch(len(data), settings.batch, 1, 1, "--batch")
    found = measure(data, settings, min(settings.workers, cpus()), weight)
    facts = {"data": configs.dump(chosen), "command": shlex.join(["python", *sys.argv]), **environment()}
    write_text(out / "reading.json", json.dumps({**facts, **asdict(found)}, indent=1, default=str) + "\n")
    text = f"{found.samples_per_s:.0f} samples/s by {found.workers} workers: {found.samples} in {found.seconds:.1f} s"
    text += f", of {found.size} samples" + ("" if weight is None else f" of {weight / 1e3:.0f} KB")
    write_text(out / "reading.md", f"```\n{facts['command']}\n```\n\n{text}\n")
    print(text)


def measure(data: Data, settings: ReadingConfig, workers: int, weight: float | None = None) -> Read:
    """Reads batches; the first one of each worker, which starts it, is not counted."""
    first = max(1, workers)
    steps = first + -(-(settings.samples or 4 * len(data)) // settings.batch)
    keys = MicroBatches(Order(len(data), settings.batch, settings.seed), 0, steps, 0, 1, 1)
    batches, watch = micro_batches(data, keys, settings.seed, workers, False), Stopwatch()
    for _ in range(first):
        next(batches)
    with Progress("read", True) as step, watch.lap((steps - first) * settings.batch):
        for done, _ in enumerate(batches, 1):
            step(done * settings.batch, (steps - first) * settings.batch)
    return Read(watch.images_per_second, watch.seconds, watch.images, len(data), workers, weight)


def write_photos(root: Path, count: int) -> float:
    """Writes what is not there yet; the mean size of a file in bytes."""
    files = [root / f"{i % 10}" / f"{i}.jpg" for i in range(count)]
    missing = [(i, file) for i, file in enumerate(files) if not file.is_file()]
    for folder in {file.parent for file in files}:
        folder.mkdir(parents=True, exist_ok=True)
    if missing:
        with Pool(cpus()) as pool:
            pool.starmap(_write_photo, missing)
    return float(np.mean([file.stat().st_size for file in files]))


def _write_photo(index: int, file: Path) -> None:
    """Colours that change slowly under a grain, which a JPEG of quality 90 keeps: as large as a photograph's."""
    rng = np.random.default_rng(index)
    colours = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    grain = rng.normal(0, 21, (375, 500, 1))
    pixels = np.asarray(colours.resize((500, 375), Image.Resampling.BICUBIC), np.float32) + grain
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)


def write_codes(root: Path, count: int, seed: int) -> None:
    """Random codes of 16 x 16 tokens, a class each image, anew; what was there is lost."""
    rng, folder = np.random.default_rng(seed), root / "train"
    folder.mkdir(parents=True, exist_ok=True)
    index = codes.Index(
        version=codes.VERSION,
        split="train",
        source={"kind": "synthetic"},
        tokenizer="0" * 64,
        grid=[1, 16, 16],
        vocab=16384,
        views="ten_crop",
        ranges=[1.1, 1.05],
        image_size=[256, 256],
        classes=[str(i) for i in range(1000)],
        images=count,
        shard_images=8192,
    )
    for i in range(index.shard_count):
        labels = rng.integers(0, len(index.classes), len(index.shard(i)))
        codes.write_shard(folder, index, i, rng.integers(0, index.vocab, index.shape(i)), labels)
    index.shards = [record for i in range(index.shard_count) if (record := codes.shard_record(folder, index, i))]
    index.complete = True
    codes.write_index(folder, index)


if __name__ == "__main__":
    configs.run_program(main)
