"""Held-out losses: right means, and training that does not notice them."""

import dataclasses

import pytest
import torch
from test_loop import NOISY, same, state_of
from toy import metrics, plugins, train

from visgen import run_files
from visgen.config import UserError, plugin_config
from visgen.data import to_batch
from visgen.data.synthetic import Config, Synthetic
from visgen.model import ModelConfig
from visgen.objectives import next_token
from visgen.train import main as program
from visgen.train.held_out import held_out_losses, spaced
from visgen.train.main import TrainConfig


class Counting:
    """Returns the mean index parity of a batch, so that a wrong weighting shows."""

    def held_out(self, model, batch):
        return {"label": batch["label"].float().mean()}


def test_every_sample_weighs_the_same_whatever_the_batch():
    data = Synthetic(Config(image_size=8, n_held_out=23), "held_out")
    truth = float(data.get_many(range(23))["label"].float().mean())
    for batch in (1, 5, 23, 64):
        found = held_out_losses(Counting(), torch.nn.Identity(), data, 100, batch, torch.device("cpu"))
        assert found == {"held_out/label": pytest.approx(truth, abs=1e-6)}


def test_a_part_has_all_classes_though_they_alternate():
    data = Synthetic(Config(image_size=8, n_held_out=1024), "held_out")
    index = spaced(data, 32)
    assert len(set(index)) == 32 and [i // 32 for i in index] == list(range(32))
    classes = data.get_many(index)["label"].bincount(minlength=4)
    assert classes.min() >= 4 and spaced(data, 2000) == list(range(1024))


def test_training_does_not_notice_and_the_log_has_the_line(tmp_path):
    with plugins():
        plain = train(tmp_path / "plain", *NOISY)
        watched = train(tmp_path / "watched", *NOISY, "--loop.eval-every", "2", "--loop.eval-samples", "5")
    last = [state_of(run_files.find_step(run)) for run in (plain, watched)]
    assert same(*last)
    lines = [line for line in metrics(watched) if "held_out/error" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert lines[-1]["held_out/error"] < lines[0]["held_out/error"]
    assert [line for line in metrics(watched) if "held_out/error" not in line] == metrics(plain)


def test_next_token_is_the_plain_cross_entropy():
    model = ModelConfig(
        grid=(1, 2, 2),
        vocab=7,
        backbone=plugin_config("visgen.backbones", "ar", layers=1, heads=1, width=8),
        condition=plugin_config("visgen.conditions", "label", classes=3, dropout=1.0),
    )
    objective = next_token.NextToken(next_token.Config(model=model))
    net = objective.exported().eval()
    torch.nn.init.normal_(net.head.output.weight)
    tokens, label = torch.randint(0, 7, (5, 4)), torch.tensor([0, 1, 2, 0, 1])
    batch = to_batch({"tokens": tokens, "label": label}, "cpu")
    found = objective.held_out(net, batch)["nats_per_token"]
    assert float(found) == pytest.approx(float(net.loss(tokens, {"label": label}, None).mean()))
    other = objective.held_out(net, to_batch({"tokens": tokens, "label": (label + 1) % 3}, "cpu"))["nats_per_token"]
    assert float(found) != pytest.approx(float(other)), "labels are not dropped"


def test_held_out_losses_are_never_of_training_samples(monkeypatch):
    def none(*given):
        raise UserError("toy has one split")

    monkeypatch.setattr(program.configs, "build", none)
    data, config = object(), TrainConfig()
    assert program.held_out(config, data) is data, "previews alone may be"
    watched = dataclasses.replace(config, loop=dataclasses.replace(config.loop, eval_every=5))
    with pytest.raises(UserError, match=r"loop\.eval_every needs a held-out split"):
        program.held_out(watched, data)
