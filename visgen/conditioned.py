"""What may be asked of a model: classes, prompts, seeds, guidance, controls, known pictures, sizes; all checked."""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import re
import reprlib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from visgen import config as configs
from visgen.checks import SEEDS
from visgen.config import UserError
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.layout import Grid
from visgen.model import Model
from visgen.nn.control import STRENGTHS, Hint
from visgen.prompts import Features, check_prompts
from visgen.tokenizers import Tokenizer


class Conditioned:
    """A model, its tokenizer and the names of its classes, where they shall run.

    Attributes:
        classes: class names, as far as the checkpoint records them.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, classes: Sequence[str], device: torch.device) -> None:
        self.model, self.tokenizer, self.classes, self.device = model, tokenizer, list(classes), device

    def check_asked(self, kind: str) -> None:
        """Raises `UserError` unless the model is conditioned on `kind`, which is "label" or "text"."""
        asked = self.model.config.condition
        found = "label" if hasattr(asked, "classes") else configs.kind_of(asked)
        if found == kind:
            return
        if found == "text":
            raise UserError(
                "this model is conditioned on text, not on class labels: give it prompts, as `--prompt TEXT` "
                "or `sample(prompts=[TEXT])`"
            )
        raise UserError(
            "this model is conditioned on class labels, not on text: give it labels, as `--label` or "
            f"`sample(labels=[...])`; it knows {self.class_list}"
        )

    @property
    def needs_map(self) -> bool:
        """Whether it draws under a control map alone."""
        model = self.model
        return model.controls is not None and (model.config.control is None or model.backbone.taught is not None)

    @property
    def class_count(self) -> int:
        """Raises `UserError` for a model of another condition than class labels."""
        self.check_asked("label")
        return self.model.config.condition.classes

    @property
    def class_list(self) -> str:
        """The classes in the words of a message."""
        if not self.classes:
            return f"ids 0 to {self.class_count - 1} (no names recorded)"
        more = f", ... ({len(self.classes)} in all)" if len(self.classes) > 20 else ""
        return ", ".join(self.classes[:20]) + more

    def label(self, name: str | int) -> int:
        """A class id from an id or a class name, in any letter case and Unicode form; a string that is both is the
        name."""
        count, lowered = self.class_count, [_folded(c) for c in self.classes]
        if isinstance(name, str) and name in self.classes:
            return self.classes.index(name)
        if isinstance(name, str) and not re.fullmatch(r"-?\d+", name):
            if _folded(name) not in lowered:
                near = [c for c in self.classes if name and _folded(name) in _folded(c)]
                near = near[:1] or difflib.get_close_matches(name[:100], self.classes, 1)
                perhaps = f" (perhaps '{near[0]}')" if near else ""
                raise UserError(f"label '{name}' is unknown{perhaps}; the checkpoint knows {self.class_list}")
            return lowered.index(_folded(name))
        try:
            label = int(name) if isinstance(name, str) else operator.index(name)
        except TypeError:
            raise UserError(f"label {reprlib.repr(name)} is no class; the checkpoint knows {self.class_list}") from None
        if not 0 <= label < count:
            raise UserError(f"label {label} is out of range: the checkpoint knows classes 0 to {count - 1}")
        return label

    def check_guidance(self, guidance: Guidance, controlled: bool = False) -> None:
        """Raises `UserError` for a guidance that this model cannot follow; controlled: whether a control is given."""
        guidance, _ = self.settled(guidance, Warp())
        if guidance.control is not None and not (controlled and self.model.config.control):
            lacks = "a control is given" if self.model.config.control else "the checkpoint has a control of its own"
            raise UserError(
                f"guidance.control {guidance.control} scales a control: it has a meaning only where {lacks}"
            )
        if self.model.config.condition.dropout == 0 and guidance.branches > 1:
            raise UserError("guidance.scale must be 1: this checkpoint was trained without a null class (dropout 0)")

    def rules(self, guidance: Guidance | float | None, warp: Warp | None, controlled: bool) -> tuple[Guidance, Warp]:
        """What the engine gets for what is given; controlled: whether a control is.

        Raises:
            UserError: no such things, or none that this model can follow.
        """
        guidance = _guidance(guidance)
        if warp is not None and not isinstance(warp, Warp):
            raise UserError(f"warp {reprlib.repr(warp)} is no `visgen.decode.warp.Warp`, such as Warp(top_p=0.97)")
        self.check_guidance(guidance, controlled)
        guidance, warp = self.settled(guidance, warp or Warp())
        if warp != Warp() and self.model.continuous:
            given = [f"warp.{name} {value}" for name, value in vars(warp).items() if value != getattr(Warp(), name)]
            raise UserError(
                f"{', '.join(given)} filters a law over codes, this model draws vectors: leave filters out, and take a "
                f"sampler of vectors, such as {self.model.backbone.sampler}"
            )
        return guidance, warp

    def settled(self, guidance: Guidance, warp: Warp) -> tuple[Guidance, Warp]:
        """What the engine gets: of a student the defaults, for its weights hold the settings of its teacher.

        Raises:
            UserError: others than those that it learned.
        """
        if self.model.backbone.taught is None:
            return guidance, warp
        for name, given, learned in zip(
            ("guidance", "warp"), (guidance, warp), self.model.backbone.taught, strict=True
        ):
            if given not in (type(learned)(), learned):
                raise UserError(
                    f"{name} {given} is not what this student learned from its teacher, {learned}, and it cannot be "
                    "changed; leave it out"
                )
        return Guidance(), Warp()

    def grid_of(self, size: tuple[int, int] | None) -> Grid:
        """The token grid of images of `size` (H, W).

        Raises:
            UserError: sides that are no multiples of the stride, more tokens than positions, or another tokenizer.
        """
        own, grid = self.tokenizer.image_size, self.model.grid
        if size is None or tuple(size) == tuple(own):
            return grid
        stride = own[0] // grid[1]
        if not hasattr(self.tokenizer, "grid_of"):
            raise UserError(f"this tokenizer decodes images of {own} px alone; leave the size out")
        if min(size) < stride or any(side % stride for side in size):
            near = " ".join(str(max(stride, round(side / stride) * stride)) for side in size)
            raise UserError(
                f"size {size[0]} {size[1]} must be multiples of the tokenizer's stride {stride}, e.g. {near}"
            )
        rows, columns = size[0] // stride, size[1] // stride
        most = getattr(self.model.config.backbone, "rope_columns", None)
        if most is not None and rows * columns > most**2:
            raise UserError(
                f"size {size[0]} {size[1]} is {rows * columns} tokens, this checkpoint has positions for {most**2}; "
                "take a smaller one"
            )
        return grid[0], rows, columns

    def hints(self, control: Hint | Sequence[Hint] | Tensor | None, count: int, grid: Grid) -> list[Hint]:
        """What is given as control, each with one row or `count`, for images of `grid`."""
        if isinstance(control, Tensor):
            control = Hint(control.unsqueeze(1) if control.ndim == 4 else control)
        several = isinstance(control, Sequence) and not isinstance(control, Hint)  # a Hint is a tuple
        hints: list[Any] = [] if control is None else list(control) if several else [control]
        if hints and self.model.controls is None:
            raise UserError(
                "this model was trained without control; leave it out, or load one that was trained with it"
            )
        if not hints and self.needs_map:
            student = self.model.backbone.taught is not None
            why = "is a student that learned nothing without a map" if student else "reads a control map as its prefix"
            raise UserError(f"this model {why}; give it one, as by --control.image")
        for hint in hints:
            _check_hint(hint, count, math.prod(grid))
        return hints

    def plan(
        self, labels: Any, prompts: Any, seeds: Sequence[int] | None, num: int | None = None, seed: int | None = None
    ) -> tuple[list[int], list[str] | Features | None, list[int]]:
        """Return (class ids or none, prompts or their features or none, seeds) of the images; for the arguments see
        `Generator.sample`."""
        if seeds is not None and seed is not None:
            raise UserError("seed and seeds are both given; give the first seed, or a seed for each image")
        first, each = whole("seed", 0 if seed is None else seed), whole("num", 1 if num is None else num)
        if each < 1:
            raise UserError(f"num {each} must be at least 1, the number of images of each label or prompt")
        if labels is None and prompts is None:
            if self.class_count > 1:
                raise UserError(
                    f"labels are missing: pass ids or names of classes, as labels=[0]; the "
                    f"checkpoint knows {self.class_list}"
                )
            labels = 0
        try:
            numbers = None if seeds is None else [operator.index(s) for s in seeds]
        except TypeError:
            raise UserError(
                f"seeds {' '.join(reprlib.repr(seeds).split())} must be whole numbers, one per image, such as [0, 1]"
            ) from None
        for number in numbers or [first]:
            check_seed(number)
        if labels is not None and prompts is not None:
            raise UserError("labels and prompts are both given; a model reads one of them, leave the other out")
        self.check_asked("label" if prompts is None else "text")
        what, asked = ("label", labels) if prompts is None else ("prompt", prompts)
        if not isinstance(asked, Features):
            single = isinstance(asked, str) or not hasattr(asked, "__iter__") or getattr(asked, "ndim", 1) == 0
            asked = [asked] * (1 if numbers is None or num is not None else len(numbers)) if single else list(asked)
            asked = [x for x in asked for _ in range(each)]
        else:
            asked = asked.rows([i for i in range(len(asked)) for _ in range(each)]) if each > 1 else asked
        if numbers is None:
            numbers = list(range(first, first + len(asked)))
            check_seed(numbers[-1] if numbers else first)
        ids: list[int] = [] if prompts is not None else [self.label(x) for x in asked]
        if isinstance(asked, list) and prompts is not None:
            check_prompts(asked)
        if not len(asked) or len(numbers) != len(asked):
            raise UserError(
                f"{len(asked)} {what}s and {len(numbers)} seeds; give at least one {what}, and one seed per {what}"
            )
        return ids, None if prompts is None else asked, numbers

    @torch.inference_mode()
    def known_tokens(self, known: Any, images: int) -> tuple[Tensor, Tensor]:
        """Tokens [images, N] of known (pixels, mask), or of known first frames, and which of them are kept."""
        height, width = self.tokenizer.image_size
        given = known if isinstance(known, tuple | list) else (known,)
        if len(given) != 2 or not all(isinstance(x, Tensor) for x in given):
            of = ", ".join(type(x).__name__ for x in given)
            raise UserError(
                f"known is of {of}; give (pixels [B, 3, {height}, {width}] in [-1, 1], mask [B, {height}, {width}] "
                "bool), two tensors"
            )
        pixels, mask = given[0], given[1].bool()
        frames = pixels.shape[1:2] if pixels.ndim == 5 and self.model.grid[0] > 1 else ()
        if pixels.shape[1:] != (*frames, 3, height, width) or mask.shape[1:] != (*frames, height, width):
            raise UserError(
                f"known pixels {list(pixels.shape)} and mask {list(mask.shape)} must be [B, 3, {height}, {width}] and "
                f"[B, {height}, {width}], the size the checkpoint was trained at"
            )
        if not pixels.is_floating_point():
            raise UserError(f"known pixels are {pixels.dtype}; give floats in [-1, 1], as pixels / 127.5 - 1")
        _check_levels("known pixels", pixels)
        if not {len(pixels), len(mask)} <= {1, images}:
            raise UserError(f"{len(pixels)} known images and {len(mask)} masks for {images} images; give 1 or {images}")
        tokens = self.tokenizer.encode(pixels.to(self.device) if frames else pixels.to(self.device).unsqueeze(1))
        _, rows, columns = self.tokenizer.grid
        cells = mask.to(self.device).unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
        keep = cells.all(-1).all(-2).flatten(1)  # [B, N]: every pixel of the cell is known
        if not keep.any():
            raise UserError(
                f"the mask keeps no token: each is {height // rows} x {width // columns} px, of which all must be "
                "kept; keep more of the known image"
            )
        return tokens.expand(images, *tokens.shape[1:]), keep.expand(images, -1)


def filters(warp: Warp | None, **given: float | None) -> Warp | None:
    """Return the filters that `sample` is given: as a `Warp`, or by their names.

    Raises:
        UserError: both, or a value that is no number.
    """
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        return warp
    if warp is not None:
        raise UserError(f"{', '.join(named)} and warp are both given; put all filters into the Warp, or leave it out")
    for name, value in named.items():
        try:
            named[name] = operator.index(value) if name == "top_k" else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            kind = "a whole number" if name == "top_k" else "a number"
            raise UserError(f"{name} {reprlib.repr(value)} must be {kind}") from None
    return Warp(**named)  # type: ignore[arg-type]


def whole(name: str, value: Any) -> int:
    """Return the value of an argument that must be a whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} {reprlib.repr(value)} must be a whole number") from None


