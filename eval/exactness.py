"""Are the samplers lossless? Enumeration, simulation, equality of tokens, and controls that must fail.

python eval/exactness.py --draws 1000000 --seed 0
python eval/exactness.py --sampler.kind sjd --sampler.drafting coupled --sampler.window 4    # one setting alone
python eval/exactness.py --sampler.kind cspec                                                # vectors alone

Every check runs the shipped samplers on tiny models whose distribution is known (`visgen/lossless.py` lists them):
tables of probabilities, and a random transformer behind the real engine, with known tokens, mixed labels, refilled
rows, control maps, intervals and schedules of guidance, and in bfloat16. The kernels of a window run too (in Triton's
interpreter where there is no GPU), and must draw the tokens of the plain code. `cspec`, whose tokens are vectors, runs
on Gaussians and mixtures of 16 channels, by Kolmogorov-Smirnov tests. The last line is one line of JSON; exit code 0
iff every sampler passes and every control is caught.
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any
from unittest import mock

import torch
from torch import Tensor

from visgen import config as configs
from visgen import exactness as ex
from visgen import mutants, vectors
from visgen.checks import Positive, Range, Seed
from visgen.config import UserError, kind_of, plugin, plugin_config
from visgen.decode import refill
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.enumeration import BranchingLaw, enumerate_law
from visgen.launch import cpus
from visgen.lossless import GRID, REAL, TABLES, World, automatic, cases, family, name, transformer, world
from visgen.nn.categorical import Categorical
from visgen.samplers import Sampler

TOLERANCE = 1e-12  # of an enumerated distribution, as TV
ALPHA = 1e-3  # of the whole family of G-tests (Holm), and of that of the controls


@dataclass(frozen=True)
class ExactnessConfig:
    """Proves the samplers lossless, or finds that they are not.

    Attributes:
        sampler: of this kind alone, or, with settings, this one alone; default all. A draft model is provided.
        draws: simulated sequences of each case on a table; a tenth of them on a transformer.
        vectors: simulated sequences of each case of vectors.
        seed: of the first sequence.
        processes: that share the checks, at most; 1: this one alone.
    """

    sampler: Any = plugin("visgen.samplers", None)
    draws: Annotated[int, Range(10_000)] = 1_000_000  # fewer tell no control from the exact distribution
    vectors: Annotated[int, Range(2_000)] = 20_000
    seed: Seed = 0
    processes: Positive = field(default_factory=cpus)


def main() -> None:
    settings, start = configs.load(ExactnessConfig, sys.argv[1:], prog="eval/exactness.py"), time.perf_counter()
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, which any check may do
    chosen, alone = configurations(settings.sampler)
    ids, continuous = [c for c in chosen if not _vectors(c)], [c for c in chosen if _vectors(c)]
    tasks: dict[str, tuple[Any, ...]] = {}  # the long ones first
    if continuous:
        given = [_provided(c) for c in continuous]
        tasks["vectors"] = vectors.prove, given, settings.vectors, settings.seed, ALPHA
    if ids:
        for i, title in enumerate((*TABLES, *REAL)):
            tasks[title] = simulation, title, cases(ids, title, alone), settings.draws, settings.seed, 100 * i
        tasks["trials"] = trials, ids, settings.draws, settings.seed
        tasks |= {"controls": (controls, settings.draws, settings.seed), "equalities": (equalities, ids)}
        tasks |= {"kernels": (kernels, ids), "enumeration": (enumeration, ids, alone)}
    found, cpu = ex.side_by_side(tasks, settings.processes)
    proof, passed = found.pop("vectors", None), True
    summary: dict[str, Any] = {}
    if ids:
        summary = summarised(settings.draws, **found)
        passed = summary.pop("pass")
    if proof is not None:
        passed = proof.pop("pass") and passed
        summary["vectors"] = proof
    summary |= {"seconds": round(time.perf_counter() - start, 1), "cpu_seconds": round(cpu, 1)}
    print(json.dumps({"pass": passed, **summary}))
    raise SystemExit(0 if passed else 1)


def summarised(
    draws: int,
    controls: dict[str, bool],
    equalities: dict[str, bool],
    kernels: dict[str, bool],
    enumeration: dict[str, float],
    **simulated: dict[str, ex.Fit],
) -> dict[str, Any]:
    """The last line of what was found of samplers of ids; pass: all of them do, and every control is caught."""
    adjusted = ex.holm([fit.p for fits in simulated.values() for fit in fits.values()])
    equal = {**equalities, **{f"kernels {k}": v for k, v in kernels.items() if not k.startswith("control")}}
    caught = {**controls, **{k: v for k, v in kernels.items() if k.startswith("control")}}
    summary = {
        "enumerated": len(enumeration),
        "enumeration_max_tv": max(enumeration.values(), default=0.0),
        "simulated": len(adjusted),
        "draws": draws,
        "min_holm_p": min(adjusted, default=1.0),
        "equalities": f"{sum(equal.values())}/{len(equal)}",
        "controls_caught": f"{sum(caught.values())}/{len(caught)}",
    }
    exact = summary["enumeration_max_tv"] < TOLERANCE and summary["min_holm_p"] >= ALPHA  # type: ignore[operator]
    return {"pass": exact and all(equal.values()) and all(caught.values()), **summary}


def configurations(given: Any) -> tuple[list[Any], bool]:
    """Configs of all samplers, of one kind, or one alone; and whether it is one alone."""
    if given is not None and not _provable(given):
        raise UserError(
            f"sampler.kind {kind_of(given)} has no case here: there is nothing that its distribution could be compared "
            "with (docs/methods.md); choose ar, sjd, speculative or cspec, or none for all"
        )
    if getattr(given, "draft", None) is not None:
        raise UserError(f"sampler.draft {given.draft} is not read: the tiny models have drafts of their own")
    if getattr(given, "mode", None) == "distance":
        raise UserError("sampler.mode distance is not lossless, and does not claim to be; use exact or head_time")
    if given is not None and given != type(given)():
        return [given], True
    found = [c for c in family() if given is None or kind_of(c) == kind_of(given)]
    return (found, False) if found else ([given], True)


# --------------------------------------------------------------------------------------------------- the checks


@torch.no_grad()
def enumeration(family: list[Any], alone: bool) -> dict[str, float]:
    """TV of each enumerated distribution; drafts that share a continuous noise cannot be enumerated."""
    out = {}
    for title in ("plain", "filtered", "known", "transformer", "bf16"):
        table = world(title, BranchingLaw) if title in TABLES else _as_table(world(title))
        for config in cases(family, title, alone):
            if kind_of(config) not in ("sjd", "speculative") or "gumbel" in getattr(config, "drafting", ""):
                continue
            tv, nfe = _enumerated(configs.build(_provided(config)), table)
            out[f"{title} {name(config)}"] = tv
            tokens = table.engine.tokens
            print(f"enumerated  {title:11} {name(config):32} TV {tv:.1e}  NFE {nfe:.3f} of {tokens}", flush=True)
    return out


def _as_table(real: World) -> World:
    """A world of the same distributions, and drafts, in tables that can be enumerated."""
    draft: Engine = real.engine.once(("draft", None), lambda: real.engine)
    tables = [ex.tabulated(dataclasses.replace(real, engine=e)) for e in (draft, real.engine)]
    drafter = ex.TableEngine(tables[0], GRID, law=BranchingLaw)
    return World(ex.TableEngine(tables[1], GRID, drafter, BranchingLaw), real.conditions)


def _enumerated(sampler: Sampler, table: World) -> tuple[float, float]:
    """The greatest TV over the conditions, and the mean of the expected evaluations."""
    wanted = ex.joint(table)
    found = [enumerate_law(sampler, table, c) for c in range(table.conditions)]
    tv = max(float((law - one).abs().sum()) / 2 for (law, _), one in zip(found, wanted, strict=True))
    return tv, sum(nfe for _, nfe in found) / len(found)


@torch.no_grad()
def simulation(title: str, chosen: list[Any], draws: int, seed: int, first: int) -> dict[str, ex.Fit]:
    """How well each simulated distribution fits in one of the worlds; case `first` has the first seeds."""
    asked, count = world(title), _draws(title, draws)
    law, fits = ex.joint(asked), {}
    for i, config in enumerate(chosen, first):
        sampler = configs.build(_provided(config))
        fit = fits[name(config)] = ex.simulate(sampler, asked, count, seed + (i << 32), law)
        print(f"simulated   {title:11} {name(config):32} {_words(fit)} of {asked.engine.tokens}", flush=True)
    return fits


def _draws(title: str, draws: int) -> int:
    """How many are drawn in a world: fewer of a real model, fewest of one that reads a map for each image."""
    return draws if title in TABLES else max(draws // (50 if title == "control" else 10), 10_000)


def _words(fit: ex.Fit) -> str:
    return f"TV {fit.tv:.4f} (floor {fit.floor:.4f})  p {fit.p:.4f}  NFE {fit.nfe:.3f}"


class Clock(ex.TableEngine):
    """A table of 2 tokens on which the wide window seems fast where its trial drew the favoured first token, and slow
    elsewhere."""

    def __init__(self, favoured: int) -> None:
        self.favoured = favoured
        super().__init__(ex.table(3, 2, 0, 0.3), (1, 1, 2))

    def laps(self, sampler: Any, state: Any, noise: Noise, length: int, warmup: int = 3) -> Iterator[float]:
        for _ in super().laps(sampler, state, noise, length, warmup):
            wide = len(state.slots) > 1
            yield (0.1 if int(state.tokens[0, 0]) == self.favoured else 10.0) if wide else 1.0


@torch.no_grad()
def trials(family: list[Any], draws: int, seed: int) -> dict[str, ex.Fit]:
    """`window: auto` by a clock that favours what was drawn, each image by an engine that has not chosen yet."""
    fits = {}
    for i, config in enumerate(c for c in family if automatic(c)):
        fit = fits[name(config)] = _by_trial(configs.build(config), draws, seed + ((2000 + i) << 32))
        print(f"simulated   trial       {name(config):32} {_words(fit)} of 2", flush=True)
    return fits


def _by_trial(sampler: Sampler, draws: int, seed: int) -> ex.Fit:
    """Clocks favour tokens 0, 1 and 2 in turn; the draws under each are counted apart. Each draw costs a whole trial,
    so there are few."""
    count = min(max(draws // 1000, 300), 1000)
    law, counts, evaluations = ex.joint(World(Clock(0))).expand(3, -1), torch.zeros(3, 9, dtype=torch.float64), 0
    for i in range(count):
        tokens, nfe = World(Clock(i % 3)).decode(sampler, torch.tensor([0]), torch.tensor([seed + i]))
        counts[i % 3, ex.place(tokens, 3)] += 1
        evaluations += int(nfe)
    return ex.fitted(counts, law, evaluations / count)


@torch.no_grad()
def equalities(family: list[Any]) -> dict[str, bool]:
    """Tokens that must be equal: of an image at every batch size, though rows finish apart, and in rows that are
    refilled; of greedy draws, and of `pure_gumbel`, and those of plain autoregression; of a window that was chosen, and
    the same window that is given."""
    out = {}
    ar = configs.build(plugin_config("visgen.samplers", "ar"))
    for config in family:
        sampler = configs.build(_provided(config))
        if automatic(config):
            out[f"chosen {name(config)}"] = _as_given(config)
            continue
        engine = transformer((1, 5, 7), 16, Guidance(1.5), Warp(top_p=0.95))
        together, nfe = _decoded(sampler, engine, list(range(8)))
        parts = [torch.cat([_decoded(sampler, engine, p)[0] for p in torch.arange(8).split(n)]) for n in (1, 2)]
        in_step = type(sampler).done is Sampler.done or getattr(config, "window", 0) == 1
        ragged = in_step or len(nfe.unique()) > 2
        out[f"rows {name(config)}"] = ragged and all(torch.equal(together, p) for p in parts)
        if sampler.ragged:
            found, _ = World(engine, 3, rows=3).decode(sampler, torch.arange(8) % 3, torch.arange(8))
            out[f"refill {name(config)}"] = torch.equal(together, found)
        if getattr(config, "drafting", "") == "pure_gumbel":
            out[f"ar {name(config)}"] = torch.equal(together, _decoded(ar, engine, range(8))[0])
        for warp in (Warp(temperature=0.0), Warp(top_k=1)):
            greedy = transformer((1, 5, 7), 16, Guidance(1.5), warp)
            same = torch.equal(*(_decoded(s, greedy, range(8))[0] for s in (sampler, ar)))
            out[f"greedy {warp.top_k} {name(config)}"] = same
    for title, same in out.items():
        if not same:
            print(f"not equal   {title}")
    print(f"equal       {sum(out.values())} of {len(out)}: batch sizes, refilled rows, greedy, pure_gumbel, auto")
    return out


def _decoded(sampler: Sampler, engine: Engine, seeds: Any) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and evaluations [B] of the images of these seeds."""
    seeds = torch.as_tensor(seeds)
    return World(engine, 3).decode(sampler, seeds % 3, seeds)


