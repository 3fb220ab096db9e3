"""Scores of image files: the ADM suite's numbers of an .npz, or a folder against a folder.

python eval/files.py --images admnet_guided_upsampled_imagenet256.npz --reference VIRTUAL_imagenet256_labeled.npz \
    --extractor adm-tf1 --weights pt_inception-2015-12-05-6726825d.pth
python eval/files.py --images out/a --reference out/b --extractor clean --weights pt_inception-2015-12-05-6726825d.pth
python eval/files.py --images out/a --reference out/b --extractor clean-fid --weights inception-2015-12-05.pt
accelerate launch eval/files.py ...      # the same numbers, images dealt out over the GPUs
"""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from visgen import config as configs
from visgen import evaluate as ev
from visgen.checks import Positive, Range
from visgen.config import UserError
from visgen.launch import Progress, claim, device_of, writable
from visgen.metrics.features import build_extractor
from visgen.metrics.image_files import open_images
from visgen.metrics.report import Report
from visgen.tally import Tally, load_bundle, protocol_of, require_reference


@dataclass(frozen=True)
class FilesConfig:
    """Scores images that lie in files; writes OUT/report.{json,md}.

    With adm-tf1 these are FID, sFID, Inception Score (chunks of 5,000 in file order), precision and recall as the ADM
    suite defines them.

    Attributes:
        images: an .npz with uint8 [N, H, W, 3] under `arr_0`, or a folder of PNG images.
        reference: a file of eval/reference.py, an .npz of the ADM suite, an .npz of images, or a folder.
        n: how many images there must be: a set that is cut short is refused.
        extractor, weights: feature network and, where it needs one, its weight file.
        extractor_batch: images per pass of the feature network; default by device.
        groups: jackknife groups; 1 leaves the error out.
        allow_small: score although N does not exceed the feature width.
        allow_lossy: take JPEG images.
        device: a torch device; "auto" takes a GPU when there is one.
        out: directory of the report.
    """

    images: Path | None = None
    reference: Path | None = None
    n: Annotated[int, Range(2)] | None = None
    extractor: str = "adm-tf1"
    weights: Path | None = None
    extractor_batch: Positive | None = None
    groups: Positive = 25
    allow_small: bool = False
    allow_lossy: bool = False
    device: str = "auto"
    out: Path = Path("out/eval/files")


def main() -> None:
    settings = configs.load(FilesConfig, sys.argv[1:], prog="eval/files.py")
    if settings.images is None or settings.reference is None:
        raise UserError("--images and --reference are needed: an .npz or a folder each, or a file of eval/reference.py")
    world = ev.World.current()
    out = writable(settings.out, "--out")
    claim(out)
    images = open_images(settings.images, settings.allow_lossy)
    if settings.n is not None and settings.n != images.n:
        raise UserError(f"{settings.images} holds {images.n} images, --n says {settings.n}; make the missing ones")
    extractor = build_extractor(
        settings.extractor,
        weights=settings.weights,
        device=device_of(settings.device, "device"),
        batch=settings.extractor_batch,
    )
    with Progress("reference", world.rank == 0) as step:
        ref = load_bundle(settings.reference, extractor, world, settings.allow_lossy, step)
    require_reference(ref, images.size)
    tally = Tally(extractor, ref, images.n, min(settings.groups, images.n), world, settings.allow_small)
    start = time.perf_counter()
    with Progress("images", world.rank == 0) as step:
        checks = tally.take(images.rows(extractor.batch, world.rank, world.size), extractor, step)
    scores = tally.scores()
    if world.rank:
        return
    seconds = time.perf_counter() - start
    side = images.size[0] if images.size else 0
    report = Report(
        protocol_of(extractor, ref, images.n, "source", settings.groups, side),
        scores,
        model={"ckpt": str(settings.images)},
        sampling={"reference": dict(ref.facts)},
        checks=checks,
        speed={"img_per_s": images.n / seconds, "device": str(extractor.device)},
        command=shlex.join(["python", *sys.argv]),
        duration_s=seconds,
    )
    report.write(out)
    print(report.markdown())


if __name__ == "__main__":
    configs.run_program(main)
