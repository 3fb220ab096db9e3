"""Where the tokens of a generative model's objective come from: cached ones, or a frozen tokenizer and pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.checks import Positive
from visgen.config import UserError
from visgen.data import Batch, Data
from visgen.data._classes import same_classes
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.nn.diffusion import TIMES
from visgen.objectives import Logs

BANDS = 4  # of time, each with an error of its own in the log


@dataclass(frozen=True)
class Previewed:
    """Images, or frames of clips, drawn during training.

    Attributes:
        images: how many; labels go round the classes, texts round those of the batch.
        guidance, sampler: how they are drawn.
    """

    images: Positive = 16
    guidance: Guidance = field(default_factory=Guidance)


def read_tokenizer(path: Path | None, model: Model, data: Data) -> dict[str, nn.Module]:
    """{"tokenizer": the frozen one at `path`}, or {} where there is none, after checking that it, the data and the
    model fit.

    Raises:
        UserError: naming what does not fit and the remedy.
    """
    check_labels(model, data)
    check_text(model, data)
    cached = hasattr(data, "grid")
    if cached:
        check_cache(model, data)
    if path is None:
        if not cached:
            raise UserError(
                f"data.kind '{configs.kind_of(data.config)}' gives pixels: set objective.tokenizer to the run "
                "directory of a tokenizer, or cache its tokens with `python -m visgen.encode`"
            )
        return {}
    from visgen.checkpoint import load_tokenizer, tokenizer_hash  # reads files, which building the nets does not need
    from visgen.encode import preflight

    try:
        tokenizer: Any = load_tokenizer(path)
    except UserError as error:
        raise UserError(f"objective.tokenizer: {error}") from None
    model.check_tokenizer(tokenizer, f"objective.tokenizer {path}")
    if cached:
        data.check(tokenizer_hash(tokenizer))  # type: ignore[attr-defined]
        preflight(tokenizer, data)  # type: ignore[arg-type]
        return {"tokenizer": tokenizer}
    if tuple(data.image_size) != tuple(tokenizer.image_size):
        raise UserError(
            f"the data gives images of {data.image_size} px, {path} was made for {tokenizer.image_size}; set "
            "data.image_size, or use a tokenizer of that size"
        )
    if data.frames * tokenizer.grid[0] != model.grid[0]:
        raise UserError(
            f"the data gives {data.frames} frames a sample, objective.model.grid {tuple(model.grid)} has "
            f"{model.grid[0]}; set one to the other"
        )
    return {"tokenizer": tokenizer}


def tokens_of(batch: Batch, frozen: dict[str, nn.Module]) -> Tensor:
    """Cached tokens [B, N] or [B, N, C], or those of the batch's pixels."""
    if "tokens" in batch:
        return batch["tokens"]
    with torch.no_grad(), torch.autocast(batch["pixels"].device.type, enabled=False):
        return frozen["tokenizer"].encode(batch["pixels"])  # type: ignore[operator]


def by_band(errors: Tensor, time: Tensor) -> Logs:
    """Mean error in each quarter of time; both of one shape, time from 0 to `TIMES`."""
    band, logs = (time / TIMES * BANDS).long().clamp(max=BANDS - 1), {}
    for i in range(BANDS):
        share = (band == i).float()
        logs[f"mse_t{i * TIMES // BANDS}"] = (errors * share).sum() / share.sum().clamp(min=1)
    return logs


def drawn(model: Any, tokenizer: Any, settings: Any, seed: int) -> Tensor | None:
    """Images, or frames of clips, of labels that go round the classes; None without a tokenizer.

    Args:
        settings: how many `images`, and their `guidance` and `sampler`.
    """
    if tokenizer is None:
        return None
    index = torch.arange(settings.images, device=next(model.parameters()).device)
    engine = Engine(model, settings.guidance)
    engine.begin({"label": index % model.config.condition.classes})
    tokens = engine.run(configs.build(settings.sampler), Noise(index + seed)).tokens
    return tokenizer.decode(tokens).flatten(0, 1)


def check_preview(model: Any, settings: Any) -> None:
    """Raises `UserError` where a model of classes cannot be previewed by these settings."""
    if configs.kind_of(model.config.condition) != "label" or model.controls is not None:
        return
    rules = (getattr(settings, "guidance", Guidance()), getattr(settings, "warp", Warp()))
    training = model.training
    model.eval()  # dropout would draw random numbers
    try:
        Engine(model, *rules).rehearse(configs.build(settings.sampler))
    except UserError as error:
        raise UserError(f"objective.preview does not fit: {error}") from None
    finally:
        model.train(training)


def check_labels(model: Model, data: Data) -> None:
    """Raises `UserError` where the data and the model have unequal numbers of classes."""
    classes = getattr(model.config.condition, "classes", None)
    if classes is not None and len(data.classes) != classes:
        raise UserError(
            f"the data has {len(data.classes)} classes, objective.model.condition.classes is {classes}; "
            f"pass --objective.model.condition.classes {len(data.classes)}"
        )


def check_names(model: Model, data: Data, path: Path, where: str) -> None:
    """Refuse class names that are not those of the model at `path`, which `model` starts from or learns from.

    Raises:
        UserError: a label would mean another class than there.
    """
    from visgen.checkpoint import classes_of, read_metadata
    from visgen.run_files import WEIGHTS, find_step

    if hasattr(model.config.condition, "classes"):
        weights = path if path.is_file() else find_step(path) / WEIGHTS
        remedy = "give the data those names, in that order"
        same_classes(classes_of(read_metadata(weights), weights), data.classes, where, remedy)


def check_text(model: Model, data: Data) -> None:
    """Raises `UserError` where the model reads text features that the data do not have, or others."""
    asked: Any = model.config.condition
    if configs.kind_of(asked) != "text":
        return
    found = getattr(data, "features", None)
    if found is None:
        raise UserError(
            f"objective.model.condition reads texts, data.kind '{configs.kind_of(data.config)}' gives no features of "
            "any; use data.kind captions with data.features, which `python -m visgen.captions` writes"
        )
    for name in ("channels", "tokens", "encoder", "clean"):
        mine, its = getattr(asked, name), getattr(found.index, name)
        if mine != its:
            raise UserError(
                f"data.features {found.folder} were made with {name} {its}, objective.model.condition.{name} is "
                f"{mine}; set it to that, or encode the captions again"
            )


def check_cache(model: Model, data: Any) -> None:
    """Refuses cached tokens that are not the model's."""
    name = "channels" if model.continuous else "vocab"
    mine, its = ((tuple(of.grid), getattr(of, name)) for of in (model.config, data))
    if mine != its:
        raise UserError(
            f"the cached tokens have grid {its[0]} and {name} {its[1]}, objective.model has {mine[0]} and {mine[1]}; "
            f"set objective.model.grid and .{name} to the cache's"
        )
    try:
        names = data.source().classes if hasattr(data, "source") else []
    except UserError:  # the pictures need not be here
        return
    if names:
        same_classes(data.classes, names, f"code cache {data.folder}", "name its source's classes so, or encode again")
