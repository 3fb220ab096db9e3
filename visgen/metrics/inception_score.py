"""Inception Score as the ADM suite computes it (Salimans et al. 2016): exp of the mean KL from each image's class law
to the mean law, of every consecutive 5,000 images in file order; the mean over these chunks.

A file sorted by class makes it far too low (62 instead of 298), so images come in an order without meaning: that of a
balanced plan, in which every run of C images holds each class once.
"""

from __future__ import annotations

import math
import statistics

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.metrics.images import require_finite
from visgen.metrics.protocol import Score

CHUNK = 5000


class InceptionScore:
    """Sums over `n` images in chunks of 5,000 by index; constant memory in n but for chunks, merged by addition.

    KL(p || mean p) averaged over a chunk is mean_i sum_c p log p - sum_c q log q with q the mean, so sums suffice.
    """

    def __init__(self, classes: int, n: int, chunk: int = CHUNK) -> None:
        self.n, self.chunk = n, chunk
        chunks = -(-n // chunk)
        self.law = torch.zeros(chunks, classes, dtype=torch.float64)  # [K, C] sum of p
        self.own = torch.zeros(chunks, dtype=torch.float64)  # [K] sum of sum_c p log p
        self.count = torch.zeros(chunks, dtype=torch.float64)  # [K]

    def update(self, logits: Tensor, index: Tensor) -> None:
        """Add logits [B, C] of images `index` [B].

        Raises:
            UserError: a logit is not finite.
        """
        require_finite(logits, index, "logits")
        log = logits.double().log_softmax(1).cpu()
        p, place = log.exp(), index.cpu() // self.chunk
        self.law.index_add_(0, place, p)
        self.own.index_add_(0, place, (p * log).sum(1))
        self.count.index_add_(0, place, torch.ones_like(self.own[place]))

    def sums(self) -> list[Tensor]:
        """What is added over processes, in place."""
        return [self.law, self.own, self.count]

    def score(self) -> Score:
        """The mean over chunks; its error from their spread; `terms` hold the deviation and the value of one chunk.

        Raises:
            UserError: not all n images have come.
        """
        if int(self.count.sum()) != self.n:
            raise UserError(f"{int(self.count.sum())} of {self.n} images were scored; the Inception Score needs all")
        values = [_value(*sums) for sums in zip(self.law, self.own, self.count, strict=True)]
        chunks, spread = len(values), statistics.stdev(values) if len(values) > 1 else math.nan
        single = _value(self.law.sum(0), self.own.sum(), self.count.sum())
        return Score(
            statistics.fmean(values),
            se=spread / math.sqrt(chunks) if chunks > 1 else None,
            n=self.n,
            terms={"chunks": float(chunks), "single": single, **({"sd": spread} if chunks > 1 else {})},
            note="" if chunks > 1 else f"no error: {self.n} images are one chunk of {self.chunk}",
        )


def _value(law: Tensor, own: Tensor, count: Tensor) -> float:
    q = law / count
    return math.exp(float(own / count - torch.special.xlogy(q, q).sum()))
