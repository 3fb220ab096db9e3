"""What programs share: what they run on, that their directory can be written, how far they are."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mimetypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from visgen.checks import printable
from visgen.config import UserError

WATCH = 2.0  # seconds between two looks of a data-reading process at its parent
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
EVERY = 30.0  # seconds between the lines that stand for a bar where there is no terminal


def on_cpu(told: bool = False) -> bool:
    """Whether accelerate runs on the CPU: told to, under `accelerate launch --cpu`, or for want of a GPU.

    It must be told in so many words, or it takes the processes of a CPU launch for separate runs.
    """
    from accelerate.utils import parse_flag_from_env  # slow to import, and `sample.py` only needs `writable`

    return told or not torch.cuda.is_available() or bool(parse_flag_from_env("ACCELERATE_USE_CPU"))


def device_of(name: str, flag: str) -> torch.device:
    """The torch device that `name` means; "auto" takes a GPU when there is one.

    Args:
        flag: what the user calls it, such as `engine.device`.

    Raises:
        UserError: no such device, or none here.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise UserError(f"{flag} '{name}' is no torch device: {str(error).splitlines()[0]}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"{flag} '{name}': this machine shows no CUDA GPU; use --{flag} cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch says it in each of these ways
        why = str(error).splitlines()[0]
        raise UserError(f"{flag} '{name}' cannot be used here ({why}); use --{flag} auto or cpu") from None
    return device


def out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that a GPU, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def has_bf16(device: torch.device) -> bool:
    """Return whether a GPU, or this machine's CPU, computes in bfloat16 itself; a CPU that emulates it is slow."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:  # no Linux
        return False
    return any(word in words for word in ("avx512_bf16", "amx_bf16", "bf16"))  # the last is ARM's


def cpus() -> int:
    """How many CPUs this process may use; more data-reading processes than these only slow it down."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reader(worker: int) -> None:
    """Prepare a data-reading process (`worker_init_fn` of a DataLoader).

    Signals to the group of its parent, as a terminal sends them, do not reach it: a training needs its readers to the
    end of the step. It ends when its parent has ended, also after kill -9 and while it writes into a full pipe.
    """
    os.setpgrp()
    signal.set_wakeup_fd(-1)
    before, parent = os.getppid(), multiprocessing.parent_process()
    _die_with_parent()

    def watch() -> None:
        while os.getppid() == before and (parent is None or parent.is_alive()):
            time.sleep(WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _die_with_parent() -> None:
    """Ask Linux for SIGKILL at the end of the parent; `reader` watches as well, for other systems."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def memory() -> int:
    """Bytes of memory of what training runs on: the GPU, or the whole machine."""
    return memory_of(torch.device("cpu" if on_cpu() else "cuda:0"))


def memory_of(device: torch.device) -> int:
    """Bytes of memory of a GPU; of any other device, those of the whole machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def writable(directory: Path, flag: str, *files: str) -> Path:
    """Makes the directory that `flag` names and tries, before any work, that it can be written.

    Args:
        files: what will be written there at the end; a folder of such a name is in its way.

    Raises:
        UserError: it cannot, or it is called like a picture or a clip.
    """
    kind = mimetypes.guess_type(directory.name.lower(), strict=False)[0] or ""
    if kind.startswith(("image/", "video/")) and not directory.is_dir():
        raise UserError(f"{flag} {directory} is a file's name; give the directory in which the files are to lie")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):  # without a name, so that the processes of a launch do not meet
            pass
    except OSError as error:
        raise UserError(f"{flag} {directory} cannot be written: {error.strerror}; choose another directory") from None
    for path in (directory / name for name in files):
        if path.is_dir():
            raise UserError(f"{flag}: {path} is a folder, where a file of that name is to be written; move it away")
    return directory


_claimed: dict[Path, int] = {}  # directories that this process holds, by the number of the open file


def claim(directory: Path) -> None:
    """Keep other processes of ours that claim the directory out of it until this one ends, however it ends.

    The lock lies on a hidden file, for `files.locked` locks the directory itself. Of a launch the main process claims
    for all. A file system without locks lets all in.

    Raises:
        UserError: another process holds it.
    """
    directory = directory.resolve()
    if directory in _claimed or os.environ.get("RANK", "0") != "0":
        return
    number = os.open(directory / ".evaluation.lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(number)
        raise UserError(
            f"another evaluation is at work in {directory}; wait for its end, or choose another --out"
        ) from None
    except OSError:
        os.close(number)
        return
    _claimed[directory] = number


@functools.cache
def say(line: str) -> None:
    """Print a line on stderr: once, however often it is said, and by the main process of a launch alone."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError, ValueError):  # nobody reads stderr any more, or it is closed
            print(line, file=sys.stderr)


def console() -> Console:
    """Return what writes to stderr: texts are taken as they are, since brackets in a name are no markup."""
    return Console(stderr=True, markup=False, emoji=False, highlight=False)


class Progress:
    """A progress bar with time left on stderr, in a job's log a line from time to time:
    `with Progress("sampling") as step: step(done, total)`."""

    def __init__(self, what: str, shown: bool = True) -> None:
        self.told = 0.0  # seconds from the start to the last line
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=console(), disable=not shown)
        self.task = self.bar.add_task(printable(what), total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self.bar.start()
        return self._step

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is not None and self.bar.tasks[self.task].total is None:
            self.bar.live.transient = True  # what is refused before its first step leaves no bar and no empty line
            self.bar.live.stop()
        else:
            self.bar.stop()

    def _step(self, done: int, total: int) -> None:
        self.bar.update(self.task, completed=done, total=total)
        task = self.bar.tasks[self.task]
        passed = task.elapsed or 0.0
        if self.bar.disable or self.bar.console.is_terminal or not 0 < done < total or passed - self.told < EVERY:
            return
        self.told = passed
        left = timedelta(seconds=round(passed / done * (total - done)))
        self.bar.console.print(f"{task.description} {done}/{total} {timedelta(seconds=round(passed))}, {left} left")
