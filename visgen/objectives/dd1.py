"""Distilled Decoding 1: a student that draws all tokens at once learns its teacher's map from noise (arXiv 2412.17153).

The teacher turns the noise of an image into tokens one by one, each by the flow of its law (`samplers/_teacher.py`).
Given the noise that is a function, and the student learns it: by cross-entropy of every token, and if wanted by a
regression of the code vectors. In half of the samples the tokens before `second` are given, which is what the second
pass of sampling starts from. A batch says what is asked for, its labels, texts and control maps; its pictures are never
looked at, but for the maps. A teacher with control teaches the images of each map; the student then has it too.

Known of the authors' recipe: architecture, the set of starts {first token, t}, targets, EMA. Not published: weights of
the losses, how the tokens are split between them, and the optimiser. Here all tokens have the cross-entropy, so that
images are read from the logits alone; the perceptual loss is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.checks import Positive, Weight
from visgen.config import UserError, plugin, plugin_config
from visgen.data import Batch, Data
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise
from visgen.model import Model, ModelConfig
from visgen.nn.mixture import STEPS
from visgen.objectives import Logs, Objective
from visgen.objectives._control import Maps
from visgen.objectives._tokens import check_labels, check_text
from visgen.samplers._teacher import Teacher, codes_of, make_pairs, noise_of, read_teacher

SEEDS = 1 << 62  # training draws seeds below it, evaluation begins with it
ASKED = ("label", "text", "text_mask", "map")  # of a batch, what condition and control read


@dataclass(frozen=True)
class PreviewConfig:
    """Images drawn during training.

    Attributes:
        images: how many; labels go round the classes.
        sampler: how they are drawn.
    """

    images: Positive = 16
    sampler: Any = plugin("visgen.samplers", "one_step")


def _model() -> ModelConfig:
    return ModelConfig(
        backbone=plugin_config("visgen.backbones", "one_step"),
        condition=plugin_config("visgen.conditions", "label", dropout=0.0),
    )


@dataclass(frozen=True)
class Config:
    """Distilled Decoding 1.

    Attributes:
        model: the student. Its backbone says for which second pass it is trained (`second`) and which guidance and
            filters its teacher's probabilities have, for good.
        teacher: run directory of an autoregressive model with its tokenizer.
        start: from the teacher's weights, as published: condition, layers, norm, logits, control; or from scratch.
        regression: weight of the squared error of the code vectors; 0: the student has no such output.
        precision: that the teacher makes pairs in, where these are not read (`data.kind: pairs`).
        captured: on a GPU, make pairs by the captured engine instead of the eager one.
        preview: images for the logger.
    """

    model: ModelConfig = field(default_factory=_model)
    teacher: Path | None = None
    start: Literal["teacher", "scratch"] = "teacher"
    regression: Weight = 0.0
    precision: Literal["fp32", "bf16"] = "fp32"
    captured: bool = True
    preview: PreviewConfig = field(default_factory=PreviewConfig)


class DD1(Objective):
    """`nets["student"]` returns the mean cross-entropy of the teacher's tokens given their noise."""

    export = "student"
    held_out_values = ("nats_per_token", "agreement")
    larger_is_better = ("agreement",)

    def __init__(self, config: Config) -> None:
        self.config = config
        model = Model(config.model)
        _check_student(model, config.regression)
        self.nets = {"student": StudentNet(model, config.regression)}
        self.frozen: dict[str, nn.Module] = {}
        self.maps = None if model.controls is None else Maps(model.controls)
        self._engine: Engine | None = None

    def setup(self, data: Data) -> None:
        model: Any = self.exported()
        guidance, _ = model.backbone.taught
        teacher = read_teacher(self.config.teacher, guidance, "objective.teacher")
        check_labels(model, data)
        check_text(model, data)
        _check_teacher(model, teacher, f"objective.teacher {self.config.teacher}")
        model.backbone.codes.copy_(codes_of(teacher.tokenizer))
        if self.maps is not None:
            self.maps.setup(data)
            self.frozen |= {f"control_{kind}": control for kind, control in self.maps.kinds.items()}
        if self.config.start == "teacher":
            start_from_teacher(model, teacher.model)
        self.facts = {"teacher": teacher.hash, "teacher_path": str(self.config.teacher)}
        self.frozen["tokenizer"] = teacher.tokenizer
        if hasattr(data, "index") and hasattr(data.index, "map_steps"):
            check_pairs(data, model, teacher)
            return
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.config.precision]
        self.frozen["teacher"] = teacher.model.to(kind)

    def reading(self, data: Data) -> Data:
        return data if self.maps is None else self.maps.reading(data)

    def loss(
        self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: torch.Generator
    ) -> tuple[Tensor, Logs]:
        batch = batch if self.maps is None else self.maps.batch(batch, rng)
        rows, device = _rows(batch), self.exported().parameter_device()
        seeds = batch["seed"] if "seed" in batch else torch.randint(SEEDS, (rows,), generator=rng, device=device)
        tokens = self._tokens(batch, seeds)
        second = self.config.model.backbone.second
        late = torch.rand(rows, generator=rng, device=device) < (0.5 if second else 0.0)
        values, level = inputs(self.exported(), tokens, seeds, second * late.long())
        return nets[name](values, level, tokens, asked(batch))

    def _tokens(self, batch: Batch, seeds: Tensor) -> Tensor:
        """The teacher's tokens [B, N] of these seeds: those of the batch, if it is of pairs, or made now."""
        if "seed" in batch:
            return batch["tokens"]
        if self._engine is None:
            self._engine = self._make_engine(self.frozen["teacher"])
        return make_pairs(self._engine, self.exported().backbone.codes, asked(batch), seeds)

    def _make_engine(self, teacher: Any) -> Engine:
        settings = self.exported().backbone.taught
        if self.config.captured and teacher.parameter_device().type == "cuda":
            from visgen.decode.captured import CapturedEngine  # needs Triton

            return CapturedEngine(teacher, *settings)
        return Engine(teacher, *settings)

    def held_out(self, model: Any, batch: Batch) -> Logs:
        """Cross-entropy of one pass, and how many of its tokens are the teacher's."""
        batch = batch if self.maps is None else self.maps.batch(batch)
        device = model.parameter_device()
        seeds = batch["seed"] if "seed" in batch else SEEDS + torch.arange(_rows(batch), device=device)
        tokens = self._tokens(batch, seeds)
        values, level = inputs(model, tokens, seeds, torch.zeros_like(seeds))
        h = hidden(model, values, level, asked(batch))[0]
        law = model.head.dist(h.unsqueeze(0), torch.ones(1, *tokens.shape, device=device))
        same = (law.logits.argmax(-1) == tokens).float().mean()
        return {"nats_per_token": -law.log_prob(tokens).mean(), "agreement": same}

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> Tensor | None:
        tokenizer: Any = self.frozen.get("tokenizer")
        if tokenizer is None:
            return None
        index = torch.arange(self.config.preview.images, device=next(model.parameters()).device)
        given = asked(batch if self.maps is None else self.maps.batch(batch))
        given = {name: value.to(index.device)[index % len(value)] for name, value in given.items()}
        if self.maps is None and "label" in given:
            given["label"] = index % self.config.model.condition.classes
        engine = Engine(model)
        engine.begin(given)
        tokens = engine.run(configs.build(self.config.preview.sampler), Noise(index + seed)).tokens
        images = tokenizer.decode(tokens)[:, 0]
        if self.maps is None:
            return images
        return torch.stack([given["map"][:, 0].to(images), images], 1).flatten(0, 1)  # each beside its map


