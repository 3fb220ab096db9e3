"""Every sampler that calls itself lossless, in every setting that the proof must reach.

`family` lists the samplers, `world` makes what they are asked to draw, and `cases` says which of them meet. All
samplers run on plain and filtered tables; `SHORT`, one of every drafting, runs in all other worlds. A sampler that is
lossless (`Sampler.lossless`) needs a case for every value that its settings can name: `uncovered`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.config import UserError, kind_of, kinds, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.exactness import TableEngine, World, lengths, table
from visgen.model import Model, ModelConfig
from visgen.nn.categorical import Categorical

DRAFTINGS, INITS = ("fresh", "coupled", "gumbel", "pure_gumbel"), ("uniform", "left", "up", "repeat")
SHORT = (("fresh", "left"), ("coupled", "up"), ("gumbel", "repeat"), ("pure_gumbel", "uniform"))
TABLES = ("plain", "filtered", "mixed", "known", "refill")
REAL = ("transformer", "guided", "control", "bf16")
FULL = ("plain", "filtered")
FILTERS = (Guidance(2.0, schedule="linear"), Warp(0.9, top_k=2, top_p=0.95))
INTERVAL = (3.0, (0.3, 0.7), "cosine")  # of 4 tokens it guides the second and the third
GRID = (1, 2, 2)  # of real models
REFILLED = 1 << 10  # rows that are refilled


# ------------------------------------------------------------------------------------------------------ the samplers


def family() -> list[Any]:
    """Configs of all lossless samplers."""

    def config(kind: str, **values: Any) -> Any:
        return plugin_config("visgen.samplers", kind, **values)

    return [
        config("ar"),
        *(config("sjd", drafting=d, init=i, window=3) for d in DRAFTINGS for i in INITS),
        config("sjd", drafting="coupled", window=99),
        *(config("sjd", drafting=d, window="auto") for d in DRAFTINGS),
        *(config("speculative", length=n, threshold=t) for n, t in ((1, 0.7), (2, 1.0), (4, 0.5))),
        *(config("cspec", length=n) for n in (1, 3)),
        config("cspec", mode="head_time", length=8),
    ]


def cases(family: Iterable[Any], title: str, alone: bool = False) -> list[Any]:
    """Those of these samplers that draw in the world of this title; one that stands alone draws wherever it can."""
    found = [c for c in family if not automatic(c)]
    if title == "refill":
        found = [c for c in found if configs.implementation(c).ragged]  # type: ignore[attr-defined]
    return found if alone or title in FULL else [c for c in found if _short(c)]


def _short(config: Any) -> bool:
    if kind_of(config) == "sjd":
        return (config.drafting, config.init) in SHORT
    return kind_of(config) != "speculative" or config.length == 2


def automatic(config: Any) -> bool:
    """Whether its window is chosen by a trial, which needs a clock and so a check of its own."""
    return getattr(config, "window", None) == "auto"


def name(config: Any) -> str:
    """A config in few words."""
    return " ".join([kind_of(config), *(str(v) for v in vars(config).values() if v is not None)])


def uncovered(family: Iterable[Any]) -> list[str]:
    """Settings that call themselves lossless and have no case. Looked at are, of every kind, the default, each value
    that a field names, and each pair of values of two fields that are nothing but names."""
    found, missing = list(family), []
    for kind in kinds("visgen.samplers"):
        default = plugin_config("visgen.samplers", kind)
        have = [c for c in found if kind_of(c) == kind]
        for values in ({}, *_named(type(default))):
            if _lossless(dataclasses.replace(default, **values)) and not any(_has(c, values) for c in have):
                missing.append(f"{kind} {values}" if values else kind)
    return missing


def _named(config: type) -> Iterator[dict[str, Any]]:
    """Every value that a field can name, and every pair of such values of two fields."""
    hints = get_type_hints(config)
    names = {field: [v for v in _values(hints[field]) if isinstance(v, str)] for field in hints}
    for field, values in names.items():
        yield from ({field: value} for value in values)
    pure = [field for field in names if get_origin(hints[field]) is Literal]
    for one, other in itertools.combinations(pure, 2):
        yield from ({one: a, other: b} for a in names[one] for b in names[other])


def _values(hint: Any) -> Iterator[Any]:
    """What the Literals inside a type allow."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _values(part)


