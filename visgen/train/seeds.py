"""Random streams of a run: every one is a function of a key, so none has a state to save."""

from __future__ import annotations

import random

import numpy as np
import torch

BUILD, STEP, TURN = range(3)  # first words of a key: building the nets, a step's global streams, a turn's generator


def random_key(*key: int) -> int:
    """63 random bits that are a function of `key`."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_process(*key: int) -> None:
    """Seeds the global generators of Python, NumPy and torch (CPU and CUDA)."""
    seed = random_key(*key)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
