"""The kernels of a window of drafts against their eager twins: one by one on random states, and whole decodes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import Verdict, advance, first_drafts, open_window, verify
from visgen.decode.warp import Warp
from visgen.nn.categorical import Categorical
from visgen.nn.guided import Guided
from visgen.samplers.sjd import SJD, Config
from visgen.samplers.speculative import Config as SpeculativeConfig
from visgen.samplers.speculative import Speculative

pytest.importorskip("triton")
from visgen.decode.captured import CapturedEngine

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
B, W = 4, 4
SEEDS = torch.tensor([3, 1, 2**62, -5], device=DEVICE)
WARPS = [Warp(), Warp(0.0), Warp(0.8, top_k=1), Warp(1.2, 4, 0.9), Warp(top_p=0.6)]


class Case:
    """A window of B images: a law p of two guided branches, drafts of q, and where they wait."""

    def __init__(self, vocab: int, warp: Warp, known: bool, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed + vocab)
        self.branches = (torch.randn(2, B, W, vocab, generator=rng) * 2).to(dtype).to(DEVICE)
        scale = 1 + torch.rand(B, W, generator=rng)
        self.weights = torch.stack([1 - scale, scale]).to(DEVICE)
        self.warp, self.known = warp, None
        if known:
            tokens, mask = (torch.randint(n, (B, W), generator=rng).to(DEVICE) for n in (vocab, 2))
            self.known = tokens, mask.bool()
        index = torch.stack([torch.randperm(W, generator=rng) for _ in range(B)]) + 5
        self.index = index.to(DEVICE)
        self.waiting = self.index >= torch.tensor([[5], [7], [8], [99]], device=DEVICE)
        near = self.p(False).logits + torch.randn(B, W, vocab, generator=rng).to(DEVICE)
        self.q = torch.where(near == -torch.inf, torch.zeros_like(near), near)
        self.q[:, :, 0] = -torch.inf
        self.iteration = torch.tensor([[1], [7], [2], [3]], device=DEVICE)
        self.noise = Noise(SEEDS)
        self.draft = Categorical(self.q).draw(self.noise, self.index, Stream.DRAFT, self.iteration)

    def p(self, fused: bool) -> Guided:
        return Guided(self.branches, self.weights, self.warp, self.known, fused)

    def tested(self, fused: bool, every: bool, redraw: Stream | None) -> tuple[Verdict, Tensor]:
        """The verdict, and the labels afterwards."""
        labels, at = self.q.clone(), (self.noise, self.index, self.waiting, self.iteration)
        return verify(self.p(fused), self.draft, Categorical(labels), *at, every, redraw, relabel=True), labels


def check_equal(case: Case, every: bool, redraw: Stream | None) -> Tensor:
    """Whether drafts were kept [B, W], if both ways agree in all that is read of them."""
    (slow, labels), (fast, written) = (case.tested(f, every, redraw) for f in (False, True))
    assert torch.equal(slow.kept, fast.kept) and torch.equal(slow.first, fast.first)
    one, other = (torch.where(v.index <= v.first, v.tokens, v.behind) for v in (slow, fast))
    assert torch.equal(one, other)
    assert torch.allclose(written[case.waiting], labels[case.waiting], rtol=1e-5, atol=1e-5)
    assert torch.equal(written[~case.waiting], case.q[~case.waiting])
    return fast.kept[case.waiting]


@pytest.mark.parametrize(("vocab", "warp"), zip((37, 5, 37, 37, 5), WARPS, strict=True), ids=str)
def test_a_test_equals_accept_residual_and_draw(vocab: int, warp: Warp) -> None:
    rules = ((True, None), (False, Stream.DRAFT), (False, Stream.TOKEN), (False, None))
    kept = []
    for seed, (every, redraw) in enumerate(rules):
        for known, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            kept.append(check_equal(Case(vocab, warp, known, dtype, seed), every, redraw))
    assert not torch.cat(kept).all() and torch.cat(kept).any()


def test_a_test_raises_the_flag_where_either_law_is_not_finite() -> None:
    flags = []
    for damaged in ("", "p", "q"):
        case, unsound = Case(5, Warp(), False), torch.zeros(1, dtype=torch.int32, device=DEVICE)
        if damaged:
            (case.branches if damaged == "p" else case.q)[..., 3] = torch.nan
        p = case.p(True)
        p.unsound = unsound
        at = case.noise, case.index, case.waiting, case.iteration
        verdict = verify(p, case.draft, Categorical(case.q), *at, False, Stream.DRAFT, relabel=True)
        assert int(verdict.tokens.max()) < 5 and int(verdict.behind.max()) < 5
        flags.append(int(unsound))
    assert flags == [0, 1, 1]


def test_equal_laws_keep_every_draft_and_disjoint_ones_none() -> None:
    case = Case(37, Warp(), known=False)
    case.q = case.p(False).logits.clone()
    assert check_equal(case, True, None).all()
    case.branches[...] = torch.where(torch.arange(37, device=DEVICE) < 20, 0.0, -1e9)
    case.q = torch.where(torch.arange(37, device=DEVICE) < 20, -torch.inf, torch.zeros_like(case.q))
    case.draft = case.draft.clamp(min=20)
    assert not check_equal(case, True, None).any()


def test_what_either_law_excludes() -> None:
    """0 / 0 is refused, p / 0 is kept, and a residual without mass is p."""
    case = Case(5, Warp(top_k=1), known=False)
    best = case.p(False).logits.argmax(-1)
    case.q = case.p(False).logits.clone()
    case.draft = (best + 1) % 5
    (slow, _), (fast, _) = (case.tested(f, True, None) for f in (False, True))
    assert not fast.kept[case.waiting].any() and torch.equal(fast.tokens[case.waiting], best[case.waiting])
    assert torch.equal(fast.tokens, slow.tokens)
    case.q, case.draft = torch.where(case.q == 0, -torch.inf, torch.zeros_like(case.q)), best
    case.q.scatter_(-1, best.unsqueeze(-1), -torch.inf)
    assert check_equal(case, True, None).all()


def states(window: int, count: int, vocab: int, seed: int, known: bool) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A random state, twice, the second one for the kernels; its first row is complete."""
    rng = torch.Generator().manual_seed(seed)
    position = torch.randint(count, (B, 1), generator=rng)
    position[0] = count
    rounds = torch.where(torch.arange(count) < position, 1, 0)
    mask = torch.rand(B, count, generator=rng) < 0.5
    given = torch.randint(vocab, (B, count), generator=rng)
    made = {
        "tokens": torch.randint(vocab, (B, count), generator=rng),
        "position": position,
        "iteration": torch.randint(1, 99, (B, 1), generator=rng),
        "rounds": rounds,
        "slots": torch.arange(window),
        "laws": torch.randn(B, window, vocab, generator=rng),
    }
    both = [SimpleNamespace(**{k: v.clone().to(DEVICE) for k, v in made.items()}, fused=f) for f in (False, True)]
    for state in both:
        state.known = (given.to(DEVICE), mask.to(DEVICE)) if known else None
    return both[0], both[1]


