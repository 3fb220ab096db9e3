"""Signals, dead processes and kills: what a run leaves behind, and that it goes on from there."""

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import survival
import torch
from pair import end_pair, start_pair
from safetensors.torch import load_file
from toy import HERE, metrics, train

from visgen import run_files
from visgen.config import UserError
from visgen.train import faults
from visgen.train import loop as loops
from visgen.train.order import say_killed

ROOT = HERE.parents[1]
NOISY = ("--objective.dropout", "0.3", "--objective.noise", "0.1")
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml")
ALONE = SimpleNamespace(num_processes=1)


def start(*words, **environment):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen([sys.executable, *words], env=env, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(condition, alive, said, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert alive(), said()[-3000:]
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.005)


def lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def raise_at(monkeypatch, step, *numbers):
    real = loops.train_step

    def struck(state, batches, at):
        real(state, batches, at)
        for number in numbers if at == step else ():
            os.kill(os.getpid(), number)

    monkeypatch.setattr(loops, "train_step", struck)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGINT, signal.SIGTERM]])
@pytest.mark.parametrize("log_every", ["1", "50"])
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, monkeypatch, capsys, numbers, log_every):
    """The second of two signals that come together is the launcher's copy of the first."""
    flags = (*NOISY, "--loop.save-every", "50", "--loop.log-every", log_every)
    with monkeypatch.context() as patch:
        raise_at(patch, 2, *numbers)
        before = signal.getsignal(signal.SIGTERM)
        run = train(tmp_path / "run", *flags)
        assert signal.getsignal(signal.SIGTERM) is before
    assert [p.name for p in run_files.find_steps(run)] == ["step_0000003"]
    said = capsys.readouterr().err
    assert f"{numbers[0].name}: step 3 is saved; the same command goes on from there" in said
    train(run, *flags)
    whole = train(tmp_path / "whole", *flags)
    assert [line["step"] for line in metrics(run)] == ([1, 2, 3, 4, 5, 6] if log_every == "1" else [3, 6])
    a, b = (load_file(r / "step_0000006" / "state" / "model.safetensors") for r in (run, whole))
    assert all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize(("after", "code"), [(0.05, 0), (0.6, 128 + signal.SIGTERM)])
def test_signals_are_dated_as_they_arrive(monkeypatch, after, code):
    """A call into a library keeps handlers waiting: a signal's copy is no second one then, and a second one counts."""
    monkeypatch.setattr(faults, "ONE", 0.3)
    start = time.monotonic()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)
    second = int(50_000 / (time.monotonic() - start))
    child = os.fork()
    if child == 0:
        with faults.Stop(ALONE) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(after, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * second)
            os._exit(not stop.agreed())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code


