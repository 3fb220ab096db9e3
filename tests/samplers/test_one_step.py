"""One-step students, and the teacher whose map they learn: passes, spans, settings, and the law of the map itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from visgen import checkpoint, load, run_files
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.exactness import TableEngine, place, rows, sequences, table
from visgen.model import Model
from visgen.nn.mixture import STEPS, scale_of
from visgen.samplers import ar
from visgen.samplers._teacher import codes_of, make_pairs, noise_of
from visgen.samplers.one_step import Config, OneStep

LABELS, SEEDS = torch.tensor([0, 1, 2, 0, 1]), torch.tensor([3, 1, 4, 15, 92])
Make = Callable[..., Any]


def codebook(count: int, channels: int) -> Tensor:
    codes = torch.randn(count, channels, generator=torch.Generator().manual_seed(7))
    return codes * scale_of(codes)


# ------------------------------------------------------------------------------------------------------ the teacher


@pytest.mark.parametrize("settings", [(Guidance(), Warp()), (Guidance(2.0), Warp(0.9, 6))])
def test_pairs_are_the_naive_ones(make_model: Make, settings: Any) -> None:
    """Every token by the reference's solver from the guided, filtered law given all tokens before it."""
    model, codes = make_model(grid=(1, 2, 3), vocab=12), codebook(12, 3)
    found = make_pairs(Engine(model, *settings), codes, {"label": LABELS}, SEEDS)
    eps = noise_of(Noise(SEEDS), torch.arange(6).expand(5, -1), 3)
    scale = settings[0].scale
    given, null = (model.condition({"label": LABELS}, torch.full((5,), drop)) for drop in (False, True))
    for k in range(6):
        laws = [model.head.output(model.backbone(found[:, :k], None, cond=c)[:, -1]) for c in (null, given)]
        logp = settings[1](laws[0] + scale * (laws[1] - laws[0])).log_softmax(-1)
        for i in range(5):
            p = logp[i].double().exp().tolist()
            assert reference.flow_multistep(eps[i, k].double(), p, codes.double(), STEPS) == found[i, k]


def test_pairs_do_not_depend_on_their_company(make_model: Make) -> None:  # S10
    model, codes = make_model(), codebook(16, 3)
    labels, seeds = torch.arange(12) % 3, torch.arange(12) * 77 + (1 << 40)
    whole = make_pairs(Engine(model, Guidance(1.5)), codes, {"label": labels}, seeds)
    for size in (1, 5, 8):
        engine = Engine(model, Guidance(1.5))
        parts = zip(labels.split(size), seeds.split(size), strict=True)
        assert torch.equal(torch.cat([make_pairs(engine, codes, {"label": y}, s) for y, s in parts]), whole)
    assert whole.unique(dim=0).shape[0] > 6 and not whole.is_inference()


def law_of_table(logits: Tensor, vocab: int, count: int) -> Tensor:
    """P of every sequence, by the chain rule."""
    logp, total = logits.log_softmax(-1), torch.zeros(vocab**count, dtype=torch.float64)
    for row, tokens in enumerate(sequences(vocab, count).tolist()):
        node = 0
        for token in tokens:
            total[row] += logp[node, token]
            node = node * vocab + token + 1
    return total.exp()


def distance(law: Tensor, seen: Tensor) -> float:
    """z of the chi-square of counts against a law; cells of which less than 5 are expected are one."""
    expected = law * seen.sum()
    small = expected < 5
    cells = torch.stack([seen.double(), expected], 1)
    cells = torch.cat([cells[~small], cells[small].sum(0)[None]])
    cells = cells[cells[:, 1] > 0]
    value = float(((cells[:, 0] - cells[:, 1]) ** 2 / cells[:, 1]).sum())
    return (value - (len(cells) - 1)) / math.sqrt(2 * (len(cells) - 1))