def _as_given(config: Any) -> bool:
    """Whether the clock alone, and no image, chooses the window, whose tokens then are those of that window."""
    windows, same = set(), []
    for favoured, seed in itertools.product(range(3), range(0, 30, 3)):
        engine = Clock(favoured)
        tokens, _ = _decoded(configs.build(config), engine, [seed])
        window = engine.once(("window", config), dict)[1]["window"]
        given = configs.build(dataclasses.replace(config, window=window))
        same.append(torch.equal(tokens, _decoded(given, engine, [seed])[0]))
        windows.add((favoured, window))
    return sorted(window for _, window in windows) == [1, 1, 2] and all(same)


@torch.no_grad()
def kernels(family: list[Any]) -> dict[str, bool]:
    """Whether the kernels of laws and windows draw the tokens of the plain code; and whether one is caught that leaves
    a draft its old label. In Triton's interpreter where there is no GPU."""
    try:
        import triton  # noqa: F401
    except ImportError:
        print("equal       kernels are not checked: Triton is not installed, and nothing here runs them")
        return {}
    wrong = mutants.UnwrittenLabels(plugin_config("visgen.samplers", "sjd", drafting="coupled", window=3))
    sampled = {name(c): configs.build(_provided(c)) for c in family if not automatic(c)} | {"control": wrong}
    out = {}
    for title, sampler in sampled.items():
        plain, kernelled = (_by_kernels(sampler, wanted) for wanted in (False, True))
        out[title] = torch.equal(plain, kernelled) == (sampler is not wrong)
        if not out[title]:
            print(f"not equal   kernels {title}")
    print(f"equal       {sum(out.values())} of {len(out)}: kernels and plain code; a wrong one differs", flush=True)
    return out


