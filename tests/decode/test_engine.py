"""The engine: cached decoding equals the full forward, whatever the window, the guidance, the padding and the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import reference
import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.conditions import Condition, Prefix
from visgen.decode.engine import POLL, Engine, Looks
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.layout import Layout
from visgen.model import Model
from visgen.samplers.ar import AR, Config

MakeModel = Callable[..., Model]
N, VOCAB, CLASSES = 16, 16, 3
LABELS = torch.tensor([0, 2, 1])
TOKENS = torch.randint(VOCAB, (3, N), generator=torch.Generator().manual_seed(5))


class Words(Condition):
    """A prefix of three slots per label, padded as the batch says: what a text condition looks like."""

    prefix = 3

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES + 1, 3 * width)

    def forward(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Prefix:
        return Prefix(self.table(batch["label"]).unflatten(1, (3, -1)), batch.get("visible"))

    def null(self, given: Prefix) -> Prefix:
        rows = torch.full((len(given.vectors),), CLASSES)
        return Prefix(self.table(rows).unflatten(1, (3, -1)), given.visible)


@pytest.fixture(scope="module")
def worded(make_model: MakeModel) -> Model:
    """A model whose condition is `Words`."""
    model = make_model(kv_heads=2)
    layout = Layout.raster((1, 4, 4)).with_prefix(3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.condition = Words(32)
        model.backbone = configs.build(model.config.backbone, layout, VOCAB).eval()
        for parameter in (*model.condition.parameters(), *model.backbone.parameters()):
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.25)
    return model.requires_grad_(False)


def full(model: Model, batch: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [B, N, V] by the training pass."""
    cond = model.condition(batch)
    h = model.backbone(tokens[:, :-1], None, cond=cond)
    return model.head.output(h[:, model.condition.prefix - 1 :])


def twin(model: Model, cond: Prefix, tokens: Tensor) -> Tensor:
    backbone = model.config.backbone
    kv_heads = backbone.kv_heads or backbone.heads
    return reference.ar_logits(
        model.state_dict(), cond.vectors, tokens[:, :-1], (4, 4), backbone.heads, kv_heads, cond.visible
    )


def forced(engine: Engine, tokens: Tensor, windows: Sequence[int] = (1,) * N) -> Tensor:
    """Logits [B, N, V] of given tokens through the engine's cache, window by window."""
    out, start = [], 0
    with torch.inference_mode():
        for width in windows:
            index = torch.arange(start, start + width).expand(len(tokens), -1)
            out.append(engine.forward(tokens, index).logits)
            start += width
    assert start == N
    return torch.cat(out, dim=1)


def started(model: Model, batch: dict[str, Tensor], *settings: Any, known: Any = None) -> Engine:
    engine = Engine(model, *settings)
    engine.begin(batch, known)
    return engine


def decoded(engine: Engine, batch: dict[str, Tensor], seeds: Sequence[int], known: Any = None) -> Tensor:
    engine.begin(batch, known)
    return engine.run(AR(Config()), Noise(torch.tensor(seeds))).tokens


# ------------------------------------------------------------------------------------------ cache and windows


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_cached_equals_full_equals_twin(make_model: MakeModel, kv_heads: int | None) -> None:
    model, batch = make_model(kv_heads=kv_heads), {"label": LABELS}
    whole = full(model, batch, TOKENS)
    assert whole.std() > 0.3, "a model that says something"
    assert torch.allclose(whole, twin(model, model.condition(batch), TOKENS), atol=1e-5)
    assert torch.allclose(forced(started(model, batch), TOKENS), whole, atol=1e-5)


@pytest.mark.parametrize("windows", [(4,) * 4, (16,), (1, 3, 5, 7), (15, 1)])
def test_several_tokens_at_once_equal_token_by_token(make_model: MakeModel, windows: tuple[int, ...]) -> None:
    model, batch = make_model(kv_heads=2), {"label": LABELS}
    assert torch.allclose(forced(started(model, batch), TOKENS, windows), full(model, batch, TOKENS), atol=1e-5)
    settings = (Guidance(2.0, (0.2, 0.9), "linear"), Warp(0.8))
    one_by_one = forced(started(model, batch, *settings), TOKENS)
    assert torch.allclose(forced(started(model, batch, *settings), TOKENS, windows), one_by_one, atol=5e-5)


