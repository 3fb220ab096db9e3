"""Masked decoding against a naive loop, and what it does with sets, guidance, steps and known tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from no_host import NoHost
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from visgen.config import UserError, build, plugin_config
from visgen.decode.engine import Engine, Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.nn.ancestral import walk
from visgen.samplers.masked import bucket, reveals

LABELS, SEEDS = torch.tensor([0, 2, 1]), torch.tensor([3, 1, 4])
N, C = 16, 3
KNOWN = torch.randn(3, N, C, generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(3, N, generator=torch.Generator().manual_seed(1)) < 0.3
LINEAR = Guidance(2.5, schedule="linear")


def made(**values: Any) -> Any:
    return build(plugin_config("visgen.samplers", "masked", **{"iterations": 5, "steps": 4, **values}))


def decode(model: Any, guidance: Guidance = LINEAR, known: Any = None, rows: Any = None, **values: Any) -> Generation:
    rows = [0, 1, 2] if rows is None else rows
    engine = Engine(model, guidance)
    engine.begin({"label": LABELS[rows]}, known)
    return engine.run(made(**values), Noise(SEEDS[rows]))


def naive(
    model: Any, scale: float, row: int, solver: Any = "auto", temperature: float = 1.0, keep: Any = None
) -> Tensor:
    """One image, by the formulas: only known tokens go into the backbone, only the tokens of a set through the head."""
    noise, head = Noise(SEEDS[row : row + 1]), model.head
    order = noise.bits(torch.arange(N)[None], 1, Stream.ORDER)[0, :, 0].argsort(stable=True).tolist()
    keep = torch.zeros(N, dtype=torch.bool) if keep is None else keep[row]
    tokens, seen = torch.where(keep[:, None], KNOWN[row], 0.0), [i for i in range(N) if keep[i]]
    conditions = (
        [{"label": LABELS[row : row + 1]}, torch.tensor([False])],
        [{"label": LABELS[:1]}, torch.tensor([True])],
    )
    steps, left = walk(head.path, solver, 4), N
    for k, count in enumerate(reveals(N, 5)):
        places, left = order[N - left : N - left + count], left - count
        w = 1 + (scale - 1) * (N - max(1, left)) / N
        hs = [
            model.backbone(tokens[seen][None], torch.tensor([seen], dtype=torch.int64), cond=model.condition(*c))
            for c in conditions
        ]
        fresh = {}
        for place in places:
            if keep[place]:
                continue
            x = noise.normal(torch.tensor([[place]]), C, Stream.DENOISE, 0)[0, 0]
            before, kept = torch.zeros(C), torch.zeros(C)
            for j in range(steps.steps):
                time, _, _, p, q, a, b, c, kk, hold = steps.rows[j].tolist()
                out = [head.predict(x, head.about(torch.tensor(time)), head.condition(h[0, place])) for h in hs]
                now = p * x + q * (out[1][0] + w * (out[0][0] - out[1][0]))
                new = a * x + b * now + c * before + kk * kept
                if steps.noisy[j]:
                    share = (out[0][1] + 1) / 2
                    spread = (share * steps.high[j] + (1 - share) * steps.low[j]).div(2).exp()
                    draw = noise.normal(torch.tensor([[place]]), C, Stream.DENOISE, j + 1)[0, 0]
                    new = new + temperature * spread * draw
                before, kept, x = now, x if hold else kept, new
            fresh[place] = x
        for place, x in fresh.items():
            tokens[place] = x
        seen = sorted({*seen, *places})
        assert len(seen) >= N - left and k < 5
    return tokens


def close(a: Tensor, b: Tensor, bound: float = 2e-3) -> bool:
    return bool((a - b).abs().max() < bound * b.abs().max())


@pytest.mark.parametrize(
    ("head", "solver", "temperature"),
    [
        ({}, "auto", 1.0),
        ({}, "ancestral", 0.9),
        ({}, "dpmpp_2m", 1.0),
        ({}, "euler", 1.0),
        ({"predicts": "velocity"}, "auto", 1.0),
        ({"predicts": "velocity"}, "heun", 1.0),
    ],
)
def test_it_is_the_naive_loop(make_masked: Callable[..., Any], head: Any, solver: Any, temperature: float) -> None:
    model = make_masked(**head)
    found = decode(model, solver=solver, temperature=temperature)
    assert found.nfe == 5 and found.rounds.unique().tolist() == [1, 2, 3, 4, 5]
    for row in range(3):
        assert close(found.tokens[row], naive(model, 2.5, row, solver, temperature)), row


def test_known_tokens_are_seen_from_the_start(make_masked: Callable[..., Any]) -> None:
    model = make_masked()
    found = decode(model, known=(KNOWN, KEEP)).tokens
    assert torch.equal(found[KEEP], KNOWN[KEEP])
    for row in range(3):
        assert close(found[row], naive(model, 2.5, row, keep=KEEP)), row
    free = decode(model).tokens
    assert not torch.allclose(found[~KEEP], free[~KEEP], atol=1e-2)


@pytest.mark.parametrize("variance", ["fixed_large", "fixed_small"])
def test_a_fixed_variance_is_drawn_by(make_masked: Callable[..., Any], variance: str) -> None:
    model, noise = make_masked(variance=variance), Noise(SEEDS)
    for parameter in model.head.output.parameters():
        parameter.zero_()  # no noise is predicted, so x0 = x / alpha
    found = decode(model, Guidance()).tokens
    steps, index = walk(model.head.path, "auto", 4), torch.arange(N).expand(3, -1)
    x = noise.normal(index, C, Stream.DENOISE)
    for j in range(4):
        _, _, _, p, _, a, b, *_ = steps.rows[j]
        x = a * x + b * p * x
        if j < 3:
            log = steps.high[j] if variance == "fixed_large" else steps.low[j]
            x = x + (log / 2).exp() * noise.normal(index, C, Stream.DENOISE, j + 1)
    assert close(found, x)


def test_published_counts() -> None:
    assert reveals(256, 16) == [2, 3, 7, 8, 11, 13, 15, 16, 19, 20, 22, 23, 23, 25, 24, 25]
    assert reveals(256, 8) == [5, 15, 24, 31, 39, 45, 48, 49]
    assert reveals(256, 256) == reveals(256, 1000) == [1] * 256
    at_64 = reveals(256, 64)
    assert at_64[:17] == [1] * 13 + [2, 3, 2, 2] and max(at_64) == 7 and sum(at_64) == 256
    assert reveals(256, 1) == [256]


def test_the_order_is_the_images_own(make_masked: Callable[..., Any]) -> None:
    found = decode(make_masked(), iterations=16)
    assert torch.equal(found.rounds.sort(1)[0], torch.arange(1, 17).expand(3, -1))
    assert not torch.equal(found.rounds[0], found.rounds[1])
    alone = decode(make_masked(), rows=[1], iterations=16)
    assert torch.equal(alone.rounds[0], found.rounds[1]) and close(alone.tokens[0], found.tokens[1])


def test_guidance_of_one_computes_one_branch(make_masked: Callable[..., Any]) -> None:
    model = make_masked()
    plain = decode(model, Guidance()).tokens
    assert close(plain[1], naive(model, 1.0, 1))
    assert not close(plain, decode(model).tokens, 0.01)


def test_annealed_steps_are_fewer_and_begin_as_the_others(make_masked: Callable[..., Any]) -> None:
    model = make_masked()
    plain, annealed = decode(model, steps=20), decode(model, steps=20, last_steps=2)
    assert plain.notes == {"head_steps": 100} and annealed.notes["head_steps"] < 75
    first = plain.rounds == 1
    assert torch.equal(annealed.tokens[first], plain.tokens[first])
    assert not torch.equal(annealed.tokens[~first], plain.tokens[~first])
    assert torch.equal(decode(model, steps=20, last_steps=20).tokens, plain.tokens)


def test_a_decode_in_bfloat16_is_near(make_masked: Callable[..., Any]) -> None:
    """The bodies are bfloat16; the head's input and output, its chain and the tokens are float32."""
    model = make_masked()
    wanted = decode(model, steps=10).tokens
    found = decode(model.bfloat16(), steps=10).tokens
    assert found.dtype == torch.float32 and (found - wanted).square().mean() < 0.02 * wanted.square().mean()


