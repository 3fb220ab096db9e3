"""Dead terminals and Ctrl-C: what every program does about them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from visgen import interrupts, program
from visgen.config import UserError

ROOT = Path(__file__).parents[1]


def dead(kind):
    """A text stream that cannot be written."""
    if kind == "full":
        return open("/dev/full", "w", buffering=1)
    near, far = os.pipe() if kind == "pipe" else os.openpty()
    os.close(near)
    return os.fdopen(far, "w", buffering=1)


@pytest.mark.parametrize("kind", ["pipe", "terminal", "full"])
def test_a_sink_never_raises(kind):
    stream = dead(kind)
    with pytest.raises(OSError):
        print("lost", file=stream)
    sink = program.Sink(dead(kind))
    for _ in range(1000):
        print("lost", file=sink, flush=True)
    sink.end()
    sink.stream.close()  # what was left is gone as well


def test_a_sink_goes_on_after_a_full_disk(tmp_path):
    class Full:
        full = True

        def __init__(self):
            self.seen = []

        def write(self, text):
            if self.full:
                raise OSError(28, "No space left on device")
            self.seen.append(text)

    stream = Full()
    sink = program.Sink(stream)
    sink.write("a")
    stream.full = False
    sink.write("b")
    assert stream.seen == ["b"]


@pytest.mark.parametrize("kind", ["pipe", "terminal", "full"])
def test_a_refusal_ends_with_2_whatever_stderr_is(kind, monkeypatch):
    monkeypatch.setattr(sys, "stderr", dead(kind))
    with pytest.raises(SystemExit) as end:
        program.run_program(lambda: (_ for _ in ()).throw(UserError("no")))
    assert end.value.code == 2


def run(*words, pauses=()):
    """Exit code and stderr of `python WORDS`, sent SIGINT once it prints, and again after each of `pauses` seconds."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    process.stdout.readline()
    for pause in (0.0, *pauses):
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    return process.returncode, said


def test_ctrl_c_while_a_program_is_imported(tmp_path):
    (tmp_path / "visgen-slow").write_text("import time, visgen\nprint('here', flush=True)\ntime.sleep(50)")
    assert run(str(tmp_path / "visgen-slow")) == (130, "interrupted\n")


def test_ctrl_c_of_a_users_own_script_is_his(tmp_path):
    script = """
import time
import visgen
try:
    print("here", flush=True)
    time.sleep(50)
except KeyboardInterrupt:
    raise SystemExit(7)
"""
    assert run("-c", script) == (7, "")


@pytest.mark.parametrize(
    ("main", "argv", "ours"),
    [
        ("train.py", ["train.py"], True),
        ("eval/fid.py", ["eval/fid.py"], True),
        ("mine.py", ["mine.py"], False),
        ("", ["-m", "visgen.encode"], True),
        ("", ["-m", "pytest"], False),
    ],
)
def test_what_is_a_program(monkeypatch, main, argv, ours):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(ROOT / main), raising=False)
    monkeypatch.setattr(sys, "argv", argv[:1])
    monkeypatch.setattr(sys, "orig_argv", ["python", *argv])
    assert interrupts.is_program() is ours


def test_a_second_ctrl_c_within_a_second_is_the_first():
    """Also while the first one is cleaned up after."""
    script = """
import time
from visgen.program import run_program
def main():
    print("here", flush=True)
    try:
        time.sleep(50)
    finally:
        time.sleep(0.4)
run_program(main)
"""
    assert run("-c", script, pauses=[0.2]) == (130, "interrupted\n")


def test_a_second_ctrl_c_after_a_second_ends_a_clean_up_that_hangs():
    script = """
import time
from visgen import interrupts, program
program.ONE = 0.1
def main():
    print("here", flush=True)
    try:
        time.sleep(50)
    finally:
        time.sleep(50)
program.run_program(main)
"""
    assert run("-c", script, pauses=[0.5])[0] == 130


def test_ctrl_c_stays_ignored_where_it_is():
    """As in a script's background job."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert program.run_program(lambda: signal.getsignal(signal.SIGINT)) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_handler_of_before_is_back():
    before = signal.getsignal(signal.SIGINT)
    assert program.run_program(lambda: signal.getsignal(signal.SIGINT)) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_closed_descriptors_are_not_taken_by_files(tmp_path):
    script = """
from visgen.program import run_program
def main():
    with open("data", "w") as file:
        assert file.fileno() > 2
        import sys; print("lost", file=sys.stderr)
run_program(main)
"""
    words = ["bash", "-c", '"$0" -c "$1" >&- 2>&-', sys.executable, script]
    assert subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
    assert (tmp_path / "data").read_text() == ""
