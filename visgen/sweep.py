"""Sweeps: many ways of sampling under one protocol, and what a reader needs to choose among them.

A row such as `"sjd coupled: sampler.kind=sjd sampler.window=8,16"` changes settings of the report's own; a value with
commas is an axis, and each combination of axes is a *cell*. All cells draw the same plan (labels and seeds), so each is
also compared with the first one, the baseline, image by image and with a paired error. `eval/report.py` runs them;
`visgen/sweep_report.py` writes what they found.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visgen import config as configs
from visgen import evaluate as ev
from visgen import scale, speed, tensors
from visgen.config import UserError
from visgen.data import Data
from visgen.files import read_json, write_json
from visgen.generate import Generator
from visgen.launch import Progress
from visgen.loading import load
from visgen.metrics.chunks import ChunkStore, difference
from visgen.metrics.features import FeatureExtractor
from visgen.metrics.frechet import Moments, frechet_distance
from visgen.metrics.kid import FeatureBank, kid
from visgen.metrics.protocol import EvalProtocol, SamplePlan, Score
from visgen.run_files import Step
from visgen.sample import describe
from visgen.sampling import SamplingConfig
from visgen.scored_data import check_checkpoint
from visgen.small_set import SmallSet

CELL, IMAGES = "cell.json", "images.safetensors"  # what is kept of a finished cell


@dataclass(frozen=True)
class CellConfig(SamplingConfig):
    """What a cell may change: how images are drawn, and of which checkpoint.

    Attributes:
        checkpoint: run directory or Hub id.
        step: which step of the run, or `best`; default the newest.
    """

    checkpoint: str = ""
    step: Step = None


@dataclass(frozen=True)
class Cell:
    """One way of sampling.

    Attributes:
        row: what the row calls itself; cells of one row share a colour.
        at: where on the row's axes it stands, such as `window 16`; empty without axes.
    """

    row: str
    at: str
    settings: CellConfig

    @property
    def name(self) -> str:
        return ", ".join(part for part in (self.row, self.at) if part)

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return re.sub(r"[^a-z0-9.]+", "_", self.name.lower()).strip("_")


def cells_of(rows: Sequence[str], sweep: Sequence[str], base: CellConfig) -> list[Cell]:
    """The cells of all rows; `sweep` are words that every row has, axes too.

    Raises:
        UserError: a word that is no `name=value`, a setting that does not exist, two cells of one name.
    """
    found: list[Cell] = []
    for row in rows:
        name, colon, words = row.partition(":")
        if not colon:
            raise UserError(
                f"row '{row}' has no name; write 'NAME: name=value ..', or 'NAME:' for no settings of its own"
            )
        pairs = [_pair(word, row) for word in [*sweep, *words.split()]]
        keys = [key for key, _ in pairs]
        again = next((key for key in keys if keys.count(key) > 1), None)
        if again is not None:
            raise UserError(f"row '{row}' is told {again} twice, by itself or by --sweep; leave one out")
        axes = [key for key, values in pairs if len(values) > 1]
        for chosen in itertools.product(*(values for _, values in pairs)):
            told = {key: value for (key, _), value in zip(pairs, chosen, strict=True)}
            at = ", ".join(f"{_short(key)} {told[key]}" for key in axes)
            found.append(Cell(name.strip(), at, _settings(told, base, row)))
    if not found:
        raise UserError("rows is empty; give at least one, such as 'ar: sampler.kind=ar'")
    names = [cell.slug for cell in found]
    odd = next((cell for cell in found if not re.search(r"[a-z0-9]", cell.slug) or len(cell.slug) > 100), None)
    if odd is not None:
        raise UserError(
            f"row name '{odd.name[:40]}' cannot be a file's name; give it letters of a to z or digits, at most 100"
        )
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice:
        raise UserError(f"two cells are called '{twice}'; give each row a name of its own")
    return found


def _pair(word: str, row: str) -> tuple[str, list[str]]:
    key, equals, values = word.partition("=")
    if not equals or not key or not all(values.split(",")):
        raise UserError(
            f"'{word}' of row '{row}' is no setting; write name=value, or name=value,value,.. for an axis, such as "
            "'sjd: sampler.kind=sjd sampler.window=16,32'"
        )
    return key, values.split(",")


def _short(key: str) -> str:
    """`guidance.scale` is guidance, `sampler.window` window, `warp.top_k` top_k."""
    parent, _, last = key.rpartition(".")
    return parent if last == "scale" else last


def _settings(told: Mapping[str, str], base: CellConfig, row: str) -> CellConfig:
    try:
        return configs.load(CellConfig, [f"--{key}={value}" for key, value in told.items()], values=configs.dump(base))
    except UserError as error:
        raise UserError(f"row '{row}': {error}") from None


# --------------------------------------------------------------------------------------------------- the target


@dataclass
class Target:
    """What all cells are scored against, and which images they draw.

    Attributes:
        headline: the metric that the plots show.
        data: whose classes the images are asked for.
        labels: of what the plan balances, classes of the data; None: the plan balances these classes.
        score: features [n, D] in the plan's order to scores.
        marks: values of the headline to compare with, by name.
    """

    protocol: EvalProtocol
    plan: SamplePlan
    headline: str
    data: Data
    labels: Tensor | None
    score: Callable[[Tensor], dict[str, Score]]
    marks: dict[str, float]

    def asked(self, cell: Cell, generator: Generator) -> Tensor:
        """Return the checkpoint's label of each number that the plan balances.

        Raises:
            UserError: the checkpoint does not go with the data.
        """
        found = check_checkpoint(self.data, generator, f"checkpoint {cell.settings.checkpoint}")
        return found if self.labels is None else found[self.labels]


def large_target(
    data: Data,
    extractor: FeatureExtractor,
    plan: SamplePlan,
    groups: int,
    world: ev.World,
    reference_n: int | None = None,
    cache: Path | None = None,
    allow_small: bool = False,
) -> Target:
    """Fréchet distance and KID against the held-out split; the mark is the floor of a perfect model."""
    with Progress("reference", world.rank == 0) as step:
        ref = ev.reference(data, extractor, world, reference_n, cache, step)
    protocol = ev.protocol_of(extractor, ref, data, plan, groups)
    device = extractor.device if extractor.device.type == "cuda" else torch.device("cpu")

    def score(features: Tensor) -> dict[str, Score]:
        moments = Moments(features.shape[1], plan.n, groups, ref.stats.mean, device)
        for index in torch.arange(plan.n).split(4096):
            moments.update(features[index], index)
        fd = frechet_distance(
            moments, ref.stats.to(device), extractor=extractor.id, allow_small=allow_small, with_error=groups > 1
        )
        return {"fd": fd, **({"kid": kid(features, ref.features)} if min(plan.n, ref.n) >= 4 else {})}

    return Target(protocol, plan, "fd", data, None, score, {})


def small_target(
    data: SmallSet,
    extractor: FeatureExtractor,
    n: int | None,
    seed: int,
    groups: int,
    world: ev.World,
    tokenizer: Any,
    batch: int,
) -> Target:
    """KID by base (docs/small_sets.md); the marks are real pictures and the tokenizer's own round trip."""
    plan, m = data.plan(n, seed), len(data.bases)
    with Progress("reference", world.rank == 0) as step:
        held_out = ev.reference(data.held_out, extractor, world, on_step=step, chosen=data.bases)
    recon = ev.round_trip(tokenizer, ev.pictures(data.held_out, data.bases, world, batch))
    recon_features = ev.collect(recon, m, extractor, world)[0]
    chosen = data.training_like(1, seed).flatten().tolist()
    train = ev.collect(ev.pictures(data.train, chosen, world, batch), len(chosen), extractor, world)[0]
    protocol = ev.protocol_of(extractor, held_out, data.held_out, plan, groups)
    order = plan.rows().label.argsort(stable=True)

    def score(features: Tensor) -> dict[str, Score]:
        by_base = features[order].view(m, -1, features.shape[1])  # [M, R, D]
        return {"kid": kid(by_base, held_out.features, groups=groups)}

    marks = {
        name: kid(x[:, None], held_out.features, groups=groups).value
        for name, x in (("tokenizer alone", recon_features), ("training pictures", train.view(m, -1)))
    }
    protocol = replace(protocol, labels="source", estimator="kid-by-base-f64")
    return Target(protocol, plan, "kid", data.held_out, data.labels, score, marks)