def test_the_handlers_of_before_are_back():
    woken, before = signal.set_wakeup_fd(-1), signal.getsignal(signal.SIGINT)
    with faults.Stop(ALONE):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.set_wakeup_fd(woken) == -1 and signal.getsignal(signal.SIGINT) is before


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with faults.Stop(ALONE):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_reader_is_told_in_one_line():
    with pytest.raises(UserError, match=r"DataLoader worker \(pid 5\) is killed by signal: Killed; .*loop.workers"):
        say_killed(RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed. "))
    say_killed(RuntimeError("another one"))


def test_a_reader_that_lives_on_does_not_keep_the_run():
    with faults.Stop(ALONE):
        reader = os.fork()  # with a copy of all that is open
        if reader == 0:
            time.sleep(20)
            os._exit(0)
    alive = os.waitpid(reader, os.WNOHANG) == (0, 0)
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
    assert alive


def test_a_second_signal_ends_at_once(monkeypatch):
    monkeypatch.setattr(faults, "ONE", 0.0)
    child = os.fork()
    if child == 0:
        with faults.Stop(ALONE) as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            if stop.received == "SIGTERM" and stop.agreed():
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(20)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 128 + signal.SIGINT


@pytest.mark.slow
def test_readers_do_not_get_the_signals_of_the_group(tmp_path):
    """As Ctrl-C does, which a terminal sends to all processes of its foreground group."""
    flags = (*NOISY, "--loop.workers", "1", "--loop.steps", "1000", "--loop.save-every", "1000")
    place = ("--loop.out", str(tmp_path / "run"), "--objective.trace", str(tmp_path))
    script = f"import os, runpy, sys; os.setpgrp(); sys.argv = ['toy', *{[*flags, *place]!r}]; " + (
        f"runpy.run_path({str(HERE / 'toy.py')!r}, run_name='__main__')"
    )
    with start("-c", script, TOY_PAUSE="0.01", PYTHONPATH=str(HERE)) as process:
        wait_for(lambda: lines(tmp_path / "rank0.txt") > 3, lambda: process.poll() is None, process.stderr.read)
        os.killpg(process.pid, signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 0, said[-2000:]
    assert "SIGINT: step " in said and len(run_files.find_steps(tmp_path / "run")) == 1


def test_a_signal_to_one_of_two_processes_stops_both_at_one_step(tmp_path):
    flags = (*NOISY, "--loop.steps", "100000", "--loop.save-every", "100000", "--loop.out", str(tmp_path / "run"))
    said = tmp_path / "said.txt"
    pair = start_pair(HERE / "toy.py", *flags, "--objective.trace", str(tmp_path), said=said)
    wait_for(lambda: lines(tmp_path / "rank1.txt") > 5, lambda: all(p.is_alive() for p in pair), said.read_text)
    os.kill(int((tmp_path / "rank1.pid").read_text()), signal.SIGTERM)
    end_pair(pair)
    saved = run_files.find_steps(tmp_path / "run")
    assert (
        len(saved) == 1 and f"a signal to another process: step {int(saved[0].name[5:])} is saved" in said.read_text()
    )
    assert lines(tmp_path / "rank0.txt") == lines(tmp_path / "rank1.txt")


def test_a_dead_process_ends_the_job_with_its_log(tmp_path):
    flags = (*NOISY, "--loop.steps", "100000", "--loop.save-every", "4", "--loop.out", str(tmp_path / "run"))
    words = (*ACCELERATE, "--main_process_port", "0", str(HERE / "toy.py"), *flags, "--objective.trace", str(tmp_path))
    with start(*words, TOY_PAUSE="0.01") as process:
        wait_for(lambda: lines(tmp_path / "rank1.txt") > 9, lambda: process.poll() is None, process.stderr.read)
        dead = int((tmp_path / "rank1.pid").read_text())
        os.kill(dead, signal.SIGKILL)
        try:
            said = process.communicate(timeout=100)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode != 0 and f"pid: {dead}" in said.replace("  ", " ") and "Signal 9 (SIGKILL)" in said
    assert run_files.find_steps(tmp_path / "run")


@pytest.mark.slow
def test_twenty_kills_change_nothing(tmp_path):
    """kill -9 at random moments: every published step can be read, and the end is that of an uninterrupted run."""
    steps, rng = 120, random.Random(0)
    flags = (*NOISY, "--loop.steps", str(steps), "--loop.save-every", "2", "--loop.keep-last", "2")
    whole = train(tmp_path / "whole", *flags)
    run, trace, kills = tmp_path / "run", tmp_path / "rank0.txt", 0
    while True:
        words = (str(HERE / "toy.py"), *flags, "--loop.out", str(run), "--objective.trace", str(tmp_path))
        trace.unlink(missing_ok=True)
        turns = rng.randint(2, 9)
        with start(*words, TOY_PAUSE="0.01") as process:
            if kills < 20:
                wait_for(lambda: lines(trace) >= turns, lambda: process.poll() is None, process.stderr.read)  # noqa: B023
                time.sleep(rng.uniform(0, 0.05))
                process.kill()
                kills += 1
            said = process.stderr.read()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said[-2000:]
        assert "damaged" not in said
        for step in run_files.find_steps(run):
            load_file(step / "model.safetensors")
            for path in (step / "state").iterdir():
                load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert kills == 20 and [m["step"] for m in metrics(run)] == list(range(1, steps + 1))
    for name in ("model.safetensors", "state/model.safetensors", "state/model_1.safetensors"):
        a, b = (load_file(r / run_files.step_name(steps) / name) for r in (run, whole))
        assert all(torch.equal(a[n], b[n]) for n in a)
    assert metrics(run)[-1] == metrics(whole)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("way", survival.WAYS)
@pytest.mark.parametrize("pipe", ["", "tee"])
def test_a_training_survives(tmp_path, way, pipe):
    words = ["train.py", *survival.FLAGS.split()]
    found = survival.trial(way, "head" if way == "reader gone" else pipe, 0.5, tmp_path / "run", words)
    assert found == (True, 0)
