"""The proof of exactness: its parts against twins, and the program itself at a size for every day."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import program

from visgen import exactness as ex
from visgen import lossless, mutants, vectors
from visgen.config import UserError, build, kind_of, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.enumeration import BranchingLaw, enumerate_law
from visgen.exactness import World
from visgen.nn.ancestral import walk
from visgen.nn.categorical import Categorical
from visgen.nn.diffusion import Path as Denoising
from visgen.samplers.ar import AR
from visgen.samplers.ar import Config as ARConfig
from visgen.samplers.cspec import CSpec
from visgen.samplers.sjd import SJD, Config
from visgen.samplers.speculative import Config as SpeculativeConfig
from visgen.samplers.speculative import Speculative

ROOT = Path(__file__).parents[1]
GRID = (1, 2, 2)


def engine(law: Any = BranchingLaw, seed: int = 0) -> ex.TableEngine:
    logits = ex.table(3, 4, seed, 1.3)
    return ex.TableEngine(logits, GRID, ex.TableEngine(logits + ex.table(3, 4, 99, 0.6), GRID, law=law), law)


def tv(sampler: Any, of: ex.TableEngine) -> float:
    law, nfe = enumerate_law(sampler, World(of))
    assert 1 <= nfe <= 4 and math.isclose(float(law.sum()), 1, abs_tol=1e-12)
    return float((law - ex.joint(World(of))[0]).abs().sum()) / 2


def test_the_joint_law_is_the_product_of_the_tables() -> None:
    of, laws = engine(), ex.table(3, 4, 0, 1.3).softmax(-1)
    for place, sequence in enumerate(itertools.product(range(3), repeat=4)):
        product, node = 1.0, 0
        for token in sequence:
            product, node = product * float(laws[node, token]), 3 * node + token + 1
        assert math.isclose(float(ex.joint(World(of))[0, place]), product, rel_tol=1e-9)
        assert int(ex.place(torch.tensor([sequence]), 3)) == place
    assert ex.lengths(3, 4).tolist() == [0] + [1] * 3 + [2] * 9 + [3] * 27


def test_a_real_engine_as_a_table(make_model: Callable[..., Any]) -> None:
    """Its classes too; and the training pass, guided by the formula, says what the engine says."""
    rules = (
        (Guidance(2.0, schedule="linear"), Warp(0.9, top_k=2)),
        (Guidance(3.0, (0.3, 0.7), "cosine"), Warp()),
        (Guidance(), Warp(0.8)),
    )
    for rule in rules:
        real = World(Engine(make_model(grid=GRID, vocab=3), *rule), 3)
        of = World(ex.TableEngine(ex.tabulated(real), GRID), 3)
        assert torch.allclose(ex.joint(of), ex.joint(real), atol=1e-6)
    late = World(Engine(real.engine.model, mutants.LateGuidance(*rules[1][0].__dict__.values())), 3)
    right = ex.joint(World(Engine(real.engine.model, rules[1][0]), 3))
    assert torch.equal(ex.joint(late), right), "the formula does not ask the engine's guidance"
    assert not torch.allclose(ex.joint(World(ex.TableEngine(ex.tabulated(late), GRID), 3)), right, atol=1e-3)


def test_a_table_reads_what_was_fed_last() -> None:
    of, logits = engine(), ex.table(3, 4, 0, 1.3)
    first = of.forward(torch.tensor([[2, 1, 0, 0]]), torch.tensor([[0, 1, 2]]))
    assert torch.allclose(first.logits[0].double(), logits[[0, 3, 11]], atol=1e-6)
    again = of.forward(torch.tensor([[0, 2, 0, 0]]), torch.tensor([[1, 2]]))  # token 0 was refused
    assert torch.allclose(again.logits[0].double(), logits[[1, 6]], atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [2, 3, 9])
@pytest.mark.parametrize("init", ["uniform", "left", "up", "repeat"])
@pytest.mark.parametrize("drafting", ["fresh", "coupled"])
def test_speculative_jacobi_decoding_is_exact(drafting: Any, init: Any, window: int, seed: int) -> None:
    assert tv(SJD(Config(drafting, window, init)), engine(seed=seed)) < 1e-12


@pytest.mark.parametrize(("length", "threshold"), [(1, 1.0), (2, 0.3), (3, 0.6), (5, 1.0)])
def test_speculative_sampling_is_exact(length: int, threshold: float) -> None:
    assert tv(Speculative(SpeculativeConfig(None, length, threshold)), engine()) < 1e-12


def test_a_draw_that_is_said_to_be_unseen_must_be() -> None:
    """An enumeration spares what `where` leaves out, so it must notice when that is looked at all the same."""

    class Careless(BranchingLaw):
        def residual(self, *given: Any) -> torch.Tensor:
            return super().residual(*given[:-1], torch.zeros_like(given[-1]))

    assert tv(SJD(Config("coupled", 3)), engine(Careless)) > 0.05


def test_simulation_counts_as_enumeration_does() -> None:
    sampler = SJD(Config("coupled", 3))
    _, nfe = enumerate_law(sampler, World(engine()))
    fit = ex.simulate(sampler, World(engine(Categorical)), 50_000, seed=10**9)
    assert abs(fit.nfe - nfe) < 0.02 and fit.p > 1e-4 and fit.tv < 1.3 * fit.floor


def test_simulated_laws_are_the_models() -> None:
    """What enumeration cannot do: the shipped noise, and drafts that share it."""
    samplers = [SJD(Config(d, 3, i)) for d, i in (("fresh", "up"), ("gumbel", "left"), ("pure_gumbel", "uniform"))]
    samplers += [Speculative(SpeculativeConfig(None, 2, 0.5)), AR(ARConfig())]  # type: ignore[list-item]
    fits = [ex.simulate(s, World(engine(Categorical)), 100_000, seed=(k + 7) << 32) for k, s in enumerate(samplers)]
    assert min(ex.holm([f.p for f in fits])) > 1e-3


def test_lock_step_rows_advance_together() -> None:
    of, sampler = engine(Categorical), mutants.LockStep(Config("coupled", 2))
    of.begin(ex.rows(6))
    state, noise = sampler.init(of, Noise(torch.arange(6))), Noise(torch.arange(6))
    sampler.iterate(state, of.forward, noise)
    assert torch.equal(state.position[::2], state.position[1::2])


def test_the_g_test_equals_scipys() -> None:
    from scipy import stats

    law = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.039, 0.0007, 0.0003], dtype=torch.float64)
    counts = torch.tensor([420.0, 270, 210, 60, 38, 2, 0], dtype=torch.float64)
    pooled = [*counts[:5].tolist(), 2.0], [*(1000 * law[:5]).tolist(), 1.0]
    expected = stats.power_divergence(*pooled, lambda_="log-likelihood").pvalue
    assert math.isclose(ex.g_test(counts, law), expected, rel_tol=1e-6)
    assert ex.g_test(counts, torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04, 0, 0], dtype=torch.float64)) == 0
    both = stats.chi2.sf(2 * stats.power_divergence(*pooled, lambda_="log-likelihood").statistic, 10)
    assert math.isclose(ex.g_test(counts.expand(2, -1), law.expand(2, -1)), both, rel_tol=1e-6)


def test_holms_adjustment() -> None:
    assert ex.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert ex.holm([]) == [] and ex.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_the_floor_is_what_the_law_itself_shows() -> None:
    fits = [ex.simulate(AR(ARConfig()), World(engine(Categorical)), 20_000, seed=k << 32) for k in range(8)]
    assert sum(f.tv for f in fits) / 8 == pytest.approx(fits[0].floor, rel=0.1)


# ------------------------------------------------------------------------------------------------- the program


CHECKS = ("simulation", "trials", "controls", "equalities", "kernels", "enumeration")


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs `eval/exactness.py`: its exit code and its last line. Checks that are left out find nothing."""
    exactness = program("exactness")

    def run(*flags: str, without: Sequence[str] = (), **patches: Any) -> tuple[int, Any]:
        for check in without:
            monkeypatch.setattr(exactness, check, lambda *given: {})
        for name, value in patches.items():
            monkeypatch.setattr(exactness.mutants, name, value)
        monkeypatch.setattr(sys, "argv", ["exactness", "--processes", "1", *flags])
        with pytest.raises(SystemExit) as stop:
            exactness.main()
        return int(stop.value.code or 0), json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_the_default_sampler_is_proved_on_1e5_draws(prove: Callable[..., tuple[int, Any]]) -> None:
    code, said = prove("--draws", "100000", "--sampler.kind", "sjd", "--sampler.window", "3")
    assert code == 0 and said["pass"] and said["enumeration_max_tv"] < 1e-12
    assert (said["enumerated"], said["simulated"]) == (5, 9)
    assert said["controls_caught"] == "19/19" and said["equalities"] == "5/5"


