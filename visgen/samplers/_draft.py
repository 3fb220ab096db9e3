"""The draft model of a speculative sampler: read, and refused where it is no draft of the model that it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visgen.config import UserError, kind_of
from visgen.decode.engine import Engine


def load_draft(path: Path | None, engine: Engine) -> Engine:
    """An engine of the draft model, for the same tokens, guidance and filters.

    Raises:
        UserError: no such model, a one-step student, or one of other tokens, another condition or without a null class.
    """
    from visgen.checkpoint import load_model, read_metadata
    from visgen.run_files import WEIGHTS, find_step

    if path is None or str(path) == ".":  # "." is what an empty flag becomes
        raise UserError("sampler.draft is needed: the run directory of a smaller model of the same tokenizer")
    try:
        step = find_step(path)
    except UserError as error:
        raise UserError(f"sampler.draft: {error}") from None
    model, its = load_model(step), (read_metadata(step / WEIGHTS).get("tokenizer") or "")[:12] or None
    wanted: dict[str, Any] = {"grid": tuple(engine.grid), "tokenizer": engine.tokenizer}
    given: dict[str, Any] = {"grid": tuple(model.grid), "tokenizer": its}
    if _resizes(model, its, engine):
        given["grid"] = wanted["grid"]
    name = "channels" if engine.continuous else "vocab"
    wanted[name], given[name] = getattr(engine.model.config, name), getattr(model.config, name)
    for name, value in given.items():
        unknown = name == "tokenizer" and None in (value, wanted[name])  # older files name no tokenizer
        if value != wanted[name] and not unknown:
            raise UserError(
                f"sampler.draft {path}: its {name} is {value}, the model's is {wanted[name]}; "
                "pass a draft model that was trained on the same tokenizer"
            )
    if model.backbone.taught is not None:
        raise UserError(
            f"sampler.draft {path} is a student, which draws all tokens at once and knows no law of one after another; "
            "pass an autoregressive model"
        )
    mine, target = model.config.condition, engine.model.config.condition
    if _told(mine) != _told(target):
        raise UserError(
            f"sampler.draft {path}: its condition is {_told(mine)}, the model's is {_told(target)}; "
            "pass a draft model that is told the same"
        )
    if engine.guidance.branches > 1 and mine.dropout == 0:
        raise UserError(f"sampler.draft {path} was trained without a null class; set guidance.scale to 1")
    model = model.at(engine.model.grid).to(engine.device, engine.dtype).eval().requires_grad_(False)
    return type(engine)(model, engine.guidance, engine.warp)  # a captured one keeps its batches in the same buffers


def _resizes(model: Any, tokenizer: str | None, engine: Engine) -> bool:
    """Whether a draft model of another grid may draft here as the model itself does at a size of its own."""
    most = getattr(model.config.backbone, "rope_columns", None)
    return (
        tokenizer is not None
        and tokenizer == engine.tokenizer
        and model.grid[0] == engine.grid[0]
        and (most is None or engine.tokens <= most**2)
    )


def check_chains(draft: Engine, engine: Engine, path: Path | None) -> None:
    """Refuses a draft model of vectors whose denoising is another chain than the model's.

    Raises:
        UserError: naming what differs: the order of tokens, the path of the head, or the guidance.
    """
    backbones, heads = ([part(e.model.config) for e in (draft, engine)] for part in (_backbone, _head))
    for name, (its, mine), remedy in (
        ("backbone", backbones, "tokens must be drawn in the same order"),
        ("head", heads, "both must walk the same path from noise to tokens"),
        ("guidance", [draft.guidance, engine.guidance], "the law of a draft must be guided as the one that tests it"),
    ):
        if its != mine:
            raise UserError(f"sampler.draft {path}: its {name} is {its}, the model's is {mine}; {remedy}")


def _backbone(config: Any) -> str:
    order = getattr(config.backbone, "order", None)
    return kind_of(config.backbone) + (f" (order {order})" if order else "")


def _head(config: Any) -> str:
    head = config.head
    if not hasattr(head, "predicts"):
        return kind_of(head)
    schedule = f", schedule {head.schedule}" if head.predicts == "epsilon" and hasattr(head, "schedule") else ""
    return f"{kind_of(head)} (predicts {head.predicts}{schedule})"


def _told(condition: Any) -> str:
    """A condition's settings, those of training alone left out."""
    settings = {name: value for name, value in vars(condition).items() if name not in ("dropout", "views")}
    kind = type(condition).__module__.rpartition(".")[2]
    return f"{kind} ({', '.join(f'{name} {value}' for name, value in settings.items())})"