def test_mapped_sequences_have_the_teachers_law() -> None:  # S9, the whole law instead of its likelihood
    vocab, count, draws = 5, 3, 12_000
    logits = table(vocab, count, seed=2, sharpness=1.0)
    engine, law = TableEngine(logits, (1, 1, count)), law_of_table(logits, vocab, count)
    tokens = make_pairs(engine, codebook(vocab, 4), rows(draws), torch.arange(draws))
    seen = torch.bincount(place(tokens, vocab), minlength=vocab**count)
    assert abs(distance(law, seen)) < 4
    ancestral = law[torch.multinomial(law, draws, True, generator=torch.Generator().manual_seed(1))].log()
    mapped = law[place(tokens, vocab)].log()
    error = math.sqrt(float(ancestral.var() + mapped.var()) / draws)
    assert abs(float(ancestral.mean() - mapped.mean())) < 3 * error
    marginal = torch.ones(vocab**count, dtype=torch.float64)
    for k in range(count):  # the floor: every token from its own marginal
        each = torch.zeros(vocab, dtype=torch.float64).index_add_(0, sequences(vocab, count)[:, k], law)
        marginal *= each[sequences(vocab, count)[:, k]]
    assert abs(distance(marginal, seen)) > 20, "the check tells it from independent tokens"


@pytest.mark.slow
def test_mapped_images_are_as_likely_as_those_of_ar() -> None:  # S9, on a shipped teacher
    root, settings = Path(__file__).parents[2] / "assets" / "fashion32", (Guidance(1.1), Warp(top_k=200))
    model, rows = checkpoint.load_model(root), 768
    codes, batch = codes_of(checkpoint.load_tokenizer(root)), {"label": torch.arange(rows) % 10}
    engine = Engine(model, *settings)
    mapped = make_pairs(engine, codes, batch, torch.arange(rows) + (1 << 40))
    engine.begin(batch)
    drawn = engine.run(ar.AR(ar.Config()), Noise(torch.arange(rows))).tokens.clone()
    nats = [-engine.laws(batch, tokens).log_prob(tokens).sum(1) for tokens in (mapped, drawn)]
    assert all(each.isfinite().all() for each in nats), "no token that the filters exclude"
    error = math.sqrt(float(sum(each.var() for each in nats)) / rows)
    assert abs(float(nats[0].mean() - nats[1].mean())) < 3 * error
    shuffled = torch.stack([mapped[torch.randperm(rows), k] for k in range(mapped.shape[1])], 1)  # the lower floor
    plain = -Engine(model, settings[0]).laws(batch, shuffled).log_prob(shuffled).sum(1)
    assert float(plain.mean()) > float(nats[1].mean()) + 10 * error


# ------------------------------------------------------------------------------------------------------ the student


def test_a_token_reads_its_own_noise_and_what_comes_before(make_student: Make) -> None:  # S11
    engine = Engine(make_student())
    engine.begin({"label": LABELS[:1]})
    noise = torch.randn(1, 16, 3, generator=torch.Generator().manual_seed(0))
    plain = engine.whole(noise, torch.ones(1, 16))[0].logits
    for k in range(16):
        changed = noise.clone()
        changed[:, k] += 1
        after = engine.whole(changed, torch.ones(1, 16))[0].logits
        assert torch.equal(after[:, :k], plain[:, :k]) and not torch.allclose(after[:, k], plain[:, k], atol=1e-4)


def test_noise_and_known_codes_are_told_apart(make_student: Make) -> None:
    student = make_student()
    engine = Engine(student)
    engine.begin({"label": LABELS[:1]})
    tokens = torch.arange(16).unsqueeze(0)
    values = student.backbone.codes[tokens]
    known, noisy = (engine.whole(values, torch.full((1, 16), level))[0].logits for level in (0.0, 1.0))
    assert not torch.allclose(known, noisy, atol=1e-3)
    by_id = student.backbone(tokens, None, cond=engine.condition)[:, 1:]
    assert torch.equal(by_id, student.backbone(values, None, cond=engine.condition, level=torch.zeros(1, 16))[:, 1:])


def passes(engine: Engine, config: Config, known: Any = None) -> Any:
    engine.begin({"label": LABELS}, known)
    return engine.run(OneStep(config), Noise(SEEDS))