def test_processes_change_nothing() -> None:
    sampler = SJD(Config("coupled", 3))
    tasks = {
        title: (ex.simulate, sampler, lossless.world(title), 2000, 0) for title in ("plain", "mixed", "transformer")
    }
    (one, cpu), (two, _) = ex.side_by_side(tasks, 1), ex.side_by_side(tasks, 2)
    assert one == two and one.keys() == tasks.keys() and cpu > 0


def test_a_control_that_is_missed_fails(prove: Callable[..., tuple[int, Any]]) -> None:
    flags, rest = ("--draws", "10000", "--sampler.kind", "ar"), [c for c in CHECKS if c != "controls"]
    code, said = prove(*flags, StaleLaw=SJD, without=rest)  # no control at all: it is exact
    assert code == 1 and not said["pass"] and said["controls_caught"] == "16/18"


@pytest.mark.parametrize("check", ["equalities", "kernels"])
def test_unequal_tokens_fail(
    prove: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    flags, rest = (
        ("--draws", "10000", "--sampler.kind", "sjd", "--sampler.window", "3"),
        [c for c in CHECKS if c != check],
    )
    assert prove(*flags, without=rest)[0] == 0
    turned = Noise.gumbel
    monkeypatch.setattr(Noise, "gumbel", lambda self, index, *rest: turned(self, index + len(self.seeds), *rest))
    code, said = prove(*flags, without=rest)
    assert code == 1 and not said["pass"]


@pytest.mark.parametrize(
    "flags",
    [
        "sjd --sampler.window 1",
        pytest.param("speculative --sampler.length 1 --sampler.threshold 0", marks=pytest.mark.slow),
    ],
)
def test_settings_that_draw_in_step_are_proved_too(prove: Callable[..., tuple[int, Any]], flags: str) -> None:
    code, said = prove("--draws", "10000", "--sampler.kind", *flags.split(), without=["controls"])
    assert code == 0 and said["pass"] and said["equalities"] == ("5/5" if "sjd" in flags else "4/4")


def test_the_sampler_of_the_guide_is_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    mine = types.ModuleType("visgen.samplers.mine")
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    assert code is not None
    exec(textwrap.dedent(code[1]), vars(mine))
    exactness = program("exactness")
    family, alone = exactness.configurations(mine.Config())
    assert family == [mine.Config()] and alone and exactness.enumeration(family, alone) == {}
    titles = [title for title in (*exactness.TABLES, *exactness.REAL) if title != "refill"]
    fits = [exactness.simulation(title, family, 10_000, 0, 0) for title in titles]
    assert min(fit.p for found in fits for fit in found.values()) > 1e-3 and all(exactness.equalities(family).values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--draws 9999", "draws is 9999"),
        ("--sampler.kind speculative --sampler.draft nowhere", "sampler.draft nowhere is not read"),
        ("--sampler.kind cspec --sampler.mode distance --sampler.radius 1", "mode distance is not lossless"),
        ("--sampler.kind cspec --vectors 1999", "vectors is 1999"),
        ("--sampler.kind one_step", "sampler.kind one_step has no case here"),
        ("--sampler.kind one_step --sampler.passes 2", "sampler.kind one_step has no case here"),
        ("--sampler.kind causal", "sampler.kind causal has no case here"),
    ],
)
def test_what_cannot_be_proved_is_refused(prove: Callable[..., tuple[int, Any]], flags: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        prove(*flags.split())


@pytest.mark.slow
def test_every_sampler_is_proved_on_1e6_draws(prove: Callable[..., tuple[int, Any]]) -> None:
    code, said = prove("--draws", "1000000")
    assert code == 0 and said["pass"]


def test_every_setting_that_calls_itself_lossless_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    family = lossless.family()
    assert lossless.uncovered(family) == []
    assert lossless.uncovered([c for c in family if getattr(c, "init", "") != "up"])[0] == "sjd {'init': 'up'}"
    half = [c for c in family if (getattr(c, "drafting", ""), getattr(c, "init", "")) != ("gumbel", "up")]
    assert lossless.uncovered(half) == ["sjd {'drafting': 'gumbel', 'init': 'up'}"]
    assert lossless.uncovered([c for c in family if not lossless.automatic(c)]) == ["sjd {'window': 'auto'}"]
    assert "cspec" in lossless.uncovered(family[:-3])
    monkeypatch.setattr(importlib.import_module("visgen.samplers.masked").Masked, "lossless", True)
    assert lossless.uncovered(family)[0] == "masked"


def test_every_world_has_a_case_of_every_lossless_kind_and_drafting() -> None:
    ids = [c for c in lossless.family() if kind_of(c) != "cspec"]
    for title in (*lossless.TABLES, *lossless.REAL):
        found = lossless.cases(ids, title)
        if title != "refill":
            assert {kind_of(c) for c in found} == {"ar", "sjd", "speculative"}
        assert {c.drafting for c in found if kind_of(c) == "sjd"} == set(lossless.DRAFTINGS)
        assert len({c.init for c in found if kind_of(c) == "sjd"}) == 4


def test_the_worlds_are_what_they_are_called() -> None:
    made = {title: lossless.world(title) for title in (*lossless.TABLES, *lossless.REAL)}
    rules = [w.engine.guidance for w in made.values()] + [lossless.FILTERS[0]]
    assert {r.schedule for r in rules} == {"constant", "linear", "cosine"}
    assert made["guided"].engine.guidance.interval != (0.0, 1.0) and made["control"].engine.guidance.control is not None
    assert made["bf16"].engine.dtype == torch.bfloat16 and made["refill"].rows is not None
    for title in ("mixed", "known", "guided", "control"):
        laws = ex.joint(made[title])
        assert (laws[0] - laws[1]).abs().sum() > 0.1, "two conditions of different distributions"


def test_the_clock_of_auto_has_no_say_in_the_tokens(prove: Callable[..., tuple[int, Any]]) -> None:
    """As it was, with the seeds of the images, its distribution is another, and the program says so."""
    flags = ("--draws", "10000", "--sampler.kind", "sjd", "--sampler.window", "auto")
    code, said = prove(*flags, without=["controls"])
    assert code == 0 and said["pass"] and (said["simulated"], said["equalities"]) == (1, "1/1")
    exactness = program("exactness")
    old = exactness._by_trial(mutants.TrialOfImages(Config("coupled", "auto")), 100_000, 5 << 32)
    assert old.p < 1e-6 and old.tv > 0.12


# ----------------------------------------------------------------------------------------------------- vectors


CSPEC = ("--sampler.kind", "cspec", "--sampler.length", "2")


def test_the_ks_tests_equal_scipys() -> None:
    from scipy import stats

    rng = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, generator=rng, dtype=torch.float64) for n in (4000, 3000))
    for shift in (0.0, 0.03, 0.06):
        one, two = stats.kstest(a + shift, "norm"), stats.ks_2samp(a + shift, b, method="asymp")
        assert vectors.ks(a + shift) == pytest.approx(one.pvalue, rel=0.05)
        assert vectors.ks(a + shift, b) == pytest.approx(two.pvalue, rel=0.1)
    assert vectors.ks(a, a) == 1.0 and vectors.ks(a + 5, b) < 1e-12