def check_states_equal(slow: Any, fast: Any) -> None:
    for name in ("tokens", "position", "iteration", "rounds", "laws"):
        assert torch.equal(getattr(slow, name), getattr(fast, name)), name


@pytest.mark.parametrize(("window", "count"), [(1, 3), (3, 11), (4, 16), (6, 6)])
def test_open_advance_and_first_drafts_equal_their_twins(window: int, count: int) -> None:
    for seed in range(8):
        slow, fast = states(window, count, 7, seed, known=seed % 2 == 1)
        windows = open_window(slow), open_window(fast)
        for name in ("index", "waiting", "draft"):
            assert torch.equal(*(getattr(w, name) for w in windows)), name
        index, waiting = windows[0].index, windows[0].waiting
        rng = torch.Generator().manual_seed(seed)
        kept = (torch.rand(B, window, generator=rng) < 0.7).to(DEVICE) | ~waiting
        here, behind = (torch.randint(7, (B, window), generator=rng).to(DEVICE) for _ in range(2))
        here = torch.where(waiting, here, windows[0].draft)
        behind = torch.where(waiting, behind, windows[0].draft)
        for state in (slow, fast):
            advance(state, Verdict(index, kept, here, behind))
        check_states_equal(slow, fast)
        for stream, labelled in ((Stream.DRAFT, True), (Stream.TOKEN, False)):
            for state in (slow, fast):
                laws = state.laws if labelled else None
                law = Categorical(state.laws)
                first_drafts(state, law, None, laws, index, Noise(SEEDS), stream, state.known)
            check_states_equal(slow, fast)


