"""What a program runs on."""

from __future__ import annotations

import warnings

import pytest
import torch

from visgen.launch import cpus, on_cpu


@pytest.mark.parametrize(
    ("gpu", "told", "flag", "expected"),
    [
        (True, False, None, False),
        (True, False, "false", False),
        (True, True, None, True),
        (True, False, "true", True),
        (False, False, None, True),
    ],
)
def test_the_cpu_is_used_when_told_or_for_want_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, told: bool, flag: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if flag:
        monkeypatch.setenv("ACCELERATE_USE_CPU", flag)
    assert on_cpu(told) is expected


def test_cpus_are_those_that_this_process_may_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of more
        torch.utils.data.DataLoader([0], num_workers=cpus())
    assert cpus() >= 1
