"""Vector quantizer: nearest code of a learned table, unit-length low-dimensional codes, plain gradient table.

Sources: van den Oord et al., arXiv:1711.00937 (eq. 3); Yu et al., arXiv:2110.04627, section 3.2 (normalised,
low-dimensional codes); LlamaGen, arXiv:2406.06525. The table is stored un-normalised and normalised at look-up.

What keeps all codes in use: for `init_after` steps vectors pass unquantised, then the table is drawn from that batch;
later a code whose moving share of the tokens falls below `restart_below` is drawn again from the current batch. Both
are one rule (`_restart`), pure tensor code without a host read, driven by saved buffers: a resumed run never
initialises again, and no random generator is consumed.

Restarts leave Adam's moments of the row alone: a code dies only after a long time without gradient, so its first
moment has decayed to nothing.

A step here is one step of the optimiser. The first of its micro-batches (`micro_batch`) offers the vectors that replace
dead codes, the last one enters the codes of all into the statistics. The entropy loss sees one micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from visgen.checks import Natural, Positive, Range, Rate, Scale, Weight
from visgen.quantizers import Quantized, Quantizer

BUDGET = 2**22  # elements of the largest [tokens, codes] float32 matrix that lives (16 MiB)
NARROW = 16  # up to this width distances are summed channel by channel
ENTROPY_ROWS = 4096  # tokens that the entropy loss looks at


@dataclass(frozen=True)
class Config:
    codes: Positive = 16384
    channels: Positive = 8
    normalise: bool = True  # unit-length vectors and codes (cosine distance); False: plain Euclidean VQ
    commitment: Weight = 0.25  # weight of |z - sg[e]|^2; |e - sg[z]|^2 weighs 1
    # bypass quantisation this many steps, then draw the table from the batch; -1: random table
    init_after: Annotated[int, Range(-1)] = -1
    restart_below: Weight = 0.0  # redraw a code whose share is below this part of 1 / codes; 0: never
    restart_until: Natural = 0  # last step with restarts, so that a weight EMA can settle; 0: no end
    decay: Rate = 0.99  # of the moving share of each code
    entropy: Weight = 0.0  # weight of mean entropy - entropy of the mean; 0 computes nothing
    temperature: Scale = 0.01  # of the assignment probabilities in the entropy loss
    window: Positive = 20  # usage counts the codes chosen within the last window * codes tokens


class VQ(Quantizer):
    """See the module's docstring. Metrics: `usage`, `perplexity` (moving, of all ranks), `restarts`, `distance`."""

    no_decay = True  # asks the optimiser to leave the table's norm alone
    micro_batch = (0, 1)  # which of how many micro-batches of a step the next training forward sees; set by the loop
    steps: Tensor
    share: Tensor
    idle: Tensor
    pending: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.vocab, self.channels = config.codes, config.channels
        table = torch.empty(config.codes, config.channels).uniform_(-1 / config.codes, 1 / config.codes)
        self.table = nn.Parameter(self._scale(table))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))  # training steps seen
        self.register_buffer("share", torch.ones(config.codes))  # moving share of the tokens, times codes
        self.register_buffer("idle", torch.full((config.codes,), 2**40))  # tokens since the code was last chosen
        self.register_buffer("pending", torch.zeros(config.codes), persistent=False)  # counts of this step so far

    def forward(self, vectors: Tensor) -> Quantized:
        """vectors [B, N, C] -> straight-through codes; in training mode counts, initialises and restarts."""
        config = self.config
        with torch.autocast(vectors.device.type, enabled=False):
            z = self._scale(vectors.float())
            flat = z.detach().reshape(-1, self.channels)
            restarts = self._restart(flat) if self._may_restart() else torch.zeros((), device=z.device)
            table = self._scale(self.table.float())
            ids = nearest(flat, table.detach())[0].view(z.shape[:2])
            codes = table[ids]
            on = (self.steps >= config.init_after).float()  # 0 while bypassed: the table then has zero gradient
            losses = {
                "codebook": on * F.mse_loss(codes, z.detach()),
                "commitment": on * config.commitment * F.mse_loss(z, codes.detach()),
            }
            if config.entropy > 0:
                losses["entropy"] = on * config.entropy * self._entropy(z, table)
            metrics = {"distance": F.mse_loss(codes, z).detach() * self.channels}
            if self.training and self.micro_batch[0] == 0:
                metrics["restarts"] = restarts
            if self.training:
                metrics |= self._count(ids.view(-1))
            return Quantized(z + on * (codes - z).detach(), ids, losses, metrics)

    @torch.no_grad()
    def encode(self, vectors: Tensor) -> Tensor:
        """vectors [B, N, C] -> ids [B, N]; the first of equally near codes."""
        with torch.autocast(vectors.device.type, enabled=False):
            flat = self._scale(vectors.float()).reshape(-1, self.channels)
            return nearest(flat, self._scale(self.table.float()))[0].view(vectors.shape[:2])

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, N] -> [B, N, C] float32, unit length if normalised."""
        return self._scale(F.embedding(ids, self.table.float()))

    def _scale(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1) if self.config.normalise else vectors

    # ---------------------------------------------------------------------------------- statistics, alike on ranks

    def _may_restart(self) -> bool:
        wanted = self.config.init_after >= 0 or self.config.restart_below > 0
        return self.training and self.micro_batch[0] == 0 and wanted

    @torch.no_grad()
    def _restart(self, flat: Tensor) -> Tensor:
        """Redraws dead codes (at the first quantised step: all) from flat [M, C]; returns how many.

        Candidates are drawn in proportion to their squared distance from the present table (as in k-means++), so
        restarts go where tokens are served badly. A redrawn code starts with the share of a uniform one.
        """
        config = self.config
        dead = self.share < config.restart_below
        if config.restart_until > 0:
            dead &= self.steps < config.restart_until
        dead = torch.where(self.steps == config.init_after, torch.ones_like(dead), dead)
        dead &= self.steps >= config.init_after
        rows = self._candidates(flat, nearest(flat, self._scale(self.table.float()))[1])
        turn = (dead.cumsum(0) - 1).clamp(min=0)  # the k-th dead code takes the k-th candidate
        self.table.copy_(torch.where(dead[:, None], rows[turn], self.table))
        self.share.copy_(torch.where(dead, torch.ones_like(self.share), self.share))
        return dead.sum().float()

    def _candidates(self, flat: Tensor, weight: Tensor) -> Tensor:
        """Rows of flat [M, C] drawn without replacement by weight [M] -> [codes, C], in order, the same on all ranks.

        An exponential race (Efraimidis & Spirakis, 2006): the largest w / -log(u). The u are a Weyl sequence over
        (step, rank, token), float64 since compilers count indices in int32. A batch with fewer tokens than codes
        repeats its rows.
        """
        world, rank = _world()
        wanted = math.ceil(self.vocab / world)
        token = torch.arange(flat.shape[0], device=flat.device)
        phase = token.double() * 0.6180339887498949 + (self.steps * world + rank).double() * 0.3719080126542381
        u = phase.frac().float().clamp(1e-6, 1 - 1e-6)
        best = ((weight + 1e-12) / -u.log()).topk(min(wanted, flat.shape[0])).indices
        rows = flat[best[torch.arange(wanted, device=flat.device) % best.shape[0]]].contiguous()
        if world > 1:
            gathered = [torch.empty_like(rows) for _ in range(world)]
            dist.all_gather(gathered, rows)
            rows = torch.stack(gathered, 1).flatten(0, 1)  # the best of every rank first
        return rows[: self.vocab]

    @torch.no_grad()
    def _count(self, ids: Tensor) -> dict[str, Tensor]:
        """Enter the ids [M] of all micro-batches of a step into the moving statistics, with the last one; return usage
        and perplexity then. They are not a number while quantisation is bypassed."""
        config, (part, parts) = self.config, self.micro_batch
        ones = torch.ones_like(ids, dtype=torch.float32)
        self.pending.copy_((self.pending if part else torch.zeros_like(self.pending)).scatter_add(0, ids, ones))
        if part < parts - 1:
            return {}
        counts = self.pending.clone()
        world = _world()[0]
        if world > 1:
            dist.all_reduce(counts)
        tokens = ids.shape[0] * world * parts
        live = self.steps >= config.init_after
        share = torch.lerp(self.share, counts * (config.codes / tokens), 1 - config.decay)
        self.share.copy_(torch.where(live, share, self.share))
        self.idle.copy_(torch.where(live & (counts > 0), torch.zeros_like(self.idle), self.idle + tokens))
        self.steps += 1
        usage = (self.idle < max(config.window * config.codes, tokens)).float().mean()
        p = self.share / self.share.sum()
        found = {"usage": usage, "perplexity": (-(p * (p + 1e-12).log()).sum()).exp()}
        return {name: torch.where(live, value, torch.nan) for name, value in found.items()}

    def _entropy(self, z: Tensor, table: Tensor) -> Tensor:
        """Mean entropy of the assignments minus the entropy of the mean assignment (over all ranks).

        p = softmax(-d / temperature) of at most ENTROPY_ROWS evenly spaced tokens; -d = 2 z.e - |e|^2 + const.
        """
        flat = z.reshape(-1, self.channels)
        flat = flat[:: math.ceil(flat.shape[0] / ENTROPY_ROWS)]
        logits = (2 * flat @ table.T - table.square().sum(1)) / self.config.temperature
        log_p = logits.log_softmax(1)
        p = log_p.exp()
        mean = p.mean(0)
        if _world()[0] > 1:  # global value, local gradient: its average over ranks is the exact gradient
            total = mean.detach().clone()
            dist.all_reduce(total)
            mean = mean + (total / _world()[0] - mean.detach())
        return -(p * log_p).sum(1).mean() + (mean * (mean + 1e-12).log()).sum()


@torch.no_grad()
def nearest(z: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest rows of table [V, C] to z [M, C], both float32 -> ids [M] (first of ties), squared distances [M].

    Works through the tokens in pieces of at most BUDGET / V. Narrow codes are summed channel by channel: unlike a
    matrix product this is exact about ties, independent of how tokens are batched, and never TF32.
    """
    half = table.square().sum(1) / 2
    found = []
    rows = max(1, BUDGET // table.shape[0])
    for start in range(0, z.shape[0], rows):
        piece = z[start : start + rows]
        if z.shape[1] > NARROW:
            scores = half - piece @ table.T
        else:
            scores = half.repeat(piece.shape[0], 1)
            for c in range(z.shape[1]):
                scores.addcmul_(piece[:, c : c + 1], table[:, c], value=-1)
        found.append(scores.min(1))
    score, ids = (torch.cat([piece[i] for piece in found]) for i in (0, 1))
    return ids, (2 * score + z.square().sum(1)).clamp(min=0)


def _world() -> tuple[int, int]:
    """Number of processes and this one's rank."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(), dist.get_rank()
    return 1, 0
