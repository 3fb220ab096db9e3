"""Reference statistics in files, and all metrics of a stream of features against them.

A `Bundle` is what a reference says: moments of the features that FID and sFID use, some features for precision, recall
and KID, and the facts that make it this reference and no other (crop, list of images, weights). It comes from a file of
`eval/reference.py`, from an .npz of the ADM suite, or from images. A `Tally` sums over images in constant memory, but
for the features that precision, recall and KID need.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from visgen import tensors
from visgen.config import UserError
from visgen.evaluate import Reference, Rows, World
from visgen.metrics.features import RANDOM, FeatureExtractor
from visgen.metrics.frechet import Moments, Stats, frechet_distance, require_enough
from visgen.metrics.image_files import KEY, open_images
from visgen.metrics.images import ImageAudit
from visgen.metrics.inception_score import InceptionScore
from visgen.metrics.kid import FeatureBank, kid
from visgen.metrics.prdc import precision_recall
from visgen.metrics.protocol import EvalProtocol, Score

INCEPTIONS = ("adm-tf1", "clean", "clean-fid")  # whose Fréchet distance is called FID
NEIGHBOURS = {"dinov2-vitl14": 5}  # k of precision and recall (dgm-eval); 3 elsewhere (the ADM suite)
FEATURES = 10_000  # reference images whose features are kept, unless told: as many as the ADM suite's
OnStep = Callable[[int, int], None] | None
REBUILD = "build it again with eval/reference.py"


@dataclass
class Bundle:
    """A reference.

    Attributes:
        hash: of its images, or of its file.
        pool, spatial: statistics of the features of FID and sFID.
        features: [m, D] of some of its images.
        facts: what else makes it this one: `crop`, `size`, `extractor`, ..
    """

    name: str
    hash: str
    pool: Stats
    spatial: Stats | None = None
    features: Tensor | None = None
    facts: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(ref: Reference) -> Bundle:
        """Of a data set's held-out split."""
        return Bundle(ref.name, ref.hash, ref.stats, None, ref.features)

    def save(self, path: Path) -> None:
        """Write a safetensors file whose header holds the facts."""
        held = {"pool.mean": self.pool.mean, "pool.cov": self.pool.cov}
        if self.spatial is not None:
            held |= {"spatial.mean": self.spatial.mean, "spatial.cov": self.spatial.cov}
        if self.features is not None:
            held["features"] = self.features
        tensors.write(path, held, {**self.facts, "name": self.name, "hash": self.hash, "n": str(self.pool.n)})


def make_bundle(
    name: str,
    rows: Iterator[tuple[Tensor, Tensor]],
    n: int,
    extractor: FeatureExtractor,
    world: World,
    facts: Mapping[str, str],
    kept: int = FEATURES,
    on_step: OnStep = None,
) -> Bundle:
    """The reference of n images: `rows` are this process's, with their indices. Features of `kept` images, chosen by a
    fixed permutation, stay."""
    device = extractor.device if extractor.device.type == "cuda" else torch.device("cpu")
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:kept].sort().values
    place = torch.full((n,), -1, dtype=torch.int64)
    place[chosen] = torch.arange(len(chosen))
    sums = {k: Moments(extractor.dims[k], n, 1, None, device) for k in ("pool", "spatial") if k in extractor.dims}
    bank, audit, done = FeatureBank(extractor.dims["pool"], len(chosen)), ImageAudit(n), 0
    for pixels, index in rows:
        found = extractor(audit.update(pixels, index))
        for key, moments in sums.items():
            moments.update(found[key], index)
        wanted = place[index] >= 0
        bank.update(found["pool"].cpu()[wanted], place[index][wanted])
        done += len(index)
        if on_step is not None:
            on_step(min(done * world.size, n), n)
    for moments in sums.values():
        moments.reduce(world.sum)
    bank.reduce(world.sum)
    audit.reduce(world.sum)
    audit.require_complete()
    stats = {key: moments.stats() for key, moments in sums.items()}
    told = {**facts, "extractor": extractor.fingerprint, "extractor_id": extractor.id, "resize": extractor.resize}
    return Bundle(name, audit.hash, stats["pool"], stats.get("spatial"), bank.all(), told)