def test_two_passes_by_hand(make_student: Make) -> None:
    student = make_student(second=6)
    engine = Engine(student)
    one, two = (passes(engine, Config(n)) for n in (1, 2))
    assert (one.nfe, two.nfe) == (1, 2) and two.rounds[0].tolist() == [1] * 6 + [2] * 10
    index = torch.arange(16).expand(5, -1)
    noise = noise_of(Noise(SEEDS), index, 3)
    assert torch.equal(one.tokens, engine.whole(noise, torch.ones(5, 16))[0].logits.argmax(-1))
    values = torch.where((index < 6).unsqueeze(-1), student.backbone.codes[one.tokens], noise)
    wanted = engine.whole(values, (index >= 6).float())[0].logits.argmax(-1)
    assert torch.equal(two.tokens[:, :6], one.tokens[:, :6]) and torch.equal(two.tokens[:, 6:], wanted[:, 6:])
    assert not torch.equal(two.tokens, one.tokens)


def test_known_tokens_are_read_as_codes(make_student: Make) -> None:
    student = make_student()
    mask = torch.arange(16).expand(5, -1) < 4
    tokens = torch.arange(80).view(5, 16) % 16
    found = passes(Engine(student), Config(), (tokens, mask)).tokens
    engine = Engine(student)
    engine.begin({"label": LABELS})
    noise = noise_of(Noise(SEEDS), torch.arange(16).expand(5, -1), 3)
    values = torch.where(mask.unsqueeze(-1), student.backbone.codes[tokens], noise)
    law = engine.whole(values, (~mask).float())[0]
    assert torch.equal(found, torch.where(mask, tokens, law.logits.argmax(-1)))


def test_the_second_output_is_read_from_split_on(make_student: Make) -> None:
    student = make_student(regress=True)
    engine = Engine(student)
    plain, split = passes(engine, Config()).tokens, passes(engine, Config(split=5)).tokens
    assert torch.equal(plain[:, :5], split[:, :5]) and not torch.equal(plain[:, 5:], split[:, 5:])
    noise = noise_of(Noise(SEEDS), torch.arange(16).expand(5, -1), 3)
    found = student.backbone.vectors(engine.whole(noise, torch.ones(5, 16))[1], engine.condition)
    far = (found.unsqueeze(2) - student.backbone.codes).square().sum(-1)  # [B, N, V]
    assert torch.equal(split[:, 5:], far.argmin(-1)[:, 5:])


def student_of(make_student: Make, teacher_dir: Path, **settings: Any) -> Model:
    tokenizer = checkpoint.load_tokenizer(teacher_dir)
    student = make_student(grid=tokenizer.grid, **settings)
    student.backbone.codes.copy_(codes_of(tokenizer))
    return student


@pytest.mark.parametrize("first", [0, 2])
def test_a_span_is_the_teachers(make_student: Make, teacher_dir: Path, first: int) -> None:
    told = {"guidance": Guidance(1.5), "warp": Warp(top_k=9)}
    student = student_of(make_student, teacher_dir, second=6, **told)
    engine, count = Engine(student), student.tokens
    found = passes(engine, Config(2, teacher_dir, first))
    before = int(first > 0)
    assert found.notes == {"passes": 1 + before, "teacher_evaluations": 6 - first}
    assert found.nfe == 1 + before + 6 - first == found.rounds.max() and found.rounds[0, 6] == found.nfe
    teacher = Engine(checkpoint.load_model(teacher_dir), *told.values())
    if not first:  # all of the span follows from the noise, as in a pair
        pairs = make_pairs(teacher, student.backbone.codes, {"label": LABELS}, SEEDS)
        assert torch.equal(found.tokens[:, :6], pairs[:, :6])
    one = passes(engine, Config()).tokens
    assert torch.equal(found.tokens[:, :first], one[:, :first])
    index = torch.arange(count).expand(5, -1)
    values = torch.where(
        (index < 6).unsqueeze(-1), student.backbone.codes[found.tokens], noise_of(Noise(SEEDS), index, 3)
    )
    engine.begin({"label": LABELS})
    wanted = engine.whole(values, (index >= 6).float())[0].logits.argmax(-1)
    assert torch.equal(found.tokens[:, 6:], wanted[:, 6:])


def test_a_random_span_is_the_draw_of_ar(make_student: Make, teacher_dir: Path) -> None:
    student = student_of(make_student, teacher_dir, second=6)
    found = passes(Engine(student), Config(2, teacher_dir, 0, "random")).tokens
    engine = Engine(checkpoint.load_model(teacher_dir))
    engine.begin({"label": LABELS})
    assert torch.equal(found[:, :6], engine.run(ar.AR(ar.Config()), Noise(SEEDS)).tokens[:, :6])


