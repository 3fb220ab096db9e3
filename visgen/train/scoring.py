"""Fréchet distance during training: a small number of images, drawn with the weight average, on all processes.

The images draw no number of training's streams, so a run with it is, bit for bit, the run without it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from accelerate import Accelerator

from visgen import evaluate as ev
from visgen.checks import Natural, Positive, Range, Seed
from visgen.config import UserError, plugin, plugin_config
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.generate import Generator
from visgen.metrics.features import build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.model import Model
from visgen.objectives import Objective
from visgen.sampling import EngineConfig, SamplingConfig
from visgen.scored_data import build_pictures, check_match
from visgen.tally import Bundle, Tally
from visgen.train.shards import sharding


@dataclass(frozen=True)
class ScoreConfig:
    """Scores images of the weight average against the held-out split, as `eval/fid.py` would: the values are of the
    log, `eval/<protocol>/fd` and `/kid`.

    Attributes:
        every: in steps; 0 never. The last step scores too.
        n: images; they take the same labels and seeds each time, so that the curve is one of the weights alone.
        sampler, guidance, warp: how they are drawn; default the model's own sampler, plain.
        batch: images at once, on each process.
        data: pictures to compare with; default the training's data, which caches of codes are not.
        reference_n: of them; default the whole held-out split.
        extractor, weights: feature network and, where it needs one, its weight file.
        groups: jackknife groups; 1 leaves the error out.
        allow_small: score although n does not exceed the feature width: the value then says less.
        seed: of labels and images.
    """

    every: Natural = 0
    n: Annotated[int, Range(4)] = 2000
    sampler: Any = plugin("visgen.samplers", None)
    guidance: Guidance = field(default_factory=Guidance)
    warp: Warp = field(default_factory=Warp)
    batch: Positive = 64
    data: Any = plugin("visgen.data", None)
    reference_n: Annotated[int, Range(4)] | None = None
    extractor: str = "fd_efflite0"
    weights: Path | None = None
    groups: Positive = 1
    allow_small: bool = False
    seed: Seed = 0


class Scoring:
    """What `ScoreConfig` asks for; `prepare` it once, after the objective's set-up."""

    def __init__(self, config: ScoreConfig, data: Any) -> None:
        self.config, self.data = config, config.data or data

    def due(self, done: int, steps: int) -> bool:
        """Is the average scored after `done` of `steps` steps?"""
        every = self.config.every
        return every > 0 and (done % every == 0 or done == steps)

    def prepare(self, objective: Objective, accelerator: Accelerator, classes: Sequence[str]) -> None:
        """Reads the pictures, and scores the reference on all processes.

        Args:
            classes: names of the classes that the model is trained on.

        Raises:
            UserError: the objective draws no images of classes, has no tokenizer, or the settings do not fit.
        """
        if not self.config.every:
            return
        model = objective.exported()
        if not isinstance(model, Model) or not hasattr(model.config.condition, "classes"):
            raise UserError("score.every: only a class-conditional model draws images to score; set score.every 0")
        tokenizer: Any = objective.frozen.get("tokenizer")
        if tokenizer is None:
            raise UserError("score.every needs the tokenizer that decodes the images: set objective.tokenizer")
        config, device = self.config, accelerator.device
        try:
            pictures = build_pictures(self.data, "held_out")
        except UserError as error:
            raise UserError(f"score.every needs held-out pictures ({error}), as --score.data.kind") from None
        count = model.config.condition.classes
        self.labels = check_match(pictures, tokenizer, count, classes, "score.data: the training")
        if not sharding(accelerator):  # the shards of a model draw nothing; its whole average is checked when it does
            self.check(model, tokenizer, str(device))
        extractor = build_extractor(config.extractor, weights=config.weights, device=device)
        plan = SamplePlan(config.n, len(pictures.classes), config.seed)
        n_ref = min(config.reference_n or len(pictures), len(pictures))
        ev.check_size(plan, n_ref, extractor, config.groups, config.allow_small)
        reference = ev.reference(pictures, extractor, ev.World.current(), config.reference_n)
        self.tokenizer, self.extractor, self.plan = tokenizer, extractor, plan
        self.reference = Bundle.of(reference)
        self.protocol = ev.protocol_of(extractor, reference, pictures, plan, config.groups)
        self.precision: Any = "bf16" if accelerator.mixed_precision == "bf16" and device.type == "cuda" else "fp32"

    def check(self, model: Any, tokenizer: Any, device: str) -> None:
        """Refuses a way of drawing that does not fit the model."""
        generator, settings = self.drawing(model, tokenizer, EngineConfig("eager", device, "fp32", 1))
        try:
            ev.check_images(generator, settings)
        except UserError as error:
            raise UserError(f"score.*: {error}") from None

    def drawing(self, model: Any, tokenizer: Any, engine: EngineConfig) -> tuple[Generator, SamplingConfig]:
        """What draws the images by a copy of the model, and how."""
        generator = Generator(copy.deepcopy(model), tokenizer, engine)
        sampler = self.config.sampler or plugin_config("visgen.samplers", generator.model.backbone.sampler)
        return generator, SamplingConfig(sampler, self.config.guidance, self.config.warp, engine)

    def measure(self, average: Any) -> dict[str, float]:
        """`eval/<protocol>/<metric>` of the weight average, on every process; the average itself is left as it is."""
        config, world = self.config, ev.World.current()
        devices = [self.extractor.device] if self.extractor.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            engine = EngineConfig(device=str(self.extractor.device), precision=self.precision, batch=config.batch)
            generator, settings = self.drawing(average, self.tokenizer, engine)
            tally = Tally(
                self.extractor, self.reference, config.n, config.groups, world, config.allow_small, neighbours=False
            )
            tally.take(ev.generated(generator, self.plan, settings, world, self.labels), self.extractor)
            scores = tally.scores()
        found = {}
        for name, score in scores.items():
            key = f"eval/{self.protocol.id}/{name}"
            values = dataclasses.asdict(score)
            found[key] = score.value
            found |= {f"{key}_{part}": values[part] for part in ("se", "bias_corrected") if values[part] is not None}
        return found