def load_bundle(
    path: Path, extractor: FeatureExtractor, world: World, lossy: bool = False, on_step: OnStep = None
) -> Bundle:
    """A reference from a file of `eval/reference.py`, an .npz of the ADM suite (mu, sigma, mu_s, sigma_s and images),
    an .npz of images alone, or a folder.

    Raises:
        UserError: it is of another extractor, damaged, or not one of these.
    """
    if path.suffix == ".safetensors":
        return _read(path, extractor)
    moments = set() if path.is_dir() else _arrays(path)
    if {"mu", "sigma"} <= moments:
        return _adm(path, extractor, world, moments, on_step)
    images = open_images(path, lossy)
    facts = {"crop": "none", "size": "x".join(map(str, images.size or ())) or "any"}
    rows = images.rows(extractor.batch, world.rank, world.size)
    return make_bundle(path.name, rows, images.n, extractor, world, facts, on_step=on_step)


def _arrays(path: Path) -> set[str]:
    if not path.is_file():
        raise UserError(f"reference {path} does not exist; pass a .safetensors, an .npz or a folder of images")
    if not zipfile.is_zipfile(path):
        raise UserError(f"reference {path} is no .npz, or damaged; pass a .safetensors, an .npz or a folder")
    try:
        with zipfile.ZipFile(path) as archive:
            return {name.removesuffix(".npy") for name in archive.namelist()}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"reference {path} is damaged ({error}); copy it again") from None


def _adm(path: Path, extractor: FeatureExtractor, world: World, arrays: set[str], on_step: OnStep) -> Bundle:
    if extractor.id.removesuffix(RANDOM) != "adm-tf1":
        raise UserError(
            f"reference {path} holds moments of the ADM suite, which go with --extractor adm-tf1, not {extractor.id}; "
            "build one for it with eval/reference.py"
        )
    pool, about = Stats.load(path)
    spatial = Stats.load(path, ("mu_s", "sigma_s"))[0] if {"mu_s", "sigma_s"} <= arrays else None
    features = None
    if KEY in arrays:
        images = open_images(path)
        bank = FeatureBank(extractor.dims["pool"], images.n)
        for done, (pixels, index) in enumerate(images.rows(extractor.batch, world.rank, world.size)):
            bank.update(extractor(pixels)["pool"], index)
            if on_step is not None:
                on_step(min((done + 1) * extractor.batch * world.size, images.n), images.n)
        bank.reduce(world.sum)
        features = bank.all()
    return Bundle(path.name, about["sha256"][:16], pool, spatial, features, {"crop": "adm", "size": ""})


def _read(path: Path, extractor: FeatureExtractor) -> Bundle:
    if not path.is_file():
        raise UserError(f"reference {path} does not exist; build it with eval/reference.py")
    held, about = tensors.read(path, REBUILD)
    missing = [k for k in ("extractor", "extractor_id", "name", "hash") if k not in about]
    if missing or not {"pool.mean", "pool.cov"} <= held.keys() or not about.get("n", "").isdecimal():
        raise UserError(f"reference {path} is no file of eval/reference.py; {REBUILD}")
    if about["extractor"] != extractor.fingerprint:
        raise UserError(
            f"reference {path} is of extractor {about['extractor_id']} ({about['extractor']}), this run has "
            f"{extractor.id} ({extractor.fingerprint}); take that extractor and its weights, or build a reference anew"
        )
    pool, spatial = (
        Stats.checked(held[f"{part}.mean"], held[f"{part}.cov"], int(about["n"]), path)
        if {f"{part}.mean", f"{part}.cov"} <= held.keys()
        else None
        for part in ("pool", "spatial")
    )
    assert pool is not None
    features = held.get("features")
    if features is not None and (features.ndim != 2 or features.shape[1] != pool.dim):
        raise UserError(f"reference {path}: its features are {list(features.shape)}, not [n, {pool.dim}]; {REBUILD}")
    return Bundle(about["name"], about["hash"], pool, spatial, features, about)


def require_reference(ref: Bundle, size: tuple[int, int] | None, crop: str | None = None) -> None:
    """Raises `UserError` where the reference says another image size, or another crop, than what is scored."""
    told = ref.facts.get("size", "")
    if size is not None and told not in ("", "any", f"{size[0]}x{size[1]}"):
        raise UserError(
            f"reference {ref.name} is of {told} px, the images are {size[0]}x{size[1]}; build one of this size with "
            "eval/reference.py"
        )
    of = ref.facts.get("crop", "none")
    if crop is not None and of not in ("none", crop):
        raise UserError(f"reference {ref.name} was cropped by '{of}', this protocol says '{crop}'; build one anew")


