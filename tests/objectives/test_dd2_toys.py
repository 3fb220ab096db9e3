"""Distilled Decoding 2 on laws that are known: one token, a joint of two, and the fixed point of its losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.config import plugin_config
from visgen.decode.noise import Noise
from visgen.decode.points import Points
from visgen.model import ModelConfig
from visgen.nn.mixture import fm_map, scale_of
from visgen.objectives import dd2, dd2_tuning
from visgen.objectives._dd2 import predicted
from visgen.objectives._distilled import features
from visgen.objectives.dd2 import DD2, generated
from visgen.objectives.dd2_tuning import DD2Tuning
from visgen.samplers._teacher import noise_of

pytestmark = pytest.mark.slow


class Toy:
    """The stages of DD2 for a teacher that is a table: logits [nodes, V] of the token after every prefix."""

    def __init__(self, logits: Tensor, count: int, channels: int, start: float = 0.7, **values: Any) -> None:
        torch.manual_seed(0)
        self.logits, self.count, self.vocab = logits.float(), count, logits.shape[1]
        trunk = {"layers": 2, "heads": 4, "width": 32, "mlp_multiple_of": 16, "channels": channels, "start": start}
        model = ModelConfig(
            (1, 1, count),
            self.vocab,
            plugin_config("visgen.backbones", "flow_step", **trunk),
            plugin_config("visgen.conditions", "label", classes=1, dropout=0.0),
            plugin_config("visgen.heads", "diffusion", layers=3, width=96, predicts="velocity"),
        )
        codes = torch.randn(self.vocab, channels, generator=torch.Generator().manual_seed(7))
        self.codes = codes * scale_of(codes)
        self.rng = torch.Generator().manual_seed(1)
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

    def batch(self, rows: int) -> Any:
        return {"label": torch.zeros(rows, dtype=torch.int64)}

    def tune(self, steps: int, rows: int, rate: float = 2e-3) -> None:
        """Stage 1; both networks of stage 2 start from it."""
        optimiser = adam(self.first.nets["student"], rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, steps, pct_start=0.1)
        for step in range(steps):
            self.step(self.first, "student", optimiser, step, rows)
            schedule.step()
        for net in self.second.nets.values():
            net.model.load_state_dict(self.first.exported().state_dict())

    def step(self, objective: Any, name: str, optimiser: torch.optim.Optimizer, step: int, rows: int) -> Any:
        loss, logs = objective.loss(name, objective.nets, self.batch(rows), step, self.rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.nets[name].parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        return logs

    def distil(self, steps: int, rows: int, rate: float, critic: float, decay: float = 0.995) -> None:
        """Stage 2; leaves the average in the generator."""
        optimisers = {
            "student": adam(self.second.nets["student"], rate),
            "critic": adam(self.second.nets["critic"], critic),
        }
        mean = [p.detach().clone() for p in self.second.exported().parameters()]
        for step in range(steps):
            for name in self.second.turns(step):
                self.step(self.second, name, optimisers[name], step, rows)
            own = [p.detach() for p in self.second.exported().parameters()]
            torch._foreach_lerp_(mean, own, 1 - min(decay, (step + 1) / (step + 10)))
        for parameter, value in zip(self.second.exported().parameters(), mean, strict=True):
            parameter.data.copy_(value)

    @torch.no_grad()
    def drawn(self, rows: int = 20_000) -> Tensor:
        """Tokens [rows, N] of the generator."""
        index = torch.arange(self.count).expand(rows, -1)
        noise = noise_of(Noise(torch.arange(rows)), index, self.codes.shape[1])
        return Points(generated(self.second.exported(), noise, self.batch(rows)), self.codes).likeliest()

    def histogram(self, tokens: Tensor) -> Tensor:
        return torch.bincount(tokens, minlength=self.vocab).double() / len(tokens)


def adam(net: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)


def distance(seen: Tensor, law: Tensor) -> float:
    """Total variation."""
    return 0.5 * float((seen - law).abs().sum())


def one_token() -> Tensor:
    return 1.2 * torch.randn(1, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_one_token_reaches_the_given_law() -> None:  # S15
    logits = one_token()
    toy = Toy(logits, 1, 8)
    toy.tune(1500, 256)
    law = logits[0].softmax(0)
    before = distance(toy.histogram(toy.drawn()[:, 0]), law)
    toy.distil(3000, 512, 2e-4, 4e-4)
    after = distance(toy.histogram(toy.drawn()[:, 0]), law)
    assert after < 0.06 < before, (before, after)


def test_two_tokens_that_are_always_equal_stay_so() -> None:  # S16: the joint law {(0, 0), (1, 1)}
    certain = 60.0
    toy = Toy(torch.tensor([[0.0, 0.0], [certain, 0.0], [0.0, certain]]), 2, 4)
    toy.tune(500, 256)
    toy.distil(1200, 256, 1e-3, 2e-3, 0.98)
    tokens = toy.drawn()
    assert float((tokens[:, 0] != tokens[:, 1]).float().mean()) < 0.02, "of independent tokens half differ"
    assert abs(float(tokens.float().mean()) - 0.5) < 0.05


def joint(vocab: int = 4) -> Tensor:
    """A table for two tokens."""
    return 1.2 * torch.randn(1 + vocab, vocab, generator=torch.Generator().manual_seed(3))


def test_the_teachers_own_tokens_are_a_fixed_point() -> None:  # S13
    """Exact tokens in place of a generator's, times at which the weight of the loss does not explode."""
    toy = Toy(joint(), 2, 4, times=(0.2, 0.98))
    toy.tune(500, 256)
    critic = toy.second.nets["critic"]
    optimiser = adam(critic, 5e-4)
    for step in range(300):  # what psi learns of tokens that the teacher's map has made
        tokens = mapped(toy, 256)
        with torch.no_grad():
            t, e = dd2.draws(critic.model.head, toy.codes[tokens], 4, (0.04, 0.98), toy.rng)
        critic(toy.codes[tokens], toy.codes[tokens], t, e, toy.batch(256))[0].backward()
        optimiser.step()
        optimiser.zero_grad()
        if step == 200:
            optimiser.param_groups[0]["lr"] = 5e-5
    tokens = mapped(toy, 8192)
    gaps, slopes = [], []
    for teacher in (toy.logits, toy.logits.flip(1)):
        toy.logits = teacher
        q = toy.codes[tokens].clone().requires_grad_()
        loss, logs = toy.second.judged(q, toy.batch(len(q)), toy.rng)
        slope = torch.autograd.grad(len(q) * loss, q)[0]
        gaps.append(float(logs["gap"]))
        slopes.append(float(slope.norm(dim=-1).median()))
    assert gaps[0] < 0.05 * gaps[1] and slopes[0] < 0.35 * slopes[1], f"{gaps} {slopes}: against another teacher's"


