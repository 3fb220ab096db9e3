"""The verifier: the law of what it leaves, its kernels against twins, and its windows."""

from __future__ import annotations

import math

import reference
import torch
from torch import Tensor

from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import first_of, ring, verify
from visgen.decode.warp import Warp
from visgen.nn.categorical import Categorical

V, DRAWS = 5, 200_000


def laws(seed: int, *shape: int) -> tuple[Categorical, Categorical]:
    rng = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(*shape, V, generator=rng) for _ in range(2))
    return Categorical(p), Categorical(q)


def verified(p: Categorical, q: Categorical, every: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(draft, tokens, first) of one window for each seed."""
    rows, width = p.logits.shape[:2]
    index, noise = torch.arange(width).expand(rows, -1), Noise(torch.arange(rows))
    draft = q.draw(noise, index, Stream.DRAFT, 1)
    waiting = torch.ones_like(index, dtype=torch.bool)
    verdict = verify(p, draft, q, noise, index, waiting, torch.ones(rows, 1, dtype=torch.int64), every)
    return draft, verdict.tokens, verdict.first


def z(tokens: Tensor, law: list[float]) -> float:
    """Largest standard score of the tokens' counts."""
    counts = torch.bincount(tokens, minlength=V)
    assert all(counts[i] == 0 for i, p in enumerate(law) if p == 0)
    n = len(tokens)
    return max(abs(float(c) - n * p) / math.sqrt(n * p * (1 - p)) for c, p in zip(counts, law, strict=True) if p > 0)


def test_what_a_draft_has_become_follows_the_law() -> None:
    for seed in range(3):
        for warp in (Warp(), Warp(0.7, 3, 0.95)):
            p, q = (law.warped(warp) for law in laws(seed, 1, 1))
            twin = reference.warped(laws(seed, 1, 1)[0].logits[0, 0].tolist(), warp.temperature, warp.top_k, warp.top_p)
            many = [Categorical(law.logits.expand(DRAWS, 1, V)) for law in (p, q)]
            draft, tokens, _ = verified(*many)
            assert z(tokens[:, 0], twin) < 4
            assert abs(float((draft == tokens).float().mean()) - float(p.overlap(q))) < 0.005, "as often as can be"


def test_the_test_sees_a_wrong_label() -> None:
    p, q = (Categorical(law.logits.expand(DRAWS, 1, V)) for law in laws(0, 1, 1))
    index, noise = torch.zeros(DRAWS, 1, dtype=torch.int64), Noise(torch.arange(DRAWS))
    draft = q.draw(noise, index, Stream.DRAFT, 1)
    wrong = Categorical(torch.zeros_like(q.logits))
    out = verify(p, draft, wrong, noise, index, index == 0, torch.ones_like(index), True).tokens
    assert z(out[:, 0], p.probs()[0, 0].tolist()) > 10


def test_kernels_equal_their_twins() -> None:
    p, q = laws(7, 3, 4)
    draft = torch.randint(V, (3, 4), generator=torch.Generator().manual_seed(0))
    index, noise = torch.arange(4).expand(3, -1) + 2, Noise(torch.tensor([3, 1, 4]))
    accepted = p.accept(draft, q, noise, index, Stream.ACCEPT, 5)
    redrawn = p.residual(q, noise, index, Stream.RESIDUAL, 5)
    for b in range(3):
        for w in range(4):
            law, other = p.probs()[b, w].tolist(), q.probs()[b, w].tolist()
            kept = reference.acceptance(law, int(draft[b, w]), other)
            assert math.isclose(float(p.acceptance(draft, q)[b, w]), kept, rel_tol=1e-4)
            seed, k = int(noise.seeds[b]), int(index[b, w])
            assert bool(accepted[b, w]) == (reference.uniform(seed, k, 0, Stream.ACCEPT, 5) < kept)
            rest = reference.residual(law, other)
            assert torch.allclose(p.leftover(q).probs()[b, w], torch.tensor(rest), atol=1e-5)
            twin = reference.gumbel_max(rest, lambda i, s=seed, k=k: reference.gumbel(s, k, i, Stream.RESIDUAL, 5))
            assert int(redrawn[b, w]) == twin
            assert math.isclose(float(p.overlap(q)[b, w]), sum(map(min, law, other)), rel_tol=1e-4)


def test_an_empty_residual_is_the_law_itself() -> None:
    p, _ = laws(1, 2, 3)
    assert torch.equal(p.leftover(p).probs(), p.probs())
    greedy = p.warped(Warp(0.0))
    assert torch.equal(greedy.leftover(greedy).probs(), greedy.probs())


def test_what_either_law_excludes() -> None:
    p = Categorical(torch.tensor([[[0.0, 0.0, -torch.inf]]]))
    q = Categorical(torch.tensor([[[-torch.inf, 0.0, 0.0]]]))
    assert p.acceptance(torch.tensor([[2]]), q).item() == 0, "a draft that the filters of today exclude"
    assert p.acceptance(torch.tensor([[0]]), q).item() == 1, "no draft of q, but no reason to refuse it"
    assert p.leftover(q).probs().tolist() == [[[1, 0, 0]]]
    both = Categorical(torch.tensor([[[0.0, -torch.inf, -torch.inf]]]))
    assert both.acceptance(torch.tensor([[2]]), both).item() == 0


def test_only_waiting_tokens_are_tested_and_only_the_first_refused_one_is_replaced() -> None:
    p, q = (Categorical(law.logits) for law in laws(3, 500, 6))
    p = Categorical(p.logits.masked_fill(torch.arange(V) == 0, -torch.inf))  # token 0 is never kept
    rows = torch.arange(500)
    index, noise = torch.stack([torch.randperm(6) + 3 for _ in rows]), Noise(rows)
    draft = torch.zeros(500, 6, dtype=torch.int64)
    start = torch.randint(3, 9, (500, 1))
    verdict = verify(p, draft, q, noise, index, index >= start, torch.ones(500, 1, dtype=torch.int64), every=False)
    assert torch.equal(verdict.first, start)
    assert torch.equal(verdict.tokens != 0, index == start)
    every = verify(p, draft, q, noise, index, index >= start, torch.ones(500, 1, dtype=torch.int64), every=True)
    assert torch.equal(every.first, start) and torch.equal(every.tokens != 0, index >= start)


def test_the_first_of_the_marked_positions() -> None:
    index = torch.tensor([[4, 5, 2, 3], [4, 5, 2, 3], [9, 6, 7, 8]])
    marked = torch.tensor([[True, True, False, False], [False] * 4, [True] * 4])
    assert first_of(marked, index).tolist() == [[4], [5], [6]]


def test_a_ring_keeps_every_position_in_its_slot() -> None:
    for count, width in ((7, 3), (5, 5), (1, 1), (12, 4)):
        for position in range(count + 1):
            index = ring(torch.tensor([[position]]), torch.arange(width), count)[0]
            start = min(position, count - width)
            assert sorted(index.tolist()) == list(range(start, start + width))
            assert torch.equal(index % width, torch.arange(width))
