"""Every objective: nets whose forward is the loss, turns that train every parameter, and an exported model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visgen.config import build, plugin_config
from visgen.objectives import Objective

PACKAGE = "objectives"
B, SIZE, N, CLASSES = 4, 16, 64, 3
SETTINGS: dict[str, dict[str, Any]] = {  # beside the shrinking by field names of conftest.SMALL
    "next_token": {"grid": (1, 8, 8), "vocab": 16},
    "acdit": {"grid": (1, 8, 8), "channels": 4, "block": (1, 4, 4)},
    "masked": {"grid": (1, 8, 8), "channels": 4},
    "dd1": {"grid": (1, 8, 8), "vocab": 16, "second": 20, "regress": True, "regression": 0.5},
    "dd2": {"grid": (1, 8, 8), "vocab": 16, "critic_steps": 2},
    "dd2_tuning": {"grid": (1, 8, 8), "vocab": 16},
    "dd2_teacher": {"grid": (1, 8, 8), "vocab": 16, "code_channels": 8, "fit_steps": 0},
    "vq": {"gan_start": 0, "discriminator_start": 0, "layers": 1, "width": 8},
}


@pytest.fixture
def objective(kind: str, small: Callable[..., Any], make_model: Callable[..., Any]) -> Objective:
    torch.manual_seed(0)
    made = build(small(PACKAGE, kind, **SETTINGS.get(kind, {})))
    if getattr(made, "needs_laws", False):
        made.frozen["teacher"] = make_model(grid=(1, 8, 8), vocab=16)
    return made


def batch(vectors: bool = False) -> Any:
    rng = torch.Generator().manual_seed(0)
    return {
        "pixels": torch.rand(B, 1, 3, SIZE, SIZE, generator=rng) * 2 - 1,
        "tokens": torch.randn(B, N, 4, generator=rng) if vectors else torch.randint(16, (B, N), generator=rng),
        "label": torch.arange(B) % CLASSES,
        "index": torch.arange(B),
        "seed": torch.arange(B),
    }


def vectors(objective: Objective) -> bool:
    """Whether the tokens it trains on are vectors."""
    return getattr(objective.exported(), "continuous", False)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Counted(nn.Module):
    """A wrapper like DDP: the objective must go through its forward, once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.calls = module, 0

    def forward(self, *given: Any, **named: Any) -> Any:
        self.calls += 1
        out = self.module(*given, **named)
        loss, logs = out
        assert loss.ndim == 0 and loss.requires_grad and isinstance(logs, dict)
        return out


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_builds_on_the_meta_device_and_reads_nothing(kind: str) -> None:
    with torch.device("meta"):
        objective = build(plugin_config("visgen.objectives", kind))
    assert objective.nets and objective.frozen == {}
    assert all(p.is_meta for net in objective.nets.values() for p in net.parameters())


def test_the_export_says_how_to_build_it_again(objective: Objective) -> None:
    assert objective.export in objective.nets
    model = objective.exported()
    assert model is objective.nets[objective.export].model and hasattr(model, "config")
    assert isinstance(model, nn.Module) and set(model.parameters()) <= set(
        objective.nets[objective.export].parameters()
    )


def test_a_step_gives_every_parameter_a_gradient_through_the_wrapped_nets(objective: Objective) -> None:
    nets: dict[str, nn.Module] = {name: Counted(net) for name, net in objective.nets.items()}
    turns = objective.turns(0)
    assert turns and set(turns) == set(nets), "this test's settings train every net at step 0"
    generator, shared = rng(), batch(vectors(objective))
    for name in turns:
        others = {n: [p.grad for p in net.parameters()] for n, net in nets.items() if n != name}
        loss, logs = objective.loss(name, nets, shared, 0, generator)
        assert loss.ndim == 0 and loss.isfinite()
        assert all(isinstance(v, Tensor) and v.numel() == 1 and not v.requires_grad for v in logs.values()), "logs"
        loss.backward()
        without = [n for n, p in nets[name].named_parameters() if p.requires_grad and p.grad is None]
        assert not without, f"turn {name} leaves {without} without a gradient: DDP would wait for them"
        for other, before in others.items():
            after = [p.grad for p in nets[other].parameters()]
            assert all(a is b for a, b in zip(after, before, strict=True)), f"turn {name} reached into {other}"
    assert all(net.calls == turns.count(name) for name, net in nets.items()), "one forward per turn"


def test_the_loss_depends_on_the_given_generator_alone(objective: Objective) -> None:
    for net in objective.nets.values():
        net.eval()  # dropout draws from the global generator, which the loop seeds
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        shared, nets = batch(vectors(objective)), objective.nets
        losses.append([objective.loss(n, nets, shared, 0, rng())[0].detach() for n in objective.turns(0)])
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


def test_held_out_values_are_those_that_are_named(objective: Objective) -> None:
    found = objective.held_out(objective.exported().eval(), batch(vectors(objective)))
    assert tuple(found) == objective.held_out_values and set(objective.larger_is_better) <= set(found)


def test_turns_are_names_of_nets_at_every_step(objective: Objective) -> None:
    for step in (0, 1, 7, 10**6):
        assert objective.turns(step) and set(objective.turns(step)) <= set(objective.nets)