def mapped(toy: Toy, rows: int) -> Tensor:
    """Tokens [rows, N] by the flow of the teacher's laws."""
    tokens = torch.zeros(rows, toy.count, dtype=torch.int64)
    for k in range(toy.count):
        law = toy.logits[toy.nodes(tokens)[:, k]].log_softmax(-1)
        noise = torch.randn(rows, toy.codes.shape[1], generator=toy.rng)
        tokens[:, k] = fm_map(noise, law, toy.codes)
    return tokens


def test_the_critic_draws_what_the_generator_draws() -> None:  # S14
    toy = Toy(joint(), 2, 4)
    toy.tune(500, 256)
    optimiser = adam(toy.second.nets["critic"], 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, 1000, pct_start=0.1)
    for step in range(1000):  # as in an alignment: the generator rests
        toy.step(toy.second, "critic", optimiser, step, 256)
        schedule.step()
    seen, wanted = walked(toy, toy.second.nets["critic"].model, 20_000), toy.drawn()
    both = [torch.bincount(4 * ids[:, 0] + ids[:, 1], minlength=16).double() / len(ids) for ids in (seen, wanted)]
    teacher = toy.ancestral(20_000)
    law = torch.bincount(4 * teacher[:, 0] + teacher[:, 1], minlength=16).double() / len(teacher)
    assert distance(*both) < 0.06 and distance(*both) < 0.5 * distance(both[1], law), (
        "of the generator, not the teacher"
    )


@torch.no_grad()
def walked(toy: Toy, model: Any, rows: int, steps: int = 60) -> Tensor:
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
