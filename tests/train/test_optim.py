"""Schedules, parameter groups and the average, against formulas worked by hand."""

import math

import pytest
import torch
from torch import nn

from visgen.config import UserError
from visgen.train.ema import Ema
from visgen.train.optim import OptimConfig, build_optimizer, learning_rate, override, schedule, split_decay


def rates(config, steps):
    return [schedule(config, s, steps) for s in range(steps)]


def test_warmup_then_constant():
    assert rates(OptimConfig(warmup=4), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_starts_at_the_peak_and_heads_for_final():
    config = OptimConfig(schedule="cosine", warmup=2, final=0.1)
    found = rates(config, 10)
    assert found[:3] == [0.5, 1.0, 1.0]
    assert found[6] == pytest.approx(0.55)  # half-way
    assert found[9] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 7 / 8)) / 2)
    assert schedule(config, 10, 10) == pytest.approx(0.1)


def test_wsd_is_flat_then_linear():
    found = rates(OptimConfig(schedule="wsd", warmup=2, decay=0.4, final=0.0), 10)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_scale_multiplies_and_overrides_replace():
    config = override(OptimConfig(lr=1e-3), {"lr_scale": 0.5, "betas": (0.5, 0.9)})
    assert learning_rate(config, 0, 10) == pytest.approx(5e-4) and config.betas == (0.5, 0.9)
    assert override(config, None) == config


@pytest.mark.parametrize(
    ("config", "word"),
    [(OptimConfig(warmup=10), "optim.warmup"), (OptimConfig(schedule="wsd", warmup=5, decay=0.6), "optim.decay")],
)
def test_schedules_that_do_not_fit_are_refused(config, word):
    with pytest.raises(UserError, match=word):
        config.check(10)


def test_decay_spares_vectors_marked_modules_and_named_parameters():
    class Codes(nn.Module):
        no_decay = True

        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 2))

    net = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(3, 2), "norm": nn.LayerNorm(2), "codes": Codes()})
    net["b"].bias.requires_grad_(False)
    decayed, free = split_decay(net, {"b.weight"})
    names = {id(p): n for n, p in net.named_parameters()}
    assert [names[id(p)] for p in decayed] == ["a.weight"]
    assert {names[id(p)] for p in free} == {"a.bias", "b.weight", "norm.weight", "norm.bias", "codes.table"}
    groups = build_optimizer(net, OptimConfig(weight_decay=0.3)).param_groups
    assert [g["weight_decay"] for g in groups] == [0.3, 0.0]


def test_optimiser_kinds():
    net = nn.Linear(2, 2)
    assert type(build_optimizer(net, OptimConfig())) is torch.optim.AdamW
    assert type(build_optimizer(net, OptimConfig(method="adam"))) is torch.optim.Adam
    with pytest.raises(ValueError, match="no trainable"):
        build_optimizer(net.requires_grad_(False), OptimConfig())


def test_average_equals_its_formula_and_copies_buffers():
    net = nn.BatchNorm1d(2)
    ema = Ema(net, decay=0.4)
    mean, values = None, torch.tensor([1.0, 5.0, 2.0, -3.0, 8.0, 4.0])
    for t, value in enumerate(values):
        with torch.no_grad():
            net.weight.fill_(value)
            net.running_mean.fill_(10 * value)
            net.num_batches_tracked += 1
        ema.update()
        decay = min(0.4, (1 + t) / (10 + t))
        mean = value if t == 0 else decay * mean + (1 - decay) * value
        assert ema.module.weight.tolist() == pytest.approx([mean.item()] * 2, rel=1e-6)
        assert torch.equal(ema.module.running_mean, net.running_mean)
    assert ema.module.num_batches_tracked == len(values) and not ema.module.training
    assert [ema.decay_at(t) for t in (0, 1, 5, 100)] == pytest.approx([0, 2 / 11, 6 / 15, 0.4])
    assert Ema(nn.Linear(1, 1), 0.9999).decay_at(10**6) == 0.9999


def test_zero_decay_is_a_copy():
    net = nn.Linear(2, 2)
    ema = Ema(net, 0.0)
    for _ in range(3):
        with torch.no_grad():
            net.weight.normal_()
        ema.update()
        assert torch.equal(ema.module.weight, net.weight)