def check_no_others(unknown: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuse arguments that `function` does not have."""
    allowed = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name in unknown:
        near = difflib.get_close_matches(name, allowed, 1)
        perhaps = f"; did you mean '{near[0]}'?" if near else "."
        raise UserError(f"{function.__name__}() has no argument '{name}'{perhaps} It takes {', '.join(allowed)}")


def _guidance(given: Guidance | float | None) -> Guidance:
    if isinstance(given, Guidance):
        return given
    try:
        scale = 1.0 if given is None else float(given)
    except (TypeError, ValueError):
        raise UserError(f"guidance {reprlib.repr(given)} must be its scale, a number, or a `Guidance`") from None
    return Guidance(scale)


def _check_levels(what: str, values: Tensor) -> None:
    """Raises `UserError` for values beyond [-1, 1], or that are no numbers."""
    if values.numel() and not values.abs().max() <= 1 + 1e-3:
        raise UserError(
            f"{what} lie within {values.min():g} and {values.max():g}; give floats in [-1, 1], as levels / 127.5 - 1"
        )


def _check_hint(hint: Any, count: int, tokens: int) -> None:
    """Raises `UserError` unless it is a `Hint` for `count` images of so many tokens."""
    if not isinstance(hint, Hint) or not isinstance(hint.map, Tensor):
        given = type(hint.map if isinstance(hint, Hint) else hint).__name__
        raise UserError(f"control is of {given}; give a tensor of maps [B, 3, H, W] in [-1, 1], or several `Hint`s")
    maps, region = hint.map, hint.region
    if not maps.numel() or not maps.ndim or len(maps) not in (1, count) or not maps.is_floating_point():
        raise UserError(
            f"control maps are {maps.dtype} {list(maps.shape)} for {count} images; give floats in "
            f"[-1, 1], 1 or {count} of them"
        )
    _check_levels("control maps", maps)
    try:
        strengths = torch.as_tensor(hint.strength, dtype=torch.float64).flatten().tolist()
    except (TypeError, ValueError):
        raise UserError(f"the strength of a control is {reprlib.repr(hint.strength)}; give a number") from None
    for strength in strengths:
        if strength not in STRENGTHS:
            raise UserError(f"the strength of a control is {strength}; it must be {STRENGTHS}")
    if region is not None and not isinstance(region, Tensor):
        raise UserError(f"the region of a control is of {type(region).__name__}; give a tensor")
    if region is not None and (region.ndim != 2 or len(region) not in (1, count) or region.shape[1] != tokens):
        raise UserError(
            f"the region of a control is {list(region.shape)}; give a weight for each token, [1 or {count}, {tokens}]"
        )


def check_seed(seed: int) -> None:
    """Raises `UserError` for a number that `checks.Seed` does not hold."""
    if seed not in SEEDS:
        raise UserError(f"seed {seed} is no seed; it must lie within 0 and 2^63 - 1")


def _folded(name: str) -> str:
    """A name as it is compared: file systems and keyboards spell accents in different ways."""
    return unicodedata.normalize("NFC", name.lower())