# ----------------------------------------------------------------------------------------------------- the cells


@dataclass
class Found:
    """What is known of a cell.

    Attributes:
        speed: `speed.Speed` as values, one for each batch size.
        nfe: [n] evaluations of the backbone until each image of the plan was complete.
        keys: [n] hashes of the images' bytes.
        pixels: uint8 [shown, 3, H, W], the first images.
    """

    cell: Cell
    scores: dict[str, Score]
    checks: dict[str, float]
    speed: list[dict[str, Any]]
    about: dict[str, Any]
    seconds: float
    nfe: Tensor
    keys: Tensor
    pixels: Tensor


@dataclass
class Run:
    """How cells are measured.

    Attributes:
        shown: images whose pixels are kept.
        batches, repeats: of the speed measurement; no batches: none.
        chunk: images of a chunk, the unit that an interruption costs.
    """

    target: Target
    extractor: FeatureExtractor
    world: ev.World
    folder: Path
    shown: int = 16
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    chunk: int = scale.CHUNK


def measure(cell: Cell, generator: Generator, run: Run, copy: float) -> Found:
    """Draws, scores and times a cell, or reads what an earlier run found of the very same one.

    Args:
        copy: bytes a second that the device copies (`speed.bandwidth`).

    Raises:
        UserError: the cell's folder holds another one.
    """
    folder, target = run.folder / cell.slug, run.target
    asked = target.asked(cell, generator)
    identity = scale.identity_of(generator, cell.settings, target.plan, asked, run.extractor)
    identity["protocol"] = target.protocol.hash
    found = _read(cell, folder, identity, run)
    known = torch.tensor([int(found is not None)])
    if int(run.world.sum(known)) == run.world.size and found is not None:  # all processes decide alike
        return found
    start = time.perf_counter()
    timed = time_cell(cell, generator, run, copy)
    kept = {**identity, "shown": str(run.shown)}  # what a chunk depends on
    store = ChunkStore(folder / "chunks", kept, target.plan.n, run.chunk, run.world.rank)
    work = scale.Work(
        lambda part: scale.drawn(generator, target.plan, cell.settings, part, asked),
        run.extractor,
        target.plan.n,
        run.shown,
    )
    bank = FeatureBank(run.extractor.dims["pool"], target.plan.n)
    whole = scale.Whole(target.plan.n, run.shown, generator.tokenizer.image_size)
    with Progress(cell.name, run.world.rank == 0) as step:
        for part, chunk in scale.fill(work, store, run.world, step):
            bank.update(chunk["feature.pool"], torch.arange(part.start, part.stop))
            whole.add(part, chunk)
    bank.reduce(run.world.sum)
    whole.reduce(run.world)
    found = Found(
        cell,
        target.score(bank.all()),
        whole.audit.checks(),
        timed,
        describe(cell.settings, generator),
        time.perf_counter() - start,
        whole.nfe,
        whole.audit.keys,
        whole.pixels,
    )
    if run.world.rank == 0:
        _write(found, folder, identity)
        store.remove()
    run.world.sum(torch.zeros(1))  # nobody goes on before the files are there
    return found


