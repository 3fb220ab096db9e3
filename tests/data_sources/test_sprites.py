"""Moving sprites: motions that move, bounce and overlap; fresh clips for training, fixed ones to score on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from visgen.config import UserError, build, plugin_config
from visgen.data.sprites import MOTIONS, Sprites


def made(split: Any = "train", **values: Any) -> Sprites:
    pictures = plugin_config("visgen.data", "synthetic", n=20, n_held_out=20, image_size=16)
    given = {"pictures": pictures, "ground": "white", "image_size": 24, "sprite": 8, "frames": 12, "n": 16, **values}
    return build(plugin_config("visgen.data", "sprites", **given), split)


@pytest.mark.parametrize("name", MOTIONS)
def test_a_motion_stays_inside_and_moves_smoothly(name: str) -> None:
    for seed in range(50):
        path = MOTIONS[name](32, 20.0, np.random.default_rng(seed))
        assert path.shape == (32, 2) and path.min() >= -1e-9 and path.max() <= 20 + 1e-9
        steps = np.linalg.norm(np.diff(path, axis=0), axis=1)
        assert steps.max() < 8 and path.std(0).max() > 0.5


def test_a_bounce_turns_at_the_walls_and_a_fall_at_the_floor() -> None:
    turned = [np.diff(MOTIONS["bounce"](40, 10.0, np.random.default_rng(s)), axis=0) for s in range(20)]
    assert all((np.sign(d[1:]) != np.sign(d[:-1])).any() for d in turned)
    straight = turned[0][:, 0]
    assert np.isclose(abs(straight), abs(straight).max()).mean() > 0.7, "between walls the speed is constant"
    fall = MOTIONS["fall"](40, 10.0, np.random.default_rng(0))[:, 1]
    assert (
        fall.max() > 8 and (np.diff(np.sign(np.diff(fall))) < 0).any() and (np.diff(np.sign(np.diff(fall))) > 0).any()
    )


def test_training_draws_new_clips_of_the_same_class() -> None:
    data = made()
    first, second = (data.get(5, np.random.default_rng(s)) for s in (1, 2))
    assert first["label"] == second["label"] == 1 and data.classes[1] == "fall"
    assert not torch.equal(first["pixels"], second["pixels"])
    held_out = made("held_out", n_held_out=16)
    assert torch.equal(held_out.get(5, np.random.default_rng(1))["pixels"], held_out.get(5)["pixels"])


def test_frames_differ_and_sprites_pass_over_one_another() -> None:
    clip = made(sprites=1).get(0)["pixels"]
    assert clip.shape == (12, 3, 24, 24) and (clip.float().diff(dim=0).abs().mean((1, 2, 3)) > 0).all()
    hidden = []
    for index in range(16):
        one, two = (made(sprites=k, frames=1, seed=3).get(index)["pixels"] for k in (1, 2))
        was = (one < 200).any(1)  # [T, H, W] where the first sprite is
        hidden.append(bool(((one != two).any(1) & was).any()))
    assert any(hidden) and not all(hidden), "the second passes in front of the first in some clips"


def test_black_ground() -> None:
    data = made(ground="black", sprites=1)
    assert (data.get(0)["pixels"][:, :, 0, 0] == 0).float().mean() > 0.5


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"motions 5 must lie in 1\.\.4: bounce, fall, circle, swing"):
        made(motions=5)
    with pytest.raises(UserError, match="sprite 24 px leaves no room to move in 24 px"):
        made(sprite=24)