def test_a_fused_draw_has_noise_of_every_iteration_and_looks_where_it_is_told() -> None:
    case = Case(37, Warp(1.1, 12, 0.9), known=True)
    for iteration in (case.iteration, 3, 0):
        slow, fast = (
            case.p(f).draw(case.noise, case.index, Stream.DRAFT, iteration, case.waiting) for f in (False, True)
        )
        assert torch.equal(slow[case.waiting], fast[case.waiting])
    with pytest.raises(ValueError, match="one number for each image"):
        case.p(True).draw(case.noise, case.index, Stream.DRAFT, case.index)


# ------------------------------------------------------------------------------------------------ whole decodes


class Stepped(CapturedEngine):
    """The kernels without a graph, so that they run on a CPU in Triton's interpreter."""

    prepared = Engine.prepared
    stepper = Engine.stepper


@pytest.mark.parametrize("drafting", ["fresh", "coupled", "gumbel", "pure_gumbel"])
def test_a_decode_by_kernels_draws_the_tokens_of_the_eager_one(make_model: Callable[..., Any], drafting: Any) -> None:
    rows = 3  # times two branches and a window: more than the 16 of which products take another way
    model = make_model(grid=(1, 3, 3) if ON_GPU else (1, 2, 2), layers=1).to(DEVICE)
    settings = Guidance(2.0, (0.1, 0.9), "linear"), Warp(0.9, top_k=12)
    tokens = torch.arange(model.tokens, device=DEVICE).expand(rows, -1)
    whole = model.tokens
    for init, window, known in (("uniform", 3, (tokens, tokens % 4 == 1)), ("up", whole, None)):
        found = []
        for kind in (Engine, CapturedEngine if ON_GPU else Stepped):
            engine = kind(model, *settings)
            engine.begin({"label": torch.arange(rows, device=DEVICE)}, known)
            found.append(engine.run(SJD(Config(drafting, window, init)), Noise(SEEDS[:rows])))
        assert torch.equal(found[0].tokens, found[1].tokens) and torch.equal(found[0].rounds, found[1].rounds)


def test_speculative_sampling_by_kernels_draws_the_tokens_of_the_eager_one(make_model: Callable[..., Any]) -> None:
    model, draft = (make_model(grid=(1, 1, 5), layers=1, seed=s).to(DEVICE) for s in (0, 1))
    found = []
    for kind in (Engine, CapturedEngine if ON_GPU else Stepped):
        engine = kind(model, Guidance(2.0), Warp(top_k=9))
        engine.once(("draft", None), lambda kind=kind: kind(draft, Guidance(2.0), Warp(top_k=9)))
        engine.begin({"label": torch.tensor([0, 1], device=DEVICE)})
        found.append(engine.run(Speculative(SpeculativeConfig(None, 2, 1.0)), Noise(SEEDS[:2])))
    assert torch.equal(found[0].tokens, found[1].tokens) and torch.equal(found[0].rounds, found[1].rounds)