def _by_kernels(sampler: Sampler, kernels: bool) -> Tensor:
    """Tokens of images of three classes, guided, filtered and in part known."""
    from visgen.decode.captured import CapturedEngine

    class Stepped(CapturedEngine):
        """Kernels of laws and windows, without a graph, over the plain backbone."""

        prepared, stepper = Engine.prepared, Engine.stepper

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._fused = None

    rules = Guidance(2.0, (0.1, 0.9), "linear"), Warp(0.9, 4, 0.95)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = transformer((1, 3, 2), 5, *rules, engine=Stepped if kernels else Engine, device=device)
    mask = torch.tensor([[0] * 6, [1, 0, 0, 0, 1, 0], [0, 0, 1, 0, 0, 0]]).bool()
    asked = World(engine, 3, known=(torch.tensor([[1, 2, 3, 4, 0, 1]]).expand(3, -1), mask))
    return asked.decode(sampler, torch.arange(3), torch.arange(3))[0]


@torch.no_grad()
def controls(draws: int, seed: int) -> dict[str, bool]:
    """Samplers that are wrong on purpose: is each one seen, by enumeration and by simulation?"""

    def config(drafting: str, init: str = "uniform", window: Any = 3) -> Any:
        return plugin_config("visgen.samplers", "sjd", drafting=drafting, init=init, window=window)

    sjd = type(configs.build(config("fresh")))
    wrong: list[tuple[str, str, Sampler, Any]] = [  # name, world, sampler, class of laws
        ("stale law", "plain", mutants.StaleLaw(config("coupled")), None),
        ("mislabelled init", "plain", mutants.MislabelledInit(config("fresh", "repeat")), None),
        ("resample from p", "plain", sjd(config("fresh")), mutants.ResampledLaw),
        ("filter on the residual", "plain", sjd(config("coupled")), mutants.FilteredResidualLaw),
        ("lock-step, stale law", "plain", mutants.LockStep(config("coupled")), None),
        ("noise of the draft", "plain", sjd(config("gumbel")), mutants.SharedNoise),
        ("known, not in the residual", "known", mutants.FreeDrafts(config("coupled")), mutants.UnpinnedLaw),
        ("neighbour's law", "mixed", mutants.NeighboursLaw(config("coupled")), None),
        ("test without the control", "control", mutants.UncontrolledTest(config("coupled")), None),
        ("interval a token late", "guided", sjd(config("coupled")), mutants.LateGuidance),
        ("refill by the old noise", "refill", sjd(config("coupled")), mutants.OldNoise),
    ]
    out, alpha = {}, ALPHA / (len(wrong) + 1)
    for i, (title, where, sampler, part) in enumerate(wrong):
        fit = _wrongly(sampler, where, part, draws, seed + ((1000 + i) << 32))
        out[f"simulated {title}"] = fit.p < alpha
        print(f"control     simulated   {title:32} {_words(fit)}", flush=True)
        if where not in ("plain", "known") or isinstance(sampler, mutants.LockStep) or part is mutants.SharedNoise:
            continue  # rows that depend on each other, or noise that is shared
        branching = BranchingLaw if part is None else type("Wrong", (part, BranchingLaw), {})
        tv, _ = _enumerated(sampler, world(where, branching))
        out[f"enumerated {title}"] = tv > 1e-3
        print(f"control     enumerated  {title:32} TV {tv:.1e}", flush=True)
    tv, _ = _enumerated(sjd(config("coupled")), world("plain", type("Wrong", (mutants.RoundedRatio, BranchingLaw), {})))
    out["enumerated ratio in bfloat16"] = tv > 10 * TOLERANCE
    print(f"control     enumerated  {'ratio in bfloat16':32} TV {tv:.1e}", flush=True)
    fit = _by_trial(mutants.TrialOfImages(config("coupled", window="auto")), draws, seed + (3000 << 32))
    out["simulated trial by the images' noise"] = fit.p < alpha
    print(f"control     simulated   {'trial by the noise of the images':32} {_words(fit)}", flush=True)
    return out


