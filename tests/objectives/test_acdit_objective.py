"""Blockwise denoising: what the loss is of, in which order, and that precision and compilation leave it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.model import Model, ModelConfig
from visgen.objectives.acdit import Blocks, Config, error

TOKENS = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(2, 16, 3, generator=torch.Generator().manual_seed(1))
BATCH: Any = {"tokens": TOKENS, "label": torch.tensor([0, 2])}


def objective(model: Model) -> Blocks:
    made = build(Config(model=model.config))
    made.exported().load_state_dict(model.state_dict())
    return made


def loss(made: Blocks, batch: Any = BATCH) -> Any:
    return made.loss("model", made.nets, batch, 0, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("predicts", ["epsilon", "velocity"])
def test_an_untrained_head_leaves_the_power_of_the_target(make_blocks: Callable[..., Model], predicts: str) -> None:
    model = make_blocks(predicts=predicts)
    model.head.output.weight.zero_()
    time = torch.full((2, 4), 300.0)
    found = error(model, TOKENS, BATCH, None, time, NOISE)
    target = NOISE if predicts == "epsilon" else NOISE - TOKENS
    cells = target.square().mean(-1).unflatten(1, (2, 2, 2, 2)).mean((2, 4)).flatten(1)  # 2 x 2 blocks of a 4 x 4 image
    assert torch.allclose(found, cells, atol=1e-5)


def test_each_block_has_a_time_of_its_own(make_blocks: Callable[..., Model]) -> None:
    model = make_blocks()
    plain = error(model, TOKENS, BATCH, None, torch.full((2, 4), 300.0), NOISE)
    time = torch.full((2, 4), 300.0)
    time[:, 2] = 800
    changed = (error(model, TOKENS, BATCH, None, time, NOISE) != plain).any(0)
    assert changed.tolist() == [False, False, True, False]


def test_what_is_logged_by_time_adds_up(make_blocks: Callable[..., Model]) -> None:
    total, logs = loss(objective(make_blocks()))
    bands = [float(v) for k, v in logs.items() if k.startswith("mse_t")]
    assert len(bands) == 4 and float(logs["mse"]) == float(total.detach())
    assert min(b for b in bands if b) <= float(total.detach()) <= max(bands)


def test_labels_are_dropped_at_the_conditions_rate(make_blocks: Callable[..., Model]) -> None:
    made = objective(make_blocks())
    seen: list[Any] = []
    net = made.nets["model"]
    whole = {"tokens": TOKENS.repeat(500, 1, 1), "label": torch.zeros(1000, dtype=torch.int64)}
    nets: Any = {"model": lambda *given: seen.append(given) or net(TOKENS, BATCH, None, given[3][:2], given[4][:2])}
    made.loss("model", nets, whole, 0, torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    _, _, drop, time, noise = seen[0]
    assert 0.06 < drop.float().mean() < 0.14
    assert time.unique().numel() > 500 and (time == time.round()).all() and abs(float(noise.std()) - 1) < 0.02


def test_held_out_errors_draw_no_random_number(make_blocks: Callable[..., Model]) -> None:
    made = objective(make_blocks())
    first = made.held_out(made.exported(), BATCH)["mse"]
    torch.manual_seed(5)
    assert torch.equal(made.held_out(made.exported(), BATCH)["mse"], first)


@pytest.mark.parametrize(("attention", "predicts"), [("dense", "velocity"), ("flex", "epsilon")])
def test_a_graph_and_bfloat16_leave_the_loss(make_blocks: Callable[..., Model], attention: str, predicts: str) -> None:
    made = objective(make_blocks(attention=attention, predicts=predicts).requires_grad_(False))
    with torch.no_grad():  # FlexAttention has no backward on a CPU
        plain = loss(made)[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.allclose(loss(made)[0].float(), plain, rtol=0.05)
        copy.deepcopy(made.exported())  # as the average is made, masks and all
        net = made.nets["model"]
        net.forward = torch.compile(net.forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]
        assert torch.allclose(loss(made)[0], plain, rtol=1e-4)


def test_a_decode_in_bfloat16_is_near(make_blocks: Callable[..., Model]) -> None:
    """The weights and the cache are bfloat16, times and the solver float32."""
    tokens = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = make_blocks(predicts="velocity").to(dtype)
        engine = Engine(model, Guidance(1.5))
        engine.begin({"label": torch.tensor([0, 1])})
        sampler = build(plugin_config("visgen.samplers", "blockwise", steps=4))
        tokens[dtype] = engine.run(sampler, Noise(torch.arange(2))).tokens
        assert engine._cache is not None and engine._cache.keys.dtype == dtype
    a, b = tokens.values()
    assert b.dtype == torch.float32 and (a - b).square().mean() < 0.01 * a.square().mean()


def test_parts_that_do_not_go_together_are_refused() -> None:
    blocks, head = plugin_config("visgen.backbones", "acdit"), plugin_config("visgen.heads", "denoiser")
    with pytest.raises(UserError, match=r"acdit is for continuous tokens, model\.head categorical is not"):
        Model(ModelConfig(grid=(1, 16, 16), channels=4, backbone=blocks))
    with pytest.raises(UserError, match=r"model\.channels is None, model\.backbone acdit is for continuous tokens"):
        Model(ModelConfig(grid=(1, 16, 16), backbone=blocks, head=head))
    with pytest.raises(UserError, match=r"model\.channels is 4, model\.backbone ar is for codes; leave it out"):
        Model(ModelConfig(channels=4))
    with pytest.raises(UserError, match="objective acdit trains a model of vectors"), torch.device("meta"):
        build(Config(model=ModelConfig()))
