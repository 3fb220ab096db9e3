"""eval/train_speed.py on toy configs: its report, several kinds of nets, what it refuses."""

import json
import math
import runpy
import sys
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

ROOT = Path(__file__).parents[1]


def run(monkeypatch, out, *words):
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    flags = ("--laps", "1", "--steps", "2", "--out", str(out))
    monkeypatch.setattr(sys, "argv", ["eval/train_speed.py", *words, *flags])
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "eval" / "train_speed.py"), run_name="__main__")
    return json.loads((out / "train_speed.json").read_text())


@pytest.mark.parametrize("name", ["next_token", "mar", "acdit", "vq", "causal"])
def test_report(monkeypatch, capsys, tmp_path, name):
    flags = ("--batch", "8", "--accumulation", "2", "--peak-tflops", "0.1")
    found = run(monkeypatch, tmp_path, "--config", f"configs/debug/{name}.yaml", *flags)
    assert (found["batch"], found["accumulation"], found["processes"], found["compiled"]) == (8, 2, 1, "no")
    assert found["images_per_s"] == pytest.approx(8 / found["seconds"]) and math.isfinite(found["loss"])
    if name == "vq":
        assert found["mfu"] is None and found["tokens_per_s"] is None
    else:
        assert found["tokens_per_s"] == pytest.approx(64 * found["images_per_s"])
        assert found["mfu"] == pytest.approx(found["images_per_s"] * found["gflop"] * 1e9 / 1e11)
    assert "| processes | batch |" in capsys.readouterr().out and (tmp_path / "train_speed.md").is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--config is not set"),
        (("--config", "configs/debug/dd2.yaml"), "only tokenizers, next_token, masked and acdit"),
        (("--config", "configs/debug/control.yaml"), "without control, are timed here"),
        (("--config", "configs/debug/mar.yaml", "--batch", "3", "--accumulation", "2"), "batch 3 is no multiple"),
    ],
)
def test_refusals_are_one_line(monkeypatch, capsys, tmp_path, words, said):
    with pytest.raises(SystemExit) as found:
        run(monkeypatch, tmp_path, *words)
    assert found.value.code == 2 and said in capsys.readouterr().err
