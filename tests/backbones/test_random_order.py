"""Causal models of vectors in random order: cached decoding is the training pass, told which token comes next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine, Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.model import Model
from visgen.nn.ancestral import walk
from visgen.objectives.next_token import Config, PreviewConfig

LABELS, SEEDS, N, C = torch.tensor([0, 2, 1]), torch.tensor([3, 1, 4]), 16, 3
TOKENS = torch.randn(3, N, C, generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(3, N, generator=torch.Generator().manual_seed(1)) < 0.3
ORDER = torch.rand(3, N, generator=torch.Generator().manual_seed(2)).argsort(1)
Make = Callable[..., Model]


@pytest.fixture(scope="module")
def model(make_causal: Make) -> Model:
    return make_causal(order="random")


def hidden(model: Model, tokens: Tensor, order: Tensor) -> Tensor:
    """[B, N, D] of the n-th tokens, by the training pass."""
    cond = model.condition({"label": LABELS[: len(tokens)]})
    return model.backbone(tokens[:, :-1], None, cond=cond, order=order)  # type: ignore[call-arg]


def decode(
    model: Model, known: Any = None, draft: Model | None = None, scale: float = 1.7, **sampler: Any
) -> Generation:
    engine = Engine(model, Guidance(scale))
    if draft is not None:
        engine.once(("draft", None), lambda: Engine(draft, Guidance(scale)))
    engine.begin({"label": LABELS}, known)
    return engine.run(
        build(plugin_config("visgen.samplers", **{"kind": "causal", "steps": 4, **sampler})), Noise(SEEDS)
    )


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() < 2e-3 * b.abs().max())


def test_windows_with_a_cache_equal_the_training_pass(model: Model) -> None:
    whole, cond = hidden(model, TOKENS, ORDER), model.condition({"label": LABELS})
    cache = model.backbone.make_cache(3, torch.device("cpu"), torch.float32)
    before = torch.cat([torch.full((3, 1, C), 7.0), TOKENS], 1)  # 7: ignored at the prefix slot
    parts = []
    for start, end in ((0, 1), (1, 4), (3, 16)):  # the third window reads slot 3 again
        pos = torch.arange(start, end).expand(3, -1)
        given: Any = {"cond": cond, "cache": cache, "order": ORDER}
        parts.append(model.backbone(before[:, start:end], pos, **given))
    found = torch.cat([parts[0], parts[1][:, :2], parts[2]], 1)
    assert found.shape == whole.shape and torch.allclose(found, whole, atol=2e-5)


def test_a_slot_sees_earlier_tokens_and_the_place_that_it_predicts(model: Model) -> None:
    plain = hidden(model, TOKENS, ORDER)
    for k in (0, 5, 14):
        changed = TOKENS.clone()
        changed[:, k] += 1
        after = hidden(model, changed, ORDER)
        assert torch.equal(after[:, : k + 1], plain[:, : k + 1])
        assert ((after - plain)[:, k + 1 :].abs().amax(-1) > 1e-4).all()
        other = ORDER.clone()
        other[:, k], other[:, k + 1] = ORDER[:, k + 1], ORDER[:, k]
        after = hidden(model, TOKENS, other)
        assert torch.equal(after[:, :k], plain[:, :k]) and ((after - plain)[:, k].abs().amax(-1) > 1e-2).all()


def test_no_order_is_raster_order(model: Model, make_causal: Make) -> None:
    raster = torch.arange(N).expand(3, -1)
    cond = model.condition({"label": LABELS})
    assert torch.equal(model.backbone(TOKENS[:, :-1], None, cond=cond), hidden(model, TOKENS, raster))
    same = make_causal(order="raster")
    same.load_state_dict({k: v for k, v in model.state_dict().items() if k in same.state_dict()})
    tables: Any = model.backbone
    with torch.no_grad():
        kept = [t.weight.clone() for t in (tables.targets, tables.head_positions)]
        for t in (tables.targets, tables.head_positions):
            t.weight.zero_()
        assert torch.allclose(hidden(model, TOKENS, raster), same.backbone(TOKENS[:, :-1], None, cond=cond), atol=1e-5)
        for t, weight in zip((tables.targets, tables.head_positions), kept, strict=True):
            t.weight.copy_(weight)


def naive(model: Any, scale: float, keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """By the training pass alone, anew for every token; and the order."""
    noise, steps = Noise(SEEDS), walk(model.head.path, "auto", 4)
    order = noise.bits(torch.arange(N)[None], 1, Stream.ORDER).squeeze(-1).argsort(1)
    if keep is not None:
        lists = [[p for p in row.tolist() if keep[i, p]] for i, row in enumerate(order)]
        rest = [[p for p in row.tolist() if not keep[i, p]] for i, row in enumerate(order)]
        order = torch.tensor([a + b for a, b in zip(lists, rest, strict=True)])
    tokens, found = torch.zeros(3, N, C), torch.zeros(3, N, C)
    conditions = [model.condition({"label": LABELS}, torch.full((3,), drop)) for drop in (False, True)]
    for k in range(N):
        place = order[:, k : k + 1]
        hs = [model.backbone(tokens[:, :-1], None, cond=c, order=order)[:, k : k + 1] for c in conditions]
        x = noise.normal(place, C, Stream.DENOISE, 0)
        for j in range(4):
            time, _, _, p, q, a, b, *_ = steps.rows[j].tolist()
            out = [model.head.predict(x, model.head.about(torch.tensor(time)), model.head.condition(h)) for h in hs]
            x = a * x + b * (p * x + q * (out[1][0] + scale * (out[0][0] - out[1][0])))
            if steps.noisy[j]:
                share = (out[0][1] + 1) / 2
                spread = (share * steps.high[j] + (1 - share) * steps.low[j]).div(2).exp()
                x = x + spread * noise.normal(place, C, Stream.DENOISE, j + 1)
        for i in range(3):
            at = int(place[i])
            tokens[i, k] = x[i, 0] if keep is None or not keep[i, at] else TOKENS[i, at]
            found[i, at] = tokens[i, k]
    return found, order


def test_decoding_is_the_naive_loop_in_the_images_own_order(model: Model) -> None:
    found, (wanted, order) = decode(model), naive(model, 1.7)
    assert close(found.tokens, wanted)
    assert torch.equal(found.rounds.gather(1, order), torch.arange(1, N + 1).expand(3, -1))
    assert not torch.equal(order[0], order[1])


def test_known_tokens_come_first_and_are_seen_by_all_others(model: Model) -> None:
    found, (wanted, order) = decode(model, (TOKENS, KEEP)), naive(model, 1.7, KEEP)
    assert torch.equal(found.tokens[KEEP], TOKENS[KEEP]) and close(found.tokens, wanted)
    assert torch.equal(found.rounds.gather(1, order), torch.arange(1, N + 1).expand(3, -1))


def test_speculation_keeps_the_order(model: Model, make_causal: Make) -> None:
    plain = decode(model, variance=1.0, end_noise=True).tokens
    same = decode(model, draft=model, kind="cspec", length=3)
    assert close(same.tokens, plain) and same.nfe == 4 and not (same.rounds.diff(dim=1) >= 0).all()
    gate: Any = {"kind": "cspec", "mode": "distance", "radius": 0.0}
    assert close(decode(model, draft=make_causal(order="random", seed=1), **gate).tokens, plain)
    kept = decode(model, (TOKENS, KEEP), draft=model, kind="cspec", length=3)
    assert close(kept.tokens, decode(model, (TOKENS, KEEP), variance=1.0, end_noise=True).tokens)
    alone = decode(model, kind="cspec", mode="head_time", length=1)
    assert close(alone.tokens, decode(model, kind="cspec", mode="head_time", length=1).tokens)
    with pytest.raises(UserError, match=r"its backbone is ar \(order raster\), the model's is ar \(order random\)"):
        decode(model, draft=make_causal(), kind="cspec")


def test_the_objective_draws_an_order_for_every_sample(model: Model) -> None:
    preview = PreviewConfig(sampler=plugin_config("visgen.samplers", "causal"))
    made = build(Config(model=model.config, preview=preview))
    made.exported().load_state_dict(model.state_dict())
    made.exported().eval()
    asked: list[Tensor] = []
    inner = made.exported().backbone.forward

    def watched(*given: Any, order: Any = None, **named: Any) -> Tensor:
        asked.append(order)
        return inner(*given, order=order, **named)

    made.exported().backbone.forward = watched
    batch: Any = {"tokens": TOKENS, "label": LABELS}
    losses = [made.loss("model", made.nets, batch, 0, torch.Generator().manual_seed(s))[0] for s in (0, 0, 1)]
    assert torch.equal(losses[0], losses[1]) and not torch.equal(losses[0], losses[2])
    assert torch.equal(asked[0], asked[1]) and not torch.equal(asked[0], asked[2])
    assert all(torch.equal(o.sort(1)[0], torch.arange(N).expand(3, -1)) and len(o.unique(dim=0)) == 3 for o in asked)
    losses[0].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.exported().parameters())
    values = [made.held_out(made.exported(), batch)["loss"] for _ in range(2)]
    assert torch.equal(*values) and torch.equal(asked[-1], Noise(torch.arange(3)).order(N))


def test_what_does_not_fit_is_refused(model: Model, make_model: Make) -> None:
    with pytest.raises(UserError, match="order random is for vectors; set continuous, or leave it out"):
        make_model(order="random")
    with pytest.raises(UserError, match="has embeddings of its own places alone; leave size out"):
        model.at((1, 2, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_decode_is_the_eager_one(make_causal: Make) -> None:
    captured: Any = pytest.importorskip("visgen.decode.captured")
    model = make_causal(order="random").to("cuda")
    found = []
    for engine in (captured.CapturedEngine(model, Guidance(1.7)), Engine(model, Guidance(1.7))):
        for first in (0, 8):  # the second batch, of other orders, in the buffers of the first
            engine.begin({"label": LABELS.to("cuda")})
            sampler = build(plugin_config("visgen.samplers", "causal", steps=4))
            found.append(engine.run(sampler, Noise(torch.arange(first, first + 3, device="cuda"))))
    for fast, slow in zip(found[:2], found[2:], strict=True):
        assert torch.equal(fast.rounds, slow.rounds) and close(fast.tokens, slow.tokens)
