"""Scoring on a small set: what is compared with what, likelihoods, and that a memoriser is found out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import visgen
from visgen import evaluate as ev
from visgen import small_set as small
from visgen.config import UserError
from visgen.data import Data, codes, emoji, synthetic
from visgen.evaluate import World, reconstruct
from visgen.metrics.features import build_extractor
from visgen.metrics.kid import kid
from visgen.metrics.neighbours import nearest
from visgen.metrics.protocol import Score
from visgen.small_set import SmallSet

SHAPES = synthetic.Config(image_size=16, classes=3, n=200, n_held_out=40)


@pytest.fixture(scope="module")
def emojis() -> SmallSet:
    return SmallSet(emoji.Config(hflip=True))


@pytest.fixture(scope="module")
def shapes() -> SmallSet:
    return SmallSet(SHAPES)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ what is compared


def test_bases_are_one_picture_a_concept_or_all(emojis: SmallSet, shapes: SmallSet) -> None:
    assert len(emojis.bases) == len(set(emojis.held_out.concepts.tolist())) == 117  # type: ignore[attr-defined]
    assert len(emojis.train_bases) == 1053 and emojis.mirrored and not shapes.mirrored
    assert shapes.bases == list(range(40)) and shapes.train_bases == list(range(200))


def test_the_plan_has_the_classes_of_the_bases(emojis: SmallSet) -> None:
    assert emojis.plan(None, 0).n == 1170
    plan = emojis.plan(351, seed=3)
    assert torch.bincount(plan.rows().label).tolist() == [3] * 117
    drawn = torch.bincount(emojis.labels[plan.rows().label], minlength=9)
    assert torch.equal(drawn, 3 * torch.bincount(emojis.labels, minlength=9))


@pytest.mark.parametrize(("n", "use"), [(100, 117), (1000, 1053), (0, 117), (-117, 117)])
def test_other_numbers_are_refused(emojis: SmallSet, n: int, use: int) -> None:
    said = refused(lambda: emojis.plan(n, 0))
    assert said.startswith(f"--n {n} must be a multiple of the 117") and said.endswith(f"use {use}")


def test_training_images_of_the_classes_each_once(emojis: SmallSet) -> None:
    like = emojis.training_like(99, seed=0)
    assert like.shape == (117, 7), "the one held-out flag has 7 flags to train on"
    assert len(like.unique()) == 819 and set(like.flatten().tolist()) <= set(emojis.train_bases)
    assert torch.equal(emojis.train.labels[like], emojis.labels[:, None].expand(-1, 7))
    assert torch.equal(like, emojis.training_like(7, 0)) and not torch.equal(like, emojis.training_like(7, 1))
    assert emojis.training_like(2, 0).shape == (117, 2)
    smileys = [i for i in emojis.train_bases if emojis.train.labels[i] == 0]
    drawn = emojis.training_like(3, 0)[emojis.labels == 0]
    assert drawn.min() < smileys[10] and drawn.max() > smileys[-10], "from the whole class, not from its beginning"


def test_halves_are_disjoint_and_of_equal_classes(emojis: SmallSet) -> None:
    first, second = emojis.halves(0)
    assert len(first) == len(second) == 57 and len(torch.cat([first, second]).unique()) == 114
    assert torch.equal(emojis.labels[first], emojis.labels[second])
    assert not torch.equal(first, emojis.halves(1)[0])


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    few = synthetic.Config(image_size=16, classes=3, n_held_out=9)
    assert "9 base pictures, which make 3 pairs of one class" in refused(lambda: SmallSet(few))
    odd = synthetic.Config(image_size=16, classes=3, n=29, n_held_out=30)
    assert "class 'triangle' has 9 base pictures to train on and 10 held out" in refused(lambda: SmallSet(odd))
    assert "gives tokens, pictures are needed" in refused(lambda: SmallSet(codes.Config(tmp_path)))


# ------------------------------------------------------------------------------------------------------------- rows


def test_mirror_images_are_of_what_may_be_mirrored(emojis: SmallSet) -> None:
    rows = list(small.mirrored(emojis.train, batch=1000))
    pixels = torch.cat([p for p, _ in rows])
    assert torch.cat([i for _, i in rows]).tolist() == list(range(len(emojis.train)))
    plain = emojis.train.get_many(range(len(emojis.train)))["pixels"][:, 0]
    flags = emojis.train.labels == 8
    assert torch.equal(pixels[flags], plain[flags])
    people = emojis.train.labels == 1
    assert torch.equal(pixels[people], plain[people].flip(-1))


def test_copies_are_training_images_as_training_shows_them() -> None:
    data = SmallSet(emoji.Config(hflip=True, shift=3)).train
    chosen = [5, 3, 17, 5, 5]
    rows = [list(small.augmented(data, chosen, 1, World(rank, 2), batch=2)) for rank in range(2)]
    order = torch.cat([index for part in rows for _, index in part]).argsort()
    found = torch.cat([pixels for part in rows for pixels, _ in part])[order]
    for i, image in enumerate(found):
        assert torch.equal(image, data.get(chosen[i], np.random.default_rng((1, i)))["pixels"][0])
    assert not torch.equal(found[0], found[3]) and not torch.equal(found[0], data.get(5)["pixels"][0])


def extract(pixels: Tensor) -> Tensor:
    return build_extractor("fd_debug")(pixels)["pool"]


def plain(data: Data, chosen: Sequence[int]) -> Tensor:
    return data.get_many(chosen)["pixels"][:, 0]


def test_known_pictures(emojis: SmallSet) -> None:
    """With a tokenizer that loses the last bit, every row is what it says."""

    class Coarse(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def encode(self, pixels: Tensor) -> Tensor:
            return ((pixels + 1) * 127.5).round().long() // 2 * 2

        def decode(self, tokens: Tensor) -> Tensor:
            return tokens / 127.5 - 1

    def coarse(pixels: Tensor) -> Tensor:
        return extract(pixels // 2 * 2)

    known = small.known(emojis, Coarse(), build_extractor("fd_debug"), 2, 0, batch=500)  # type: ignore[arg-type]
    like, held_out = emojis.training_like(2, 0), plain(emojis.held_out, emojis.bases)
    assert torch.equal(known.held_out.features, extract(held_out)) and known.held_out.n == 117
    assert torch.allclose(known.recon, coarse(held_out), atol=1e-5)
    assert torch.equal(known.train.flatten(0, 1), extract(plain(emojis.train, like.flatten().tolist())))
    everything = plain(emojis.train, range(len(emojis.train)))
    assert known.views.shape == (2, 2721, 64) and torch.allclose(known.views[0], coarse(everything), atol=1e-5)
    people = emojis.train.labels == 1
    assert torch.allclose(known.views[1][people], coarse(everything[people].flip(-1)), atol=1e-5)
    distance, index = nearest(known.copies, known.views)  # mirroring is their only augmentation
    assert distance.max() < 1e-9 and (index[:, 0] == like.flatten()).double().mean() > 0.99
    straight = nearest(known.copies, known.views[:1])[0][:, 0]
    assert 0.2 < (straight > 1e-9).double().mean() < 0.5, "a copy may be a mirror image"


def made_known(shapes: SmallSet, recon: Tensor) -> small.Known:
    every = extract(plain(shapes.train, range(200)))
    like = shapes.training_like(4, 0)
    reference = ev.reference(shapes.held_out, build_extractor("fd_debug"))
    return small.Known(reference, recon, every[like], every[like].flatten(0, 1), every[None])


def test_a_memoriser_passes_by_kid_and_is_found_out_by_its_neighbours(shapes: SmallSet) -> None:
    held_out = extract(plain(shapes.held_out, shapes.bases))
    noise = 0.02 * torch.randn(held_out.shape, generator=torch.Generator().manual_seed(0))
    real = made_known(shapes, held_out + noise)
    scores = small.kid_rows(real.train, real, shapes.halves(0), groups=10)
    assert small.passes(scores) and scores["kid_generated"].value == scores["kid_train"].value
    assert [scores[f"kid_{row}"].n for row in ("generated", "recon", "train", "real")] == [160, 40, 160, 19]
    assert abs(scores["kid_real"].value) < 3 * scores["kid_real"].se  # type: ignore[operator]

    copies, honest = (nearest(x, real.views)[0][:, 0] for x in (real.copies, held_out))
    found = small.newness({"generated": copies, "copies": copies, "held_out": honest})
    assert found["generated_closer"].value == found["generated_below_1pct"].value == 1
    found = small.newness({"generated": honest, "copies": copies, "held_out": honest})
    assert found["generated_closer"].value == 0.5 and found["copies_closer"].value == 1
    assert found["generated_below_5pct"].value == pytest.approx(0.05, abs=0.01)


def test_a_generator_of_other_images_fails(shapes: SmallSet) -> None:
    pixels = plain(shapes.held_out, shapes.bases)
    real, dark = made_known(shapes, extract(pixels)), extract(pixels // 2)[:, None]
    scores = small.kid_rows(dark, real, shapes.halves(0), groups=10)
    assert not small.passes(scores) and scores["kid_recon"].value == pytest.approx(0, abs=1e-9)
    assert scores["kid_generated"].value == kid(dark, real.held_out.features, groups=10).value


@pytest.mark.parametrize(
    ("generated", "recon", "line"),
    [
        (0.0229, 0.01, "**PASS**: kid_generated 0.02290 <= 2 max(kid_recon, 0) + 3 SE = 0.02300"),
        (0.0231, 0.01, "**FAIL**: kid_generated 0.02310 > 2 max(kid_recon, 0) + 3 SE = 0.02300"),
        (0.0029, -0.5, "**PASS**: kid_generated 0.00290 <= 2 max(kid_recon, 0) + 3 SE = 0.00300"),
        (-0.2, 0.0, "**PASS**: kid_generated -0.20000 <= 2 max(kid_recon, 0) + 3 SE = 0.00300"),
    ],
)
def test_the_criterion(generated: float, recon: float, line: str) -> None:
    scores = {"kid_generated": Score(generated, se=0.001), "kid_recon": Score(recon, se=9.0)}
    assert small.verdict(scores) == line and small.passes(scores) is line.startswith("**PASS")


# ------------------------------------------------------------------------------------------------------ likelihood


def test_nats_are_the_laws_surprise(make_model: Callable[..., Any]) -> None:
    model = make_model(grid=(1, 2, 3), vocab=7)
    tokens, labels = torch.randint(7, (5, 6)), torch.tensor([0, 1, 2, 0, 1])
    found = small.nats_per_token(model, tokens, labels, batch=2)
    assert found.dtype == torch.float64 and found.shape == (5,)
    h = model.backbone(tokens[:, :-1], None, cond=model.condition({"label": labels}, None))
    law = model.head.dist(h[None], torch.ones(1, 5, 6))
    assert torch.allclose(found.float(), -law.log_prob(tokens).mean(1), atol=1e-5)
    other = small.nats_per_token(model, tokens, (labels + 1) % 3, batch=5)
    assert not torch.allclose(found, other, atol=1e-3), "labels count"


def test_marginals_equal_the_written_out_law() -> None:
    generator = torch.Generator().manual_seed(0)
    train, tokens = (torch.randint(8, (n, 3), generator=generator) for n in (30, 5))
    found, alpha = small.marginal_nats(train, tokens, vocab=9)
    losses = {}
    for a in small.SMOOTHING:
        left = [[train[torch.arange(30) != i, k].eq(train[i, k]).sum() for k in range(3)] for i in range(30)]
        losses[a] = -torch.tensor([math.log((float(c) + a) / (29 + 9 * a)) for row in left for c in row]).mean()
    assert alpha == min(losses, key=lambda a: float(losses[a])) and min(losses) < alpha < max(losses)
    for i in range(5):
        counts = [float(train[:, k].eq(tokens[i, k]).sum()) for k in range(3)]
        assert float(found[i]) == pytest.approx(-sum(math.log((c + alpha) / (30 + 9 * alpha)) for c in counts) / 3)


def test_codes_that_no_training_image_has_are_finite() -> None:
    found, _ = small.marginal_nats(torch.zeros(50, 2, dtype=torch.int64), torch.ones(3, 2, dtype=torch.int64), vocab=5)
    assert found.isfinite().all() and (found > math.log(5)).all()


def test_likelihoods_of_a_checkpoint(shapes: SmallSet, checkpoint_dir: Path) -> None:
    generator = visgen.load(str(checkpoint_dir), device="cpu")
    scores = small.likelihood(generator.model, generator.tokenizer, shapes, torch.arange(4), batch=16)
    held_out = shapes.held_out.get_many(range(40))
    tokens = reconstruct(generator.tokenizer, held_out["pixels"], decode=False)[0]
    with torch.no_grad():
        truth = generator.model.loss(tokens, {"label": held_out["label"]}, None).mean(1)
    assert scores["nats_held_out"].value == pytest.approx(float(truth.mean()), rel=1e-5)
    assert scores["nats_held_out"].se == pytest.approx(float(truth.std()) / math.sqrt(40), rel=1e-4)
    assert scores["nats_held_out_all"].value == pytest.approx(scores["nats_held_out"].value), "all are bases here"
    gap, train = scores["nats_gap"], scores["nats_train"]
    assert gap.value == pytest.approx(scores["nats_held_out"].value - train.value, rel=1e-9)
    assert gap.se == pytest.approx(math.hypot(scores["nats_held_out"].se, train.se), rel=1e-9)  # type: ignore[arg-type]
    assert scores["nats_uniform"].value == math.log(16) and scores["nats_uniform"].terms["bits"] == pytest.approx(4)
    assert scores["nats_marginals"].value < math.log(16) < train.value, "the model has random weights"
    assert train.n == 200 and all(s.terms["bits"] == pytest.approx(s.value / math.log(2)) for s in scores.values())


def test_bases_alone_are_averaged(emojis: SmallSet, make_model: Callable[..., Any]) -> None:
    class Brightness(torch.nn.Module):
        """One token: how dark the picture is, in four levels."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def encode(self, pixels: Tensor) -> Tensor:
            return ((pixels.flatten(1).mean(1, keepdim=True) + 1) * 2).long().clamp(0, 3).expand(-1, 4)

    model = make_model(grid=(1, 2, 2), vocab=4, classes=9)
    scores = small.likelihood(model, Brightness(), emojis, torch.arange(9), batch=500)  # type: ignore[arg-type]
    assert (scores["nats_train"].n, scores["nats_held_out"].n, scores["nats_held_out_all"].n) == (1053, 117, 290)
    assert scores["nats_held_out"].value != pytest.approx(scores["nats_held_out_all"].value, abs=1e-4)
    tokens = small.tokens_of(Brightness(), emojis.held_out, emojis.bases, 50)  # type: ignore[arg-type]
    truth = small.nats_per_token(model, tokens, emojis.labels, 50)
    assert scores["nats_held_out"].value == pytest.approx(float(truth.mean()))


# ---------------------------------------------------------------------------------------------------------- tables


def test_tables() -> None:
    scores = {"kid_recon": Score(1.0), "nats_train": Score(math.log(2), se=0.1), "nats_uniform": Score(math.log(4))}
    lines = small.likelihood_table(scores).splitlines()
    assert lines[2:] == ["| train | 0.6931 ± 0.1000 | 1.0000 ± 0.1443 |", "| uniform | 1.3863 | 2.0000 |"]
    lines = small.quantile_table({"made": torch.linspace(0, 1, 101, dtype=torch.float64)}).splitlines()
    assert lines[0].endswith("| images | 0% | 1% | 5% | 25% | 50% | 75% | 100% |")
    assert lines[2] == "| made | 101 | 0 | 0.01 | 0.05 | 0.25 | 0.5 | 0.75 | 1 |"