def test_rows_may_stand_at_different_places(make_model: MakeModel) -> None:
    """As after speculative decoding: row 0 is at token 2, row 1 at token 9."""
    model, labels = make_model(), LABELS[:2]
    whole = full(model, {"label": labels}, TOKENS[:2])
    engine = started(model, {"label": labels})
    forced(engine, TOKENS[:2])  # fills all slots; those past a row's place are stale
    index = torch.tensor([[2, 3], [9, 10]])
    with torch.inference_mode():
        law = engine.forward(TOKENS[:2], index)
    expected = whole.gather(1, index.unsqueeze(-1).expand(-1, -1, VOCAB))
    assert torch.allclose(law.logits, expected, atol=1e-5)


def test_going_back_with_another_token_forgets_the_first(make_model: MakeModel) -> None:
    """A rejected draft: the slots after it hold keys of tokens that were taken back."""
    model, batch = make_model(), {"label": LABELS}
    engine = started(model, batch)
    forced(engine, TOKENS)
    other = TOKENS.clone()
    other[:, 5:] = (other[:, 5:] + 1) % VOCAB
    with torch.inference_mode():
        for k in range(6, N):
            law = engine.forward(other, torch.full((3, 1), k))
            assert torch.allclose(law.logits[:, 0], full(model, batch, other)[:, k], atol=1e-5), k


def test_stale_slots_change_nothing(make_model: MakeModel) -> None:
    model, batch = make_model(), {"label": LABELS}
    clean = forced(started(model, batch), TOKENS)
    engine = started(model, batch)
    assert engine._cache is not None
    with torch.inference_mode():
        engine._cache.keys.fill_(1e30)
        engine._cache.values.fill_(-1e30)
    assert torch.equal(forced(engine, TOKENS), clean)


def test_an_engine_serves_batches_of_any_size(make_model: MakeModel) -> None:
    model = make_model()
    engine = Engine(model, Guidance(2.0))
    for labels, seeds in (([0, 1], [0, 1]), ([2, 2, 1, 0, 1], [5, 6, 7, 8, 9]), ([1], [3]), ([0, 1], [0, 1])):
        fresh = decoded(Engine(model, Guidance(2.0)), {"label": torch.tensor(labels)}, seeds)
        assert torch.equal(decoded(engine, {"label": torch.tensor(labels)}, seeds), fresh)
        assert engine.batch == len(labels)


def test_a_new_batch_forgets_known_tokens(make_model: MakeModel) -> None:
    engine, batch = Engine(make_model()), {"label": LABELS}
    free = decoded(engine, batch, [0, 1, 2])
    everything = (torch.full_like(TOKENS, 3), torch.ones_like(TOKENS, dtype=torch.bool))
    assert (decoded(engine, batch, [0, 1, 2], everything) == 3).all()
    assert torch.equal(decoded(engine, batch, [0, 1, 2]), free)


def test_begin_comes_first(make_model: MakeModel) -> None:
    engine = Engine(make_model())
    with pytest.raises(AssertionError, match=r"Engine\.begin comes first"):
        engine.forward(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))


# ---------------------------------------------------------------------------------------------------- prefixes


VISIBLE = torch.tensor([[False, False, True], [True, True, True], [False, True, True]])


@pytest.mark.parametrize("visible", [None, VISIBLE], ids=["whole", "padded"])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_long_prefix_cached_equals_full_equals_twin(worded: Model, visible: Tensor | None, scale: float) -> None:
    batch = {"label": LABELS} | ({} if visible is None else {"visible": visible})
    given = worded.condition(batch)
    branches = [twin(worded, cond, TOKENS) for cond in (worded.condition.null(given), given)]
    assert torch.allclose(full(worded, batch, TOKENS), branches[1], atol=1e-5)
    expected = branches[0] + scale * (branches[1] - branches[0])
    assert torch.allclose(forced(started(worded, batch, Guidance(scale)), TOKENS), expected, atol=1e-4)


