"""Operations of an image by hand, and what the log says of speed."""

import pytest
import torch
from toy import train

from visgen import config as configs
from visgen.config import plugin_config
from visgen.model import ModelConfig
from visgen.speed_blocks import training_work
from visgen.train import throughput
from visgen.train.main import TrainConfig
from visgen.train.rehearsal import rehearse
from visgen.train.throughput import operations


def test_operations_of_next_tokens_by_hand():
    backbone = plugin_config("visgen.backbones", "ar", layers=2, heads=4, width=32, mlp_multiple_of=16)
    condition = plugin_config("visgen.conditions", "label", classes=3)
    model = ModelConfig((1, 4, 4), 50, backbone, condition)
    hidden = 96  # 2/3 of 4 * 32, rounded up to 16
    layer = 4 * 32 * 32 + 3 * 32 * hidden
    pairs = sum(range(1, 17))  # 1 slot of the label and 15 tokens, each sees itself and those before it
    expected = 6 * (2 * layer * 16 + 32 * 50 * 16) + 3 * 2 * 2 * (2 * 32) * pairs  # QK and AV: 2 layers, 3 passes
    assert operations(rehearse(plugin_config("visgen.objectives", "next_token", model=model))) == expected


def test_llamagen_l_is_six_times_its_weights():
    """342.9 M weights, of which the tables of codes (16384) and labels (1001) of width 1024 are looked up."""
    found = operations(rehearse(configs.load(TrainConfig, ["configs/imagenet256/ar_l.yaml"]).objective))
    products = 342.9e6 - (16384 + 1001) * 1024
    attention = 12 * 1024 * 24 * 256 * 257 / 2
    assert found == pytest.approx(6 * products * 256 + attention, rel=0.002)


def test_masked_and_blockwise():
    masked = rehearse(configs.load(TrainConfig, ["configs/imagenet256/mar_b.yaml"]).objective)
    config = masked.config.model.backbone
    layers = config.layers * 12 * config.width**2
    share = sum(masked.hidden(s) for s in range(2000)) / 2000 / 256
    slots = config.buffer + 256
    trunk = 6 * layers * (slots - 256 * share + slots)
    attention = 12 * config.width * config.layers * ((slots - 256 * share) ** 2 + slots**2)
    head = 6 * throughput.products_of(masked.exported().head) * 256 * share * masked.config.model.head.repeats
    assert operations(masked) == pytest.approx(trunk + attention + head, rel=0.03)
    blocks = rehearse(configs.load(TrainConfig, ["configs/imagenet256/acdit_b.yaml"]).objective)
    assert operations(blocks) == training_work(blocks.exported(), 1)


@pytest.mark.parametrize("name", ["vq16", "dd1_l", "dd2_l", "ar_b_canny"])
def test_others_have_no_formula(name):
    assert operations(rehearse(configs.load(TrainConfig, [f"configs/imagenet256/{name}.yaml"]).objective)) is None


def test_peaks():
    assert throughput.peak(torch.device("cpu"), 0.0) is None and throughput.peak(torch.device("cpu"), 2.5) == 2.5e12
    first = next(name for name in throughput.PEAKS if name in "NVIDIA H100 PCIe")
    assert throughput.PEAKS[first] == 756.0 and throughput.PEAKS["H100"] == 989.0


def test_speeds_are_logged_and_shown(tmp_path, capsys):
    run = train(tmp_path / "run", "--loop.workers", "1")
    lines = (run / "metrics.jsonl").read_text()
    assert lines.count('"images_per_s"') == lines.count('"data_wait"') == 6 and "mfu" not in lines
    assert " images/s  data " in capsys.readouterr().err
