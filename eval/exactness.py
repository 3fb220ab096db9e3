"""Are the samplers lossless? Enumeration, simulation, equality of rows, and controls that must fail.

python eval/exactness.py --draws 1000000 --seed 0
python eval/exactness.py --sampler.kind sjd --sampler.drafting coupled --sampler.window 4    # one setting alone
python eval/exactness.py --sampler.kind cspec                                                # vectors alone

Every check runs the shipped samplers on tiny models whose law is known: tables of random laws, plain and guided and
filtered, and a random transformer: its laws as a table, and itself behind the real engine. `cspec`, whose tokens are
vectors, runs on Gaussians and mixtures of 16 channels, by Kolmogorov-Smirnov tests. The last line is one line of JSON;
exit code 0 iff every sampler passes and every control is caught.
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import dataclasses
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen import exactness as ex
from visgen import mutants, vectors
from visgen.checks import Positive, Range, Seed
from visgen.config import UserError, kind_of, plugin, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.launch import cpus
from visgen.model import Model, ModelConfig
from visgen.nn.categorical import Categorical
from visgen.samplers import Sampler

TOLERANCE = 1e-12  # of an enumerated law, as TV
ALPHA = 1e-3  # of the whole family of G-tests (Holm), and of that of the controls
TABLES = ("plain", "filtered", "transformer")  # of laws, that are simulated
DRAFTINGS, INITS = ("fresh", "coupled", "gumbel", "pure_gumbel"), ("uniform", "left", "up", "repeat")
FILTERS = (Guidance(2.0, schedule="linear"), Warp(0.9, top_k=2, top_p=0.95))


@dataclass(frozen=True)
class ExactnessConfig:
    """Proves the samplers lossless, or finds that they are not.

    Attributes:
        sampler: of this kind alone, or, with settings, this one alone; default all. A draft model is provided.
        draws: simulated sequences of each case on a table; a tenth of them on the transformer.
        vectors: simulated sequences of each case of vectors.
        seed: of the first sequence.
        processes: that share the checks, at most; 1: this one alone.
    """

    sampler: Any = plugin("visgen.samplers", None)
    draws: Annotated[int, Range(10_000)] = 1_000_000  # fewer tell no control from the exact law
    vectors: Annotated[int, Range(2_000)] = 30_000
    seed: Seed = 0
    processes: Positive = field(default_factory=cpus)


def main() -> None:
    settings, start = configs.load(ExactnessConfig, sys.argv[1:], prog="eval/exactness.py"), time.perf_counter()
    family = configurations(settings.sampler)
    ids, continuous = [c for c in family if not _vectors(c)], [c for c in family if _vectors(c)]
    tasks: dict[str, tuple[Any, ...]] = {}  # the long ones first
    if continuous:
        told = [_provided(c) for c in continuous]
        tasks["vectors"] = vectors.prove, told, settings.vectors, settings.seed, ALPHA
    if ids:
        for i, title in enumerate(TABLES):
            tasks[title] = simulation, title, ids, settings.draws, settings.seed, i * len(ids)
        tasks |= {"controls": (controls, settings.draws, settings.seed), "equalities": (equalities, ids)}
        tasks["enumeration"] = enumeration, ids
    found = side_by_side(tasks, settings.processes)
    proof, passed = found.pop("vectors", None), True
    summary: dict[str, Any] = {}
    if ids:
        summary = summarised(settings.draws, **found)
        passed = summary.pop("pass")
    if proof is not None:
        passed = proof.pop("pass") and passed
        summary["vectors"] = proof
    summary["seconds"] = round(time.perf_counter() - start, 1)
    print(json.dumps({"pass": passed, **summary}))
    raise SystemExit(0 if passed else 1)


def side_by_side(tasks: dict[str, tuple[Any, ...]], processes: int) -> dict[str, Any]:
    """What each task, a function and its arguments, returns: none is faster on two threads, so each has a process."""
    if processes == 1:
        return {name: task(*told) for name, (task, *told) in tasks.items()}
    workers = min(len(tasks), processes)
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, get_context("forkserver"), torch.set_num_threads, (threads,)) as pool:
        running = {name: pool.submit(*task) for name, task in tasks.items()}
        return {name: future.result() for name, future in running.items()}


def summarised(
    draws: int, controls: dict[str, bool], equalities: dict[str, bool], enumeration: dict[str, float], **simulated: Any
) -> dict[str, Any]:
    """The last line of what was found of samplers of ids; pass: all of them do, and every control is caught."""
    adjusted = ex.holm([fit.p for title in TABLES for fit in simulated[title].values()])
    summary = {
        "enumerated": len(enumeration),
        "enumeration_max_tv": max(enumeration.values(), default=0.0),
        "simulated": len(adjusted),
        "draws": draws,
        "min_holm_p": min(adjusted, default=1.0),
        "equalities": f"{sum(equalities.values())}/{len(equalities)}",
        "controls_caught": f"{sum(controls.values())}/{len(controls)}",
    }
    lossless = summary["enumeration_max_tv"] < TOLERANCE and summary["min_holm_p"] >= ALPHA  # type: ignore[operator]
    return {"pass": lossless and all(equalities.values()) and all(controls.values()), **summary}


# ----------------------------------------------------------------------------------------------------- the cases


def configurations(given: Any) -> list[Any]:
    """Configs of the family: of all samplers, of one kind, or one alone."""

    def config(kind: str, **values: Any) -> Any:
        return plugin_config("visgen.samplers", kind, **values)

    if given is not None and not _provable(given):
        raise UserError(
            f"sampler.kind {kind_of(given)} has no case here: there is nothing that its law could be compared with "
            "(docs/methods.md); choose ar, sjd, speculative or cspec, or none for all"
        )
    if getattr(given, "window", None) == "auto":
        raise UserError("sampler.window auto chooses by the clock, which a proof cannot; give a number, such as 3")
    if getattr(given, "draft", None) is not None:
        raise UserError(f"sampler.draft {given.draft} is not read: the tiny models have drafts of their own")
    if getattr(given, "mode", None) == "distance":
        raise UserError("sampler.mode distance is not lossless, and does not claim to be; use exact or head_time")
    if given is not None and given != type(given)():
        return [given]
    ratio = [(d, i, 3) for d in DRAFTINGS[:2] for i in INITS]
    other = (
        [("gumbel", i, 3) for i in INITS[:3]] + [("pure_gumbel", i, 3) for i in INITS[:2]] + [("coupled", INITS[0], 99)]
    )
    family = [
        config("ar"),
        *(config("sjd", drafting=d, init=i, window=w) for d, i, w in ratio + other),
        *(config("speculative", length=n, threshold=t) for n, t in ((1, 0.7), (2, 1.0), (4, 0.5))),
        *(config("cspec", length=n) for n in (1, 3)),
        config("cspec", mode="head_time", length=8),
    ]
    return [c for c in family if given is None or kind_of(c) == kind_of(given)] or [given]


def name(config: Any) -> str:
    """A config in few words."""
    return " ".join([kind_of(config), *(str(v) for v in vars(config).values() if v is not None)])


def engines(law: Any = Categorical) -> dict[str, ex.TableEngine]:
    """Engines of a table of plain laws and of one of guided and filtered laws, each with a draft model."""

    null, given, other = (ex.table(3, 6, seed, sharpness) for seed, sharpness in ((0, 1.2), (1, 1.2), (2, 0.5)))
    scale = FILTERS[0].weights(ex.lengths(3, 6), 6).unsqueeze(-1)  # [2, nodes, 1]
    guided = scale[0] * null + scale[1] * given

    def made(grid: tuple[int, int, int], logits: Tensor, draft: Tensor) -> ex.TableEngine:
        return ex.TableEngine(logits, grid, ex.TableEngine(draft, grid, law=law), law)

    return {
        "plain": made((1, 2, 3), null, null + other),
        "filtered": made((1, 3, 2), FILTERS[1](guided), FILTERS[1](guided + other)),
    }


def transformer(grid: tuple[int, int, int], vocab: int, guidance: Guidance, warp: Warp) -> Engine:
    """The real engine of a random transformer of 3 classes, with a smaller one as its draft model."""

    def model(width: int, seed: int) -> Model:
        torch.manual_seed(seed)
        backbone = plugin_config("visgen.backbones", "ar", layers=1, heads=2, width=width, mlp_multiple_of=8)
        condition = plugin_config("visgen.conditions", "label", classes=3)
        made = Model(ModelConfig(grid=grid, vocab=vocab, backbone=backbone, condition=condition)).eval()
        for parameter in made.parameters():
            nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
        return made

    engine = Engine(model(16, 0), guidance, warp)
    engine.once(("draft", None), lambda: Engine(model(8, 1), guidance, warp))
    return engine


def classes(count: int) -> dict[str, Any]:
    """A batch of one class."""
    return {"label": torch.ones(count, dtype=torch.int64)}


# --------------------------------------------------------------------------------------------------- the checks


@torch.no_grad()
def enumeration(family: list[Any]) -> dict[str, float]:
    """TV of each enumerated law; where the noise is no continuous one that is shared, there is nothing to enumerate."""
    out, real = {}, transformer((1, 2, 2), 4, *FILTERS)
    draft: Engine = real.once(("draft", None), lambda: real)
    laws = [ex.tabulated(e, classes) for e in (draft, real)]
    drafter = ex.TableEngine(laws[0], (1, 2, 2), law=ex.BranchingLaw)
    tables = engines(ex.BranchingLaw) | {"transformer": ex.TableEngine(laws[1], (1, 2, 2), drafter, ex.BranchingLaw)}
    for title, engine in tables.items():
        for config in family:
            if kind_of(config) not in ("sjd", "speculative") or "gumbel" in getattr(config, "drafting", ""):
                continue
            tv, nfe = _enumerated(configs.build(_provided(config)), engine)
            out[f"{title} {name(config)}"] = tv
            print(f"enumerated  {title:11} {name(config):32} TV {tv:.1e}  NFE {nfe:.3f} of {engine.tokens}", flush=True)
    return out


def _enumerated(sampler: Sampler, engine: ex.TableEngine) -> tuple[float, float]:
    law, nfe = ex.enumerate_law(sampler, engine)
    return float((law - ex.joint(engine, ex.rows)).abs().sum()) / 2, nfe


@torch.no_grad()
def simulation(title: str, family: list[Any], draws: int, seed: int, first: int) -> dict[str, ex.Fit]:
    """How well each simulated law of one of the `TABLES` fits; case `first` has the first seeds."""
    engine: Engine = transformer((1, 2, 2), 4, *FILTERS) if title == "transformer" else engines()[title]
    batch, count = (classes, max(draws // 10, 1)) if title == "transformer" else (ex.rows, draws)
    fits: dict[str, ex.Fit] = {}
    for i, config in enumerate(family, first):
        fit = fits[name(config)] = ex.simulate(configs.build(_provided(config)), engine, count, seed + (i << 32), batch)
        print(f"simulated   {title:11} {name(config):32} {_words(fit)} of {engine.tokens}", flush=True)
    return fits


def _words(fit: ex.Fit) -> str:
    return f"TV {fit.tv:.4f} (floor {fit.floor:.4f})  p {fit.p:.4f}  NFE {fit.nfe:.3f}"


@torch.no_grad()
def equalities(family: list[Any]) -> dict[str, bool]:
    """Tokens that must be equal: of an image at every batch size, though rows finish apart; of greedy draws, and of
    `pure_gumbel`, and those of plain autoregression."""
    out = {}
    ar = configs.build(plugin_config("visgen.samplers", "ar"))
    for config in family:
        sampler = configs.build(_provided(config))
        engine = transformer((1, 5, 7), 16, Guidance(1.5), Warp(top_p=0.95))
        together, nfe = _decoded(sampler, engine, list(range(8)))
        parts = [torch.cat([_decoded(sampler, engine, p)[0] for p in torch.arange(8).split(n)]) for n in (1, 2)]
        in_step = type(sampler).done is Sampler.done or getattr(config, "window", 0) == 1
        ragged = in_step or len(nfe.unique()) > 2
        out[f"rows {name(config)}"] = ragged and all(torch.equal(together, p) for p in parts)
        if getattr(config, "drafting", "") == "pure_gumbel":
            out[f"ar {name(config)}"] = torch.equal(together, _decoded(ar, engine, range(8))[0])
        for warp in (Warp(temperature=0.0), Warp(top_k=1)):
            greedy = transformer((1, 5, 7), 16, Guidance(1.5), warp)
            same = torch.equal(*(_decoded(s, greedy, range(8))[0] for s in (sampler, ar)))
            out[f"greedy {warp.top_k} {name(config)}"] = same
    for title, same in out.items():
        if not same:
            print(f"not equal   {title}")
    print(f"equal       {sum(out.values())} of {len(out)}: batches of 1, 2 and 8; greedy and pure_gumbel to ar")
    return out


def _decoded(sampler: Sampler, engine: Engine, seeds: Any) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] and evaluations [B] of the images of these seeds."""
    seeds = torch.as_tensor(seeds)
    engine.begin({"label": seeds % 3})
    result = engine.run(sampler, Noise(seeds))
    return result.tokens, result.nfe_per_image


