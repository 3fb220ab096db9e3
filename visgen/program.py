"""What every program does: one line for bad input, a quiet end on Ctrl-C, and output that cannot end its work."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from visgen.checks import LONGEST, UserError, cut, printable
from visgen.interrupts import INTERRUPTED, quit_at_once

ONE = 1.0  # seconds within which signals count as one: a terminal's Ctrl-C comes again through a launcher
GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO, errno.ECONNRESET, errno.ESTALE)  # it does not come back


class Sink:
    """A text stream whose writes never fail: what cannot be written is dropped.

    A closed terminal, or a pipe that nobody reads, does not come back. Its descriptor then leads to /dev/null, so that
    what the interpreter flushes at exit cannot fail either. On a full disk the next line is tried again.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: it was closed
            self._lose(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._lose(error)

    def end(self) -> None:
        """Flush for the last time; what is left goes to /dev/null."""
        try:
            self.stream.flush()
        except (OSError, ValueError):
            self._silence()

    def _lose(self, error: Exception) -> None:
        if isinstance(error, OSError) and error.errno in GONE:
            self._silence()

    def _silence(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def lasting(name: str) -> Iterator[None]:
    """Within it `sys.stderr` or `sys.stdout`, as `name` says, is a `Sink`."""
    before = getattr(sys, name)
    if before is None or isinstance(before, Sink):
        yield
        return
    sink = Sink(before)
    setattr(sys, name, sink)
    try:
        yield
    finally:
        sink.end()
        if getattr(sys, name) is sink:
            setattr(sys, name, before)


class Escaped:
    """A text stream that escapes control characters, but for the ends of lines: tables hold names from outside."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write("\n".join(map(printable, text.split("\n"))))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    """Within it `sys.stdout` is `Escaped`, unless help is asked for, which has colours."""
    before = sys.stdout
    if before is not None and not {"--help", "-h"} & set(sys.argv):
        sys.stdout = Escaped(before)
    try:
        yield
    finally:
        sys.stdout = before


class Interrupt:
    """A handler of Ctrl-C: the first raises KeyboardInterrupt, later ones within `ONE` second are the same, and one
    after that ends the process at once."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = now
            raise KeyboardInterrupt
        if now - self.first > ONE:
            os._exit(INTERRUPTED)


def run_program(main: Callable[[], Any]) -> Any:
    """Run a program's `main`.

    A `UserError` becomes one line on stderr and exit code 2, Ctrl-C one word and 130. The reader of stdout may stop
    early, as `| head` does. stderr may go away: nothing fails because of it.
    """
    _open_standard_files()
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Lines())
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt) if _may_handle() else None
    with lasting("stderr"):
        try:
            try:
                with escaping():
                    return main()
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            if not _unread():
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is flushed at exit goes there
            raise SystemExit(128 + 13) from None
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            if interrupt.first is not None:  # a copy of the signal must not end the process in another way
                before = signal.SIG_IGN
            print("interrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        finally:
            if before is not None and signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, before)


class Lines(logging.Formatter):
    """Shows our warnings, which may hold names of files and classes, as printable lines of bounded length."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        return cut(printable(text), LONGEST) if record.name.partition(".")[0] == "visgen" else text


def _may_handle() -> bool:
    """Return whether Ctrl-C is this process's to handle: not ignored, as in the background, nor another's."""
    main = threading.current_thread() is threading.main_thread()
    return main and signal.getsignal(signal.SIGINT) in (signal.default_int_handler, quit_at_once)


def _open_standard_files() -> None:
    """Point closed standard descriptors (`2>&-`) to /dev/null, or the next file that opens gets their messages."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def _unread() -> bool:
    """Return whether stdout is a pipe that nobody reads any more, not a pipe of the program's own."""
    watched = select.poll()
    watched.register(1, 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))
