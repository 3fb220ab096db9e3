"""What the distillations of an autoregressive teacher share: the teacher, its tokens and laws, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.checks import Positive
from visgen.config import UserError, plugin
from visgen.data import Batch, Data
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model, ModelConfig
from visgen.nn.keyed import Rng, whole
from visgen.nn.mixture import STEPS
from visgen.objectives import Objective
from visgen.objectives._control import Maps
from visgen.objectives._tokens import check_labels, check_names, check_preview, check_text
from visgen.samplers._teacher import Teacher, codes_of, make_pairs, read_teacher

SEEDS = 1 << 62  # training draws seeds below it, evaluation begins with it
ASKED = ("label", "text", "text_mask", "map")  # of a batch, what condition and control read
PIECE = 1 << 26  # logits of the teacher that are guided and filtered at once
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class PreviewConfig:
    """Images drawn during training.

    Attributes:
        images: how many; labels go round the classes.
        sampler: how they are drawn.
    """

    images: Positive = 16
    sampler: Any = plugin("visgen.samplers", "one_step")


@dataclass(frozen=True)
class TeacherConfig:
    """Fields of every distillation.

    Attributes:
        teacher: run directory of an autoregressive model with its tokenizer.
        precision: that the teacher runs in.
        captured: on a GPU, make tokens by the captured engine instead of the eager one, where these are not read
            (`data.kind: pairs`).
    """

    teacher: Path | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    captured: bool = True


class Distillation(Objective):
    """An objective whose exported model is a student of `config.teacher`.

    Attributes:
        needs_laws: the teacher is asked even where its tokens are read.
    """

    export = "student"
    needs_laws = False
    config: Any

    def __init__(self, config: Any, model: Model) -> None:
        check_student(model)
        self.config = config
        self.frozen: dict[str, nn.Module] = {}
        self.maps = None if model.controls is None else Maps(model.controls)
        self._engine: Engine | None = None

    def setup(self, data: Data) -> None:
        teacher, model = self._read_teacher(data), self.exported()
        model.backbone.codes.copy_(codes_of(teacher.tokenizer))
        self.start(model, teacher)

    def start(self, model: Any, teacher: Teacher) -> None:
        """Gives the student the weights that it starts from; part of `setup`."""

    @property
    def taught(self) -> tuple[Guidance, Warp]:
        """Guidance and filters of the teacher: those that stand in the student's backbone, for good."""
        return self.exported().backbone.taught

    def _read_teacher(self, data: Data) -> Teacher:
        model: Any = self.exported()
        guidance, _ = self.taught
        teacher = read_teacher(self.config.teacher, guidance, "objective.teacher")
        check_labels(model, data)
        check_text(model, data)
        check_teacher(model, teacher, f"objective.teacher {self.config.teacher}")
        check_names(model, data, Path(self.config.teacher), f"objective.teacher {self.config.teacher}")
        if self.maps is not None:
            self.maps.setup(data)
            self.frozen |= {f"control_{kind}": control for kind, control in self.maps.kinds.items()}
        self.facts = {"teacher": teacher.hash, "teacher_path": str(self.config.teacher)}
        self.frozen["tokenizer"] = teacher.tokenizer
        pairs = hasattr(data, "index") and hasattr(data.index, "map_steps")
        if pairs:
            check_pairs(data, self.taught, teacher)
        if self.needs_laws or not pairs:
            self.frozen["teacher"] = teacher.model.to(PRECISIONS[self.config.precision])
        return teacher

    def reading(self, data: Data) -> Data:
        return data if self.maps is None else self.maps.reading(data)

    def mapped(self, batch: Batch, rng: Rng | None = None) -> Batch:
        """The batch with its control maps."""
        return batch if self.maps is None else self.maps.batch(batch, rng)

    def tokens(self, batch: Batch, seeds: Tensor) -> Tensor:
        """The teacher's tokens [B, N] of these seeds [B]: those of the batch, if it is of pairs, or made now."""
        if "seed" in batch:
            return batch["tokens"]
        if self._engine is None:
            self._engine = self.make_engine(self.frozen["teacher"])
        return make_pairs(self._engine, self.exported().backbone.codes, asked(batch), seeds)

    def seeds(self, batch: Batch, rng: Rng | None = None) -> Tensor:
        """Of a batch of pairs its own; else drawn by `rng`, or those of evaluation."""
        if "seed" in batch:
            return batch["seed"]
        count, device = rows(batch), self.exported().parameter_device()
        if rng is None:
            return SEEDS + torch.arange(count, device=device)
        return whole(SEEDS, count, rng, device)

    def make_engine(self, teacher: Any) -> Engine:
        if self.config.captured and teacher.parameter_device().type == "cuda":
            from visgen.decode.captured import CapturedEngine  # needs Triton

            return CapturedEngine(teacher, *self.taught)
        return Engine(teacher, *self.taught)

    @torch.no_grad()
    def laws(self, batch: Batch, tokens: Tensor) -> Tensor:
        """The teacher's guided and filtered log p [B, N, V] float32 up to a constant of each token, given the tokens
        [B, N], or vectors [B, N, C], before it."""
        teacher: Any = self.frozen["teacher"]
        engine, given = Engine(teacher, *self.taught), asked(batch)
        size = max(1, PIECE // (tokens.shape[1] * teacher.config.vocab))
        parts = [
            engine.laws({name: value[i : i + size] for name, value in given.items()}, tokens[i : i + size]).logits
            for i in range(0, len(tokens), size)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def check_preview(self) -> None:
        settings = getattr(self.config, "preview", None)
        if settings is not None and self.maps is None:
            check_preview(self.exported(), settings)

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> Tensor | None:
        tokenizer: Any = self.frozen.get("tokenizer")
        if tokenizer is None:
            return None
        index = torch.arange(self.config.preview.images, device=next(model.parameters()).device)
        given = asked(self.mapped(batch))
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


def asked(batch: Any) -> dict[str, Any]:
    """What a batch asks for."""
    return {name: batch[name] for name in ASKED if name in batch}


def rows(batch: Any) -> int:
    return len(next(iter(asked(batch).values())))


def features(model: Any, tokens: Tensor, batch: dict[str, Any], drop: Tensor | None = None) -> Tensor:
    """h [B, N, D] of the slots that predict tokens [B, N(, C)], of which all but the last are read.

    Args:
        drop: [B] bool, rows without condition and control.
    """
    cond, control = model.condition(batch, drop), model.controlled(batch, drop)
    h = model.backbone(tokens[:, :-1], None, cond=cond, control=control)
    return h[:, model.condition.prefix - 1 :]


def start_from_teacher(student: Model, teacher: Model, head: bool = True) -> None:
    """Copies condition, layers, last norm, control and, if wanted, the head; an input of another kind stays new.

    Raises:
        UserError: the student has another shape.
    """
    parts = ["condition.", "backbone.layers.", "backbone.norm."]
    parts += ["head."] * head + ["control."] * (student.control is not None)
    own, given = student.state_dict(), teacher.state_dict()
    if not head and "backbone.tok_embeddings.fc1.weight" in given:  # both read vectors
        parts.append("backbone.tok_embeddings.")
    taken = {name: value for name, value in given.items() if name.startswith(tuple(parts))}
    wrong = [name for name in taken if name not in own or own[name].shape != taken[name].shape]
    wrong += [name for name in own if name.startswith(tuple(parts)) and name not in taken]
    if wrong:
        raise UserError(
            f"objective.start teacher: {len(wrong)} tensors of student and teacher differ, first {wrong[0]}; give "
            "objective.model.backbone the teacher's layers, heads and width, or set objective.start to scratch"
        )
    student.load_state_dict(taken, strict=False)


# ---------------------------------------------------------------------------------------------------- what is refused


def check_pairs(data: Any, taught: tuple[Guidance, Warp], teacher: Teacher) -> None:
    """Refuses pairs that were made by another teacher or with other settings than the student's."""
    guidance, warp = (configs.dump(settings) for settings in taught)
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


def check_teacher(model: Any, teacher: Teacher, where: str) -> None:
    """Refuses a teacher of other tokens, another condition or another control."""
    its, mine = teacher.model.config, model.config
    for name, one, other in (
        ("grid", tuple(its.grid), tuple(mine.grid)),
        ("vocab", its.vocab, mine.vocab),
        ("condition.classes", getattr(its.condition, "classes", None), getattr(mine.condition, "classes", None)),
        ("control", *(_control(config, mine.control is not None) for config in (its, mine))),
        ("backbone.channels", teacher.tokenizer.channels, model.backbone.codes.shape[1]),
    ):
        if one != other:
            raise UserError(f"{where}: its {name} is {one}, objective.model has {other}; set it to the teacher's")


def check_student(model: Any) -> None:
    """Refuses a null class: the teacher's guidance is what a student learns."""
    dropout = getattr(model.config.condition, "dropout", 0.0)
    if dropout and model.backbone.taught is not None:
        raise UserError(
            f"objective.model.condition.dropout is {dropout}, but the teacher's guidance is what a "
            "student learns, so it has no null class; set it to 0"
        )


def check_start(path: Path | None, model: Any, teacher: Teacher, kind: str) -> Model:
    """The model of the stage before.

    Raises:
        UserError: none, of another shape, of another teacher, or that learned other guidance or filters.
    """
    from visgen.checkpoint import load_model, read_metadata
    from visgen.run_files import WEIGHTS, find_step

    if path is None or str(path) == ".":
        raise UserError(f"objective.start is needed: the run directory of a training by objective {kind}")
    try:
        found = load_model(path)
        made = read_metadata(find_step(path) / WEIGHTS).get("objective", kind)
    except UserError as error:
        raise UserError(f"objective.start: {error}") from None
    if made != kind:
        raise UserError(f"objective.start {path} was trained by objective {made}; pass a run of objective {kind}")
    its, mine = ({**configs.flat(configs.dump(m.config)), "backbone.start": 0} for m in (found, model))
    different = [key for key in {*its, *mine} if its.get(key) != mine.get(key)]
    if different:
        key = min(different)
        raise UserError(
            f"objective.start {path}: its {key} is {its.get(key)}, objective.model has {mine.get(key)}; all stages "
            "have the same model, guidance and filters, so set it to the former"
        )
    if found.teacher != teacher.hash:
        raise UserError(
            f"objective.start {path} learned from teacher {found.teacher[:12] or 'unknown'}, objective.teacher is "
            f"{teacher.hash[:12]}; pass the one that it learned from"
        )
    return found


def _control(config: ModelConfig, wanted: bool) -> str:
    """The kind of a model's control; a teacher's is left alone where the student has none."""
    return "none" if config.control is None or not wanted else configs.kind_of(config.control)
