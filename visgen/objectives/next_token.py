"""Next-token prediction: teacher-forced cross-entropy in raster order (LlamaGen section 2.3).

Of vectors (`model.channels`) it is the loss of the head at every token (causal MAR, arXiv 2406.11838, section 3.4), in
raster order or in one that is drawn for every sample (`model.backbone.order`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.config import UserError, plugin
from visgen.data import Batch, Data
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.layout import Grid
from visgen.model import Model, ModelConfig
from visgen.nn.keyed import Rng, uniform
from visgen.objectives import Logs, Objective
from visgen.objectives._control import Maps, drops, encoders, freeze_base, start_from
from visgen.objectives._sizes import SizesConfig, allowed, resized, size_of_step
from visgen.objectives._tokens import Previewed, check_names, check_preview, read_tokenizer, tokens_of


@dataclass(frozen=True)
class PreviewConfig(Previewed):
    """As of every objective; warp: filters of the laws that are drawn from."""

    warp: Warp = field(default_factory=Warp)
    sampler: Any = plugin("visgen.samplers", "ar")


@dataclass(frozen=True)
class Config:
    """Next-token objective.

    Attributes:
        model: backbone, condition, head, grid and vocabulary.
        tokenizer: run directory or safetensors file of the tokenizer. Needed when the data are pixels (they are
            encoded on the fly) and for previews; kept beside the run.
        preview: images for the logger.
        init: a model to start from, a run or a step: objective.model, or objective.model without its control.
        train: `all` of the model, as ControlAR does; or `control_only`, over the weights of `init`, which stay as they
            are: the run's files then hold the control alone and name those weights by hash, and without a map the model
            is `init`, bit for bit.
        sizes: other sizes of images than the model's own to train on, one for each step.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: Path | None = None
    preview: PreviewConfig = field(default_factory=PreviewConfig)
    init: Path | None = None
    train: Literal["all", "control_only"] = "all"
    sizes: SizesConfig = field(default_factory=SizesConfig)


