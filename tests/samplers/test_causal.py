"""Autoregression over vectors: cached decoding is the training pass, token by token by the head's own denoising."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.model import Model, ModelConfig
from visgen.nn.ancestral import walk
from visgen.objectives.next_token import Config, PreviewConfig

LABELS, SEEDS, N, C = torch.tensor([0, 2, 1]), torch.tensor([3, 1, 4]), 16, 3
KNOWN = torch.randn(3, N, C, generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(3, N, generator=torch.Generator().manual_seed(1)) < 0.3


def decode(model: Model, scale: float = 1.7, known: Any = None, **values: Any) -> Tensor:
    engine = Engine(model, Guidance(scale))
    engine.begin({"label": LABELS}, known)
    sampler = build(plugin_config("visgen.samplers", "causal", **{"steps": 4, **values}))
    return engine.run(sampler, Noise(SEEDS)).tokens


def naive(model: Any, scale: float, keep: Tensor | None = None) -> Tensor:
    """By the training pass alone, anew for every token."""
    noise, head, tokens = Noise(SEEDS), model.head, torch.zeros(3, N, C)
    steps = walk(head.path, "auto", 4)
    drop = [torch.zeros(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool)]
    conditions = [model.condition({"label": LABELS}, d) for d in drop]
    for k in range(N):
        at = torch.full((3, 1), k)
        hs = [model.backbone(tokens[:, :-1], None, cond=cond)[:, k : k + 1] for cond in conditions]
        x, before = noise.normal(at, C, Stream.DENOISE, 0), torch.zeros(3, 1, C)
        for j in range(steps.steps):
            time, _, _, p, q, a, b, c, _, _ = steps.rows[j].tolist()
            out = [head.predict(x, head.about(torch.tensor(time)), head.condition(h)) for h in hs]
            now = p * x + q * (out[1][0] + scale * (out[0][0] - out[1][0]))
            x, before = a * x + b * now + c * before, now
            if steps.noisy[j]:
                share = (out[0][1] + 1) / 2
                spread = (share * steps.high[j] + (1 - share) * steps.low[j]).div(2).exp()
                x = x + spread * noise.normal(at, C, Stream.DENOISE, j + 1)
        tokens[:, k] = x[:, 0] if keep is None else torch.where(keep[:, k : k + 1], KNOWN[:, k], x[:, 0])
    return tokens


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 2e-3 * b.abs().max())


@pytest.mark.parametrize("head", [{}, {"predicts": "velocity"}])
def test_it_is_the_naive_loop(make_causal: Callable[..., Model], head: Any) -> None:
    model = make_causal(**head)
    assert close(decode(model), naive(model, 1.7))


def test_known_tokens_are_kept_and_read_by_later_ones(make_causal: Callable[..., Model]) -> None:
    model = make_causal()
    found = decode(model, known=(KNOWN, KEEP))
    assert torch.equal(found[KEEP], KNOWN[KEEP]) and close(found, naive(model, 1.7, KEEP))


def test_an_order_is_of_its_own_batch(make_causal: Callable[..., Model]) -> None:
    model, sampler = make_causal(order="random"), build(plugin_config("visgen.samplers", "causal", steps=3))

    def drawn(engine: Engine, seeds: list[int]) -> Tensor:
        engine.begin({"label": torch.tensor([0, 0])})
        return engine.run(sampler, Noise(torch.tensor(seeds))).tokens

    used = Engine(model)
    drawn(used, [1, 2])
    assert torch.allclose(drawn(used, [3, 4]), drawn(Engine(model), [3, 4]), atol=1e-4)


def test_windows_with_a_cache_equal_the_training_pass(make_causal: Callable[..., Model]) -> None:
    model = make_causal()
    cond = model.condition({"label": LABELS})
    whole = model.backbone(KNOWN, None, cond=cond)
    cache = model.backbone.make_cache(3, torch.device("cpu"), torch.float32)
    before = torch.cat([torch.full((3, 1, C), 7.0), KNOWN], 1)  # 7: ignored at the prefix slot
    parts = []
    for start, end in ((0, 1), (1, 4), (4, 17)):
        pos = torch.arange(start, end).expand(3, -1)
        parts.append(model.backbone(before[:, start:end], pos, cond=cond, cache=cache))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-5)


def test_the_objective_draws_times_and_noise_from_its_generator(make_causal: Callable[..., Model]) -> None:
    model = make_causal().requires_grad_(True)
    config = Config(model=model.config)
    with pytest.raises(UserError, match=r"objective\.preview\.sampler ar makes no preview.*; use kind causal"):
        build(config)
    preview = PreviewConfig(sampler=plugin_config("visgen.samplers", "causal"))
    made = build(dataclasses.replace(config, preview=preview))
    made.exported().load_state_dict(model.state_dict())
    made.exported().eval()
    batch: Any = {"tokens": KNOWN, "label": LABELS}
    losses = [made.loss("model", made.nets, batch, 0, torch.Generator().manual_seed(s))[0] for s in (0, 0, 1)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    losses[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.exported().parameters())
    assert list(made.held_out(made.exported(), batch)) == ["loss"] == list(made.held_out_values)
    with pytest.raises(UserError, match=r"objective next_token trains a causal backbone, .* is mar; use ar"):
        mar, head = plugin_config("visgen.backbones", "mar"), plugin_config("visgen.heads", "diffusion")
        with torch.device("meta"):
            build(Config(model=ModelConfig(channels=16, backbone=mar, head=head)))
