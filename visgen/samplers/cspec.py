"""Speculative decoding of vectors: a smaller causal model drafts tokens, one evaluation of the model tests them.

`exact` replaces the rule of continuous speculative decoding (CSpD, arXiv 2411.11925), which is not lossless as it was
released (docs/methods.md), by a coupling: the model's own denoising chain of every drafted token follows the recorded
chain of the draft, step by step, by the reflection maximal coupling (`nn/coupling.py`), and may come back to it after a
step apart. Its end is the token, whatever the draft was; where it is the draft, the next draft counts, and else all
behind it are dropped. So tokens follow the law of `causal` with the same steps, `variance` and `end_noise`.

`distance` keeps a draft that lies within `radius` of the token that the model draws by the same noise: not lossless.
`head_time` needs no draft model: it speculates along each token's own denoising (`_frozen.py`), and is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from visgen.checks import Range, Share, Steps, Temperature, Weight
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import first_of
from visgen.nn.ancestral import LAST
from visgen.nn.coupling import Step, coupled
from visgen.samplers import Forward, Sampler
from visgen.samplers._draft import check_chains, load_draft
from visgen.samplers._frozen import frozen
from visgen.samplers._walk import along, arranged, draws_of, fixed_log, step_mean, tables, taken, walks_of


@dataclass(frozen=True)
class Config:
    """Speculation over vectors.

    Attributes:
        mode: exact, distance or head_time.
        draft: run or step directory of the draft model, of the same latents, order and path of the head; of head_time
            none.
        length: drafts per evaluation, at most: tokens, or of head_time steps of one token's denoising.
        radius: of distance, how far (Euclidean, in the latents' units) a draft that is kept may lie from the model's
            token.
        steps: of the head's denoising, ancestral, for every token.
        last: the time at which denoising begins; None: 989, which is also the greatest.
        variance: of a step, by its place between that of the posterior (0) and beta (1): both models need the same, so
            what the heads say is not read.
        temperature: factor of the noise of every step.
    """

    mode: Literal["exact", "distance", "head_time"] = "exact"
    draft: Path | None = None
    length: Annotated[int, Range(1, 1000)] = 3
    radius: Weight | None = None
    steps: Steps = 100
    last: Annotated[int, Range(1, 999)] | None = None
    variance: Share = 1.0
    temperature: Temperature = 1.0

    @property
    def solver(self) -> Literal["ancestral"]:
        """The only one whose steps draw, so that two models' can meet."""
        return "ancestral"

    @property
    def shift(self) -> float:
        return 1.0


@dataclass
class State:
    tokens: Tensor  # [B, N, C] in the order of drawing, final ones and behind them drafts
    position: Tensor  # [B, 1], the first token that is not final
    iteration: Tensor  # [B, 1]
    rounds: Tensor  # [B, N]
    slots: Tensor  # [W], 0 to W - 1
    table: Tensor  # [S, 10]
    spread: Tensor  # [S] standard deviation of every step
    about: Tensor  # [S, width] the head's embeddings of time
    draft_about: Tensor | None  # [S, width] the draft's
    known: Tensor | None  # [B, N, C]
    keep: Tensor | None  # [B, N] bool
    order: Tensor | None  # [B, N] the place of the n-th token; None: n
    tested: Tensor  # [length] drafts whose predecessors all stayed, by their place among the drafts
    kept: Tensor  # [length] those that stayed
    whole: Tensor  # [1] those whose chain never left the draft's
    gap: Tensor  # [S] sum over tested drafts of the distance at every step
    calls: Tensor  # [1] evaluations of the head, of head_time
    drafter: Any  # the draft model's engine


class Record(NamedTuple):
    """The recorded denoising of the drafts of a window: of every step j its mean, and where it led."""

    mean: Tensor  # [S, B, W, C]
    state: Tensor  # [S, B, W, C]


class Walked(NamedTuple):
    """The model's tokens of a window, and how they stand to its drafts."""

    tokens: Tensor  # [B, W, C]
    kept: Tensor  # [B, W] bool, the draft stays
    whole: Tensor  # [B, W] bool, every step was the draft's
    gap: Tensor  # [S, B, W]


class CSpec(Sampler):
    """Drafts up to `length` tokens one by one, walks the model's own chains of them in one window, and goes on behind
    the first that is not the draft. A row whose drafts all stay gets one token more."""

    continuous = True

    def __init__(self, config: Config) -> None:
        self.config = config
        self.lossless = config.mode != "distance"
        _check(config)

    def init(self, engine: Engine, noise: Noise) -> State:
        config, path = self.config, engine.model.head.path
        engine.check_sampler("cspec", "causal")
        self._check_head(engine)
        order, known, keep = arranged(engine, noise)
        drafter, draft_about = None, None
        if config.mode != "head_time":
            drafter = engine.once(("draft", config.draft), lambda: load_draft(config.draft, engine))
            check_chains(drafter, engine, config.draft)
            drafter.begin(engine.given, engine.known)
            if order is not None:
                drafter.arrange(order)
        walk = walks_of(config, path, [config.steps])[0]
        table, bounds, about, _ = tables([walk], engine.model.head, engine.device)
        if drafter is not None:
            draft_about = drafter.model.head.about(table[:, 0])
        b, n, device = engine.batch, engine.tokens, engine.device
        zeros = torch.zeros(b, n, dtype=torch.int64, device=device)
        width = 1 if config.mode == "head_time" else min(config.length + 1, n)
        return State(
            tokens=torch.zeros(b, n, engine.model.config.channels, device=device),
            position=zeros[:, :1].clone(),
            iteration=zeros[:, :1].clone(),
            rounds=zeros,
            slots=torch.arange(width, device=device),
            table=table,
            spread=config.temperature * (fixed_log(bounds[:, 0], bounds[:, 1], config.variance) / 2).exp(),
            about=about,
            draft_about=draft_about,
            known=known,
            keep=keep,
            order=order,
            tested=torch.zeros(config.length, device=device),
            kept=torch.zeros(config.length, device=device),
            whole=torch.zeros(1, device=device),
            gap=torch.zeros(walk.steps, device=device),
            calls=torch.zeros(1, device=device),
            drafter=drafter,
        )

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        state.iteration += 1
        count, width = state.tokens.shape[1], len(state.slots)
        index = state.position.clamp(max=count - width) + state.slots  # [B, W]; at the end it covers some final tokens
        waiting = index >= state.position
        place = index if state.order is None else state.order.gather(1, index)
        draws = draws_of(noise, place, state.tokens.shape[-1], 1 + len(state.spread))  # [1 + S, B, W, C]
        if self.config.mode == "head_time":
            law, ahead = forward(state.tokens, index), self.config.length
            found = frozen(law, place, noise, draws, state, ahead)
            walked = Walked(found, torch.zeros_like(waiting), torch.zeros_like(waiting), state.gap[:, None, None] * 0)
            drafted = torch.zeros_like(waiting)
        else:
            drafted = waiting & (index < state.position + self.config.length)
            path = self.propose(state, index, drafted, draws)
            law = forward(state.tokens, index)
            walked = self.walk(state, law, place, drafted, path, draws, noise)
        self.settle(state, index, waiting, drafted, walked)

    def propose(self, state: State, index: Tensor, drafted: Tensor, draws: Tensor) -> Record:
        """Writes a draft for every token of `drafted` [B, W], by the draft model's walk over draws [1 + S, B, W, C].

        The first evaluation of the draft model reads all that may have become final since the last one.
        """
        count, width = state.tokens.shape[1], len(state.slots)
        mean, ends = torch.zeros_like(draws[1:]), torch.zeros_like(draws[1:])
        for i in range(min(self.config.length, count)):
            at = (state.position + i).clamp(max=count - 1)  # [B, 1]
            if i == 0:
                law = state.drafter.forward(state.tokens, (at - width + 1 + state.slots).clamp(min=0))
                law = law.at(slice(width - 1, width))
            else:
                law = state.drafter.forward(state.tokens, at)
            here = drafted & (index == state.position + i)  # [B, W], one slot or none
            slot = here.int().argmax(1)[None, :, None, None].expand(len(draws), -1, 1, draws.shape[-1])
            x, *noises = draws.gather(2, slot).unbind(0)
            predict = along(law, state.draft_about)  # type: ignore[arg-type]
            for j, z in enumerate(noises):
                center = step_mean(predict, x, state.table, j)
                x = center + state.spread[j] * z
                mean[j] = torch.where(here.unsqueeze(-1), center, mean[j])
                ends[j] = torch.where(here.unsqueeze(-1), x, ends[j])
            x = self._pinned(state, at, x)
            old = taken(state.tokens, at)
            state.tokens.scatter_(1, at.unsqueeze(-1).expand_as(x), torch.where(here.any(1)[:, None, None], x, old))
        return Record(mean, ends)

    def walk(
        self, state: State, law: Any, place: Tensor, drafted: Tensor, path: Record, draws: Tensor, noise: Noise
    ) -> Walked:
        """The model's chains of a window: coupled to the recorded ones, or plainly by the same noise."""
        steps, exact = len(state.spread), self.config.mode == "exact"
        log_uniform = noise.uniform(place, steps, Stream.ACCEPT).log()  # [B, W, S], of a token's own, as all its noise
        x, met, whole, gaps = draws[0], drafted, drafted, []
        predict = along(law, state.about)
        for j in range(steps):
            mean, z = step_mean(predict, x, state.table, j), draws[1 + j]
            x = mean + state.spread[j] * z
            if exact:
                step = self.step(mean, path.mean[j], z, state.spread[j], log_uniform[..., j], path.state[j])
                x = torch.where(drafted.unsqueeze(-1), step.state, x)
                met, gap = drafted & step.met, step.gap
                whole = whole & met
            else:
                gap = (x - path.state[j]).norm(dim=-1)
            gaps.append(gap)
        if self.config.radius is not None:
            met = whole = drafted & (gaps[-1] <= self.config.radius)
            x = torch.where(met.unsqueeze(-1), path.state[-1], x)
        return Walked(x, met, whole, torch.stack(gaps))

    def step(self, *of: Tensor) -> Step:
        """One step of the model's chain beside the draft's; see `nn.coupling.coupled`."""
        return coupled(*of)

    def settle(self, state: State, index: Tensor, waiting: Tensor, drafted: Tensor, walked: Walked) -> None:
        """Writes the tokens up to and with the first that is not its draft, and moves the position behind it."""
        tokens, kept = self._pinned(state, index, walked.tokens), walked.kept
        if state.keep is not None:
            kept = kept | (state.keep.gather(1, index) & drafted)
        first = first_of(~kept & waiting, index)  # [B, 1]
        new = waiting & (index <= first)
        old = taken(state.tokens, index)
        state.tokens.scatter_(1, index.unsqueeze(-1).expand_as(old), torch.where(new.unsqueeze(-1), tokens, old))
        state.rounds.scatter_(1, index, torch.where(new, state.iteration, state.rounds.gather(1, index)))
        counted = drafted & new if state.keep is None else drafted & new & ~state.keep.gather(1, index)
        place = (index - state.position).clamp(0, len(state.tested) - 1)
        state.tested.index_add_(0, place.flatten(), counted.flatten().float())
        state.kept.index_add_(0, place.flatten(), (counted & kept).flatten().float())
        state.whole += (counted & walked.whole).sum()
        state.gap += (walked.gap * counted).sum((1, 2))
        state.position.copy_(first + 1)

    def _pinned(self, state: State, index: Tensor, tokens: Tensor) -> Tensor:
        """Tokens [B, W, C], the known ones in the place of those that were drawn."""
        if state.known is None or state.keep is None:
            return tokens
        return torch.where(state.keep.gather(1, index).unsqueeze(-1), taken(state.known, index), tokens)

    def iterations(self, engine: Engine) -> int:
        return engine.tokens

    def done(self, state: State) -> Tensor:
        return state.position[:, 0] == state.tokens.shape[1]

    def notes(self, state: State) -> dict[str, Any]:
        """Read when the decode is over. `acceptance`: of the drafts behind which nothing was refused, by their place;
        `first_failure`: what would have stayed if a chain that left the draft's never came back; `distance`: mean of
        every step, of exact in units of its noise, of distance in those of the latents."""
        steps, n = len(state.spread), state.tokens.shape[1]
        if self.config.mode == "head_time":
            calls = int(state.calls.item())
            return {"head_steps": calls, "steps_per_call": round(n * steps / calls, 2)}
        tested, kept = state.tested.double().cpu(), state.kept.double().cpu()
        total = tested.sum().clamp(min=1)
        given = 0.0 if state.keep is None else state.keep.sum(1).double().mean().item()
        rounds = state.rounds.amax(1).double().mean().item()
        found: dict[str, Any] = {
            "head_steps": steps * int(state.rounds.max()),
            "tokens_per_cycle": round((n - given) / rounds, 3),
            "acceptance": [round(x, 4) for x in (kept / tested.clamp(min=1)).tolist()],
            "distance": [round(x, 4) for x in (state.gap.double().cpu() / total).tolist()],
        }
        if self.config.mode == "exact":
            found["first_failure"] = round((state.whole.double().cpu() / total).item(), 4)
        else:
            found["lossless"] = self.lossless
        return found

    def _check_head(self, engine: Engine) -> None:
        """Refuses a head whose steps draw nothing, and an engine that cannot run a loop of unknown length."""
        path, mode = engine.model.head.path, self.config.mode
        if path.predicts != "epsilon":
            raise UserError(
                f"sampler cspec couples steps that draw noise, this model's head predicts {path.predicts}, whose steps "
                "draw none, so that two chains never meet; use --sampler.kind causal"
            )
        if mode == "head_time" and engine.fused:
            raise UserError("sampler.mode head_time runs eagerly alone; add --engine.kind eager")


def _check(config: Config) -> None:
    """Refuses settings that do not belong together, or under which nothing would ever be accepted."""
    if (config.radius is None) == (config.mode == "distance"):
        what = "needs" if config.mode == "distance" else "has no"
        raise UserError(f"sampler.mode {config.mode} {what} radius; it is {config.radius}, set it for distance alone")
    if config.mode == "head_time" and config.draft is not None and str(config.draft) != ".":
        raise UserError(f"sampler.draft {config.draft} is of no use to mode head_time; pass --sampler.draft None")
    if config.last is not None and config.last > LAST:
        raise UserError(
            f"sampler.last {config.last}: the step from there multiplies the difference of two models by up to 316, so "
            f"that their chains never meet; use at most {LAST}"
        )