def _wrongly(sampler: Sampler, where: str, part: Any, draws: int, seed: int) -> ex.Fit:
    """The fit of a wrong sampler, or of a right one with a wrong part, to the true distribution."""
    asked = world(where, part if isinstance(part, type) and issubclass(part, Categorical) else Categorical)
    law = ex.joint(asked)
    if part is mutants.LateGuidance:
        asked.engine.guidance = mutants.LateGuidance(**vars(asked.engine.guidance))
    with mock.patch.object(refill, "Slots", part if part is mutants.OldNoise else refill.Slots):
        return ex.simulate(sampler, asked, _draws(where, draws), seed, law)


def _provable(config: Any) -> bool:
    """Whether there is a distribution to compare it with: of a student's passes there is none, of vectors that of
    `cspec`."""
    if _vectors(config):
        return kind_of(config) == "cspec"
    return not configs.implementation(config).whole  # type: ignore[attr-defined]


def _vectors(config: Any) -> bool:
    """Whether its tokens are vectors."""
    return configs.implementation(config).continuous  # type: ignore[attr-defined]


def _provided(config: Any) -> Any:
    """The config without its draft model, in whose place the engines here have their own."""
    return dataclasses.replace(config, draft=None) if hasattr(config, "draft") else config


if __name__ == "__main__":
    configs.run_program(main)
