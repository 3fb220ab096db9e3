"""Speculation along the denoising of one token: steps are drafted by an old prediction, and tested all at once.

De Bortoli et al. 2025 (arXiv 2501.05370), with the drafts that need no other model: the predicted x0 of the last tested
state stands in for those of the next steps. One evaluation of the head gives the model's means at all drafted states;
the chain follows them to the first step that the reflection maximal coupling does not keep, and goes on from the state
that this step leaves. It has the law of the plain walk, and never needs more evaluations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visgen.decode.noise import Noise, Stream
from visgen.nn.coupling import coupled


def frozen(law: Any, at: Tensor, noise: Noise, draws: Tensor, state: Any, ahead: int) -> Tensor:
    """Tokens [B, 1, C] of the places at [B, 1]. The host looks after every evaluation whether all rows are through.

    Args:
        draws: [1 + S, B, 1, C], the noise of every step behind the start.
        state: has `table`, `about`, `spread` and `calls`, which counts.
        ahead: steps that are drafted at once, at most.
    """
    steps, rows = len(state.spread), len(at)
    log_uniform = noise.uniform(at, steps, Stream.ACCEPT).log()[:, 0]  # [B, S]
    z = draws[1:, :, 0].transpose(0, 1)  # [B, S, C]
    x, guess = draws[0, :, 0], torch.zeros_like(draws[0, :, 0])  # [B, C]
    turn = torch.zeros(rows, 1, dtype=torch.int64, device=at.device)
    window = torch.arange(min(ahead, steps), device=at.device)
    while bool((turn < steps).any()):
        j = turn + window  # [B, L] steps; those behind the last are walked in vain
        live, j = j < steps, j.clamp(max=steps - 1)
        row, spread = state.table[j], state.spread[j]  # [B, L, 10], [B, L]
        a, b, p, q = (row[..., k] for k in (5, 6, 3, 4))
        noises = z.gather(1, j.unsqueeze(-1).expand(-1, -1, z.shape[-1]))
        means, states = [], [x]
        for k in range(len(window)):
            means.append(a[:, k, None] * states[-1] + b[:, k, None] * guess)
            states.append(means[-1] + spread[:, k, None] * noises[:, k])
        before, after = torch.stack(states[:-1], 1), torch.stack(states[1:], 1)  # [B, L, C]
        clean = p.unsqueeze(-1) * before + q.unsqueeze(-1) * law.predict(before, state.about[j])[0]
        mean = a.unsqueeze(-1) * before + b.unsqueeze(-1) * clean
        uniform = log_uniform.gather(1, j)
        step = coupled(mean, torch.stack(means, 1), noises, spread.unsqueeze(-1), uniform, after)
        state.calls += 1
        stands = live & (torch.cat([torch.ones_like(live[:, :1]), step.met[:, :-1]], 1).int().cumprod(1) > 0)
        last = (stands.sum(1, keepdim=True) - 1).clamp(min=0)  # [B, 1] the newest step that stands
        here = last.unsqueeze(-1).expand(-1, 1, x.shape[-1])
        moved = stands.any(1, keepdim=True)
        x = torch.where(moved, step.state.gather(1, here)[:, 0], x)
        guess = torch.where(moved, clean.gather(1, here)[:, 0], guess)
        turn += stands.sum(1, keepdim=True)
    return x.unsqueeze(1)
