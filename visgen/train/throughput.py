"""How fast a run trains, against what its devices could do.

MFU, the model's share of the peak rate (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): the operations that a
step needs, recomputed ones and masked-out ones left out, over what the devices could do meanwhile. A multiplication
with its addition are two; the backward pass takes twice the forward one:

    operations of an image = 6 (weights of the trunk x slots + weights of the head x what it is asked)
                             + 12 x width x layers x (pairs of slots that see each other)

Weights are those of matrix products: tables that are looked up, norms and biases do not count.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from visgen import config as configs
from visgen.model import Model
from visgen.objectives import Objective
from visgen.speed import pass_work, products_of
from visgen.speed_blocks import training_work

PEAKS = {  # dense bf16, 10^12 operations a second, as the maker publishes them; the first name that fits
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H20": 148.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.0,
}
STEPS = 1000  # of masked prediction, over which its sizes are averaged


def operations(objective: Objective) -> float | None:
    """Operations that training on one image takes; None of what has no such formula here: tokenizers, distillations,
    and models under control."""
    model = objective.exported()
    if not isinstance(model, Model) or model.controls is not None:
        return None
    kind, name = configs.kind_of(objective.config), configs.kind_of(model.config.backbone)  # type: ignore[attr-defined]
    if kind == "acdit":
        return float(training_work(model, 1))
    if kind == "next_token" and name == "ar":
        return _causal(model)
    if kind == "masked" and name == "mar":
        return _masked(objective, model)
    return None


def _causal(model: Any) -> float:
    again = getattr(model.head.config, "repeats", 1) - 1  # of the head, in training alone
    return 3 * (pass_work(model) + 2 * products_of(model.head) * model.tokens * again)


def _masked(objective: Any, model: Any) -> float:
    """Mean over steps, whose sizes differ."""
    config, backbone, total = model.config.backbone, model.backbone, 0.0
    encoder = products_of(backbone.encoder) + products_of(backbone.bridge)
    decoder, head = products_of(backbone.decoder), products_of(model.head)
    for step in range(STEPS):
        hidden = objective.hidden(step)
        known = config.buffer + model.tokens - hidden
        slots = config.buffer + model.tokens
        products = encoder * known + decoder * slots + head * hidden * model.head.config.repeats
        total += 6 * products + 12 * config.width * config.layers * (known**2 + slots**2)
    return total / STEPS


def peak(device: torch.device, stated: float) -> float | None:
    """Operations a second that MFU is a share of: what is `stated` in 10^12, or the published rate; None: unknown."""
    if stated:
        return stated * 1e12
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((rate * 1e12 for part, rate in PEAKS.items() if part in name), None)


class Clock:
    """Time of the training itself: what happens while `paused` does not count."""

    def __init__(self, step: int) -> None:
        self.step, self.start, self.waited = step, time.monotonic(), 0.0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.start += time.monotonic() - began

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it this process waits for data. A GPU works meanwhile, so it may lose less."""
        began = time.monotonic()
        yield
        self.waited += time.monotonic() - began

    def share(self) -> float:
        """Of the time since the last lap, what was spent waiting."""
        return self.waited / max(time.monotonic() - self.start, 1e-9)

    def lap(self, step: int) -> float:
        """Steps a second since the last lap, which ends with `step` steps done."""
        rate = (step - self.step) / (time.monotonic() - self.start)
        self.step, self.start, self.waited = step, time.monotonic(), 0.0
        return rate


def speeds(rate: float, batch: int, objective: Objective, work: float | None, most: float | None) -> dict[str, float]:
    """Images, tokens and the share of the peak.

    Args:
        rate: steps a second.
        work: of an image, `operations`.
        most: `peak` of all devices together.
    """
    model, found = objective.exported(), {"images_per_s": rate * batch}
    if isinstance(model, Model):
        found["tokens_per_s"] = rate * batch * model.tokens
    if work is not None and most is not None:
        found["mfu"] = rate * batch * work / most
    return found