@torch.no_grad()
def controls(draws: int, seed: int) -> dict[str, bool]:
    """Samplers that are wrong on purpose: is each one seen, by enumeration and by simulation?"""

    def config(drafting: str, init: str = "uniform") -> Any:
        return plugin_config("visgen.samplers", "sjd", drafting=drafting, init=init, window=3)

    sjd = type(configs.build(config("fresh")))
    wrong: list[tuple[str, Sampler, Any]] = [
        ("stale law", mutants.StaleLaw(config("coupled")), None),
        ("mislabelled init", mutants.MislabelledInit(config("fresh", "repeat")), None),
        ("resample from p", sjd(config("fresh")), mutants.ResampledLaw),
        ("filter on the residual", sjd(config("coupled")), mutants.FilteredResidualLaw),
        ("lock-step, stale law", mutants.LockStep(config("coupled")), None),
    ]
    out = {}
    for i, (title, sampler, law) in enumerate(wrong):
        drawn = engines(law or Categorical)["plain"]
        fit = ex.simulate(sampler, drawn, draws + draws % 2, seed + ((1000 + i) << 32))
        out[f"simulated {title}"] = fit.p < ALPHA / len(wrong)
        print(f"control     simulated   {title:32} {_words(fit)}", flush=True)
        if isinstance(sampler, mutants.LockStep):  # its rows are not independent
            continue
        branching = ex.BranchingLaw if law is None else type("Wrong", (law, ex.BranchingLaw), {})
        tv, _ = _enumerated(sampler, engines(branching)["plain"])
        out[f"enumerated {title}"] = tv > 1e-3
        print(f"control     enumerated  {title:32} TV {tv:.1e}", flush=True)
    return out


def _provable(config: Any) -> bool:
    """Whether there is a law to compare it with: of a student's passes there is none, of vectors that of `cspec`."""
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