def protocol_of(extractor: FeatureExtractor, ref: Bundle, n: int, labels: str, groups: int, size: int) -> EvalProtocol:
    """The protocol of a tally."""
    return EvalProtocol.of(
        extractor,
        reference=ref.name,
        reference_hash=ref.hash,
        reference_n=ref.pool.n,
        size=size,
        crop=ref.facts.get("crop", "none"),
        n=n,
        labels=labels,
        groups=groups,
    )


class Tally:
    """Everything that is summed over the features of n images, and the scores of the sums.

    FID and its kin need moments; sFID those of spatial features, the Inception Score class laws: the extractors
    `adm-tf1` and `clean` give both. Precision, recall and KID need a reference with features.

    Raises:
        UserError: N does not exceed the width of the features (before any image), unless `allow_small`.
    """

    def __init__(
        self,
        extractor: FeatureExtractor,
        ref: Bundle,
        n: int,
        groups: int,
        world: World,
        allow_small: bool = False,
        neighbours: bool = True,
    ) -> None:
        self.neighbours = neighbours  # precision and recall
        self.ref, self.n, self.groups, self.world, self.allow_small = ref, n, groups, world, allow_small
        self.id = extractor.id
        ref.pool.require_spread(f"reference {ref.name}")
        for count, what in ((n, "images"), (ref.pool.n, "reference images")):
            require_enough(count, extractor.dims["pool"], extractor.id, allow_small, what)
        if extractor.dims["pool"] != ref.pool.dim:
            raise UserError(
                f"reference {ref.name} has {ref.pool.dim} features, {extractor.id} {extractor.dims['pool']}; "
                "build one with this extractor"
            )
        device = extractor.device if extractor.device.type == "cuda" else torch.device("cpu")
        self.device = device
        self.pool = Moments(ref.pool.dim, n, groups, ref.pool.mean, device)
        self.spatial: Moments | None = None
        if "spatial" in extractor.dims and ref.spatial is not None:
            self.spatial = Moments(ref.spatial.dim, n, 1, ref.spatial.mean, device)
        self.classes = InceptionScore(extractor.dims["logits"], n) if "logits" in extractor.dims else None
        self.bank = FeatureBank(ref.pool.dim, n) if ref.features is not None else None

    def update(self, outputs: Mapping[str, Tensor], index: Tensor) -> None:
        """Adds an extractor's outputs for images `index` [B].

        Raises:
            UserError: a feature that is not finite.
        """
        self.pool.update(outputs["pool"], index)
        if self.spatial is not None:
            self.spatial.update(outputs["spatial"], index)
        if self.classes is not None:
            self.classes.update(outputs["logits"], index)
        if self.bank is not None:
            self.bank.update(outputs["pool"], index)

    def take(self, rows: Rows, extractor: FeatureExtractor, on_step: OnStep = None) -> dict[str, float]:
        """Adds this process's images of a stream of (pixels, index); the checks on all of them."""
        audit, done = ImageAudit(self.n), 0
        for pixels, index in rows:
            self.update(extractor(audit.update(pixels, index)), index)
            done += len(index)
            if on_step is not None:
                on_step(min(done * self.world.size, self.n), self.n)
        audit.reduce(self.world.sum)
        return audit.checks()

    def scores(self) -> dict[str, Score]:
        """Over all processes."""
        ours = self.id.removesuffix(RANDOM) in INCEPTIONS
        self.pool.reduce(self.world.sum)
        pool, small, error = self.ref.pool.to(self.device), self.allow_small, self.groups > 1
        fd = frechet_distance(self.pool, pool, extractor=self.id, allow_small=small, with_error=error)
        out = {"fid" if ours else "fd": fd}
        if self.spatial is not None and self.ref.spatial is not None:
            self.spatial.reduce(self.world.sum)
            out["sfid"] = frechet_distance(self.spatial, self.ref.spatial.to(self.device), allow_small=True)
        if self.classes is not None:
            for sums in self.classes.sums():
                sums.copy_(self.world.sum(sums))
            out["inception_score"] = self.classes.score()
        if self.bank is not None and self.ref.features is not None:
            self.bank.reduce(self.world.sum)
            mine, theirs = (x.to(self.device) for x in (self.bank.all(), self.ref.features))
            k = NEIGHBOURS.get(self.id.removesuffix(RANDOM), 3)
            if min(len(mine), len(theirs)) > k:
                out["kid"] = kid(mine, theirs)
                out |= precision_recall(mine, theirs, k) if self.neighbours else {}
        return out