class StudentNet(nn.Module):
    """Noise or codes [B, N, C], which of them is noise [B, N], the teacher's tokens [B, N] -> (loss, logs)."""

    def __init__(self, model: Model, regression: float) -> None:
        super().__init__()
        self.model, self.regression = model, regression

    def forward(self, values: Tensor, level: Tensor, tokens: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Logs]:
        h, cond = hidden(self.model, values, level, batch)
        count = level.sum()
        loss = (self.model.head.loss(h, tokens) * level).sum() / count
        logs = {"nats_per_token": loss.detach()}
        if self.regression:
            backbone: Any = self.model.backbone
            far = (backbone.vectors(h, cond) - backbone.codes[tokens]).square().mean(-1)
            far = (far * level).sum() / count
            loss, logs["mse"] = loss + self.regression * far, far.detach()
        return loss, logs


def hidden(model: Any, values: Tensor, level: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    """h [B, N, D] of the slots of the tokens, and the condition."""
    cond = model.condition(batch)
    h = model.backbone(values, None, cond=cond, level=level, control=model.controlled(batch))
    return h[:, model.condition.prefix :], cond


def inputs(model: Any, tokens: Tensor, seeds: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """What a student reads whose pass begins at token start [B]: codes before it, noise from there on [B, N, C]; and
    where there is noise [B, N]."""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    codes = model.backbone.codes
    noise, fresh = noise_of(Noise(seeds), index, codes.shape[1]), index >= start.unsqueeze(1)
    return torch.where(fresh.unsqueeze(-1), noise, codes[tokens].float()), fresh.float()


def asked(batch: Any) -> dict[str, Any]:
    """What a batch asks for."""
    return {name: batch[name] for name in ASKED if name in batch}


def _rows(batch: Any) -> int:
    return len(next(iter(asked(batch).values())))


def start_from_teacher(student: Model, teacher: Model) -> None:
    """Copies condition, layers, last norm, logits and control; the input is another one, and new.

    Raises:
        UserError: the student has another shape.
    """
    parts = "condition.", "backbone.layers.", "backbone.norm.", "head.", *(["control."] if student.control else [])
    taken = {name: value for name, value in teacher.state_dict().items() if name.startswith(parts)}
    own = student.state_dict()
    wrong = [name for name in taken if name not in own or own[name].shape != taken[name].shape]
    wrong += [name for name in own if name.startswith(parts) and name not in taken]
    if wrong:
        raise UserError(
            f"objective.start teacher: {len(wrong)} tensors of student and teacher differ, first {wrong[0]}; give "
            "objective.model.backbone the teacher's layers, heads and width, or set objective.start to scratch"
        )
    student.load_state_dict(taken, strict=False)


def check_pairs(data: Any, model: Model, teacher: Teacher) -> None:
    """Refuses pairs that were made by another teacher or with other settings than the student's."""
    guidance, warp = (configs.dump(settings) for settings in model.backbone.taught)
    for name, its, wanted in (
        ("teacher", data.index.teacher[:12], teacher.hash[:12]),
        ("tokenizer", data.index.tokenizer[:12], teacher.tokenizer_hash[:12]),
        ("guidance", data.index.guidance, guidance),
        ("warp", data.index.warp, warp),
        ("map_steps", data.index.map_steps, STEPS),
    ):
        if its != wanted:
            raise UserError(
                f"pairs {data.folder} were made with {name} {its}, the student is to learn {wanted}; set "
                f"objective.model.backbone or objective.teacher to theirs, or write other pairs"
            )


def _check_teacher(model: Any, teacher: Teacher, where: str) -> None:
    its, mine = teacher.model.config, model.config
    for name, one, other in (
        ("grid", tuple(its.grid), tuple(mine.grid)),
        ("vocab", its.vocab, mine.vocab),
        ("condition.classes", getattr(its.condition, "classes", None), getattr(mine.condition, "classes", None)),
        ("control", *(_control(config, mine.control is not None) for config in (its, mine))),
        ("backbone.channels", teacher.tokenizer.channels, mine.backbone.channels),
    ):
        if one != other:
            raise UserError(f"{where}: its {name} is {one}, objective.model has {other}; set it to the teacher's")


def _control(config: ModelConfig, wanted: bool) -> str:
    """The kind of a model's control; a teacher's is left alone where the student has none."""
    return "none" if config.control is None or not wanted else configs.kind_of(config.control)


def _check_student(model: Any, regression: float) -> None:
    config = model.config
    if model.backbone.shift or not hasattr(config.backbone, "second"):
        raise UserError(
            f"objective dd1 trains a one-step student, objective.model.backbone is {configs.kind_of(config.backbone)}; "
            "set its kind to one_step"
        )
    if getattr(config.condition, "dropout", 0.0):
        raise UserError(
            f"objective.model.condition.dropout is {config.condition.dropout}, but the teacher's guidance is what a "
            "student learns, so it has no null class; set it to 0"
        )
    if config.backbone.regress != (regression > 0):
        raise UserError(
            f"objective.regression is {regression}, objective.model.backbone.regress is {config.backbone.regress}; "
            "set both, or none"
        )
