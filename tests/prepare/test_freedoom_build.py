"""The builder: its plan, what it refuses, and, where vizdoom is installed, that a set depends on its settings alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from visgen.config import UserError
from visgen.data import freedoom as sets
from visgen.prepare import _freedoom_build, _freedoom_chunk, _freedoom_engine, _freedoom_workers, freedoom
from visgen.prepare._freedoom_build import chunks, remaining, spread
from visgen.prepare._freedoom_engine import Draws, Job
from visgen.prepare._freedoom_wads import game_data

ROOT = Path(__file__).parents[2]

# --------------------------------------------------------------------------------------------------------- plan


def test_chunks_sum_to_what_is_wanted_and_are_of_one_size() -> None:
    wanted = [7, 0, 12, 3, 5]
    asked = np.array(chunks(wanted, 4))
    assert asked.shape == (4, 5) and asked.sum(0).tolist() == wanted
    assert np.ptp(asked.sum(1)) <= 1 and np.ptp(asked, 0).max() <= 1
    assert spread(7, 3) == [3, 2, 2] and spread(7, 3, first=2) == [2, 2, 3]


def test_a_round_asks_for_what_is_missing_and_gives_up_what_is_not_there() -> None:
    assert remaining([5, 5, 5], [5, 5, 5], [5, 3, 4]) == [0, 2, 1]
    assert remaining([6, 4, 4], [6, 4, 4], [0, 4, 3]) == [0, 3, 4], "the others share the subject that is not there"
    assert remaining([0, 2, 0], [0, 2, 0], [0, 0, 0]) == [1, 0, 1], "those that are complete too"
    assert remaining([3, 3], [3, 3], [0, 0]) is None


def test_random_numbers_are_the_same_in_every_python() -> None:
    draws = Draws("0 train 7 views MAP01")
    assert [draws.whole(0, 1000) for _ in range(4)] == [529, 30, 423, 768]
    drawn = [draws.weighted([0, 3, 0, 1]) for _ in range(400)]
    assert set(drawn) == {1, 3} and 250 < drawn.count(1) < 350
    assert all(-2 <= draws.between(-2, 3) < 3 for _ in range(50))


def test_actions_and_keys_belong_together() -> None:
    assert len(_freedoom_engine.ACTIONS) == len(_freedoom_engine.KEYS) == len(_freedoom_chunk.SHARES)
    assert sum(_freedoom_chunk.SHARES) == 100 and _freedoom_engine.ACTIONS[sets.STILL] == "stay"
    turns = {name: keys[6] for name, keys in zip(_freedoom_engine.ACTIONS, _freedoom_engine.KEYS, strict=True)}
    assert all((turns[name] < 0) == ("left" in name and "strafe" not in name) for name in turns)
    assert sets.mirrored(_freedoom_engine.ACTIONS).tolist() == [0, 1, 2, 4, 3, 6, 5, 7, 9, 8]


# ------------------------------------------------------------------------------------- a build without the engine


def chunk_of(job: Job) -> tuple[int, np.ndarray]:
    """Rows that follow from a job, as an engine would make them: MAP02 has no matribites, and one view is missed."""
    rng = np.random.default_rng(list(job.seed.encode()))
    got = list(job.asked)
    if job.kind == "views":
        got[12] = 0 if job.level == "MAP02" else got[12]
        got[3] = max(0, got[3] - 1) if job.name == "chunk_00000" else got[3]
    rows = np.zeros(sum(got), _freedoom_chunk.row_type(job.frames, job.size))
    rows["pixels"] = rng.integers(0, 256, rows["pixels"].shape)
    rows["label"] = np.repeat(np.arange(len(got)), got)[:, None]
    rows["level"] = job.number
    return sum(job.asked) * 2, rows


class FakeWorker:
    """Ends at its second poll, in the other order than it was started."""

    started: ClassVar[list[str]]

    def __init__(self, job: Job) -> None:
        self.job, self.process, self.left = job, self, len(self.started) % 3
        self.started.append(job.name)

    def poll(self) -> int | None:
        self.left -= 1
        return None if self.left > 0 else 0

    def result(self) -> _freedoom_chunk.Made:
        shots, rows = chunk_of(self.job)
        got = np.bincount(rows["label"][:, 0], minlength=len(self.job.asked)).tolist()
        made = _freedoom_chunk.Made(self.job.asked, got, shots, {"close": shots - sum(got)})
        return _freedoom_chunk.publish(self.job, rows, made)

    def terminate(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds sets with `FakeWorker`s: `built(name, stop, *flags)` ends after `stop` chunks where that is given."""
    package = tmp_path / "package"
    package.mkdir()
    for name, levels in (("freedoom1.wad", ["E1M1", "E1M5"]), ("freedoom2.wad", ["MAP01", "MAP02", "MAP05"])):
        (package / name).write_bytes(wad(*levels))
    fake = type("vizdoom", (), {"__version__": "1.3.2", "__path__": [str(package)]})
    monkeypatch.setattr(_freedoom_engine, "import_vizdoom", lambda: fake)
    monkeypatch.setattr(_freedoom_workers, "check_shared_memory", lambda workers: None)
    monkeypatch.setitem(_freedoom_build.CHUNK, "views", 24)

    def build(name: str, stop: int = 1000, *flags: str) -> tuple[Path, list[str]]:
        class Worker(FakeWorker):
            started: ClassVar[list[str]] = []

            def __init__(self, job: Job) -> None:
                if len(self.started) == stop:
                    raise KeyboardInterrupt
                super().__init__(job)

        monkeypatch.setattr(_freedoom_workers, "Worker", Worker)
        asked = ["--samples", "90", "--held-out", "20", "--same-maps", "20", "--size", "16", "16"]
        try:
            freedoom.main(["--out", str(tmp_path / name), *asked, *flags])
        except KeyboardInterrupt:
            assert len(Worker.started) == stop
        return tmp_path / name, Worker.started

    return build