def test_a_chain_of_gaussians_is_the_formula() -> None:
    """The plain walk of the shipped sampler, of a mean that is not 0."""
    toy = vectors.Toy(torch.full((1, 4), 1.5), torch.ones(1), 0.6)
    plain = build(plugin_config("visgen.samplers", "causal", steps=20, variance=1.0, end_noise=True))
    found, _ = vectors.draws(plain, vectors.ToyEngine(toy, 1), 4000, 0)
    made = walk(Denoising("epsilon", "squaredcos_cap_v2"), "ancestral", 20)
    factor, deviation = vectors.gaussian_chain(
        made, (made.high / 2).exp(), 0.6, Denoising("epsilon", "squaredcos_cap_v2")
    )
    assert abs(found.mean() - 1.5 * factor) < 0.02 and abs(found.std() - deviation) < 0.01
    assert vectors.ks((found[:, 0, 0] - 1.5 * factor) / deviation) > 1e-3


def test_speculation_over_vectors_is_exact_and_stays_as_published() -> None:
    """The spec's case in 100 steps: Gaussians of 16 channels and deviation 0.7, 0.3 apart."""
    sampler = build(plugin_config("visgen.samplers", "cspec", length=1))
    p, rates = vectors.apart(sampler, 8192, 0)
    assert p > 1e-3
    assert abs(rates["acceptance"] - 0.717) < 0.01 and abs(rates["first_failure"] - 0.197) < 0.01


def test_vectors_are_proved(prove: Callable[..., tuple[int, Any]]) -> None:
    code, said = prove(*CSPEC, "--sampler.steps", "15", "--vectors", "3000")
    found = said["vectors"]
    assert code == 0 and said["pass"] and found["controls_caught"] == "4/4" and found["tested"] == 4
    assert 0.3 < found["acceptance"] < 0.95 and "enumerated" not in said


def test_a_wrong_rule_over_vectors_is_no_proof(
    prove: Callable[..., tuple[int, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vectors.mutants, "Released", CSpec)  # no control at all: it is exact
    code, said = prove(*CSPEC, "--sampler.steps", "10", "--vectors", "2000")
    assert code == 1 and not said["pass"] and said["vectors"]["controls_caught"] != "4/4"
