"""Diffusion head: the law of a continuous token as a small diffusion model that reads the token's hidden state.

Source: MAR's DiffLoss (Li et al. 2024, arXiv 2406.11838, section 3.2): an MLP with adaptive layer norm, cosine
schedule, noise prediction and learned variance of improved DDPM (Nichol & Dhariwal 2021, arXiv 2102.09672).
`predicts: velocity` trains the same network on the straight path instead. Deviation: at time 0 the variance is trained
by the same divergence as elsewhere, where the released code takes a likelihood of 8-bit pixels, which latents are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.checks import Depth, Positive
from visgen.heads import Head
from visgen.nn.ancestral import Variance, chain, divergence
from visgen.nn.diffusion import TIMES, Path, Predicts, Schedule, sinusoids
from visgen.nn.keyed import Rng, normal

if TYPE_CHECKING:
    from visgen.heads._diffusion_fused import FusedDenoised

FREQUENCIES = 256  # of the embedding of time


@dataclass(frozen=True)
class Config:
    """Diffusion head; the defaults are MAR-B's.

    Attributes:
        layers, width: residual blocks and their width.
        predicts: epsilon, on the variance-preserving path of `schedule`, as published; velocity, on the straight path.
        schedule: betas of the former, by the names of `diffusers`; squaredcos_cap_v2 is the cosine one.
        variance: of a model of noise: learned_range, as published, or fixed at beta (large) or the posterior's (small).
        repeats: times and noises that training draws for each token.
        times: how training draws times: uniform, as published, or logit_normal, more in the middle.
    """

    layers: Depth = 6
    width: Positive = 1024
    predicts: Predicts = "epsilon"
    schedule: Schedule = "squaredcos_cap_v2"
    variance: Variance = "learned_range"
    repeats: Positive = 4
    times: Literal["uniform", "logit_normal"] = "uniform"


class Draws(NamedTuple):
    """What a loss is an average over: R times and noises for each token."""

    time: Tensor  # [R, ...]
    noise: Tensor  # [R, ..., C]


class Errors(NamedTuple):
    """Of each draw [R, ...], float32: the squared error of the prediction, and the divergence of the variance in bits
    (zero where the variance is not learned); both are means over channels."""

    mse: Tensor
    vb: Tensor


class DiffusionHead(Head):
    """h [B, W, D] -> the law of tokens [B, W, C]. Body in the weights' type; input, output and all else in float32."""

    continuous = True
    no_decay = True  # as published

    def __init__(self, config: Config, width: int, vocab: int) -> None:
        super().__init__()
        self.config, self.channels = config, vocab
        self.path = Path(config.predicts, config.schedule)
        self.learned = config.predicts == "epsilon" and config.variance == "learned_range"
        self.time = nn.Sequential(
            nn.Linear(FREQUENCIES, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.condition = nn.Linear(width, config.width)
        self.input = nn.Linear(vocab, config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.output = nn.Linear(config.width, vocab * (2 if self.learned else 1))
        self.place = None if self.learned else float(config.variance == "fixed_large")  # of the log variance
        self._chain: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._init()

    def draws(self, shape: torch.Size, rng: Rng, device: torch.device) -> Draws:
        """For targets of `shape` [..., C]."""
        times = (self.config.repeats, *shape[:-1])
        time = self.path.draw(times, rng, self.config.times, device, axis=1)
        return Draws(time, normal((*times, shape[-1]), rng, device, axis=1))

    def loss(self, h: Tensor, target: Tensor, draws: Draws | None = None) -> Tensor:
        """Mean over draws [B, W], float32. Without draws they are the same at every call."""
        if draws is None:
            draws = self.draws(target.shape, torch.Generator(target.device).manual_seed(0), target.device)
        return sum(self.errors(h, target, draws)).mean(0)  # type: ignore[union-attr]

    def errors(self, h: Tensor, target: Tensor, draws: Draws) -> Errors:
        """Errors [R, ...] of hidden states [..., D] and targets [..., C], R for each."""
        target, each = target.float(), draws.time.unsqueeze(-1)
        noised = self.path.noised(target, draws.noise, each)
        found, share = self.predict(noised, self.about(draws.time), self.condition(h))
        error = found - self.path.target(target, draws.noise)
        mse = error.square().mean(-1)
        if share is None:
            return Errors(mse, torch.zeros_like(mse))
        scale, low, high = (part[draws.time.long()].unsqueeze(-1) for part in self._training(target.device))
        return Errors(mse, divergence(error.detach(), share, scale, low, high).mean(-1))

    def dist(self, h: Tensor, weights: Tensor) -> Denoised:
        """The guided law of tokens [B, W, C]."""
        return Denoised(self, self.condition(h), weights.unsqueeze(-1))

    def fused(self) -> Callable[[Tensor, Tensor], FusedDenoised]:
        from visgen.heads._diffusion_fused import FusedDenoised  # needs Triton

        return lambda h, weights: FusedDenoised(self, self.condition(h), weights.unsqueeze(-1))

    def about(self, time: Tensor) -> Tensor:
        """Embedding of times [...] -> [..., width]."""
        return self.time(sinusoids(time, FREQUENCIES).to(self.input.weight.dtype))

    def predict(self, x: Tensor, time: Tensor, given: Tensor) -> tuple[Tensor, Tensor | None]:
        """What is predicted of noised tokens x [..., C], and where their log variance lies, or None; float32.

        Args:
            time: from `about`, broadcast against `given`.
            given: self.condition(h), [..., width].
        """
        about = F.silu(time + given)
        with torch.autocast(x.device.type, enabled=False):
            y = F.linear(x.float(), self.input.weight.float(), self.input.bias.float())
        y = y.to(given.dtype)
        for block in self.blocks:
            y = block(y, about)
        shift, scale = self.modulation(about).chunk(2, -1)
        y = self.norm(y) * (1 + scale) + shift
        with torch.autocast(x.device.type, enabled=False):
            out = F.linear(y.float(), self.output.weight.float(), self.output.bias.float())
        if not self.learned:
            return out, None
        found, share = out.chunk(2, -1)
        return found, share

    def _training(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Of every time [1000]: by what an error of the noise moves the mean, and the bounds of the log variance."""
        if device not in self._chain:
            table, low, high = chain(self.path, list(range(TIMES)))
            self._chain[device] = (table[:, 4] * table[:, 6]).to(device), low.to(device), high.to(device)
        return self._chain[device]

    def _init(self) -> None:
        """Xavier for every matrix, N(0, 0.02) for the embedding of time, zero for modulations and the output."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
                if name.startswith("time."):
                    nn.init.normal_(module.weight, std=0.02)
                if name.endswith("modulation") or name == "output":
                    nn.init.zeros_(module.weight)


class Block(nn.Module):
    """x + g MLP(LN(x) (1 + scale) + shift)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.modulation = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:  # [..., width]
        shift, scale, gate = self.modulation(about).chunk(3, -1)
        return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)


class Denoised:
    """The law of tokens [B, W, C] under K guidance branches, the last of which is the conditional one.

    Attributes:
        given: [K, B, W, width], what the network is told of every token.
        weights: [K, B, W, 1], summing to 1 over K.
    """

    def __init__(self, head: DiffusionHead, given: Tensor, weights: Tensor) -> None:
        self.head, self.given, self.weights = head, given, weights

    def at(self, which: slice) -> Denoised:
        """The law of some of the tokens."""
        return Denoised(self.head, self.given[:, :, which], self.weights[:, :, which])

    def predict(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor | None]:
        """The guided prediction [B, W, C] for x [B, W, C] at one time, given as `about` [width] of it, and the place of
        the log variance, which is the conditional branch's; float32. The law of one token may be asked at L states x
        [B, L, C], each of a time of its own [B, L, width]."""
        found, share = self.head.predict(x.expand(len(self.given), *x.shape), time, self.given)
        return (found * self.weights).sum(0), None if share is None else share[-1]
