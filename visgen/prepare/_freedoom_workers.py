"""Processes that make chunks, and what ends with them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from visgen import arrays
from visgen.config import UserError
from visgen.files import read_json
from visgen.prepare import _freedoom_chunk as chunk
from visgen.prepare._freedoom_chunk import Made, row_type
from visgen.prepare._freedoom_engine import SHARED, SHM, Job, forget_shared_memory


def chunk_path(job: Job) -> Path:
    return Path(job.folder) / f"{job.name}.npy"


def read_record(job: Job) -> Made | None:
    """Return what was made of a job; None where its chunk is absent, damaged or of another job."""
    path = chunk_path(job)
    try:
        made = Made(**read_json(path.with_suffix(".json"), "build again"))
        rows = arrays.read(path, "build again", "build again", mapped=True)
        arrays.verify(path, rows, "build again", made.crc)
    except (UserError, TypeError):
        return None
    fits = rows.dtype == row_type(job.frames, job.size) and made.asked == job.asked
    return made if fits and len(rows) == sum(made.got) else None


def run(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Made]]:
    """Run jobs, `workers` at once, and yield each with what it made as it ends. What was made before is not made again.

    Raises:
        UserError: one of them fails; the others are ended first.
    """
    waiting = []
    for job in jobs:
        made = read_record(job)
        if made is None:
            waiting.append(job)
        else:
            yield job, made
    if waiting:
        check_shared_memory(min(workers, len(waiting)))
    waiting.reverse()
    running: list[Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(Worker(waiting.pop()))
            ended = [worker for worker in running if worker.process.poll() is not None]
            for worker in ended:
                running.remove(worker)
                yield worker.job, worker.result()
            if not ended:
                time.sleep(0.02)
    finally:
        for worker in running:
            worker.process.terminate()
        for worker in running:
            worker.end()
        for folder in {Path(job.folder) for job in jobs}:
            sweep(folder)


class Worker:
    """A process that makes one chunk. It has a session of its own, so that Ctrl-C reaches only the builder, which ends
    it; it ends by itself when the builder does."""

    def __init__(self, job: Job, program: Sequence[str] = ("-m", chunk.__name__)) -> None:
        self.job, self.errors = job, tempfile.TemporaryFile()  # noqa: SIM115
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")}
        self.process = subprocess.Popen(
            [sys.executable, *program, json.dumps(dataclasses.asdict(job))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, **threads},
            start_new_session=True,
        )

    def result(self) -> Made:
        """Return what it made.

        Raises:
            UserError: it has failed.
        """
        code, made = self.process.returncode, read_record(self.job) if not self.process.returncode else None
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        self.errors.close()
        if made is not None:
            return made
        why = f"signal {signal.Signals(-code).name}" if code < 0 else lines[-1] if lines else f"exit code {code}"
        raise UserError(
            f"rendering {self.job.level} failed ({why}; /dev/shm has {shared_memory() >> 20} MiB free, "
            f"the game data are {self.job.iwad}); what is rendered is kept, run the same command again"
        )

    def end(self) -> None:
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its engine is killed with it
            self.process.wait()
        self.errors.close()


def sweep(chunks: Path) -> None:
    """Remove what engines left that could not close, of this build or of an earlier one."""
    for folder in chunks.glob("engine_*"):
        forget_shared_memory(folder)
        shutil.rmtree(folder, ignore_errors=True)


def shared_memory() -> int:
    """Return how many bytes of /dev/shm are free; 0 where there is none."""
    try:
        return shutil.disk_usage(SHM).free
    except OSError:
        return 0


def check_shared_memory(workers: int) -> None:
    """Refuse more engines than /dev/shm has room for.

    Raises:
        UserError: it is too small or too full.
    """
    free, each = shared_memory(), SHARED
    if free < workers * each:
        fewer = f"pass --workers {free // each}, " if free >= each else ""
        raise UserError(
            f"/dev/shm has {free >> 20} MiB free, {workers} engines need {workers * each >> 20}; {fewer}empty it, or "
            "enlarge it (docker run --shm-size 1g)"
        )


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as an exception does, so that no worker is left."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