def test_padding_has_no_effect_on_tokens(worded: Model) -> None:
    batch = {"label": LABELS, "visible": VISIBLE}
    given = worded.condition(batch)
    other = given.vectors + 10 * (~VISIBLE).unsqueeze(-1)
    assert not torch.equal(other, given.vectors)

    class Fixed(Words):
        def forward(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Prefix:
            return Prefix(other, batch["visible"])

    whole, cached = full(worded, batch, TOKENS), forced(started(worded, batch), TOKENS)
    original, worded.condition = worded.condition, Fixed(32)
    try:
        assert torch.equal(full(worded, batch, TOKENS), whole)
        assert torch.equal(forced(started(worded, batch), TOKENS), cached)
        unpadded = {**batch, "visible": torch.ones_like(VISIBLE)}
        assert not torch.allclose(full(worded, unpadded, TOKENS), whole, atol=0.1), "positive control"
    finally:
        worded.condition = original


def test_a_padding_slot_sees_itself(worded: Model) -> None:
    """No query is left without a key, for which attention kernels return NaN or 0 as they please (spec 2.6)."""
    given = worded.condition({"label": LABELS})
    first = worded.backbone(TOKENS[:, :-1], None, cond=given)[:, 0]  # causal: it sees itself alone
    padded = worded.backbone(TOKENS[:, :-1], None, cond=Prefix(given.vectors, VISIBLE))
    assert torch.allclose(padded[:, 0], first, atol=1e-5) and padded.isfinite().all()


def test_prefixes_stack_with_their_padding() -> None:
    a, b = Prefix(torch.zeros(2, 3, 4)), Prefix(torch.ones(2, 3, 4))
    assert Prefix.cat([a, b]).vectors.shape == (4, 3, 4) and Prefix.cat([a, b]).visible is None
    padded = Prefix.cat([Prefix(a.vectors, VISIBLE[:2]), Prefix(b.vectors, ~VISIBLE[:2])])
    assert padded.visible is not None and padded.visible.tolist() == [*VISIBLE[:2].tolist(), *(~VISIBLE[:2]).tolist()]


# ---------------------------------------------------------------------------------------------------- guidance


@pytest.mark.parametrize(
    "guidance",
    [
        Guidance(1.0),
        Guidance(0.0),
        Guidance(3.0),
        Guidance(3.0, (0.3, 0.7)),
        Guidance(2.0, schedule="linear"),
        Guidance(4.0, (0.0, 0.5), "cosine"),
    ],
    ids=lambda g: f"{g.scale}-{g.interval}-{g.schedule}",
)
def test_guidance_combines_two_full_forwards(make_model: MakeModel, guidance: Guidance) -> None:
    model, batch = make_model(), {"label": LABELS}
    conditional = full(model, batch, TOKENS)
    null = full(model, {"label": torch.full_like(LABELS, CLASSES)}, TOKENS)
    scale = torch.tensor(
        [reference.guidance_scale(k, N, guidance.scale, guidance.interval, guidance.schedule) for k in range(N)]
    )
    expected = null + scale[None, :, None] * (conditional - null)
    assert torch.allclose(forced(started(model, batch, guidance), TOKENS), expected, atol=5e-5)
    if guidance.scale != 1:
        assert not torch.allclose(expected, conditional, atol=0.1)


def test_laws_of_a_whole_pass_are_guided_where_windows_are(make_model: MakeModel) -> None:
    engine, batch = Engine(make_model(), Guidance(2.5, (0.2, 0.8), "linear"), Warp(0.9)), {"label": LABELS}
    with torch.inference_mode():
        whole = engine.laws(batch, TOKENS).logits
        engine.begin(batch)
        window = engine.forward(TOKENS, torch.arange(N).expand(3, -1)).logits
    assert torch.allclose(whole, window, atol=1e-4)


def test_laws_of_bf16_weights_are_float32(make_model: MakeModel) -> None:
    engine = started(make_model().bfloat16(), {"label": torch.tensor([0])}, None, Warp(0.9, top_p=0.9))
    with torch.inference_mode():
        law = engine.forward(torch.zeros(1, N, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64))
    assert law.logits.dtype == torch.float32


# ----------------------------------------------------------------------------------------------- whole decodes


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_tokens_do_not_depend_on_the_batch(make_model: MakeModel, kv_heads: int | None) -> None:
    model = make_model(kv_heads=kv_heads)
    labels, seeds = [i % CLASSES for i in range(16)], [100 + i for i in range(16)]
    settings = (Guidance(1.5), Warp(0.9, 12, 0.95))

    def rows(chosen: Sequence[int]) -> Tensor:
        batch = {"label": torch.tensor([labels[i] for i in chosen])}
        return decoded(Engine(model, *settings), batch, [seeds[i] for i in chosen])

    together = rows(range(16))
    assert len(set(map(tuple, together.tolist()))) == 16, "seeds matter"
    for size in (1, 4):
        parts = [rows(range(start, start + size)) for start in range(0, 16, size)]
        assert torch.equal(torch.cat(parts), together), size
    moved = [7, 0, 15, 3, 8]
    assert torch.equal(rows(moved), together[moved])


def test_the_label_matters_and_the_seed_matters(make_model: MakeModel) -> None:
    engine = Engine(make_model())
    tokens = decoded(engine, {"label": torch.tensor([0, 1, 0, 0])}, [4, 4, 4, 5])
    assert torch.equal(tokens[0], tokens[2])
    assert not torch.equal(tokens[0], tokens[1]) and not torch.equal(tokens[0], tokens[3])


def test_known_tokens_are_certain_in_the_law(make_model: MakeModel) -> None:
    model, batch = make_model(), {"label": LABELS}
    mask = torch.rand(3, N, generator=torch.Generator().manual_seed(0)) < 0.5
    engine = started(model, batch, Guidance(2.0), Warp(top_k=1), known=(TOKENS, mask))
    probs, free = (
        forced(engine, TOKENS).softmax(-1),
        forced(started(model, batch, Guidance(2.0), Warp(top_k=1)), TOKENS),
    )
    assert (probs.gather(-1, TOKENS.unsqueeze(-1)).squeeze(-1)[mask] == 1).all()
    assert torch.equal(probs[~mask], free.softmax(-1)[~mask])


class Late(Looks):
    """A GPU's flags without a GPU: what is copied is there at once, or the event has yet to come."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda"))
        self.waits = 0

    def _copied(self, flags: Tensor) -> tuple[Tensor, Any]:
        return flags.clone(), self

    def synchronize(self) -> None:
        self.waits += 1


def test_a_gpu_is_asked_seldom_and_answers_late() -> None:
    looks, asked = Late(), []

    def done(launched: int) -> Tensor:
        asked.append(launched)
        return torch.tensor([launched >= 6, launched >= 3])

    seen = [(k, look) for k in range(1, 3 * POLL + 1) if (look := looks.at(k, lambda k=k: done(k))) is not None]
    assert asked == [POLL, 2 * POLL, 3 * POLL]
    assert [(k, when, flags.tolist()) for k, (when, flags) in seen] == [
        (2 * POLL, POLL, [False, True]),
        (3 * POLL, 2 * POLL, [True, True]),
    ]
    assert looks.waits == 2 and Late().at(POLL, lambda: None) is None


def test_progress_is_reported_after_every_iteration(make_model: MakeModel) -> None:
    engine = started(make_model(), {"label": LABELS})
    seen: list[tuple[int, int]] = []
    result = engine.run(AR(Config()), Noise(torch.arange(3)), lambda done, total: seen.append((done, total)))
    assert seen == [(k + 1, N) for k in range(N)]
    assert result.nfe == N and result.seconds > 0 and result.tokens.shape == (3, N)