def wad(*names: str) -> bytes:
    """A WAD of lumps without contents."""
    directory = b"".join(bytes(8) + name.encode().ljust(8, b"\0") for name in names)
    return b"IWAD" + len(names).to_bytes(4, "little") + (12).to_bytes(4, "little") + directory


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_set_is_the_same_at_any_number_of_workers_and_after_any_kill(built: Any) -> None:
    first, names = built("first", 1000, "--workers", "1")
    wanted = contents(first)
    assert len(names) > 8 and "train/index.json" in wanted and not any("chunk" in name for name in wanted)
    assert contents(built("second", 1000, "--workers", "4")[0]) == wanted
    for stop in (0, 1, 5):
        built("third", stop, "--workers", "2")
    root, last = built("third", 1000, "--workers", "3")
    assert contents(root) == wanted and 0 < len(last) < len(names)
    assert contents(built("third")[0]) == wanted, "a complete set is left alone"


def test_a_damaged_chunk_is_made_again(built: Any, tmp_path: Path) -> None:
    wanted = contents(built("first")[0])
    built("second", 4, "--workers", "1")
    broken = sorted((tmp_path / "second").rglob("chunk_*.npy"))[1]
    broken.write_bytes(broken.read_bytes()[:-50])
    assert contents(built("second")[0]) == wanted


def test_a_set_has_what_was_asked_for_of_its_maps(built: Any) -> None:
    root, _ = built("set")
    for split, count, levels in (("train", 90, {"MAP01", "MAP02", "E1M1"}), ("held_out", 20, {"MAP05", "E1M5"})):
        index = sets.read_index(root / split)
        about = np.load(sets.array_path(root / split, "about", 0))
        assert len(about) == index.samples == count and set(index.levels) == levels
        assert np.ptp(np.bincount(about["label"][:, 0], minlength=18)) <= 1, "classes are balanced"
        assert index.counts["shots"] > count and index.counts["close"] > 0
    assert sets.read_index(root / "same_maps").levels == sets.read_index(root / "train").levels
    same, train = (np.load(sets.array_path(root / s, "pixels", 0)) for s in ("same_maps", "train"))
    assert not (same[:, None] == train[None]).all((2, 3, 4, 5)).any()
    order = np.load(sets.array_path(root / "train", "about", 0))["label"][:, 0]
    assert np.count_nonzero(np.diff(order)) > 60, "samples lie in a random order"


def test_other_settings_are_refused_where_a_set_lies(built: Any) -> None:
    built("set")
    for flags, word in ((("--seed", "1"), "seed"), (("--maps", "false"), "has_maps"), (("--samples", "91"), "samples")):
        with pytest.raises(UserError, match=f"was built with {word}"):
            built("set", 1000, *flags)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--levels", "MAP99"], "MAP99"),
        (["--levels", "MAP05"], "leave none for train"),
        (["--levels", "MAP01"], "leave none for held_out"),
        (["--samples", "0", "--held-out", "0", "--same-maps", "0"], "all 0"),
        (["--wad", "nowhere.wad"], r"nowhere\.wad"),
    ],
)
def test_what_cannot_be_built_is_refused_at_once(built: Any, flags: list[str], word: str) -> None:
    with pytest.raises(UserError, match=word):
        built("set", 0, *flags)