@pytest.mark.parametrize("known", [False, True])
def test_an_iteration_asks_the_host_for_nothing(make_masked: Callable[..., Any], known: bool) -> None:
    engine, noise, sampler = Engine(make_masked(), LINEAR), Noise(SEEDS), made()
    engine.begin({"label": LABELS}, (KNOWN, KEEP) if known else None)
    with torch.inference_mode():
        state = sampler.init(engine, noise)
        buffers = {k: v.data_ptr() for k, v in vars(state).items() if isinstance(v, Tensor)}
        shapes = []
        for _ in range(5):
            with NoHost(), Shapes() as seen:
                sampler.iterate(state, engine.forward, noise)
            shapes.append(seen.shapes)
    assert buffers == {k: v.data_ptr() for k, v in vars(state).items() if isinstance(v, Tensor)}, "static buffers"
    stages = sampler.stages(state)
    assert len(set(stages)) > 1
    for shape, stage in zip(shapes, stages, strict=True):
        assert shape == shapes[stages.index(stage)], "one graph serves all iterations of a stage"


class Shapes(TorchDispatchMode):
    """Records every operation and the shapes of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.shapes.append((func.name(), tuple(out.shape) if isinstance(out, Tensor) else None))
        return out


def test_what_it_cannot_do_is_refused(
    make_masked: Callable[..., Any], make_blocks: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    with pytest.raises(UserError, match=r"sampler masked is not for this model's backbone; use .* blockwise"):
        decode(make_blocks())
    with pytest.raises(UserError, match="sampler masked is not for this model, whose tokens are codes"):
        decode(make_model())
    with pytest.raises(UserError, match="solver ancestral is for a model of epsilon"):
        decode(make_masked(predicts="velocity"), solver="ancestral")
    with pytest.raises(UserError, match=r"sampler\.temperature 0\.9 scales the noise of ancestral steps"):
        decode(make_masked(), solver="euler", temperature=0.9)
    with pytest.raises(UserError, match=r"last_steps 6 is more than sampler\.steps 5"):
        decode(make_masked(), steps=5, last_steps=6)
    engine = Engine(make_masked())
    engine.begin({"label": LABELS})
    with pytest.raises(UserError, match=r"sampler blockwise is not for this model's backbone; use .* masked"):
        engine.run(build(plugin_config("visgen.samplers", "blockwise")), Noise(SEEDS))


# --------------------------------------------------------------------------------- what the encoder reads, in few sizes


@pytest.mark.parametrize("buckets", [2, 3, 4, 16, None])
@pytest.mark.parametrize("known", [None, (KNOWN, KEEP), (KNOWN, torch.ones_like(KEEP))])
def test_sizes_change_nothing(make_masked: Callable[..., Any], buckets: int | None, known: Any) -> None:
    model = make_masked()
    whole = decode(model, known=known, buckets=1, iterations=8)
    found = decode(model, known=known, buckets=buckets, iterations=8)
    assert close(found.tokens, whole.tokens, 1e-4) and torch.equal(found.rounds, whole.rounds)


def test_the_encoder_reads_known_tokens_in_the_next_size(make_masked: Callable[..., Any]) -> None:
    watched, read, masked = make_masked(), [], []

    class Watched(type(watched.backbone)):  # type: ignore[misc]
        def _encode(self, layers: Any, tokens: Tensor, pos: Tensor, cond: Any, level: Tensor | None) -> Tensor:
            read.append(tokens.shape[1])
            masked.append(level is not None)
            return super()._encode(layers, tokens, pos, cond, level)

    watched.backbone.__class__ = Watched
    decode(watched, iterations=16, buckets=4)  # one token each
    assert read == [4] * 5 + [8] * 4 + [12] * 4 + [16] * 3
    read.clear()
    decode(watched, known=(KNOWN, KEEP), iterations=16, buckets=4)
    most = int(KEEP.sum(1).max())
    assert read == [4 * -(-max(1, min(k + most, 16)) // 4) for k in range(16)]
    assert [bucket(k, 10, 4) for k in (0, 3, 4, 5, 6, 8, 9, 10)] == [3, 3, 5, 5, 8, 8, 10, 10]
    assert all(masked)
    read.clear()
    masked.clear()
    decode(watched, iterations=16, buckets=None)
    assert read == list(range(16)) and not any(masked), "nothing is padded, so nothing is hidden"
    decode(watched, known=(KNOWN, KEEP), iterations=16, buckets=None)
    assert read[16:] == [min(k + most, 16) for k in range(16)] and all(masked[16:]), "images differ in what is given"


def test_the_head_walks_as_many_tokens_as_a_set_has(make_masked: Callable[..., Any]) -> None:
    watched, walked, asked = make_masked(), [], []

    class Head(type(watched.head)):  # type: ignore[misc]
        def dist(self, h: Tensor, weights: Tensor) -> Any:
            walked.append(h.shape[2])
            return super().dist(h, weights)

    class Backbone(type(watched.backbone)):  # type: ignore[misc]
        def forward(self, *given: Any, **told: Any) -> Tensor:
            asked.append(told["asked"].shape[1])
            return super().forward(*given, **told)

    watched.head.__class__, watched.backbone.__class__ = Head, Backbone
    counts = reveals(N, 5)
    assert len(set(counts)) > 2
    exact = decode(watched)
    assert walked == asked == counts
    for buckets in (1, 2):
        walked.clear()
        padded = decode(watched, buckets=buckets)
        assert walked == [bucket(c, max(counts), buckets) for c in counts]
        assert close(padded.tokens, exact.tokens, 1e-4) and torch.equal(padded.rounds, exact.rounds)
    assert [bucket(c, 25, 8) for c in (1, 4, 5, 20, 25)] == [4, 4, 7, 22, 25], "few graphs where sets are large"


def test_a_graph_of_a_size_serves_all_its_iterations(make_masked: Callable[..., Any]) -> None:
    """The captured engine's choice of graphs, each of which here runs the iteration of its own turn again."""
    captured: Any = pytest.importorskip("visgen.decode.captured")

    class Graph:
        def __init__(self, run: Callable[[], None]) -> None:
            self.replay = run

    class Replayed(captured.CapturedEngine):  # type: ignore[misc]
        fused = False

        def __init__(self, *given: Any) -> None:
            Engine.__init__(self, *given)
            self._captured, self.recorded = {}, []

        def _record(self, sampler: Any, state: Any, noise: Any, warm: Any, turn: int) -> Any:
            self.recorded.append(turn)

            def run() -> None:
                state.turn = turn
                sampler.iterate(state, self.forward, noise)

            return Graph(run)

    model = make_masked()
    engine = Replayed(model, LINEAR)
    for rows, known in (([0, 1, 2], None), ([2, 1, 0], None), ([0, 1, 2], (KNOWN, KEEP))):
        engine.begin({"label": LABELS[rows]}, known)
        found = engine.run(made(iterations=16, buckets=4), Noise(SEEDS[rows]))
        wanted = decode(model, known=known, rows=rows, iterations=16)
        assert close(found.tokens, wanted.tokens, 1e-4) and torch.equal(found.rounds, wanted.rounds)
        if known is None:
            assert engine.recorded == [0, 5, 9, 13], "four sizes, four graphs, recorded once"
    engine.recorded.clear()
    engine.begin({"label": LABELS})
    found = engine.run(made(iterations=16, buckets=None), Noise(SEEDS))
    assert engine.recorded == list(range(16)) and close(found.tokens, decode(model, iterations=16).tokens, 1e-4)
    engine.recorded.clear()
    annealed = made(last_steps=2, iterations=8)
    for _ in range(2):
        engine.begin({"label": LABELS})
        found = engine.run(annealed, Noise(SEEDS))
        assert close(found.tokens, decode(model, last_steps=2, iterations=8).tokens, 1e-4)
        with torch.inference_mode():
            stages = annealed.stages(engine.prepared(annealed, Noise(SEEDS))[0])
        assert len(engine.recorded) == len(set(stages)) and len({start for _, _, start in stages}) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("buckets", [8, None])
def test_captured_graphs_draw_what_the_eager_engine_draws(make_masked: Callable[..., Any], buckets: int | None) -> None:
    captured: Any = pytest.importorskip("visgen.decode.captured")
    model = make_masked().to("cuda")
    results = []
    for engine in (captured.CapturedEngine(model, LINEAR), Engine(model, LINEAR)):
        for first in (0, 8):  # the second batch in the buffers of the first
            seeds = torch.arange(first, first + 3, device="cuda")
            engine.begin({"label": LABELS.to("cuda")})
            results.append(engine.run(made(iterations=16, buckets=buckets), Noise(seeds)).tokens)
    assert close(results[0], results[2], 1e-3) and close(results[1], results[3], 1e-3)
