"""Distilled Decoding 2 on laws that are known: the fixed point of its losses, one token, a joint of two.

What has to be exact is tested with a critic in closed form. A learned critic is approximate, so those tests bound a
distance, on seeds that none of the settings here was chosen by; `pytest -rP` shows the curves.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.config import plugin_config
from visgen.decode.noise import Noise
from visgen.decode.points import Points
from visgen.model import ModelConfig
from visgen.nn.mixture import denoise, fm_map, scale_of
from visgen.objectives import dd2, dd2_tuning
from visgen.objectives._dd2 import predicted
from visgen.objectives._distilled import features
from visgen.objectives.dd2 import DD2, generated
from visgen.objectives.dd2_tuning import DD2Tuning
from visgen.samplers._teacher import noise_of

ROWS = 256
DRAWN = 20_000


class Toy:
    """The stages of DD2 for a teacher that is a table: logits [nodes, V] of the token after every prefix."""

    def __init__(self, logits: Tensor, count: int, codes: Tensor, seed: int, rows: int = ROWS, **values: Any) -> None:
        torch.manual_seed(seed)
        self.logits, self.count, self.vocab, self.rows = logits.float(), count, logits.shape[1], rows
        self.codes = (codes * scale_of(codes)).float()
        backbone = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16, "start": 0.7}
        model = ModelConfig(
            (1, 1, count),
            self.vocab,
            plugin_config("visgen.backbones", "flow_step", channels=codes.shape[1], **backbone),
            plugin_config("visgen.conditions", "label", classes=1, dropout=0.0),
            plugin_config("visgen.heads", "diffusion", layers=3, width=64, predicts="velocity", repeats=1),
        )
        self.rng = torch.Generator().manual_seed(seed)
        self.first = self._told(DD2Tuning(dd2_tuning.Config(model=model)))
        self.second = self._told(DD2(dd2.Config(model=model, **values)))

    def _told(self, objective: Any) -> Any:
        objective.laws = lambda batch, tokens: self.logits[self.nodes(tokens)]
        objective.tokens = lambda batch, seeds: self.ancestral(len(seeds))
        for net in objective.nets.values():
            net.model.backbone.codes.copy_(self.codes)
        return objective

    def nodes(self, tokens: Tensor) -> Tensor:
        """[B, N] the row of the table that says each token's law."""
        found, node = [], torch.zeros_like(tokens[:, 0])
        for k in range(self.count):
            found.append(node)
            node = node * self.vocab + tokens[:, k] + 1
        return torch.stack(found, 1)

    def ancestral(self, rows: int) -> Tensor:
        tokens = torch.zeros(rows, self.count, dtype=torch.int64)
        for k in range(self.count):
            law = self.logits[self.nodes(tokens)[:, k]].softmax(-1)
            tokens[:, k] = torch.multinomial(law, 1, generator=self.rng)[:, 0]
        return tokens

    def batch(self, rows: int = 0) -> Any:
        return {"label": torch.zeros(rows or self.rows, dtype=torch.int64)}

    def tune(self, steps: int = 400) -> None:
        """Stage 1; both networks of stage 2 start from it."""
        optimiser = adam(self.first.nets["student"])
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, steps, pct_start=0.1)
        for step in range(steps):
            self.step(self.first, "student", optimiser, step)
            schedule.step()
        for net in self.second.nets.values():
            net.model.load_state_dict(self.first.exported().state_dict())

    def step(self, objective: Any, name: str, optimiser: torch.optim.Optimizer, step: int) -> None:
        loss, _ = objective.loss(name, objective.nets, self.batch(), step, self.rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.nets[name].parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    def distil(self, steps: int, error: Callable[[], float], turns: list[str] | None = None) -> list[float]:
        """Stage 2; leaves the average in the generator. Eight errors of it, evenly spread; rates fall to 2 %."""
        rates = {"student": 1e-3, "critic": 2e-3}
        optimisers = {name: adam(net) for name, net in self.second.nets.items()}
        own, curve = list(self.second.exported().parameters()), []
        mean = [p.detach().clone() for p in own]
        for step in range(steps):
            for name in turns or self.second.turns(step):
                optimisers[name].param_groups[0]["lr"] = rates[name] * max(0.02, 1 - step / steps)
                self.step(self.second, name, optimisers[name], step)
            torch._foreach_lerp_(mean, [p.detach() for p in own], 1 - min(0.99, (step + 1) / (step + 10)))
            if (step + 1) % (steps // 8) == 0:
                kept = [p.detach().clone() for p in own]
                set_to(own, mean)
                curve.append(error())
                print(f"step {step + 1}: {curve[-1]:.4f}")
                set_to(own, kept)
        set_to(own, mean)
        return curve

    @torch.no_grad()
    def drawn(self, rows: int = DRAWN) -> Tensor:
        """Tokens [rows, N] of the generator."""
        index = torch.arange(self.count).expand(rows, -1)
        noise = noise_of(Noise(torch.arange(rows)), index, self.codes.shape[1])
        return Points(generated(self.second.exported(), noise, self.batch(rows)), self.codes).likeliest()

    def histogram(self, tokens: Tensor) -> Tensor:
        """Of whole sequences [rows, N]: [V^N]."""
        ids, size = torch.zeros_like(tokens[:, 0]), self.vocab**self.count
        for k in range(self.count):
            ids = ids * self.vocab + tokens[:, k]
        return torch.bincount(ids, minlength=size).double() / len(tokens)


def adam(net: Any, rate: float = 2e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


@torch.no_grad()
def set_to(parameters: list[Any], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def distance(seen: Tensor, law: Tensor) -> float:
    """Total variation."""
    return 0.5 * float((seen - law).abs().sum())


def circle(vocab: int) -> Tensor:
    """Codes [V, 2] of unit length, evenly spread."""
    angle = 2 * math.pi * torch.arange(vocab) / vocab
    return torch.stack([angle.cos(), angle.sin()], 1)


def table(rows: int, vocab: int, seed: int) -> Tensor:
    return 1.2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------ critics in closed form


def exactly(toy: Toy, law: Tensor, tokens: Tensor) -> Callable[..., Tensor]:
    """In place of the critic: the velocity of tokens that follow the table `law`, given those before."""
    logp = law.log_softmax(-1)[toy.nodes(tokens)].flatten(0, 1)

    def velocity(model: Any, x: Tensor, t: Tensor, h: Tensor) -> Tensor:
        mean = denoise(x.flatten(0, 2), t.flatten(0, 2), logp, toy.codes).view_as(x)
        return (x - mean) / t

    return velocity


@pytest.mark.parametrize("divergence", ["sid", "dmd"])
def test_nothing_moves_tokens_of_the_teachers_law(divergence: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # S13
    """Where the critic knows the generator's law and this is the teacher's, the gradient is 0 at every noise."""
    toy = Toy(table(5, 4, 3), 2, circle(4), 0, divergence=divergence)
    slopes = []
    for law in (toy.logits, toy.logits.flip(1)):
        tokens = toy.ancestral(512)
        monkeypatch.setattr(dd2, "predicted", exactly(toy, law, tokens))
        q = toy.codes[tokens].clone().requires_grad_()
        loss, _ = toy.second.judged(q, toy.batch(512), toy.rng)
        slopes.append(float(torch.autograd.grad(512 * loss, q)[0].norm(dim=-1).max()))
    assert slopes[0] < 1e-2 < 1 < slopes[1], slopes


@pytest.mark.parametrize("divergence", ["sid", "dmd"])
def test_tokens_move_to_codes_that_the_teacher_wants_more(
    divergence: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # the sign
    """Of two codes the generator draws one too often; its tokens between the two are drawn to the other."""
    wanted, own = torch.tensor([[0.0, 2.0]]), torch.tensor([[2.0, 0.0]])
    toy = Toy(wanted, 1, circle(2), 0, divergence=divergence)
    tokens = torch.zeros(20_000, 1, dtype=torch.int64)
    monkeypatch.setattr(dd2, "predicted", exactly(toy, own, tokens))
    q = torch.zeros(20_000, 1, 2, requires_grad=True)
    loss, _ = toy.second.judged(q, toy.batch(20_000), toy.rng)
    step = -torch.autograd.grad(20_000 * loss, q)[0][:, 0] @ (toy.codes[1] - toy.codes[0])
    assert float(step.mean()) > 4 * float(step.std()) / math.sqrt(20_000)


def sampled(toy: Toy) -> Callable[..., Tensor]:
    """In place of the critic: the mixture of 1,024 fresh sequences of the generator, of those that begin alike."""
    given, judged = toy.second._given, []

    def remember(q: Tensor) -> tuple[Tensor, Tensor]:
        judged[:] = given(q)
        return judged[0], judged[1]

    def velocity(model: Any, x: Tensor, t: Tensor, h: Tensor) -> Tensor:
        with torch.no_grad():
            noise = torch.randn(1024, toy.count, toy.codes.shape[1], generator=toy.rng)
            bank = generated(toy.second.exported(), noise, toy.batch(1024))
        before, own, means = given(bank)[1], judged[1], []
        for k in range(toy.count):
            apart = (before[:, :k] != own[:, None, :k]).any(-1)  # [B, 1024]
            logp = torch.zeros(apart.shape).masked_fill(apart, -math.inf)
            means.append(denoise(x[0, :, k], t[0, :, k], logp, bank[:, k].contiguous()))
        return (x - torch.stack(means, 1)) / t

    toy.second._given = remember
    return velocity


@pytest.mark.slow
@pytest.mark.parametrize("seed", [21, 22])
def test_the_generator_reaches_the_law_by_exact_scores(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:  # S15
    """The generator's loss alone is on trial."""
    toy = Toy(table(1, 8, seed), 1, circle(8), seed)
    toy.tune(200)
    monkeypatch.setattr(dd2, "predicted", sampled(toy))
    law = toy.logits[0].double().softmax(0)
    before = distance(toy.histogram(toy.drawn()), law)
    curve = toy.distil(400, lambda: distance(toy.histogram(toy.drawn()), law), ["student"])
    assert curve[-1] < 0.06 and curve[-1] < 0.5 * before, (before, curve)


def equal_pairs(seed: int) -> tuple[Toy, Callable[[], float]]:
    """Two tokens that the teacher always draws equal, the joint law {(0, 0), (1, 1)}; how many of a student differ."""
    certain = 60.0
    toy = Toy(torch.tensor([[0.0, 0.0], [certain, 0.0], [0.0, certain]]), 2, circle(2), seed, rows=1024)
    toy.tune()

    def mixed() -> float:
        tokens = toy.drawn()
        return float((tokens[:, 0] != tokens[:, 1]).float().mean())

    return toy, mixed


def apart(seeds: Sequence[int], turns: list[str] | None = None, exact: pytest.MonkeyPatch | None = None) -> float:
    """Share of pairs that differ, mean over the last half of a distillation and over seeds: from one step to another
    the share of one seed swings by a factor of three."""
    found = []
    for seed in seeds:
        toy, mixed = equal_pairs(seed)
        if exact is not None:
            exact.setattr(dd2, "predicted", sampled(toy))
        curve = toy.distil(400, mixed, turns)
        found.append(statistics.fmean(curve[len(curve) // 2 :]))
        assert abs(float(toy.drawn().float().mean()) - 0.5) < 0.05, seed
    print(found)
    return statistics.fmean(found)


@pytest.mark.slow
def test_equal_tokens_stay_equal_by_exact_scores(monkeypatch: pytest.MonkeyPatch) -> None:  # S16
    """Of twelve seeds 3.3 % differ, with a deviation of 1.8: four of them stay below 7 but for one in 10,000 times."""
    assert apart([42, 43, 44, 45], ["student"], monkeypatch) < 0.07, "of independent tokens half differ"


# ------------------------------------------------------------------------------------------ learned critics


@pytest.mark.slow
@pytest.mark.parametrize("seed", [31, 32, 33])
def test_one_token_reaches_the_given_law(seed: int) -> None:  # S15
    toy = Toy(table(1, 8, seed), 1, circle(8), seed)
    toy.tune()
    law = toy.logits[0].double().softmax(0)
    before = distance(toy.histogram(toy.drawn()), law)
    curve = toy.distil(400, lambda: distance(toy.histogram(toy.drawn()), law))
    assert curve[-1] < 0.06 and curve[-1] < 0.5 * before, (before, curve)


@pytest.mark.slow
def test_one_token_of_many_comes_nearer_to_its_law() -> None:  # S15, V = 32, C = 8
    codes = torch.randn(32, 8, generator=torch.Generator().manual_seed(34))
    toy = Toy(table(1, 32, 34), 1, codes, 34)
    toy.tune()
    law = toy.logits[0].double().softmax(0)
    before = distance(toy.histogram(toy.drawn()), law)
    curve = toy.distil(1200, lambda: distance(toy.histogram(toy.drawn()), law))
    assert curve[-1] < 0.15 < 0.3 < before, (before, curve)


@pytest.mark.slow
def test_equal_tokens_stay_nearly_equal() -> None:  # S16
    """Of eight seeds 2.8 % differ, with a deviation of 0.9; docs/methods.md says what keeps them from being equal."""
    assert apart([42, 44, 45]) < 0.05, "of independent tokens half differ"


@pytest.mark.slow
def test_the_teachers_own_tokens_are_a_fixed_point() -> None:  # S13, with a critic that learned them
    """The gradient that a token gets on average over noise; another teacher's is the measure of what is small."""
    toy = Toy(table(5, 4, 51), 2, circle(4), 51)
    toy.tune()
    critic = toy.second.nets["critic"]
    optimiser = adam(critic)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, 600, pct_start=0.1)
    for _ in range(600):
        clean = toy.codes[mapped(toy, ROWS)]
        with torch.no_grad():
            t, e = dd2.draws(critic.model.head, clean, 1, toy.second.config.times, toy.rng)
        critic(clean, clean, t, e, toy.batch())[0].backward()
        optimiser.step()
        optimiser.zero_grad()
        schedule.step()
    tokens = mapped(toy, 16_384)
    pair = 4 * tokens[:, 0] + tokens[:, 1]
    gaps, slopes = [], []
    for teacher in (toy.logits, toy.logits.flip(1)):
        toy.logits = teacher
        q = toy.codes[tokens].clone().requires_grad_()
        loss, logs = toy.second.judged(q, toy.batch(len(q)), toy.rng)
        slope = torch.autograd.grad(len(q) * loss, q)[0]
        mean = torch.stack([slope[pair == k].mean(0) if (pair == k).any() else slope[0] * 0 for k in range(16)])
        gaps.append(float(logs["gap"]))
        slopes.append(float(mean[pair].norm(dim=-1).mean()))
    print(gaps, slopes)
    assert gaps[0] < 0.05 * gaps[1] and slopes[0] < 0.35 * slopes[1], f"{gaps} {slopes}"


def mapped(toy: Toy, rows: int) -> Tensor:
    """Tokens [rows, N] by the flow of the teacher's laws."""
    tokens = torch.zeros(rows, toy.count, dtype=torch.int64)
    for k in range(toy.count):
        law = toy.logits[toy.nodes(tokens)[:, k]].log_softmax(-1)
        tokens[:, k] = fm_map(torch.randn(rows, toy.codes.shape[1], generator=toy.rng), law, toy.codes)
    return tokens


@pytest.mark.slow
def test_the_critic_draws_what_the_generator_draws() -> None:  # S14
    toy = Toy(table(5, 4, 61), 2, circle(4), 61)
    toy.tune()
    optimiser = adam(toy.second.nets["critic"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, 1500, pct_start=0.1)
    for step in range(1500):  # as in an alignment: the generator rests
        toy.step(toy.second, "critic", optimiser, step)
        schedule.step()
    seen = toy.histogram(walked(toy, toy.second.nets["critic"].model))
    own, teacher = toy.histogram(toy.drawn()), toy.histogram(toy.ancestral(DRAWN))
    print(distance(seen, own), distance(own, teacher))
    assert distance(seen, own) < 0.06 and distance(seen, own) < 0.5 * distance(own, teacher), "it follows the teacher"


@torch.no_grad()
def walked(toy: Toy, model: Any, rows: int = DRAWN, steps: int = 40) -> Tensor:
    """Tokens [rows, N], one by one, by Euler steps along the predicted velocity."""
    tokens = torch.zeros(rows, toy.count, dtype=torch.int64)
    for k in range(toy.count):
        h = features(model, toy.codes[tokens], toy.batch(rows))[:, k : k + 1]
        x = torch.randn(rows, 1, toy.codes.shape[1], generator=toy.rng)
        for i in range(steps):
            t = torch.full((1, rows, 1, 1), min(1 - i / steps, 0.98))
            x = x - predicted(model, x[None], t, h)[0] / steps
        tokens[:, k] = Points(x[:, 0], toy.codes).likeliest()
    return tokens
