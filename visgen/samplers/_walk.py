"""How a diffusion head's law is walked to a token: settings, tables and the loop, shared by the samplers that do so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.decode.noise import Noise, Stream
from visgen.nn.ancestral import Walk, log_variance, walk


def walks_of(config: Any, path: Any, counts: Sequence[int]) -> list[Walk]:
    """Walks of the given numbers of steps, by a sampler's `solver`, `shift`, `last` and `temperature`; equal numbers
    give one object.

    Raises:
        UserError: settings that the path does not have.
    """
    made = {n: walk(path, config.solver, n, config.shift, config.last) for n in dict.fromkeys(counts)}
    found = [made[n] for n in counts]
    if config.temperature != 1 and not any(found[0].noisy):
        raise UserError(
            f"sampler.temperature {config.temperature} scales the noise of ancestral steps, of which these are none; "
            "leave it out"
        )
    return found


def tables(walks: Sequence[Walk], head: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Of all different walks, one behind another, on the device: the fields of `Row` [S, 10], bounds of the log
    variance [S, 2], the head's embeddings of time [S, width]; and the first row of each given walk."""
    each = {w.steps: w for w in walks}
    first = dict(zip(each, torch.tensor([0, *each]).cumsum(0).tolist(), strict=False))
    table = torch.cat([w.rows for w in each.values()]).to(device)
    bounds = torch.cat([torch.stack([w.low, w.high], 1) for w in each.values()]).to(device)
    return table, bounds, head.about(table[:, 0]), [first[w.steps] for w in walks]


def arranged(engine: Any, noise: Noise) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The order [B, N] in which a causal model draws the tokens of a batch, None for raster order; and in it the known
    tokens [B, N, C] and which they are [B, N], if any. In a random order known ones come first, so that all others see
    them."""
    known, keep = (None, None) if engine.known is None else (engine.known[0].float().clone(), engine.known[1].clone())
    if not engine.model.backbone.ordered:
        return None, known, keep
    order = noise.order(engine.tokens)
    if known is not None and keep is not None:
        order = order.gather(1, (~keep.gather(1, order)).int().argsort(dim=1, stable=True))
        known, keep = taken(known, order), keep.gather(1, order)
    engine.arrange(order)
    return order, known, keep


def denoised(
    law: Any, at: Tensor, noise: Noise, channels: int, state: Any, start: int, noisy: Sequence[bool], rule: Any
) -> Tensor:
    """Tokens [B, W, C] of the places at [B, W]; the noise of a step is keyed by place and step alone.

    Args:
        state: has `table`, `bounds` and `about` (`tables`), of which the walk begins at row `start`.
        noisy: of every step, whether it draws.
        rule: a sampler's config: its `temperature` and, where there is one, its `variance`.
    """
    draws, fixed = draws_of(noise, at, channels, 1 + sum(noisy)), getattr(rule, "variance", None)
    if hasattr(law, "walked"):  # by kernels
        rows = slice(start, start + len(noisy))
        place = law.head.place if fixed is None else fixed
        tables = state.table[rows], state.bounds[rows], state.about[rows]
        return law.walked(draws, *tables, noisy, place, rule.temperature)
    x = draws[0]
    before, kept = torch.zeros_like(x), torch.zeros_like(x)
    for j, draw in enumerate(noisy):
        _, _, _, p, q, a, b, c, k, keep = state.table[start + j].unbind()
        out, share = law.predict(x, state.about[start + j])
        now = p * x + q * out
        new = a * x + b * now + c * before + k * kept
        if draw:
            low, high = state.bounds[start + j].unbind()
            if fixed is None:
                log = log_variance(share, low, high, law.head.config.variance)
            else:
                log = fixed_log(low, high, fixed)
            new = new + rule.temperature * (log / 2).exp() * draws[1 + j]
        before, kept, x = now, torch.where(keep > 0, x, kept), new
    return x


def fixed_log(low: Tensor, high: Tensor, place: float) -> Tensor:
    """A log variance that no model has a say in: `place` 0 is the posterior's, 1 is beta."""
    return place * high + (1 - place) * low


def along(law: Any, about: Tensor) -> Callable[[Tensor, int], tuple[Tensor, Tensor | None]]:
    """`law.predict` at x and the number of a step, of a walk whose times are embedded as about [S, width]. A law by
    kernels is told all times beforehand."""
    if hasattr(law, "along"):
        made: Callable[[Tensor, int], tuple[Tensor, Tensor | None]] = law.along(about)
        return made
    return lambda x, step: law.predict(x, about[step])


def step_mean(predict: Callable[[Tensor, int], Any], x: Tensor, table: Tensor, step: int) -> Tensor:
    """Mean of an ancestral step from x [B, W, C], by the predicted x0: c1 x0 + c2 x.

    Args:
        predict: of `along`; table: [S, 10] the fields of `Row`.
    """
    _, _, _, p, q, a, b, *_ = table[step].unbind()
    return a * x + b * (p * x + q * predict(x, step)[0])


def taken(x: Tensor, places: Tensor) -> Tensor:
    """[B, N, C] at places [B, W] -> [B, W, C]."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def draws_of(noise: Noise, at: Tensor, channels: int, count: int) -> Tensor:
    """`count` draws [count, B, W, C] for places [B, W], all at once."""
    index = at.unsqueeze(1).expand(-1, count, -1)
    which = torch.arange(count, device=at.device).view(1, -1, 1).expand_as(index)
    made = noise.normal(index.flatten(1), channels, Stream.DENOISE, which.flatten(1))
    return made.unflatten(1, (count, -1)).transpose(0, 1)
