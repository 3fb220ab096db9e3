"""Two gloo processes against one; W&B offline; compiled; CUDA without a host read per step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pair import launch_pair
from safetensors.torch import load_file
from toy import HERE, metrics, train

from visgen.config import UserError

ROOT = HERE.parents[1]
SLOW_PARTS = ("critic/moving",)  # kept by the main process alone, so it sees half the batch


def launch(*words, **environment):
    keep = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env = {**keep, "OMP_NUM_THREADS": "1", **environment}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def turns(folder, rank):
    lines = [line.split() for line in (folder / f"rank{rank}.txt").read_text().splitlines()]
    return [(int(step), name, weights, list(map(int, index.split(",")))) for step, name, weights, index in lines]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    out = tmp_path_factory.mktemp("two")
    run = ("--loop.out", str(out / "run"), "--objective.trace", str(out))
    launch_pair(HERE / "toy.py", *run)
    return out


@pytest.fixture
def one(tmp_path):
    train(tmp_path / "run", "--objective.trace", str(tmp_path))
    return tmp_path


def test_two_processes_keep_equal_weights_and_share_the_order(two, one):
    first, second, alone = turns(two, 0), turns(two, 1), turns(one, 0)
    assert len(alone) == 10 and [t[:3] for t in first] == [t[:3] for t in second]  # weights before every turn
    assert len({t[2] for t in first}) == 10
    for a, b, whole in zip(first, second, alone, strict=True):
        assert whole[:2] == a[:2] and [i for pair in zip(a[3], b[3], strict=True) for i in pair] == whole[3]


def test_two_processes_have_the_loss_curve_of_one(two, one):
    for a, b in zip(metrics(two / "run", *SLOW_PARTS), metrics(one / "run", *SLOW_PARTS), strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    a, b = (load_file(r / "run" / "step_0000006" / "model.safetensors") for r in (two, one))
    assert a.keys() == b.keys() and all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)


def test_gradients_that_are_summed_in_bf16_are_equal_and_near(two, tmp_path):
    run = ("--loop.out", str(tmp_path / "run"), "--objective.trace", str(tmp_path), "--loop.reduce", "bf16")
    launch_pair(HERE / "toy.py", *run)
    first, second, exact = turns(tmp_path, 0), turns(tmp_path, 1), turns(two, 0)
    assert [t[:3] for t in first] == [t[:3] for t in second]
    assert first[0][2] == exact[0][2] and all(a[2] != b[2] for a, b in zip(first[1:], exact[1:], strict=True))
    for a, b in zip(metrics(tmp_path / "run", *SLOW_PARTS), metrics(two / "run", *SLOW_PARTS), strict=True):
        assert a == pytest.approx(b, rel=2e-2, abs=1e-3)


def test_a_checkpoint_of_two_processes_continues_in_one(two, one, tmp_path):
    run = train(tmp_path / "on", "--loop.resume", str(two / "run" / "step_0000004"))
    expected = metrics(one / "run", *SLOW_PARTS)[4:]
    assert [m["step"] for m in metrics(run)] == [5, 6]
    for a, b in zip(metrics(run, *SLOW_PARTS), expected, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_two_processes_then_one_then_two_see_the_data_in_one_order(two, one, tmp_path):
    middle, last = tmp_path / "middle", tmp_path / "last"
    for folder in (middle, last):
        folder.mkdir()
    trace = ("--objective.trace", str(middle), "--loop.steps", "4")
    train(middle / "run", *trace, "--loop.resume", str(two / "run" / "step_0000002"))
    run = ("--loop.out", str(last / "run"), "--objective.trace", str(last))
    run = (*run, "--loop.resume", str(middle / "run" / "step_0000004"))
    launch_pair(HERE / "toy.py", *run)
    order = [(t[0], t[1], t[3]) for t in turns(one, 0)]
    seen = [t for t in dealt(turns(two, 0), turns(two, 1)) if t[0] < 2]
    seen += [(t[0], t[1], t[3]) for t in turns(middle, 0)]
    seen += dealt(turns(last, 0), turns(last, 1))
    assert seen == order
    a, b = (load_file(r / "run" / "step_0000006" / "model.safetensors") for r in (last, one))
    assert all(torch.allclose(a[n], b[n], atol=1e-5) for n in a)


def dealt(first, second):
    """The turns of two processes, and the samples of both in the order of the step."""
    pairs = zip(first, second, strict=True)
    return [(a[0], a[1], [i for both in zip(a[3], b[3], strict=True) for i in both]) for a, b in pairs]


STANDING = """
import sys
from toy import plugins, train
from visgen.train import loop
def stand(*given):
    print("training", flush=True)
    sys.stdin.readline()
