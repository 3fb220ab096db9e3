"""Logs that cannot be written never end a run, and `metrics.jsonl` loses nothing but what is damaged."""

import errno
import json
import os
import signal
import sys

import pytest
import wandb
from test_faults import raise_at
from toy import metrics, train

from visgen import run_files
from visgen.config import UserError
from visgen.train import lines, remote
from visgen.train.lines import Lines
from visgen.train.log import Log
from visgen.train.remote import LogConfig, Remote


def unread(kind):
    if kind == "full":
        return open("/dev/full", "w", buffering=1)
    near, far = os.pipe() if kind == "pipe" else os.openpty()
    os.close(near)
    return os.fdopen(far, "w", buffering=1)


@pytest.mark.parametrize("kind", ["pipe", "terminal", "full"])
def test_a_signal_saves_though_nobody_reads(tmp_path, monkeypatch, kind):
    raise_at(monkeypatch, 2, signal.SIGTERM)
    with monkeypatch.context() as patch:
        stream = unread(kind)
        patch.setattr(sys, "stderr", stream)
        patch.setattr(sys, "stdout", stream)
        run = train(tmp_path / "run", "--loop.save-every", "50")
    assert [p.name for p in run_files.find_steps(run)] == ["step_0000003"]


def test_a_preview_that_fails_is_said_once(tmp_path, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("no picture")

    monkeypatch.setattr(Log, "images", fail)
    run = train(tmp_path / "run", "--loop.preview-every", "2")
    assert capsys.readouterr().err.count("the preview failed (no picture)") == 1
    assert len(metrics(run)) == 6 and len(run_files.find_steps(run)) == 3


def test_lines_that_cannot_be_written_come_later(tmp_path, monkeypatch, capsys):
    real, calls = lines._append, []

    def full(path, data):
        calls.append(data)
        if len(calls) in (2, 3):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(lines, "_append", full)
    run = train(tmp_path / "run")
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4, 5, 6]
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_half_a_line_is_taken_back(tmp_path, monkeypatch):
    path, real = tmp_path / "metrics.jsonl", os.write
    found = Lines(path)
    assert found.add({"step": 1}) == ""

    def short(number, data):
        if len(data) < 10:
            raise OSError(errno.ENOSPC, "full")
        return real(number, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        assert found.add({"step": 2}) == "full"
    assert path.read_text() == '{"step": 1}\n'
    assert found.add({"step": 3}) == ""
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


DAMAGED = [b'{"step": 2, "lo', b"\xff\xfe\x00", b"[" * 100_000, b'{"step": null}', b"", b"7", b'{"step": "x"}']


@pytest.mark.parametrize("line", DAMAGED)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_line_loses_itself_alone(tmp_path, line, place):
    path = tmp_path / "metrics.jsonl"
    given = [b'{"step": 1}', b'{"step": 2}']
    given.insert(place, line)
    path.write_bytes(b"\n".join(given))  # the last line has no end
    before = path.read_bytes()
    found = Lines(path)
    found.open(2)
    assert path.read_bytes() == before, "nothing later is there, so nothing changes"
    found.add({"step": 3})
    seen = [at for at in map(lines._step_of, path.read_bytes().splitlines()) if at is not None]
    assert seen == [1, 2, 3]


def test_later_lines_go_where_a_run_starts_earlier(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 2}\n{"step": 3}\n')
    Lines(path).open(2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_finished_run_keeps_its_damaged_line(tmp_path):
    run = train(tmp_path / "run")
    path = run / "metrics.jsonl"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*text[:2], "damaged\n", *text[3:]]))
    before = path.read_bytes()
    train(run)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_a_folder_of_a_files_name_is_refused_at_the_start(tmp_path, name):
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(UserError, match=name):
        train(tmp_path / "run")


class Service:
    """A W&B run that fails where it is asked to."""

    url = "https://example.org"

    def __init__(self, failing):
        self.failing, self.seen = failing, []

    def log(self, values, step=None):
        if self.failing == "log":
            raise RuntimeError("gone")
        self.seen.append(values)

    def finish(self):
        if self.failing == "finish":
            raise RuntimeError("gone")


@pytest.mark.parametrize("failing", ["init", "log", "finish"])
def test_nothing_of_wandb_ends_a_run(tmp_path, monkeypatch, capsys, failing):
    def start(*args):
        if failing == "init":
            raise RuntimeError("gone")
        return Service(failing), "W&B: here"

    monkeypatch.setattr(remote, "_start", start)
    run = train(tmp_path / "run", "--log.wandb", "--loop.preview-every", "0")
    assert len(metrics(run)) == 6 and capsys.readouterr().err.count("gone") == 1


def test_without_a_network_wandb_is_offline(tmp_path, monkeypatch):
    modes = []

    def init(**settings):
        modes.append(settings["mode"])
        if settings["mode"] == "online":
            raise OSError("no network")
        return Service("")

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    found = Remote(LogConfig(wandb=True), tmp_path, {})
    assert modes == ["online", "offline"] and "no network" in found.line


@pytest.mark.parametrize(
    ("setting", "environment", "wanted"),
    [
        (None, {}, False),
        (None, {"WANDB_API_KEY": "x"}, False),
        (None, {"WANDB_PROJECT": "mine"}, True),
        (None, {"WANDB_MODE": "offline"}, True),
        (True, {}, True),
        (True, {"WANDB_MODE": "disabled"}, False),
        (False, {"WANDB_PROJECT": "mine"}, False),
    ],
)
def test_when_wandb_is_asked_for(monkeypatch, setting, environment, wanted):
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert LogConfig(wandb=setting).wanted() is wanted


@pytest.mark.parametrize(("setting", "sent"), [(True, 1), (None, 0)])
def test_previews_are_sent_only_where_wandb_is_asked_for_by_name(tmp_path, monkeypatch, setting, sent):
    service = Service("")
    monkeypatch.setattr(remote, "_start", lambda *args: (service, ""))
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(wandb, "Image", lambda path: path)
    found = Remote(LogConfig(wandb=setting), tmp_path, {})
    assert found.log({"a": 1.0}) == "" and found.image("preview", tmp_path / "a.png", 1) == ""
    assert sum("preview" in values for values in service.seen) == sent
