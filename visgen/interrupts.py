"""Ctrl-C while a program of this project is imported: one word and exit code 130. Imports nothing that takes time."""

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def guard_imports() -> None:
    """In a program of this project, let Ctrl-C end the process at once until `program.run_program` takes over."""
    if is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, quit_at_once)
        except ValueError:  # of the main thread alone
            return


def is_program() -> bool:
    """Return whether the process is `train.py`, `sample.py`, one of `eval/`, a `visgen-` command or `-m visgen...`."""
    if sys.argv[:1] == ["-m"]:
        return any(word.partition(".")[0] == "visgen" for word in sys.orig_argv)
    folder, name = os.path.split(os.path.realpath(getattr(sys.modules["__main__"], "__file__", None) or ""))
    shipped = folder == ROOT and name in ("train.py", "sample.py")
    return shipped or folder == os.path.join(ROOT, "eval") or name.startswith("visgen-")


def quit_at_once(number: int, frame: object) -> None:
    """End without unwinding: an exception inside the import of a C library can abort."""
    try:
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)


guard_imports()