def _has(config: Any, values: dict[str, Any]) -> bool:
    return all(getattr(config, field) == value for field, value in values.items())


def _lossless(config: Any) -> bool:
    """Whether this setting calls itself lossless; one that cannot be built does not."""
    try:
        return bool(configs.build(config).lossless)
    except UserError:
        return False


# -------------------------------------------------------------------------------------------------------- the worlds


def world(title: str, law: Any = Categorical) -> World:
    """What the samplers are asked to draw.

    - plain: one table of probabilities.
    - filtered: one whose guidance (linear), temperature, top-k and top-p are in the table.
    - mixed: images of three classes in one batch.
    - known: tokens that are given, others in every second image.
    - refill: more images than rows, of three classes; a row that is complete goes on with the next one.
    - transformer: a real model, its cache, guidance and filters.
    - guided: a real model under an interval and a cosine schedule, images of three classes in one batch.
    - control: a real model under two control maps and a guidance scale of the control's own.
    - bf16: a real model in bfloat16.

    Args:
        law: class of the laws of tables.
    """
    return _tables(title, law) if title in TABLES else _real(title)


def _tables(title: str, law: Any) -> World:
    null, given, other = (table(3, 6, seed, sharpness) for seed, sharpness in ((0, 1.2), (1, 1.2), (2, 0.5)))

    def made(grid: tuple[int, int, int], logits: Tensor, draft: Tensor) -> TableEngine:
        return TableEngine(logits, grid, TableEngine(draft, grid, law=law), law)

    if title == "filtered":
        scale = FILTERS[0].weights(lengths(3, 6), 6).unsqueeze(-1)  # [2, nodes, 1]
        guided = scale[0] * null + scale[1] * given
        return World(made((1, 3, 2), FILTERS[1](guided), FILTERS[1](guided + other)))
    if title == "plain":
        return World(made((1, 2, 3), null, null + other))
    classes = torch.stack([null, given, 3 * other])
    engine = made((1, 2, 3), classes, classes + other)
    if title == "known":
        mask = torch.tensor([[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1]]).bool()
        return World(engine, 2, known=(torch.tensor([[2, 0, 0, 1, 0, 0], [0, 0, 1, 0, 2, 0]]), mask))
    return World(engine, 3, rows=REFILLED if title == "refill" else None)


def _real(title: str) -> World:
    if title == "transformer":
        return World(transformer(GRID, 4, *FILTERS), batch=classes)
    if title == "guided":
        return World(transformer(GRID, 4, Guidance(*INTERVAL)), 3)  # type: ignore[arg-type]
    if title == "bf16":
        return World(transformer(GRID, 4, FILTERS[0], dtype=torch.bfloat16), batch=classes)
    maps = torch.rand(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    engine = transformer(GRID, 4, Guidance(2.0, control=1.5), control=True)
    return World(engine, 2, lambda which: {"label": torch.ones_like(which), "map": maps[which]})


def transformer(
    grid: tuple[int, int, int],
    vocab: int,
    guidance: Guidance | None = None,
    warp: Warp | None = None,
    control: bool = False,
    dtype: torch.dtype = torch.float32,
    engine: Any = Engine,
    device: str = "cpu",
) -> Engine:
    """The real engine of a random transformer of 3 classes, with a smaller one as its draft model."""

    def model(width: int, seed: int, layers: int = 1, control: bool = False) -> Model:
        torch.manual_seed(seed)
        backbone = plugin_config("visgen.backbones", "ar", layers=layers, heads=2, width=width, mlp_multiple_of=8)
        condition = plugin_config("visgen.conditions", "label", classes=3)
        maps = None
        if control:
            maps = plugin_config("visgen.controls", "canny")
            small = dataclasses.replace(maps.encoder, width=16, layers=1, heads=2, patch=2)
            maps = dataclasses.replace(maps, encoder=small)
        made = Model(ModelConfig(grid=grid, vocab=vocab, backbone=backbone, condition=condition, control=maps)).eval()
        for parameter in made.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
        return made.requires_grad_(False).to(device, dtype)

    made = engine(model(16, 0, 3 if control else 1, control), guidance, warp)
    made.once(("draft", None), lambda: engine(model(8, 1), guidance, warp))
    return made


def classes(which: Tensor) -> dict[str, Any]:
    """A batch of images [B], all of class 1."""
    return {"label": torch.ones_like(which)}