class NextToken(Objective):
    """`nets["model"]` returns the mean cross-entropy of the batch's tokens, under the control of its maps if any."""

    export = "model"
    shards = True
    held_out_values = ("nats_per_token",)

    def __init__(self, config: Config) -> None:
        self.config = config
        model = Model(config.model)
        self.nets = {"model": NextTokenNet(model)}
        if model.continuous:
            self._check_vectors(model)
            self.held_out_values = ("loss",)
        self.frozen: dict[str, nn.Module] = {}
        self.maps = None if model.controls is None else Maps(model.controls)
        self.sizes: list[tuple[int, int]] = []  # filled by `setup`
        if config.train == "control_only":
            if config.init is None or config.model.control is None:
                lacks = "objective.init" if config.init is None else "objective.model.control"
                raise UserError(f"objective.train control_only trains a control over a base: set {lacks}")
            self.part = "control"
            freeze_base(model)

    def setup(self, data: Data) -> None:
        model: Model = self.exported()
        self.frozen |= read_tokenizer(self.config.tokenizer, model, data)
        self._check_views(data)
        self._start(model, data)
        self._check_sizes(data)
        if self.maps is not None:
            self.maps.setup(data)
            self.frozen |= {f"control_{kind}": control for kind, control in self.maps.kinds.items()}

    def _check_vectors(self, model: Model) -> None:
        """Refuses a backbone that predicts no next token, and a preview by a sampler of codes."""
        fitting, sampler = model.backbone.sampler, configs.kind_of(self.config.preview.sampler)
        if fitting != "causal":
            kind = configs.kind_of(self.config.model.backbone)
            raise UserError(
                f"objective next_token trains a causal backbone, objective.model.backbone is {kind}; use ar"
            )
        if sampler != fitting:
            raise UserError(f"objective.preview.sampler {sampler} makes no preview of this model; use kind {fitting}")

    def _start(self, model: Model, data: Data) -> None:
        """Reads the weights to start from: the base model's, and the pretrained ones of the control's encoder."""
        path, whole = self.config.init, False
        if path is not None:
            from visgen.checkpoint import load_model, weights_hash

            base = load_model(path)
            if self.part:  # what is trained anew may learn other classes
                check_names(model, data, path, f"objective.init {path}")
            whole = start_from(model, base, f"objective.init {path}")
            self.facts = {"base": weights_hash(base), "base_path": str(path)} if self.part else {}
        for encoder in [] if whole else encoders(model):
            encoder.load_pretrained()

    def _check_sizes(self, data: Data) -> None:
        if not self.config.sizes.sides:
            return
        if hasattr(data, "grid") or self.config.tokenizer is None:
            raise UserError(
                "objective.sizes needs pixels, which are encoded at each size: data of images, and a tokenizer"
            )
        self.stride = data.image_size[0] // self.config.model.grid[1]
        self.sizes = allowed(self.config.sizes, self.stride)
        for size in self.sizes:
            self.exported().at(self._grid(size))  # refuses a prefix that stands for places of its own grid

    def _grid(self, size: tuple[int, int]) -> Grid:
        """The token grid of images of `size` (H, W)."""
        return self.config.model.grid[0], size[0] // self.stride, size[1] // self.stride

    def reading(self, data: Data) -> Data:
        if self.maps is None or (self.sizes and not getattr(data, "has_maps", False)):
            return data  # maps of resized images are made of these
        return self.maps.reading(data)

    def _check_views(self, data: Data) -> None:
        views, cached = getattr(self.config.model.condition, "views", 1), getattr(data, "view_count", 1)
        if views > 1 and views != cached:
            raise UserError(
                f"objective.model.condition.views is {views}, the data has {cached} views of an image; set it to "
                f"{cached}, or cache more: `python -m visgen.encode --views shift` writes 18"
            )

    def tokens(self, batch: Batch) -> Tensor:
        """Cached tokens [B, N], or those of the batch's pixels."""
        return tokens_of(batch, self.frozen)

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        grid = self.config.model.grid
        if self.sizes:
            size = size_of_step(self.sizes, step)
            grid, batch = self._grid(size), {**batch, "pixels": resized(batch["pixels"], size, step)}
            if "map" in batch:
                batch["map"] = resized(batch["map"], size, step, exact=True)
        tokens = self.tokens(batch)
        rate = getattr(self.config.model.condition, "dropout", 0.0)
        drop = uniform((len(tokens),), rng, tokens.device) < rate
        alone = None
        if self.maps is not None:
            batch = self.maps.batch(batch, rng)
            rate = 0.0 if self.config.model.control is None else self.config.model.control.dropout
            alone = drops(rate, len(tokens), rng, tokens.device)
        draws = self.exported().head.draws(tokens.shape, rng, tokens.device) if tokens.is_floating_point() else None
        order = None
        if self.exported().backbone.ordered:
            order = uniform(tokens.shape[:2], rng, tokens.device).argsort(1)
        return nets[name](tokens, batch, drop, drop_control=alone, grid=grid, draws=draws, order=order)

    def held_out(self, model: nn.Module, batch: Batch) -> Logs:
        batch = batch if self.maps is None else self.maps.batch(batch)
        tokens, order = self.tokens(batch), None
        if self.exported().backbone.ordered:  # orders that are the same at every evaluation
            fixed = Noise(torch.arange(len(tokens), device=tokens.device))
            order = fixed.order(tokens.shape[1])
        return {self.held_out_values[0]: model.loss(tokens, batch, None, order=order).mean()}  # type: ignore[operator]

    def check_preview(self) -> None:
        if "tokenizer" in self.frozen:
            check_preview(self.exported(), self.config.preview)

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> Tensor | None:
        tokenizer, settings = self.frozen.get("tokenizer"), self.config.preview
        if tokenizer is None:
            return None
        device = next(model.parameters()).device
        index = torch.arange(settings.images, device=device)
        engine = Engine(model, settings.guidance, settings.warp)
        if hasattr(self.config.model.condition, "classes") and self.maps is None:
            asked = {"label": index % self.config.model.condition.classes}
        else:  # only the batch knows what may be asked
            batch = batch if self.maps is None else self.maps.batch(batch)
            given: dict[str, Any] = {k: v for k, v in batch.items() if k in ("text", "text_mask", "label", "map")}
            asked = {k: v.to(device)[index % len(v)] for k, v in given.items()}
        engine.begin(asked)
        tokens = engine.run(configs.build(settings.sampler), Noise(index + seed)).tokens
        images = tokenizer.decode(tokens)[:, 0]  # type: ignore[operator]
        if self.maps is None:
            return images
        return torch.stack([asked["map"][:, 0].to(images), images], 1).flatten(0, 1)  # each beside its map


class NextTokenNet(nn.Module):
    """tokens [B, N] -> (mean cross-entropy in nats a token, logs)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self._at: dict[Grid, Model] = {}  # the same weights at other grids; a dict, so they are no modules of this one

    def forward(
        self,
        tokens: Tensor,
        batch: Batch,
        drop: Tensor | None,
        drop_control: Tensor | None = None,
        grid: Grid | None = None,
        draws: Any = None,
        order: Tensor | None = None,
    ) -> tuple[Tensor, Logs]:
        model = self.model
        if grid is not None and grid != model.grid:
            if grid not in self._at:
                self._at[grid] = model.at(grid)
            model = self._at[grid]
        per_token = model.loss(tokens, batch, drop, drop_control, draws, order)  # [B, N]
        loss = per_token.mean()
        return loss, {"loss" if model.continuous else "nats_per_token": loss.detach()}