loop.train_step = stand
with plugins():
    train(sys.argv[1], "--loop.workers", "1")
"""


def test_one_training_at_a_time_in_a_run_directory(tmp_path):
    run = tmp_path / "run"
    path = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", STANDING, str(run)], env=env, **pipes) as first:
        assert first.stdout.readline() == "training\n"
        with pytest.raises(UserError) as found:
            train(run)
        assert f"another training is at work in run directory {run}; " in str(found.value)
        assert not list(run.glob("step_*"))
        first.kill()  # its data-reading process lives on for a while
        first.wait()
        assert [m["step"] for m in metrics(train(run))] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_wandb_offline_without_a_key(tmp_path):
    flags = ("--loop.out", str(tmp_path / "run"), "--log.wandb", "--objective.noise", "0.1")
    done = launch(str(HERE / "toy.py"), *flags, NETRC=str(tmp_path / "none"), HOME=str(tmp_path))
    assert done.stderr.count("W&B: offline (no API key)") == 1
    found = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(found) == 1
    written = found[0].read_bytes()
    for key in (b"model/loss", b"critic/loss", b"images_per_s", b"preview", b"gan_start"):
        assert key in written
    assert list(found[0].parent.glob("files/media/images/preview_6_*.png"))
    assert {p.name for p in Path(tmp_path).iterdir()} <= {"run", ".cache", ".config", ".netrc", ".local"}


def test_wandb_missing_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = train(tmp_path / "run", "--log.wandb")
    assert "pip install wandb" in capsys.readouterr().err and len(metrics(run)) == 6


@pytest.mark.parametrize(
    ("environment", "text", "expected"),
    [
        ({"WANDB_API_KEY": "x"}, "", True),
        ({}, "machine api.wandb.ai login user password x", True),
        ({"WANDB_BASE_URL": "https://w.example.org"}, "machine api.wandb.ai login user password x", False),
        ({}, "", False),
    ],
)
def test_where_a_key_is_looked_for(tmp_path, monkeypatch, environment, text, expected):
    from visgen.train.remote import has_wandb_key

    (tmp_path / "netrc").write_text(text)
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **environment}.items():
        monkeypatch.setenv(name, value)
    assert has_wandb_key() is expected


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_compiled_equals_eager(tmp_path, precision):
    flags = ("--loop.precision", precision, "--loop.steps", "4")
    eager, compiled = train(tmp_path / "a", *flags), train(tmp_path / "b", *flags, "--loop.compile")
    for a, b in zip(metrics(eager), metrics(compiled), strict=True):
        assert a == pytest.approx(b, rel=1e-5 if precision == "fp32" else 2e-2, abs=1e-6)
    assert load_file(eager / "step_0000004/state/model.safetensors").keys() == (
        load_file(compiled / "step_0000004/state/model.safetensors").keys()
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_no_host_read_in_a_step(tmp_path, monkeypatch, precision):
    from visgen.train import loop as loops

    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    real = loops.train_step

    def strict(state, batches, step):
        if step < 3:  # both turns have made their optimiser's state by then
            return real(state, batches, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            real(state, batches, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(loops, "train_step", strict)
    run = train(tmp_path / "run", "--loop.precision", precision, "--objective.dropout", "0.1")
    assert len(metrics(run)) == 6
