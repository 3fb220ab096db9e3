"""Token by token: one backbone evaluation per token, in raster order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, Stream
from visgen.samplers import Forward, Sampler


@dataclass(frozen=True)
class Config:
    """Plain autoregression has no settings of its own."""


@dataclass
class State:
    tokens: Tensor  # [B, N]
    index: Tensor  # [B, 1], the token to be drawn next


class AR(Sampler):
    """Draws token k from its law given tokens < k, by the Gumbel of (seed, k)."""

    lossless = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        tokens = torch.zeros(engine.batch, engine.tokens, dtype=torch.int64, device=engine.device)
        return State(tokens, tokens.new_zeros(engine.batch, 1))

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        law = forward(state.tokens, state.index)
        drawn = law.draw(noise, state.index, Stream.TOKEN)
        state.tokens.scatter_(1, state.index, drawn)
        state.index += 1

    def iterations(self, engine: Engine) -> int:
        return engine.tokens
