"""Data in WebDataset shards: a killed run goes on at its position, bit for bit, with readers of its own."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from test_loop import Killed, kill_at
from toy import metrics, train

from visgen import run_files


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    rng = np.random.default_rng(0)
    for shard in range(3):
        with tarfile.open(folder / f"train-{shard}.tar", "w") as tar:
            for i in range(8):
                buffer = io.BytesIO()
                Image.fromarray(rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)).save(buffer, "PNG")
                for name, data in ((f"{shard}{i}.png", buffer.getvalue()), (f"{shard}{i}.cls", b"1")):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_killed_run_goes_on_at_its_position_in_the_shards(tars, tmp_path, monkeypatch, workers):
    data = ("--data.kind", "webdataset", "--data.shards", str(tars / "train-{0..2}.tar"), "--data.image-size", "4")
    flags = (*data, "--data.crop", "random", "--data.hflip", "--data.held-out-fraction", "0.1")

    def steps(folder):
        return [line.split()[::3] for line in (folder / "rank0.txt").read_text().splitlines()]

    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = train(tmp_path / "a", *flags, "--objective.trace", str(tmp_path / "whole"))
    again = (*flags, "--objective.trace", str(tmp_path / "cut"), "--loop.workers", workers)
    with monkeypatch.context() as patch:
        kill_at(patch, 5)
        with pytest.raises(Killed):
            train(tmp_path / "b", *again)
    before = len(steps(tmp_path / "cut"))
    run = train(tmp_path / "b", *again)
    assert steps(tmp_path / "cut")[before:] == [s for s in steps(tmp_path / "whole") if int(s[0]) >= 4]
    assert metrics(run) == metrics(whole)
    states = [
        torch.load(r / run_files.step_name(6) / "state" / "optimizer.bin", weights_only=True) for r in (run, whole)
    ]
    for number, values in states[0]["state"].items():
        assert torch.equal(values["exp_avg"], states[1]["state"][number]["exp_avg"])
