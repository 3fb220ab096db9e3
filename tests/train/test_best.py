"""The best step by a held-out value: kept, found again, restored exactly, and the end of a run that gets no better.

The toy objective's `error` falls with every step; its `calls` grow, so that step 1 stays the best.
"""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from pair import launch_pair
from test_loop import NOISY, Killed, kill_at, same, state_of
from toy import HERE, metrics, train

from visgen import run_files
from visgen.config import UserError
from visgen.train.held_out import Best

WORSE = (*NOISY, "--loop.eval-every", "1", "--loop.keep-best", "calls")


def steps(run):
    return [int(p.name.removeprefix("step_")) for p in run_files.find_steps(run)]


def known(run, step):
    return json.loads((run / run_files.step_name(step) / run_files.META).read_text()).get("best")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run that watches nothing."""
    from toy import plugins

    with plugins():
        return train(tmp_path_factory.mktemp("whole") / "run", *NOISY)


def test_the_best_step_outlives_the_newest_ones(tmp_path, whole):
    run = train(tmp_path / "run", *WORSE, "--loop.keep-last", "1")
    assert steps(run) == [1, 6] and run_files.find_step(run, "best").name == "step_0000001"
    assert known(run, 6) == {"metric": "calls", "step": 1, "value": 1.0, "since": 5}
    assert same(state_of(run / "step_0000006"), state_of(whole / "step_0000006")), "training does not notice"


def test_a_better_step_takes_the_place(tmp_path, monkeypatch):
    flags = ("--loop.keep-last", "1", "--loop.save-every", "6", "--loop.eval-every", "2", "--loop.keep-best", "error")
    run = train(tmp_path / "falling", *NOISY, *flags)
    assert steps(run) == [6] and known(run, 6)["since"] == 0
    from visgen.objectives.toy import Toy

    monkeypatch.setattr(Toy, "larger_is_better", ("error",))
    run = train(tmp_path / "rising", *NOISY, *flags)
    assert steps(run) == [2, 6] and known(run, 6)["step"] == 2


def test_patience_ends_the_run_and_more_of_it_goes_on(tmp_path, whole, capsys):
    run = train(tmp_path / "run", *WORSE, "--loop.patience", "2", "--loop.keep-last", "1")
    assert steps(run) == [1, 3] and max(line["step"] for line in metrics(run)) == 3
    assert "no better held_out/calls in 2 evaluations: best 1, at step 1" in capsys.readouterr().err
    before = metrics(run)
    train(run, *WORSE, "--loop.patience", "2", "--loop.keep-last", "1")
    assert metrics(run) == before and "raise loop.patience to go on" in capsys.readouterr().err
    train(run, *WORSE, "--loop.patience", "9", "--loop.keep-last", "1")
    assert steps(run) == [1, 6] and same(state_of(run / "step_0000006"), state_of(whole / "step_0000006"))


def test_a_killed_run_remembers(tmp_path, monkeypatch):
    flags = (*WORSE, "--loop.patience", "4")
    with monkeypatch.context() as patch:
        kill_at(patch, 3)
        with pytest.raises(Killed):
            train(tmp_path / "run", *flags)
    assert steps(tmp_path / "run") == [1, 2] and known(tmp_path / "run", 2)["since"] == 1
    run, straight = train(tmp_path / "run", *flags), train(tmp_path / "straight", *flags)
    assert steps(run) == steps(straight) == [1, 2, 4, 5] and metrics(run) == metrics(straight)
    assert known(run, 5) == known(straight, 5) == {"metric": "calls", "step": 1, "value": 1.0, "since": 4}


def test_another_run_or_another_metric_begins_anew(tmp_path):
    first = train(tmp_path / "first", *WORSE, "--loop.steps", "4")
    away = train(tmp_path / "away", *WORSE, "--loop.resume", str(first))
    assert known(away, 6)["step"] == 5, "the best of the other run lies there"
    train(first, *WORSE, "--loop.steps", "4")
    assert known(first, 4)["step"] == 1
    best = Best("error")
    best.restore(first / "step_0000004", first)
    assert best == Best("error") and run_files.read_best(train(tmp_path / "plain", *NOISY) / "step_0000002") is None


def test_what_is_better():
    one, alone = SimpleNamespace(larger_is_better=("psnr",)), SimpleNamespace(device=torch.device("cpu"))

    def told(metric, *values):
        best = Best(metric)
        found = [best.update({f"held_out/{metric}": v}, i, one, alone) for i, v in enumerate(values, 1)]
        return found, best.step, best.since

    nan, inf = float("nan"), float("inf")
    assert told("loss", 2.0, 2.0, 1.0, nan, 3.0) == ([True, False, True, False, False], 3, 2)
    assert told("psnr", 2.0, 1.0, 3.0) == ([True, False, True], 3, 0)
    assert told("loss", nan, inf, -inf, 5.0) == ([False, False, False, True], 4, 0)
    assert (
        Best("loss").to_dict() == {}
        and dataclasses.asdict(Best("loss", 3, 1.0)) == Best("loss", 3, 1.0).to_dict()["best"]
    )


def test_two_processes_decide_as_one(tmp_path):
    from test_processes import turns

    flags = ("--loop.out", str(tmp_path / "run"), "--objective.trace", str(tmp_path), "--loop.patience", "2")
    launch_pair(HERE / "toy.py", *flags, *WORSE)
    assert steps(tmp_path / "run") == [1, 2, 3] and known(tmp_path / "run", 3)["since"] == 2
    assert [turns(tmp_path, rank)[-1][0] for rank in (0, 1)] == [2, 2], "the last step of both, counted from 0"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--loop.keep-best", "error"), "loop.keep_best 'error' is a held-out value: set loop.eval_every"),
        (("--loop.patience", "3"), "loop.patience 3 waits for a held-out value: set loop.keep_best"),
        ((*WORSE, "--loop.patience", "-1"), "loop.patience is -1; it must be at least 0"),
        ((*WORSE[:-1], "loss"), "loop.keep_best 'loss' is no held-out value; allowed: error, calls"),
    ],
)
def test_errors_before_long_work(tmp_path, flags, words):
    with pytest.raises(UserError) as found:
        train(tmp_path / "run", *flags)
    assert words in str(found.value) and "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()
