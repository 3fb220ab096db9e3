"""Distilled Decoding 2, stage 2: a generator of all tokens at once, by conditional score distillation.

Source: arXiv 2510.21003, sections 3.2 to 3.4, appendix C. Generator G and critic psi (the paper's guidance network)
begin as the network of stage 1 (`objectives/dd2_tuning.py`). G turns noise into vectors q; psi learns the score of q_i
given those before it; the teacher's is a closed form (`nn/mixture.py`). G's loss compares the two scores at
x = (1 - t) q_i + t e, token by token, with the tokens before i given:

    sid    w <x_Phi - x_psi, (x_Phi - q_i) - alpha (x_Phi - x_psi)>, alpha = 1 in the paper
    dmd    the gradient of KL(G || teacher): q_i moves along w (x_Phi - x_psi)

x_Phi and x_psi are the posterior means of the clean token, w = 1 / mean_C |q_i - x_Phi|, at most 10. The gradient
reaches G through x and q_i, never through the tokens before i; so neither trunk of teacher and psi is differentiated.

`prefix` is what teacher and psi read of the tokens before i. `continuous`: G's vectors, as published, which takes a
teacher that reads vectors (`objectives/dd2_teacher.py`). `snapped`: the nearest codes, ours; the induction that proves
the paper's proposition 1 holds for the law of the snapped tokens, and any teacher will do.

A step is `critic_steps` turns of psi and one of G. Alignment (optional, as published): at step `align_at` G becomes its
own average and rests for `align_steps` steps, in which psi alone learns; afterwards psi has `critic_steps_after` turns.

Not published, so ours: w, the law of t, how many noises each token gets in psi's turns (the head's `repeats`), clipping
and weight decay. w is that of SiD's code (Zhou et al. 2024, arXiv 2404.04057), where the mean is over an image, never
small. Over the few channels of a token that lies near its code it is, so w has a bound: without one, errors of psi at
small t outweigh everything else, and the teacher's own tokens are no fixed point.

With alpha = 1 the value of the loss is 0 wherever psi is exact, so it is no measure of progress; `gap` and the held-out
values are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen.checks import Natural, Positive, Scale, Share, Weight
from visgen.config import UserError
from visgen.data import Batch
from visgen.decode.noise import Noise
from visgen.decode.points import Points
from visgen.model import Model, ModelConfig
from visgen.nn.keyed import Rng, normal
from visgen.nn.mixture import denoise
from visgen.objectives import Logs
from visgen.objectives._dd2 import check_form, draws, model_config, predicted
from visgen.objectives._distilled import (
    Distillation,
    PreviewConfig,
    TeacherConfig,
    asked,
    check_start,
    features,
    rows,
)
from visgen.samplers._teacher import Teacher, noise_of

NEAR = 0.1  # least mean distance that the weight of the loss divides by; codes have unit variance
LEAST = -20.0  # log-probability of a token that the teacher excludes, where surprise is reported


@dataclass(frozen=True)
class Config(TeacherConfig):
    """Stage 2 of Distilled Decoding 2.

    Attributes:
        teacher, precision, captured: as of every distillation (`_distilled.TeacherConfig`); `precision` is also that of
            the passes that nothing is learned from.
        model: generator and critic, as of the stage before but for `backbone.start`.
        start: run directory of that stage.
        divergence, alpha: sid, or dmd, which has no alpha.
        prefix: what teacher and critic read of earlier tokens.
        critic_steps, critic_lr_scale: turns of the critic in a step, and its learning rate over the generator's.
        align_at, align_steps, critic_steps_after: alignment; none where align_steps is 0.
        times: between which t lies, of both losses.
        preview: images for the logger.
    """

    model: ModelConfig = field(default_factory=model_config)
    start: Path | None = None
    divergence: Literal["sid", "dmd"] = "sid"
    alpha: Weight = 1.0
    prefix: Literal["continuous", "snapped"] = "snapped"
    critic_steps: Positive = 5
    critic_lr_scale: Scale = 2.0
    align_at: Natural = 0
    align_steps: Natural = 0
    critic_steps_after: Positive = 2
    times: tuple[Share, Share] = (0.04, 0.98)
    preview: PreviewConfig = field(default_factory=PreviewConfig)


class DD2(Distillation):
    """`nets["critic"]` returns the squared error of the velocity of G's tokens, `nets["student"]` the loss of G."""

    needs_laws = True
    held_out_values = ("nats_per_token", "teacher_entropy", "distance")

    def __init__(self, config: Config) -> None:
        model, critic = Model(config.model), Model(config.model)
        check_form(model, config.times, "dd2")
        super().__init__(config, model)
        self.nets = {"student": GeneratorNet(model), "critic": CriticNet(critic)}
        self.optim_overrides = {"critic": {"lr_scale": config.critic_lr_scale}}

    def start(self, model: Any, teacher: Teacher) -> None:
        if self.config.prefix == "continuous" and getattr(teacher.model.backbone, "codes", None) is None:
            raise UserError(
                f"objective.prefix is continuous, but objective.teacher {self.config.teacher} reads codes by a table; "
                "make one that reads vectors by objective dd2_teacher, or set prefix to snapped"
            )
        found = check_start(self.config.start, model, teacher, "dd2_tuning")
        for net in self.nets.values():
            net.model.load_state_dict(found.state_dict())  # type: ignore[union-attr]

    def turns(self, step: int) -> list[str]:
        config = self.config
        after = config.align_at + config.align_steps
        if not config.align_steps or step < config.align_at:
            return ["critic"] * config.critic_steps + ["student"]
        critic = ["critic"] * (config.critic_steps if step < after else config.critic_steps_after)
        return critic if step < after else [*critic, "student"]

    @torch.no_grad()
    def begin_step(self, step: int, average: nn.Module) -> None:
        if self.config.align_steps and step == self.config.align_at:
            for own, mean in zip(self.exported().parameters(), average.parameters(), strict=True):
                own.copy_(mean)

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        batch, model = self.mapped(batch, rng), self.exported()
        device, channels = model.parameter_device(), model.config.backbone.channels
        noise = normal((rows(batch), model.tokens, channels), rng, device)
        if name == "student":
            return nets[name](noise, asked(batch), lambda q: self.judged(q, batch, rng))
        with torch.no_grad(), self._quick(device):
            q = generated(model, noise, asked(batch))
            given, _ = self._given(q)
        critic: Any = self.nets["critic"].model
        t, e = draws(critic.head, q, critic.head.config.repeats, self.config.times, rng)
        return nets[name](q, given, t, e, asked(batch))

    def judged(self, q: Tensor, batch: Batch, rng: Rng) -> tuple[Tensor, Logs]:
        """The loss of the generator's tokens q [B, N, C]; its gradient reaches q alone."""
        model: Any = self.exported()
        critic: Any = self.nets["critic"].model
        codes = model.backbone.codes
        (t,), (e,) = draws(model.head, q, 1, self.config.times, rng)
        x = (1 - t) * q + t * e
        with _fixed(critic):
            with torch.no_grad():
                given, tokens = self._given(q.detach())
                logp = self.laws(batch, tokens if self.config.prefix == "snapped" else given)
                h = features(critic, given, asked(batch))
            x_psi = x - t * predicted(critic, x[None], t[None], h)[0]
        x_phi = denoise(x.flatten(0, 1), t.flatten(0, 1), logp.flatten(0, 1), codes).view_as(x)
        weight = 1 / (q - x_phi).detach().abs().mean(-1, keepdim=True).clamp(min=NEAR)
        gap = x_phi - x_psi
        if self.config.divergence == "sid":
            loss = (weight * gap * ((x_phi - q) - self.config.alpha * gap)).sum(-1).mean()
        else:
            loss = -((weight * gap).detach() * q).sum(-1).mean()
        far = (q.detach() - codes[tokens]).square().sum(-1).sqrt().mean()
        return loss, {"gap": gap.detach().square().sum(-1).mean(), "distance": far}

    def _given(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """What is read of tokens q [B, N, C], and the ids [B, N] of the nearest codes."""
        codes = self.exported().backbone.codes
        tokens = Points(q.float(), codes).likeliest()
        return (codes[tokens] if self.config.prefix == "snapped" else q.detach()), tokens

    def _quick(self, device: torch.device) -> Any:
        """The precision of passes without a gradient that lie outside a net's forward."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    def held_out(self, model: Any, batch: Batch) -> Logs:
        """Of one step's tokens: their surprise under the teacher, its entropy at the same places (equal for a perfect
        student), and how far the vectors lie from the codes."""
        batch = self.mapped(batch)
        seeds = self.seeds(batch)
        index = torch.arange(model.tokens, device=seeds.device).expand(len(seeds), -1)
        q = generated(model, noise_of(Noise(seeds), index, model.config.backbone.channels), asked(batch))
        tokens = Points(q, model.backbone.codes).likeliest()
        logp = self.laws(batch, tokens).log_softmax(-1).clamp(min=LEAST)
        return {
            "nats_per_token": -logp.gather(-1, tokens.unsqueeze(-1)).mean(),
            "teacher_entropy": -(logp.exp() * logp).sum(-1).mean(),
            "distance": (q - model.backbone.codes[tokens]).square().sum(-1).sqrt().mean(),
        }


class GeneratorNet(nn.Module):
    """Noise [B, N, C] -> (loss, logs) of the tokens, as `judge` says."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, noise: Tensor, batch: dict[str, Any], judge: Callable[[Tensor], tuple[Tensor, Logs]]
    ) -> tuple[Tensor, Logs]:
        return judge(generated(self.model, noise, batch))


class CriticNet(nn.Module):
    """Tokens q and what is read of them [B, N, C], times [R, B, N, 1], noise [R, B, N, C] -> (loss, logs)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, q: Tensor, given: Tensor, t: Tensor, e: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Logs]:
        found = predicted(self.model, (1 - t) * q + t * e, t, features(self.model, given, batch))
        return (found - (e - q)).square().mean(), {}


def generated(model: Any, noise: Tensor, batch: dict[str, Any]) -> Tensor:
    """The generator's tokens [B, N, C] float32."""
    return model.backbone.draw(noise, features(model, noise, batch), model.head)


@contextlib.contextmanager
def _fixed(module: nn.Module) -> Iterator[None]:
    """Within it gradients pass through the module, but none is its own."""
    wanted = [p.requires_grad for p in module.parameters()]
    module.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, flag in zip(module.parameters(), wanted, strict=True):
            parameter.requires_grad_(flag)
