"""The training program: `python train.py CONFIG.yaml [--flags]`, also installed as `visgen-train`."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from visgen import config as configs
from visgen import files, run_files
from visgen.config import UserError, plugin
from visgen.data import Data, codes
from visgen.installed import if_shipped, program
from visgen.launch import memory, say, writable
from visgen.objectives import Objective
from visgen.program import lasting
from visgen.train.ema import EmaConfig
from visgen.train.loop import fit, make_accelerator
from visgen.train.optim import OptimConfig
from visgen.train.rehearsal import allocating, parameters, rehearse, require_memory
from visgen.train.remote import LogConfig
from visgen.train.scoring import ScoreConfig, Scoring
from visgen.train.seeds import BUILD, seed_process
from visgen.train.state import LoopConfig

# Keys that may differ between a run and its continuation: they change neither the data, the maths nor the schedule.
_NEUTRAL_LOOP = (
    "accumulation",
    "compile",
    "compiled",
    "recompute",
    "most_skipped",
    "peak_tflops",
    "workers",
    "save_every",
    "keep_last",
    "keep_best",
    "patience",
    "preview_every",
    "preview_images",
    "eval_every",
    "eval_samples",
)
_NEUTRAL_OTHERS = ("log", "score", "dry_run", "objective.preview")
NEUTRAL = (*_NEUTRAL_OTHERS, *(f"loop.{n}" for n in (*_NEUTRAL_LOOP, "log_every", "out", "resume")))


@dataclass(frozen=True)
class TrainConfig:
    """Trains what `objective` says on `data`.

    Attributes:
        dry_run: build every net without memory, read no file, print {net: parameters} as JSON and stop.
    """

    objective: Any = plugin("visgen.objectives", "next_token")
    data: Any = plugin("visgen.data", "synthetic")
    optim: OptimConfig = field(default_factory=OptimConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    log: LogConfig = field(default_factory=LogConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    dry_run: bool = False


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; a `UserError` is one line on stderr and exit code 2."""
    configs.run_program(lambda: train(list(sys.argv[1:] if argv is None else argv), last=True))


def train(argv: list[str], last: bool = False) -> None:
    """Reads the config, checks the run directory, builds data and objective, and trains.

    Args:
        last: whether the process ends after it; see `faults.Stop`.

    Raises:
        UserError: no config, nets too large for this machine; see also `config.load`, `open_run` and `loop.fit`.
    """
    config = configs.load(TrainConfig, argv, prog=program("train.py"))
    if all(word.startswith("-") for word in argv[:1]) and not any(word.startswith("--objective") for word in argv):
        example = ", as in `python train.py configs/debug/vq.yaml --loop.steps 100`; configs/ holds more"
        raise UserError(
            f"{program('train.py')} needs a config{if_shipped('configs', example) or ', a YAML file'}; --help lists "
            "every key"
        )
    rehearsed = rehearse(config.objective)  # what cannot be trained is refused before a directory is made or data read
    if config.dry_run:
        print(json.dumps(parameters(rehearsed)))
        return
    with lasting("stdout"), lasting("stderr"):
        _train(with_precision(with_run(config, argv)), rehearsed, last)


def _train(config: TrainConfig, rehearsed: Objective, last: bool) -> None:
    require_memory(rehearsed, config.objective, memory())
    config.loop.check(rehearsed)
    config.optim.check(config.loop.steps)
    loop, run = config.loop, Path(config.loop.out)
    accelerator = make_accelerator(loop)
    with open_run(config, run, lock=accelerator.is_main_process) as resume:
        accelerator.wait_for_everyone()  # all have compared their config with the run's
        seed_process(loop.seed, BUILD)
        data: Data = configs.build(config.data, "train")
        with allocating(config.objective):
            objective = configs.build(config.objective)
        if accelerator.is_main_process and (resume is None or resume.parent.resolve() != run.resolve()):
            write_config(config, run)
        fit(
            objective,
            data,
            run,
            accelerator,
            loop=loop,
            optim=config.optim,
            ema=config.ema,
            log=config.log,
            resume=resume,
            values=configs.dump(config),
            held_out=lambda: held_out(config, data),
            scoring=Scoring(config.score, config.data) if config.score.every else None,
            last=last,
        )
        accelerator.wait_for_everyone()  # or a group is taken down while another process still works in it
        accelerator.end_training()


def with_run(config: TrainConfig, argv: Sequence[str]) -> TrainConfig:
    """`config` with its run directory filled in: runs/<stem of the last YAML>, or runs/<objective>."""
    if config.loop.out:
        return config
    files = []
    for word in argv:
        if word.startswith("-"):
            break
        files.append(word)
    name = Path(files[-1]).stem if files else configs.kind_of(config.objective)
    return dataclasses.replace(config, loop=dataclasses.replace(config.loop, out=str(Path("runs") / name)))


def with_precision(config: TrainConfig) -> TrainConfig:
    """Return `config` with the precision that auto stands for: of a run that goes on the one that it began with."""
    loop = config.loop
    if loop.precision == "auto" and loop.resume != "never":
        begun = Path(loop.out if loop.resume == "auto" else loop.resume)
        begun = begun.parent if run_files.is_step(begun) else begun
        found = begun / "config.yaml"
        if found.is_file() and run_files.find_steps(begun):
            before = configs.load(TrainConfig, values=configs.read_yaml(found)).loop.precision
            loop = dataclasses.replace(loop, precision=before)
    return dataclasses.replace(config, loop=loop.resolved())


