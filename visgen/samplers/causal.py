"""Token by token with vectors: one backbone evaluation for each, whose law the head's denoising draws.

Source: the causal variant of MAR (Li et al. 2024, arXiv 2406.11838, section 3.4), in the order of the model: raster, or
one of each image's own. The head's whole loop is part of an iteration, and its tables lie on the device, so one graph
serves all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visgen.checks import Range, Share, Shift, Steps, Temperature
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise
from visgen.nn.ancestral import Walk, Walker
from visgen.samplers import Forward, Sampler
from visgen.samplers._walk import arranged, denoised, tables, taken, walks_of


@dataclass(frozen=True)
class Config:
    """Autoregression over vectors.

    Attributes:
        steps: of the head's denoising, for every token.
        solver, shift, last, temperature: as of `masked`.
        variance: of ancestral steps, by its place between that of the posterior (0) and beta (1), whatever the head
            says; None: the head's. `cspec` needs one that two models share.
        end_noise: draw in the last ancestral step too, as `cspec` must; published walks do not.
    """

    steps: Steps = 100
    solver: Walker = "auto"
    shift: Shift = 1.0
    last: Annotated[int, Range(1, 999)] | None = None
    temperature: Temperature = 1.0
    variance: Share | None = None
    end_noise: bool = False


@dataclass
class State:
    tokens: Tensor  # [B, N, C] in the order of drawing
    index: Tensor  # [B, 1], the token to be drawn next
    table: Tensor  # [S, 10]
    bounds: Tensor  # [S, 2]
    about: Tensor  # [S, width]
    known: Tensor | None  # [B, N, C]
    keep: Tensor | None  # [B, N] bool
    order: Tensor | None  # [B, N] the place of the n-th token; None: n
    noisy: tuple[bool, ...]


class Causal(Sampler):
    """Draws token k from its law given tokens < k, by the noise of (seed, place of k)."""

    continuous = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        engine.check_sampler("causal")
        head, device, shape = engine.model.head, engine.device, (engine.batch, engine.tokens)
        walk = self._walk(head.path)
        order, known, keep = arranged(engine, noise)
        tokens = torch.zeros(*shape, engine.model.config.channels, device=device)
        index = torch.zeros(shape[0], 1, dtype=torch.int64, device=device)
        return State(tokens, index, *tables([walk], head, device)[:3], known, keep, order, walk.noisy)

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        law, at, channels = forward(state.tokens, state.index), state.index, state.tokens.shape[-1]
        place = at if state.order is None else state.order.gather(1, at)
        drawn = denoised(law, place, noise, channels, state, 0, state.noisy, self.config)
        if state.known is not None and state.keep is not None:
            drawn = torch.where(state.keep.gather(1, at).unsqueeze(-1), taken(state.known, at), drawn)
        state.tokens.scatter_(1, at.unsqueeze(-1).expand_as(drawn), drawn)
        state.index += 1

    def iterations(self, engine: Engine) -> int:
        return engine.tokens

    def notes(self, state: State) -> dict[str, Any]:
        return {"head_steps": state.tokens.shape[1] * len(state.noisy)}

    def _walk(self, path: Any) -> Walk:
        """The head's walk for every token.

        Raises:
            UserError: settings that it cannot follow.
        """
        config = self.config
        walk = walks_of(config, path, [config.steps])[0]
        ancestral = path.predicts == "epsilon" and config.solver in ("auto", "ancestral")
        for name, asked in (("variance", config.variance), ("end_noise", config.end_noise or None)):
            if asked is not None and not ancestral:
                raise UserError(f"sampler.{name} {asked} is for ancestral steps, of which these are none; leave it out")
        return walk._replace(noisy=(True,) * walk.steps) if config.end_noise else walk
