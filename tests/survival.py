"""What trainings leave whose terminal, pipe or user goes away: `python tests/survival.py [--trials 20 --seed 0]`.

Each trial starts a small training in a terminal of its own, waits until it has logged a step and a random time more,
and strikes in one of `WAYS`. A training survives if the newest checkpoint is of the last step that it has logged, and
its exit code is 0 (docs/scaling.md). The program prints N of TRIALS saved with the exit codes; its own is 1 unless all
are. `--launched` adds trials under `accelerate launch`, where the launcher's exit code is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import random
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
WAYS = ("terminal closed", "ctrl-c", "ctrl-c twice", "term", "hup", "reader gone")
FLAGS = """configs/debug/vq.yaml --loop.steps 1000000 --loop.save-every 1000000 --loop.log-every 1
    --loop.preview-every 20 --loop.workers 1 --loop.batch 8 --objective.losses.adversarial 0 --log.no-wandb"""
LAUNCH = "-m accelerate.commands.launch --config_file configs/accelerate/cpu2.yaml --num_processes 1"
# The inner shell notes process id and exit code of the training, and outlives the signals to its group. The outer one
# ends with its terminal, whereupon the kernel sends SIGHUP to the group.
SCRIPT = """( trap : INT TERM HUP
bash -c 'echo $$ >"$0"; exec "$@"' "$PLACE.pid" "$@"; echo $? >"$PLACE.code" )"""
PIPES = {"": "", "tee": ' 2>&1 | tee "$PLACE.log"', "head": " 2>&1 | head -n 3"}
PATIENCE = 120.0  # seconds for one training to begin, and to end


def trial(way: str, pipe: str, seconds: float, run: Path, words: list[str]) -> tuple[bool, int | None]:
    """Strike one training `seconds` after its first line of metrics; was its last step saved, and its exit code."""
    place = str(run)
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(ROOT)
        os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "PLACE": place}
        os.execvp("bash", ["bash", "-c", SCRIPT + PIPES[pipe], "bash", sys.executable, *words, "--loop.out", place])
    began = time.monotonic()
    while not _steps(run):
        _read(terminal)
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError(f"{run} has logged no step")
    _wait(terminal, seconds)
    pid = int(Path(f"{place}.pid").read_text())
    if way == "terminal closed":
        os.close(terminal)
    elif way.startswith("ctrl-c"):
        os.write(terminal, b"\x03")
        if way.endswith("twice"):
            _wait(terminal, 0.3)
            with contextlib.suppress(OSError):
                os.write(terminal, b"\x03")
    elif way == "reader gone":  # of which the training knows nothing; later it is asked to end
        os.kill(pid, signal.SIGTERM)
    else:
        os.killpg(shell, {"term": signal.SIGTERM, "hup": signal.SIGHUP}[way])
    struck = time.monotonic()
    code = Path(f"{place}.code")
    while not (code.exists() and code.read_text().strip()) and time.monotonic() - struck < PATIENCE:
        _read(terminal)
    while _alive(pid) and time.monotonic() - struck < PATIENCE:  # the launched one may outlive its launcher
        _read(terminal)
    for group in (signal.SIGCONT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell, group)
    with contextlib.suppress(OSError):
        os.close(terminal)
    os.waitpid(shell, 0)
    saved = sorted(path.name for path in run.glob("step_*") if (path / "meta.json").is_file())
    logged = _steps(run)
    whole = bool(saved) and int(saved[-1].removeprefix("step_")) == logged[-1]
    return whole, int(code.read_text()) if code.exists() and code.read_text().strip() else None


def _steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def _read(terminal: int) -> None:
    """Empty the terminal, as one that shows what comes."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
            return
    time.sleep(0.02)


def _wait(terminal: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        _read(terminal)


def _alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended but that nobody waits for does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--launched", action="store_true")
    settings = parser.parse_args()
    rng, survived, codes = random.Random(settings.seed), 0, Counter[int | None]()
    with tempfile.TemporaryDirectory() as folder:
        for i in range(settings.trials):
            way = settings.ways[i % len(settings.ways)]
            pipe = "head" if way == "reader gone" else rng.choice(("", "tee"))
            words = [*(LAUNCH.split() if settings.launched else []), "train.py", *FLAGS.split()]
            saved, code = trial(way, pipe, rng.uniform(0, 3), Path(folder) / f"run{i}", words)
            survived += saved and (code == 0 or settings.launched)
            codes[code] += 1
            print(f"{i + 1:3d}  {way:16s} {pipe or 'terminal':8s} saved {saved}  exit code {code}", flush=True)
    print(f"{survived} of {settings.trials} saved; exit codes {dict(codes)}; seed {settings.seed}")
    raise SystemExit(survived < settings.trials)


if __name__ == "__main__":
    main()
