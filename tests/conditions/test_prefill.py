"""Control as a prefix: its slots stand at their cells, and the decode that caches them equals the full pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.model import Model
from visgen.nn.control import Hint

GRID = (1, 4, 4)


@pytest.fixture
def model(make_model: Callable[..., Model], small: Callable[..., Any]) -> Model:
    control = small("controls", "canny")
    return make_model(condition={"kind": "prefill", "control": control, "grid": GRID, "classes": 3})


def batch() -> dict[str, Any]:
    maps = torch.rand(2, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {"label": torch.tensor([0, 2]), "map": maps}


def test_its_slots_stand_at_their_cells(model: Model) -> None:
    layout = model.backbone.layout
    assert layout.prefix == 17 and torch.equal(layout.coords[:16], layout.coords[17:])
    assert layout.coords[16].tolist() == [-1, -1, -1] and layout.group[:17].tolist() == list(range(-17, 0))
    assert model.controls is model.config.condition.control and model.control is None


def test_decoding_equals_the_full_pass_and_depends_on_the_map(model: Model) -> None:
    tokens = torch.randint(16, (2, 16), generator=torch.Generator().manual_seed(3))
    given = model.condition(batch())
    laws = [
        model.head.output(model.backbone(tokens[:, :-1], None, cond=cond)[:, 16:])
        for cond in (model.condition.null(given), given)
    ]
    assert not torch.allclose(*laws, atol=0.1)
    engine = Engine(model, Guidance(2.0))
    with torch.inference_mode():
        engine.begin(batch())
        found = engine.forward(tokens, torch.arange(16).expand(2, -1)).logits
    assert torch.allclose(found, laws[0] + 2 * (laws[1] - laws[0]), atol=2e-4)


def test_what_a_prefix_cannot_follow_is_refused(model: Model) -> None:
    with pytest.raises(UserError, match="holds no control `map`"):
        model.condition({"label": torch.tensor([0])})
    for hints in (
        [Hint(batch()["map"], 0.5)],
        [Hint(batch()["map"])] * 2,
        [Hint(batch()["map"], region=torch.ones(1, 16))],
    ):
        with pytest.raises(UserError, match="reads one map, at strength 1"):
            model.condition({"label": torch.tensor([0, 1]), "hints": hints})
