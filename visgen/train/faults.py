"""What a long run must survive: signals that end it, steps that are not finite, writes that fail.

Processes decide alike. Whether to stop is agreed on by a reduction between the hosts, begun in one step and read in the
next, so that neither device nor host waits for it; whether a step is finite, by one on the devices.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from visgen.config import UserError
from visgen.program import ONE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop:
    """Within it a first of `SIGNALS` asks all processes to save and end; a second one ends this one at once. SIGHUP
    stays ignored where it is, as by nohup.

    Signals are dated as they arrive, by a thread: handlers may run much later, when a call into CUDA or NCCL is over.

    Args:
        last: whether the process ends soon after. Its handlers then stay: a copy of the signal that comes while the
            process winds up must not change how it ends.
    """

    def __init__(self, accelerator: Accelerator, last: bool = False) -> None:
        self.received, self.last = "", last  # name of the signal
        self._before: dict[int, Any] = {}
        self._pending: tuple[Tensor, Any] | None = None
        world = accelerator.num_processes
        self._group: Any = dist.new_group(backend="gloo") if world > 1 else None  # between hosts

    def __enter__(self) -> Self:
        ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._listener = threading.Thread(target=_listen, args=(ear,), daemon=True)
        self._listener.start()
        self._woken = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        heard = [n for n in SIGNALS if (n, signal.getsignal(n)) != (signal.SIGHUP, signal.SIG_IGN)]
        self._before = {number: signal.signal(number, self._receive) for number in heard}
        return self

    def __exit__(self, *error: object) -> None:
        if self.last:
            atexit.register(_ignore, [*self._before])  # the interpreter itself resets handlers a moment before its end
        else:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._woken)
            self._mouth.shutdown(socket.SHUT_RDWR)  # for readers that live on as well, which have the socket too
            self._mouth.close()
            self._listener.join()
        if self._pending is not None and error[0] is None:
            self._pending[1].wait()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or signal.Signals(number).name

    def agreed(self) -> bool:
        """Shall the run end? Asked by all processes after every step; of several, the answer is that of a step ago."""
        if self._group is None:
            return bool(self.received)
        answer = False
        if self._pending is not None:
            flag, work = self._pending
            work.wait()
            answer = bool(flag)
        flag = torch.tensor([int(bool(self.received))])
        self._pending = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer


def _ignore(numbers: list[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def _listen(ear: socket.socket) -> None:
    """Ends the process at a signal that comes more than `ONE` after the first; itself when nobody can write."""
    first: float | None = None
    with ear:
        while numbers := ear.recv(64):
            now = time.monotonic()
            for number in set(numbers) & set(SIGNALS):
                first = now if first is None else first
                if now - first > ONE:
                    os._exit(128 + number)  # no clean-up: it may be what hangs


def all_true(accelerator: Accelerator, mine: bool) -> bool:
    """Whether `mine` is true on every process. Waits for all."""
    flags: Any = accelerator.gather(torch.tensor([mine], device=accelerator.device))
    return bool(flags.all())


def together(accelerator: Accelerator, what: str, work: Callable[[], None]) -> None:
    """Does `work`, which writes files, on every process; where it fails on one, all raise instead of waiting for it.

    Raises:
        UserError: `what` could not be done, and why.
    """
    reason = ""
    try:
        work()
    except Exception as error:  # a full disk, mostly
        reason = " ".join(str(error).split())[:300] or type(error).__name__
    if not all_true(accelerator, not reason):
        raise UserError(f"{what}{f' ({reason})' if reason else ', by another process'}")


class Finite:
    """Counts, on the device, optimiser steps that were skipped since their loss or gradient was not finite."""

    def __init__(self) -> None:
        self.row: dict[str, Tensor] = {}  # skipped in a row, by net
        self.worst: dict[str, Tensor] = {}  # most in a row since the last read
        self.count: dict[str, Tensor] = {}  # all since the last read

    def enter(self, net: str, fine: Tensor) -> None:
        """One step of `net`: `fine`, bool []."""
        bad = (~fine).double()
        row = (self.row[net] + bad) * bad if net in self.row else bad
        self.worst[net] = torch.maximum(self.worst[net], row) if net in self.worst else row
        self.count[net] = self.count[net] + bad if net in self.count else bad
        self.row[net] = row

    def take(self) -> dict[str, Tensor]:
        """{"NET/skipped", "NET/skipped_in_a_row": since the last time}."""
        found = {f"{net}/skipped": count for net, count in self.count.items()}
        found |= {f"{net}/skipped_in_a_row": worst for net, worst in self.worst.items()}
        self.worst, self.count = {}, {}
        return found