def time_cell(cell: Cell, generator: Generator, run: Run, copy: float) -> list[dict[str, Any]]:
    """Seconds of batches of each size, on the main process alone."""
    if run.world.rank or not run.batches:
        return []
    settings = cell.settings
    given = (generator.model, settings.engine, settings.sampler, settings.guidance, settings.warp)
    out = []
    for batch in run.batches:
        try:
            out.append(asdict(speed.measure(*given, batch, copy, run.repeats)))
        except torch.OutOfMemoryError:
            raise UserError(
                f"{cell.name}: a batch of {batch} does not fit the memory of {generator.device}; lower --batches"
            ) from None
    return out


def _write(found: Found, folder: Path, identity: Mapping[str, str]) -> None:
    tensors.write(folder / IMAGES, {"nfe": found.nfe, "keys": found.keys, "pixels": found.pixels})
    values = {
        "identity": dict(identity),
        "scores": {name: score.to_dict() for name, score in found.scores.items()},
        "checks": found.checks,
        "speed": found.speed,
        "about": found.about,
        "seconds": found.seconds,
    }
    write_json(folder / CELL, values)


def _read(cell: Cell, folder: Path, identity: Mapping[str, str], run: Run) -> Found | None:
    """What an earlier run found; None where it is not there, or of other images shown or batches timed."""
    try:
        held, kept = read_json(folder / CELL, ""), tensors.read(folder / IMAGES, "")[0]
    except UserError:  # absent or damaged: it is made again
        return None
    for name, value in identity.items():
        if held["identity"].get(name) != value:
            there, here = difference(held["identity"].get(name), value)
            raise UserError(
                f"{folder} holds a cell of {name} {there}, this run has {here}; delete it, or pass another --out"
            )
    fits = len(kept["pixels"]) == min(run.shown, run.target.plan.n)
    if not fits or [s["batch"] for s in held["speed"]] != list(run.batches):
        return None
    scores = {name: Score.from_dict(values) for name, values in held["scores"].items()}
    return Found(
        cell,
        scores,
        held["checks"],
        held["speed"],
        held["about"],
        held["seconds"],
        kept["nfe"],
        kept["keys"],
        kept["pixels"],
    )


class Generators:
    """Checkpoints by (path, step, engine); the last one stays loaded."""

    def __init__(self) -> None:
        self.key: Any = None
        self.made: Generator | None = None

    def get(self, settings: CellConfig) -> Generator:
        """The generator of a cell's checkpoint.

        Raises:
            UserError: no checkpoint is given, or it cannot be read.
        """
        if not settings.checkpoint:
            raise UserError("--checkpoint is needed: a run directory, or a Hub id")
        key = (settings.checkpoint, settings.step, settings.engine)
        if self.made is None or key != self.key:
            self.key, self.made = key, load(settings.checkpoint, settings.step, settings.engine)
        return self.made
