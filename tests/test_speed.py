"""`eval/speed.py`: the floor by hand and by the published sizes, a small run, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from programs import program

from visgen import speed
from visgen.config import UserError, build, load, plugin_config, run_program
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.samplers import ar
from visgen.sampling import EngineConfig
from visgen.train.main import TrainConfig

ROOT = Path(__file__).parents[1]
MakeModel = Callable[..., Model]


def test_the_floor_by_hand(make_model: MakeModel) -> None:
    model = make_model((1, 1, 3), kv_heads=2)  # 2 layers, head size 8, one prefix slot
    weights = 4 * sum(p.numel() for p in model.parameters())
    slot = 2 * 2 * 2 * 8 * 4  # keys and values, layers, kv heads, head size, bytes
    assert speed.floor_bytes(model, 5) == 3 * weights + 5 * slot * (1 + 2 + 3)
    assert speed.cache_bytes(model, 5) == 5 * slot * 4


@pytest.mark.parametrize(("size", "alone", "many"), [("b", 0.020, 0.070), ("l", 0.061, 0.196), ("xl", 0.136, 0.390)])
def test_the_floor_of_llamagen(size: str, alone: float, many: float) -> None:
    """Seconds for 256 tokens in bfloat16 at 2.96 TB/s, guidance on, batch 1 and 64."""
    config = load(TrainConfig, [str(ROOT / f"configs/imagenet256/ar_{size}.yaml")])
    with torch.device("meta"):
        model = build_model(config).to(torch.bfloat16)
    for batch, seconds in ((1, alone), (64, many)):
        assert speed.floor_bytes(model, 2 * batch) / 2.96e12 == pytest.approx(seconds, rel=0.03)


def build_model(config: TrainConfig) -> Model:
    return build(config.objective).exported()


def test_a_measured_batch(make_model: MakeModel) -> None:
    kernels: list[str] = []
    given = (EngineConfig(kind="eager", device="cpu"), ar.Config(), Guidance(2.0), Warp())
    found = speed.measure(make_model((1, 1, 3)), *given, 2, 1e9, repeats=2, kernels=kernels)
    assert (found.batch, found.nfe, found.peak_bytes) == (2, 3, None)
    assert found.seconds > 0 and found.images_per_s == pytest.approx(2 / found.seconds)
    assert found.fraction == pytest.approx(found.floor / found.seconds)
    assert "aten::" in kernels[0]


def test_a_model_with_control_is_timed_under_one_or_without(make_model: MakeModel) -> None:
    model, asked = make_model((1, 1, 3), control="canny"), []
    begin = Engine.begin

    class Watched(Engine):
        def begin(self, batch: Any, known: Any = None) -> None:
            asked.append(sorted(batch))
            begin(self, batch, known)

    given = (ar.Config(), Guidance(2.0), Warp(), 2, 1e9, 1, None)
    plain = make_model((1, 1, 3))
    for control in (True, False):
        config: Any = SimpleNamespace(make=Watched)
        found = speed.measure(model, config, *given, control=control)
        assert found.floor == speed.measure(plain, EngineConfig(kind="eager", device="cpu"), *given).floor
    assert asked == [["label", "map"]] * 2 + [["label"]] * 2


def test_the_program(checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--repeats", "1", "--engine.device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(speed, "bandwidth", lambda device: 1e9)
    for more in (["--batches", "1", "--profile"], ["--batches", "1", "2"]):
        monkeypatch.setattr(sys, "argv", ["speed.py", "--checkpoint", str(checkpoint_dir), *flags, *more])
        program("speed").main()
    found = json.loads((tmp_path / "speed.json").read_text())
    assert [row["batch"] for row in found["rows"]] == [1, 2]
    assert (found["weights"], found["engine"], found["precision"]) == ("trained", "eager", "float32")
    assert found["command"].startswith("python speed.py --checkpoint")
    assert "| 2 | " in (tmp_path / "speed.md").read_text()
    assert (tmp_path / "profile_1.txt").is_file() and not (tmp_path / "profile_2.txt").exists()


def test_a_training_config_gives_random_weights() -> None:
    module = program("speed")
    settings = module.SpeedConfig(config=ROOT / "configs/debug/next_token.yaml", engine=EngineConfig(device="cpu"))
    model, weights = module.build(settings)
    assert weights == "random" and model.head.output.weight.std() > 0.01


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("", "one of --checkpoint"),
        ("--config configs/debug/vq.yaml", "trains no model that decodes"),
        ("--config configs/debug/next_token.yaml --engine.kind captured", "--engine.kind eager"),
        ("--batches", "batches"),
        ("--config configs/debug/next_token.yaml --batches 0", "batches"),
    ],
)
def test_refused(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(speed, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(sys, "argv", ["speed.py", *flags.split(), "--engine.device", "cpu", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        run_program(program("speed").main)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_a_copy_has_a_bandwidth() -> None:
    assert 1e8 < speed.bandwidth(torch.device("cpu"), repeats=1) < 1e14


def test_errors_are_user_errors() -> None:
    with pytest.raises(UserError, match="one of --checkpoint"):
        program("speed").build(program("speed").SpeedConfig())


@pytest.mark.parametrize(("kind", "iterations"), [("masked", 4), ("causal", 16)])
def test_models_of_vectors_are_timed_against_their_weights(
    make_masked: Callable[..., Any], make_causal: Callable[..., Any], kind: str, iterations: int
) -> None:
    model = make_masked() if kind == "masked" else make_causal()
    sampler = plugin_config("visgen.samplers", kind, steps=3, **({"iterations": 4} if kind == "masked" else {}))
    settings = EngineConfig(device="cpu"), sampler, Guidance(2.0), Warp()
    found = speed.measure(model, *settings, 2, 1e9, repeats=1)
    walked = [model.head.input, model.head.output, *(part for b in model.head.blocks for part in (b.norm, b.mlp))]
    head = sum(p.numel() for part in walked for p in part.parameters()) * 4  # the rest of it is read once for all steps
    rest = sum(p.numel() for p in model.parameters()) * 4 - head
    assert found.nfe == iterations and found.notes == {"head_steps": 3 * iterations}
    assert found.floor == pytest.approx(iterations * (rest + 3 * head) / 1e9)


def test_the_work_of_a_pass_by_hand(make_student: MakeModel, make_model: MakeModel) -> None:
    layer = 2 * (4 * 32 * 32 + 3 * 32 * 96)  # operations of a slot; hidden width 2/3 of 4 * 32, rounded up to 16
    for model, slots, inputs in ((make_student(), 17, 3 * 32), (make_model(), 16, 0)):
        attention = 2 * 2 * 2 * 32 * sum(range(1, slots + 1))  # QK and AV, in 2 layers
        assert speed.pass_work(model) == (2 * layer + 2 * inputs) * slots + 2 * 32 * 16 * 16 + attention


def test_a_student_is_held_against_a_product(make_student: MakeModel) -> None:
    model, settings = make_student(second=6), (EngineConfig(device="cpu"), Guidance(), Warp())
    for passes in (1, 2):
        sampler = plugin_config("visgen.samplers", "one_step", passes=passes)
        found = speed.measure(model, settings[0], sampler, *settings[1:], 2, 1e9, repeats=1, product=1e9)
        assert found.rate == pytest.approx(passes * 2 * speed.pass_work(model) / found.seconds)
        assert found.share == pytest.approx(found.rate / 1e9)
        assert f"| {found.share:.1%} |" in speed.table([found])
    plain = speed.measure(model, settings[0], sampler, *settings[1:], 2, 1e9, repeats=1)
    assert plain.share is None and plain.rate is None


def test_the_program_measures_a_product_for_a_student_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(speed, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr(speed, "matmul_rate", lambda device, dtype: 5e12)
    flags = ["--batches", "2", "--repeats", "1", "--engine.device", "cpu", "--out", str(tmp_path)]
    for name, kind, product in (("dd2", "one_step", 5e12), ("next_token", "ar", None)):
        words = ["--config", f"configs/debug/{name}.yaml", "--sampler.kind", kind, *flags]
        monkeypatch.setattr(sys, "argv", ["speed.py", *words])
        program("speed").main()
        found = json.loads((tmp_path / "speed.json").read_text())
        assert found["matmul_flops_per_s"] == product and (found["rows"][0]["share"] is None) == (product is None)
        assert ("matrix product 5 TFLOP/s" in (tmp_path / "speed.md").read_text()) == (product is not None)
