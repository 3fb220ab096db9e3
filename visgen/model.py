"""A generative model: backbone, condition and head over one token grid."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.backbones import Backbone
from visgen.checks import Positive
from visgen.conditions import Condition
from visgen.config import UserError, plugin
from visgen.heads import Head
from visgen.layout import Grid
from visgen.nn.control import ConditionalDecoding, hints_of
from visgen.tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of.

    Attributes:
        grid: (T, H, W) of its tokens; must be the tokenizer's.
        vocab: number of codes; must be the tokenizer's.
        backbone, condition, head: plugins.
        channels: width C of continuous tokens, which have no vocab; must be the tokenizer's.
        control: the spatial control that it is trained for, and the encoder of its maps; none: no control.
    """

    grid: tuple[Positive, Positive, Positive] = (1, 16, 16)
    vocab: Positive = 16384
    backbone: Any = plugin("visgen.backbones", "ar")
    condition: Any = plugin("visgen.conditions", "label")
    head: Any = plugin("visgen.heads", "categorical")
    channels: Positive | None = None
    control: Any = plugin("visgen.controls", None)


class Model(nn.Module):
    """Backbone, condition, head and perhaps control. `h = model.backbone(...)`, `model.head` turns h into a loss or a
    law."""

    backbone: Backbone
    condition: Condition
    head: Head
    control: ConditionalDecoding | None
    teacher: str = ""  # of a student read from a file, the hash of the weights that it learned from

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.backbone.width
        self.condition = configs.build(config.condition, width)
        for table in self.condition.modules():
            if isinstance(table, nn.Linear | nn.Embedding):
                nn.init.normal_(table.weight, std=0.02)
        kind = configs.implementation(config.backbone)
        head: Any = configs.implementation(config.head)
        vectors = bool(getattr(config.backbone, "continuous", kind.continuous))  # type: ignore[attr-defined]
        self._check_parts(vectors, head.continuous and not kind.snaps)  # type: ignore[attr-defined]
        if kind.snaps and getattr(config.head, "predicts", "") != "velocity":  # type: ignore[attr-defined]
            raise UserError(
                f"model.backbone {configs.kind_of(config.backbone)} draws codes as vectors: set model.head to kind "
                "diffusion, predicts velocity"
            )
        if head.denoises != kind.denoises:  # type: ignore[attr-defined]
            raise UserError(
                f"model.head {configs.kind_of(config.head)} does not go with model.backbone "
                f"{configs.kind_of(config.backbone)}: use head denoiser with acdit, diffusion with the others"
            )
        place = config.grid, self.condition.prefix, self.condition.coords
        layout = kind.arrange(config.backbone, *place)  # type: ignore[attr-defined]
        self.backbone = configs.build(config.backbone, layout, config.channels or config.vocab)
        channels = config.backbone.channels if kind.snaps else config.channels  # type: ignore[attr-defined]
        self.head = configs.build(config.head, width, channels or config.vocab)
        self.control = None if config.control is None else ConditionalDecoding(config.control, width, config.grid)

    def _check_parts(self, backbone: bool, head: bool) -> None:
        """Refuses parts of which some are for continuous tokens and some are not."""
        config, wanted = self.config, "continuous tokens" if backbone else "codes"
        if head != backbone:
            raise UserError(
                f"model.backbone {configs.kind_of(config.backbone)} is for {wanted}, model.head "
                f"{configs.kind_of(config.head)} is not; choose a head for them"
            )
        if backbone and config.control is not None:
            raise UserError(
                f"model.control is added to slots that predict one token, which model.backbone "
                f"{configs.kind_of(config.backbone)} has none of; leave it out"
            )
        if backbone != (config.channels is not None):
            remedy = "set it to the tokenizer's" if backbone else "leave it out"
            raise UserError(
                f"model.channels is {config.channels}, model.backbone {configs.kind_of(config.backbone)} is for "
                f"{wanted}; {remedy}"
            )

    @property
    def continuous(self) -> bool:
        """Whether tokens are vectors."""
        return self.config.channels is not None

    @property
    def grid(self) -> Grid:
        return self.config.grid

    @property
    def tokens(self) -> int:
        """Number N of tokens."""
        return self.backbone.layout.tokens

    def loss(
        self,
        tokens: Tensor,
        batch: Mapping[str, Any],
        drop: Tensor | None,
        drop_control: Tensor | None = None,
        draws: Any = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Teacher-forced loss per token [B, N] of tokens [B, N(, C)] under the batch's condition and control.

        Args:
            drop: [B] bool, rows whose condition and control are both dropped.
            drop_control: [B] bool, rows whose control alone is dropped.
            draws: times and noise of a head of vectors, `head.draws`; None: the same at every call.
            order: [B, N] in which the tokens of a backbone that is `ordered` are predicted, and losses stand; None:
                raster order.
        """
        cond = self.condition(batch, drop)
        both = drop if drop_control is None else drop_control if drop is None else drop | drop_control
        control = self.controlled(batch, both)
        told = {} if order is None else {"order": order}
        if order is not None:
            tokens = tokens.gather(1, order.unsqueeze(-1).expand_as(tokens))
        h = self.backbone(tokens[:, :-1], None, cond=cond, control=control, **told)  # [B, P + N - 1, D]
        h = h[:, self.condition.prefix - 1 :]
        return self.head.loss(h, tokens) if draws is None else self.head.loss(h, tokens, draws)  # type: ignore[call-arg]

    def at(self, grid: Grid) -> Model:
        """The same weights, not copied, for images of another grid.

        Raises:
            UserError: its prefix stands for places of its own grid.
        """
        if grid == self.grid:
            return self
        if self.condition.coords is not None:
            raise UserError(f"a model with its control as a prefix draws images of its own grid {self.grid} alone")
        other = copy.copy(self)
        other.config = replace(self.config, grid=grid)
        other._modules = dict(self._modules)
        other.backbone = self.backbone.at(self.backbone.arrange(self.config.backbone, grid, self.condition.prefix))
        if self.control is not None:
            other.control = copy.copy(self.control)
            other.control.grid = grid
        return other

    def controlled(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Tensor | None:
        """What the batch's maps add to the backbone, [J, B or 1, N, D], zero in rows where drop [B] is true; None for
        a model without control, or a batch without maps."""
        hints = hints_of(batch)
        return self.control(hints, drop) if self.control is not None and hints else None

    @property
    def controls(self) -> Any:
        """The config of the controls whose maps it reads, be it by conditional decoding or as a prefix; or None."""
        return self.config.control or getattr(self.config.condition, "control", None)

    def check_tokenizer(self, tokenizer: Tokenizer, where: str = "tokenizer") -> None:
        """Refuses a tokenizer whose tokens are not the ones this model was made for."""
        grid, its_grid = tuple(self.config.grid), tuple(tokenizer.grid)
        if its_grid[0] == 1:  # it takes any number of frames, one by one
            its_grid = (grid[0], *its_grid[1:])
        kinds = ("codes", "vectors")
        if self.continuous != (tokenizer.vocab is None):
            its_kind, kind = kinds[tokenizer.vocab is None], kinds[self.continuous]
            raise UserError(f"{where}: its tokens are {its_kind}, the model's are {kind}; use a tokenizer of {kind}")
        for name, mine, its in (
            ("grid", grid, its_grid),
            ("vocab", None if self.continuous else self.config.vocab, tokenizer.vocab),
            ("channels", self.config.channels, None if tokenizer.vocab else tokenizer.channels),
        ):
            if mine != its:
                raise UserError(
                    f"{where}: its {name} is {its}, the model's is {mine}; use the tokenizer the model is made for, or "
                    f"in the training of a new one set objective.model.{name}"
                )

    def parameter_device(self) -> torch.device:
        return next(self.parameters()).device