@pytest.mark.parametrize("data", [b"", b"hello", b"PWAD" + wad("MAP01")[4:], wad("MAP01")[:-3], wad("E1M1")])
def test_a_wrong_wad_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "my.wad").write_bytes(data)
    with pytest.raises(UserError, match=r"my\.wad (is no game data|holds no map)"):
        game_data(tmp_path / "my.wad", tmp_path)


def test_a_users_own_wad_gives_its_maps(tmp_path: Path) -> None:
    (tmp_path / "my.wad").write_bytes(wad("THINGS", "MAP03", "MAP07", "E1M1"))
    data = game_data(tmp_path / "my.wad", tmp_path)
    assert data.levels == ("MAP03", "MAP07") and data.overlay_of("MAP03") == "" and len(data.files()) == 1


# ------------------------------------------------------------------------------------------------------ failures


def test_an_absent_or_untested_vizdoom_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vizdoom", None)
    with pytest.raises(UserError, match=r"pip install 'visgen\[freedoom\]'"):
        _freedoom_engine.import_vizdoom()
    for version in ("1.2.9", "1.4.0", "2.0.0"):
        monkeypatch.setitem(sys.modules, "vizdoom", type("vizdoom", (), {"__version__": version}))
        with pytest.raises(UserError, match=version):
            _freedoom_engine.import_vizdoom()


def test_a_full_dev_shm_is_refused_before_the_first_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_freedoom_workers, "shared_memory", lambda: 30 << 20)
    _freedoom_workers.check_shared_memory(2)
    with pytest.raises(UserError, match=r"30 MiB free, 3 engines need 33; pass --workers 2"):
        _freedoom_workers.check_shared_memory(3)


@pytest.mark.parametrize(("code", "word"), [("exit('no light')", "no light"), ("1 / 0", "ZeroDivision")])
def test_a_worker_that_fails_is_one_line(tmp_path: Path, code: str, word: str) -> None:
    with pytest.raises(UserError, match=rf"MAP07 failed \(.*{word}.*run the same command again") as error:
        worker_of(tmp_path, code).result()
    assert "\n" not in str(error.value)


def test_a_worker_that_is_killed_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="SIGBUS"):
        worker_of(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGBUS)").result()


def worker_of(folder: Path, code: str) -> _freedoom_workers.Worker:
    """A worker that runs `code` and has ended."""
    worker = _freedoom_workers.Worker(job_in(folder), ["-c", code])
    worker.process.wait()
    return worker


def job_in(folder: Path) -> Job:
    return Job("chunk_00000", str(folder), "views", "MAP07", 0, "0", [1] * 18, [64, 64], 1, 0, "my.wad", "")


def test_what_a_crashed_engine_left_is_swept_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, chunks_ = tmp_path / "shm", tmp_path / "chunks"
    for folder in (memory, chunks_ / "engine_a", chunks_ / "engine_b"):
        folder.mkdir(parents=True)
    for name in ("ViZDoomSMabc", "ViZDoomMQCtrabc", "ViZDoomSMother", "torch_abc"):
        (memory / name).touch()
    (chunks_ / "engine_a" / _freedoom_engine.INSTANCE).write_text("abc")
    (chunks_ / "chunk_00000.npy").touch()
    monkeypatch.setattr(_freedoom_engine, "SHM", memory)
    _freedoom_workers.sweep(chunks_)
    assert {path.name for path in memory.iterdir()} == {"ViZDoomSMother", "torch_abc"}
    assert [path.name for path in chunks_.iterdir()] == ["chunk_00000.npy"]


# ------------------------------------------------------------------------------------------------ with the engine


def command(out: Path, *flags: str) -> list[str]:
    asked = ["--samples", "36", "--held-out", "0", "--same-maps", "0", "--levels", "MAP07", "E1M2"]
    return [sys.executable, "-m", "visgen.prepare.freedoom", "--out", str(out), *asked, *flags]


def engines(folder: Path) -> int:
    """How many engines run that write below a folder."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            found += b"-config\0" + os.fsencode(folder) in path.read_bytes()
    return found


@pytest.mark.slow
def test_the_engine_gives_the_same_set_again_and_none_is_left(tmp_path: Path) -> None:
    subprocess.run(command(tmp_path / "a", "--workers", "2"), check=True, cwd=ROOT, capture_output=True)
    process = subprocess.Popen(command(tmp_path / "b", "--workers", "1"), cwd=ROOT, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (engines(tmp_path) and list(tmp_path.glob("b/train/chunks/*.json"))):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM and not engines(tmp_path)
    subprocess.run(command(tmp_path / "b", "--workers", "1"), check=True, cwd=ROOT, capture_output=True)
    assert contents(tmp_path / "b") == contents(tmp_path / "a") and not engines(tmp_path)
    index = json.loads((tmp_path / "a" / "train" / "index.json").read_text())
    assert index["complete"] and index["samples"] == 36
