"""Data order: a function of (seed, step) that neither world size, accumulation nor a restart changes."""

import numpy as np
import pytest
import torch

from visgen import config as configs
from visgen.config import UserError
from visgen.train import order as orders
from visgen.train.order import MicroBatches, Order, check_batch, micro_batches


def toy_data(**values):
    return configs.build(configs.plugin_config("visgen.data", "toy", **values), "train")


def test_every_epoch_is_a_permutation_of_its_own():
    order = Order(size=10, batch=4, seed=1)
    keys = [key for step in range(5) for key in order.step(step)]  # two epochs, a step lies across their border
    assert [e for _, e in keys] == [0] * 10 + [1] * 10
    first, second = ([i for i, e in keys if e == epoch] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    assert Order(10, 4, 2).step(0) != order.step(0)


def test_any_step_can_be_asked_first():
    order = Order(10, 4, 0)
    forward = [order.step(s) for s in range(9)]
    assert [Order(10, 4, 0).step(s) for s in range(9)] == forward
    assert [order.step(s) for s in reversed(range(9))] == forward[::-1]


@pytest.mark.parametrize(("world", "parts"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 2)])
def test_ranks_and_micro_batches_deal_out_the_same_step(world, parts):
    order = Order(20, 8, 3)
    dealt = [list(MicroBatches(order, 2, 5, rank, world, parts)) for rank in range(world)]
    assert all(len(d) == 3 * parts for d in dealt)
    for i, step in enumerate(range(2, 5)):
        mine = [[key for part in d[i * parts : (i + 1) * parts] for key in part] for d in dealt]
        assert [m for row in zip(*mine, strict=True) for m in row] == order.step(step)
        assert {len(part) for d in dealt for part in d} == {8 // (world * parts)}


def test_samples_do_not_depend_on_the_workers():
    keys = MicroBatches(Order(40, 8, 0), 1, 3, 0, 1, 1)
    here, there = (list(micro_batches(toy_data(), keys, 5, workers, pin=False)) for workers in (0, 1))
    assert len(here) == 2
    for a, b in zip(here, there, strict=True):
        assert a["index"].tolist() == b["index"].tolist()
        assert np.array_equal(a["pixels"], b["pixels"])


@pytest.mark.parametrize(("most", "shared"), [(0, {"pixels", "label", "index"}), (8 * 8, {"pixels"}), (1 << 20, set())])
def test_small_tensors_of_a_batch_are_sent_and_large_ones_shared(monkeypatch, most, shared):
    monkeypatch.setattr(orders, "SMALL", most)
    keys = MicroBatches(Order(40, 8, 0), 0, 1, 0, 1, 1)
    (here,), (there,) = (list(micro_batches(toy_data(), keys, 5, workers, pin=False)) for workers in (0, 1))
    assert {name for name, values in there.items() if values.is_shared()} == shared
    assert all(there[k].dtype == v.dtype and there[k].equal(v) for k, v in here.items()) and len(there) == len(here)


def test_what_pins_a_batch_receives_tensors(monkeypatch):
    seen = []

    def pinned(batch, device=None):
        seen.extend(batch.values())
        return batch

    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.utils.data._utils.pin_memory, "pin_memory", pinned)
    (batch,) = micro_batches(toy_data(), MicroBatches(Order(40, 8, 0), 0, 1, 0, 1, 1), 5, 1, pin=True)
    assert [id(value) for value in seen] == [id(value) for value in batch.values()]
    assert all(isinstance(value, torch.Tensor) for value in seen)


@pytest.mark.parametrize(("workers", "started"), [(0, 0), (2, 2), (3, 3), (9, 3)])
def test_no_more_workers_than_cpus(monkeypatch, workers, started):
    seen = []
    monkeypatch.setattr(orders, "cpus", lambda: 3)
    monkeypatch.setattr(orders, "DataLoader", lambda *given, num_workers, **named: seen.append(num_workers) or [])
    assert list(micro_batches(toy_data(), MicroBatches(Order(8, 8, 0), 0, 1, 0, 1, 1), 0, workers, pin=False)) == []
    assert seen == [started]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_speaks_in_one_line(workers):
    keys = MicroBatches(Order(8, 8, 0), 0, 1, 0, 1, 1)
    with pytest.raises(UserError) as found:
        list(micro_batches(toy_data(n=8, bad=3), keys, 0, workers, pin=False))
    assert str(found.value) == "image 3.png cannot be read; remove it"


@pytest.mark.parametrize(
    ("size", "batch", "world", "parts", "word"),
    [(100, 10, 4, 1, "multiple of processes"), (100, 12, 2, 4, "2 x 4"), (9, 10, 1, 1, "9 samples"), (9, 0, 1, 1, "0")],
)
def test_batches_that_cannot_be_dealt_out(size, batch, world, parts, word):
    with pytest.raises(UserError, match=word):
        check_batch(size, batch, world, parts)