@contextlib.contextmanager
def open_run(config: TrainConfig, run: Path, lock: bool = True) -> Iterator[Path | None]:
    """Makes the run directory, keeps other trainings out of it, and gives the step to continue from (None: start anew).

    Args:
        lock: whether this process is the one of its launch that locks the directory.

    Raises:
        UserError: it cannot be written, another training is at work in it, or its checkpoints are of another config.
    """
    new = not run.exists()
    writable(run, "loop.out", "config.yaml", "metrics.jsonl")
    try:
        with locked(run) if lock else contextlib.nullcontext():
            yield find_resume(config, run)
    except UserError:
        if lock and new and {p.name for p in run.iterdir()} <= {"config.yaml", ".lock"}:
            shutil.rmtree(run)  # refused before anything came of it
        raise


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Holds `run/.lock`, of which the system lets go when this process ends, however it does.

    Unlike `flock`'s, this lock is not inherited by the data-reading processes, so a killed run can go on at once.
    """
    with open(run / ".lock", "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise UserError(
                f"another training is at work in run directory {run}; wait for its end, or choose another loop.out"
            ) from None
        except OSError as error:  # a file system without locks
            print(f"{run} cannot be locked ({error.strerror}): start no second training there", file=sys.stderr)
        yield


def find_resume(config: TrainConfig, run: Path) -> Path | None:
    """The step that `config.loop.resume` means, None to start anew.

    Raises:
        UserError: there is none, or the run's checkpoints are of another config.
    """
    mode, steps = config.loop.resume, run_files.find_steps(run)
    if mode == "auto":
        if not steps:
            return None
        compare_config(config, run)
        return steps[-1]
    if steps:
        raise UserError(
            f"run directory {run} holds checkpoints already, loop.resume is '{mode}'; choose another loop.out, "
            "remove it, or continue it with loop.resume auto"
        )
    if mode == "never":
        return None
    step = run_files.find_step(mode)
    if not (step / "state").is_dir():
        raise UserError(f"loop.resume: {step} holds weights only, no training state; pass a step of a training run")
    return step


def compare_config(config: TrainConfig, run: Path) -> None:
    """Refuses to continue `run` under another objective, or a config that differs in more than `NEUTRAL` keys."""
    path = run / "config.yaml"
    remedy = f"put it back, or start from its weights with --loop.resume {run} in another loop.out"
    if not path.is_file():
        raise UserError(
            f"run directory {run} holds checkpoints but no config.yaml to compare this config with; {remedy}"
        )
    values = configs.read_yaml(path)
    if not values:
        raise UserError(f"{path} is empty; {remedy}")
    old = configs.flat(configs.dump(configs.load(TrainConfig, values=values)))
    new = configs.flat(configs.dump(config))
    if old["objective.kind"] != new["objective.kind"]:
        raise UserError(
            f"run directory {run} holds a run of objective {old['objective.kind']}, this config trains "
            f"{new['objective.kind']}; choose another loop.out"
        )
    changed = [
        f"{key} ({old.get(key, 'absent')} there, {new.get(key, 'absent')} now)"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not any(f"{key}.".startswith(f"{n}.") for n in NEUTRAL)
    ]
    if changed:
        raise UserError(
            f"run directory {run} was made with another config: {', '.join(changed)}; undo that, choose another "
            f"loop.out, or start from its weights with --loop.resume {run} in another loop.out"
        )


def write_config(config: TrainConfig, run: Path) -> None:
    """Writes `config.yaml`, which `train.py` takes again."""
    files.write_text(run / "config.yaml", yaml.safe_dump(configs.dump(config), sort_keys=False))


def held_out(config: TrainConfig, data: Data) -> Data:
    """The held-out split; for previews alone also `data` where there is none, which is said.

    Raises:
        UserError: held-out losses are asked for and there is no such split.
    """
    try:
        return configs.build(config.data, "held_out")
    except UserError as error:
        if config.loop.eval_every:
            raise UserError(
                f"loop.eval_every needs a held-out split ({error}); or set loop.eval_every 0"
                f"{' and loop.keep_best empty' if config.loop.keep_best else ''}"
            ) from None
        print(f"previews are of training samples: {error}", file=sys.stderr)
        return data


def data_of(checkpoint: str) -> Any:
    """Return the data config of the run that a run or step directory belongs to, and say which data it is.

    Of cached codes it is the config of the data that they were made from.

    Raises:
        UserError: no such directory, or no config.yaml in it.
    """
    if not checkpoint:
        raise UserError(
            "--data.kind and its settings are needed, or a checkpoint with a config.yaml that names the data"
        )
    path = Path(checkpoint)
    found = next((p for p in (path / "config.yaml", path.parent / "config.yaml") if p.is_file()), None)
    if found is None and not path.exists():
        raise UserError(f"checkpoint {path} is not here; pass a run directory, or with a Hub id also --data.kind")
    if found is None:
        raise UserError(f"there is no config.yaml in {path} that names the data; pass --data.kind and its settings")
    data = configs.load(TrainConfig, values=configs.read_yaml(found)).data
    said = f"data: {configs.kind_of(data)}, from {found}"
    if isinstance(data, codes.Config):
        with contextlib.suppress(UserError):  # the cache is not here: what needs pixels says so
            data = codes.source_of(data)
            said += f"; its codes were made from {configs.kind_of(data)}"
    say(said)
    return data


if __name__ == "__main__":
    main()