@pytest.mark.parametrize(
    ("config", "student", "said"),
    [
        (Config(2), {}, "sampler.passes 2: this student was trained for one pass"),
        (
            Config(1, Path("x"), 16),
            {"second": 6},
            "first is 16, but sampler.teacher draws tokens before 16; set",
        ),
        (Config(2, Path("x"), 6), {"second": 6}, "sampler.first is 6, but .* set it below 6"),
        (Config(2, Path("nowhere")), {"second": 6}, "sampler.teacher: checkpoint nowhere does not exist"),
        (Config(split=3), {}, "sampler.split reads a second output"),
        (Config(first=8), {}, "sampler.first and sampler.draw are about sampler.teacher"),
        (Config(draw="random"), {}, "sampler.first and sampler.draw are about sampler.teacher"),
    ],
)
def test_what_a_student_cannot_do_is_refused(make_student: Make, config: Config, student: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        passes(Engine(make_student(**student)), config)


def test_another_teacher_is_refused(make_student: Make, teacher_dir: Path) -> None:
    student = student_of(make_student, teacher_dir, second=6)
    engine = Engine(student, tokenizer="0123456789ab")
    with pytest.raises(UserError, match=r"its tokenizer is .* pass the teacher that the student learned from"):
        passes(engine, Config(2, teacher_dir))
    student.teacher = "0123456789abcdef"
    with pytest.raises(UserError, match=r"its hash is .{12}, the student's is 0123456789ab; pass the teacher"):
        passes(Engine(student), Config(2, teacher_dir))
    with pytest.raises(UserError, match="its classes is 3, the student's is 4"):
        passes(Engine(student_of(make_student, teacher_dir, second=6, classes=4)), Config(2, teacher_dir))


def test_samplers_and_models_that_do_not_fit_are_refused(make_student: Make, make_model: Make) -> None:
    engine = Engine(make_student())
    engine.begin({"label": LABELS})
    with pytest.raises(UserError, match=r"sampler ar is not for this model, .*drawn at once; use --sampler.kind one_s"):
        engine.run(ar.AR(ar.Config()), Noise(SEEDS))
    with pytest.raises(UserError, match=r"sampler one_step is not for this model, .* use --sampler.kind ar"):
        passes(Engine(make_model()), Config())
    with pytest.raises(UserError, match="holds its teacher's guidance"):
        passes(Engine(make_student(), Guidance(2.0)), Config())


def test_guidance_and_filters_cannot_be_changed(make_student: Make, teacher_dir: Path, tmp_path: Path) -> None:
    student = student_of(make_student, teacher_dir, guidance=Guidance(1.5), warp=Warp(top_k=9))
    folder = tmp_path / "student" / run_files.step_name(1)
    folder.mkdir(parents=True)
    tokenizer = checkpoint.load_tokenizer(teacher_dir)
    facts = {"tokenizer": checkpoint.tokenizer_hash(tokenizer)}
    checkpoint.save_module(folder / run_files.WEIGHTS, student, student.config, extra_metadata=facts)
    (folder / run_files.META).write_text("{}")
    checkpoint.save_module(tmp_path / "student" / run_files.TOKENIZER, tokenizer, tokenizer.config)
    generator = load(tmp_path / "student", device="cpu")
    assert generator.model.backbone.taught == (Guidance(1.5), Warp(top_k=9))
    plain = generator.sample([0, 1], [5, 6])
    assert plain.nfe == 1 and torch.equal(
        plain.tokens, generator.sample([0, 1], [5, 6], Guidance(1.5), Warp(top_k=9)).tokens
    )
    for given in ({"guidance": 2.0}, {"warp": Warp(top_k=8)}):
        with pytest.raises(UserError, match="is not what this student learned"):
            generator.sample([0], [1], **given)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"use --sampler.kind one_step"):
        generator.sample([0], [1], sampler="sjd")
    with torch.no_grad():
        tokenizer.quantizer.table.mul_(-1)  # another tokenizer of the same shape
    checkpoint.save_module(tmp_path / "student" / run_files.TOKENIZER, tokenizer, tokenizer.config)
    with pytest.raises(UserError, match="is not the tokenizer that"):
        load(tmp_path / "student", device="cpu")
