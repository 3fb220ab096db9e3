"""Masked prediction: which tokens are hidden, what the loss is of, and how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from visgen.config import UserError, build, plugin_config
from visgen.model import Model, ModelConfig
from visgen.objectives.masked import Config, Masked, hidden_states

TOKENS = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
BATCH: Any = {"tokens": TOKENS, "label": torch.tensor([0, 2])}


def objective(model: Model, **values: Any) -> Masked:
    made = build(Config(model=model.config, **values))
    made.exported().load_state_dict(model.state_dict())
    made.exported().eval()
    return made


def loss(made: Masked, step: int = 0, batch: Any = BATCH) -> Any:
    return made.loss("model", made.nets, batch, step, torch.Generator().manual_seed(0))


def test_the_hidden_share_follows_the_published_law(make_masked: Callable[..., Model]) -> None:
    """N(1, 0.25^2) cut to [0.7, 1]: mean 0.867, median 0.874, all 256 tokens hidden in 1.6 % of steps."""
    made = objective(make_masked())
    u = (np.arange(20_000) + 0.5) / 20_000
    shares = np.array([made.share(x) for x in u])
    assert abs(shares.mean() - 0.8670) < 1e-4 and abs(made.share(0.5) - 0.874) < 5e-4
    assert shares.min() >= 0.7 and shares.max() <= 1 and abs((np.ceil(256 * shares) == 256).mean() - 0.016) < 2e-3
    normal = np.random.default_rng(0).normal(1, 0.25, 400_000)
    normal = normal[(normal >= 0.7) & (normal <= 1)]
    assert np.abs(np.quantile(normal, [0.1, 0.3, 0.9]) - [made.share(x) for x in (0.1, 0.3, 0.9)]).max() < 2e-3


def test_shares_are_spread_evenly_over_steps(make_masked: Callable[..., Model]) -> None:
    model = make_masked(grid=(1, 16, 16))
    made = objective(model)
    for start in (0, 5000):
        counts = [made.hidden(step) for step in range(start, start + 50)]
        assert abs(np.mean(counts) / 256 - 0.869) < 0.004, "which independent draws of 50 would miss half the time"
    assert objective(make_masked(), least=1.0).hidden(3) == 16 and objective(make_masked(), least=0.01).hidden(3) >= 1


def test_the_head_learns_hidden_tokens_from_known_ones_alone(make_masked: Callable[..., Model]) -> None:
    model = make_masked()
    order = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)).argsort(1)
    h, target = hidden_states(model, TOKENS, BATCH, None, order, 12)
    assert torch.equal(target[1], TOKENS[1, order[1, :12]]) and h.shape == (2, 12, 32)
    changed = TOKENS.clone()
    changed[0, order[0, :12]] = 7
    assert torch.equal(hidden_states(model, changed, BATCH, None, order, 12)[0], h)
    changed[0, order[0, 12:]] = 7
    assert not torch.allclose(hidden_states(model, changed, BATCH, None, order, 12)[0], h, atol=1e-3)
    level = torch.full((2, 16), -1.0).scatter(1, order[:, :12], 0)
    whole = model.backbone(TOKENS, None, cond=model.condition(BATCH), level=level)
    assert torch.allclose(whole[0, order[0, :12]], h[0], atol=1e-5)


def test_what_is_logged_adds_up(make_masked: Callable[..., Model]) -> None:
    made = objective(make_masked())
    total, logs = loss(made)
    bands = [float(v) for k, v in logs.items() if k.startswith("mse_t")]
    assert len(bands) == 4 and min(b for b in bands if b) <= float(logs["mse"]) <= max(bands)
    assert torch.isclose(total, logs["mse"] + logs["vb"]) and float(logs["hidden"]) == made.hidden(0) / 16
    assert float(loss(made, 1)[1]["hidden"]) != float(logs["hidden"])


def test_samples_have_orders_and_drops_of_their_own(make_masked: Callable[..., Model]) -> None:
    made, seen = objective(make_masked()), []
    net = made.nets["model"]
    whole = {"tokens": TOKENS.repeat(500, 1, 1), "label": torch.zeros(1000, dtype=torch.int64)}
    nets: Any = {"model": lambda *given: seen.append(given) or net(*given)}
    loss_of = made.loss("model", nets, whole, 0, torch.Generator().manual_seed(0))[0]  # type: ignore[arg-type]
    _, _, drop, order, count, draws = seen[0]
    assert loss_of.isfinite() and 0.06 < drop.float().mean() < 0.14 and draws.noise.shape == (4, 1000, count, 3)
    assert torch.equal(order.sort(1)[0], torch.arange(16).expand(1000, -1))
    first = torch.nn.functional.one_hot(order[:, 0], 16).float().mean(0)
    assert (first - 1 / 16).abs().max() < 0.04


def test_held_out_values_draw_no_random_number(make_masked: Callable[..., Model]) -> None:
    made = objective(make_masked())
    first = made.held_out(made.exported(), BATCH)
    torch.manual_seed(5)
    again = made.held_out(made.exported(), BATCH)
    assert first == again and tuple(first) == made.held_out_values and first["loss"] != first["loss_tenth"]


def test_bfloat16_and_compilation_leave_the_loss(make_masked: Callable[..., Model]) -> None:
    made = objective(make_masked().requires_grad_(False))
    with torch.no_grad():
        plain = loss(made)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cast = loss(made)[0]
        assert cast.dtype == torch.float32 and torch.allclose(cast, plain, rtol=0.05)
        net = made.nets["model"]
        net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
        assert torch.allclose(loss(made)[0], plain, rtol=1e-4)


def test_a_backbone_that_masks_nothing_is_refused(make_blocks: Callable[..., Model]) -> None:
    with pytest.raises(UserError, match=r"objective masked trains a masked backbone, .* is acdit; use mar"):
        build(Config(model=make_blocks().config))
    with pytest.raises(UserError, match="objective acdit trains"), torch.device("meta"):
        mar, head = plugin_config("visgen.backbones", "mar"), plugin_config("visgen.heads", "diffusion")
        build(plugin_config("visgen.objectives", "acdit", model=ModelConfig(channels=16, backbone=mar, head=head)))
