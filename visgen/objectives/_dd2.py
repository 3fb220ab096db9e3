"""What two stages of Distilled Decoding 2 share: times and noise, predicted and exact velocities, the model's form."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from visgen import config as configs
from visgen.config import UserError, plugin_config
from visgen.model import ModelConfig
from visgen.nn.diffusion import TIMES
from visgen.nn.keyed import Rng, normal

Times = tuple[float, float]


def model_config() -> ModelConfig:
    """A student of a LlamaGen-B teacher."""
    return ModelConfig(
        backbone=plugin_config("visgen.backbones", "flow_step"),
        condition=plugin_config("visgen.conditions", "label", dropout=0.0),
        head=plugin_config("visgen.heads", "diffusion", layers=3, predicts="velocity"),
    )


def check_form(model: Any, times: Times, objective: str) -> None:
    """Refuses another backbone, and times that are no span within (0, 1]."""
    if not model.backbone.snaps:
        kind = configs.kind_of(model.config.backbone)
        raise UserError(f"objective {objective} trains backbone flow_step, objective.model.backbone is {kind}; set it")
    if not 0 < times[0] < times[1] <= 1:
        raise UserError(f"objective.times {times} must satisfy 0 < first < last <= 1")


def draws(head: Any, clean: Tensor, count: int, times: Times, rng: Rng) -> tuple[Tensor, Tensor]:
    """Times [R, B, N, 1] within `times` and noise [R, B, N, C] for tokens [B, N, C], by the head's law of times."""
    shape = (count, *clean.shape[:-1], 1)
    share = head.path.draw(shape, rng, head.config.times, clean.device, axis=1) / TIMES
    noise = normal((count, *clean.shape), rng, clean.device, axis=1)
    return times[0] + (times[1] - times[0]) * share, noise


def predicted(model: Any, x: Tensor, t: Tensor, h: Tensor) -> Tensor:
    """The velocity [R, B, N, C] float32 of x at t [R, B, N, 1] given h [B, N, D]."""
    head = model.head
    return head.predict(x, head.about(t.squeeze(-1) * TIMES), head.condition(h))[0]
