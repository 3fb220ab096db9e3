"""Reference statistics in a file: moments, some features, and what makes them this reference and no other.

python eval/reference.py --data.kind folder --data.root IMAGES --split train --extractor dinov2-vitl14 \
    --weights vit_large_patch14_dinov2.lvd142m.safetensors --out in256_dinov2.safetensors
python eval/reference.py --images val_256.npz --extractor adm-tf1 --weights pt_inception-2015-12-05-6726825d.pth \
    --out in256_val.safetensors
accelerate launch eval/reference.py ...      # the same file, images dealt out over the GPUs
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from visgen import config as configs
from visgen import evaluate as ev
from visgen.checks import Positive, Range
from visgen.config import UserError, kind_of, plugin
from visgen.launch import Progress, device_of, writable
from visgen.metrics.features import build_extractor
from visgen.metrics.image_files import open_images
from visgen.metrics.report import environment
from visgen.scored_data import build_pictures
from visgen.tally import FEATURES, make_bundle


@dataclass(frozen=True)
class ReferenceConfig:
    """Writes OUT, whose header says: name, number and hash of the images in their order, crop, size, extractor with
    the hash of its weights, and the revision of the code.

    Attributes:
        data: the data set, whose split is the reference; its crop is the one that training uses (ADM's).
        split: train or held_out.
        images: in its stead, an .npz or a folder of images, taken as they are.
        name: of the reference; default the data's kind and split, or the file's name.
        n: images; default all.
        extractor, weights: feature network and, where it needs one, its weight file.
        extractor_batch: images per pass of the feature network; default by device.
        features: images whose features are kept, for precision, recall and KID.
        allow_lossy: take JPEG images.
        device: a torch device; "auto" takes a GPU when there is one.
        out: the file, .safetensors.
    """

    data: Any = plugin("visgen.data", None)
    split: Literal["train", "held_out"] = "train"
    images: Path | None = None
    name: str = ""
    n: Annotated[int, Range(2)] | None = None
    extractor: str = "fd_efflite0"
    weights: Path | None = None
    extractor_batch: Positive | None = None
    features: Positive = FEATURES
    allow_lossy: bool = False
    device: str = "auto"
    out: Path = Path("out/eval/reference.safetensors")


def main() -> None:
    settings = configs.load(ReferenceConfig, sys.argv[1:], prog="eval/reference.py")
    if (settings.data is None) == (settings.images is None):
        raise UserError("one of --data.kind (a data set) and --images (an .npz or a folder) is needed")
    if settings.out.suffix != ".safetensors":
        raise UserError(f"--out {settings.out} must end in .safetensors")
    world = ev.World.current()
    writable(settings.out.parent, "the folder of --out")
    extractor = build_extractor(
        settings.extractor,
        weights=settings.weights,
        device=device_of(settings.device, "device"),
        batch=settings.extractor_batch,
    )
    if settings.data is not None:
        data = build_pictures(settings.data, settings.split)
        n = min(settings.n or len(data), len(data))
        rows = ev.pictures(data, range(n), world, extractor.batch)
        name, size = f"{kind_of(data.config)}/{settings.split}", tuple(data.image_size)
        facts = {"crop": "none" if kind_of(data.config) == "fashion_mnist" else "adm"}
        facts |= {"data": json.dumps(configs.dump(data.config), sort_keys=True)}
    else:
        assert settings.images is not None
        images = open_images(settings.images, settings.allow_lossy)
        if settings.n is not None and settings.n != images.n:
            raise UserError(f"--n {settings.n}: {settings.images} holds {images.n} images, all of which count")
        n, rows, name = images.n, images.rows(extractor.batch, world.rank, world.size), settings.images.name
        size, facts = images.size or (), {"crop": "none"}
    facts |= {"size": "x".join(map(str, size)) or "any", "git_sha": environment()["git_sha"]}
    with Progress("reference", world.rank == 0) as step:
        made = make_bundle(settings.name or name, rows, n, extractor, world, facts, settings.features, step)
    if world.rank == 0:
        made.save(settings.out)
        print(f"{made.name}: {n} images ({made.hash}), {extractor.id} ({extractor.fingerprint}) -> {settings.out}")


if __name__ == "__main__":
    configs.run_program(main)
