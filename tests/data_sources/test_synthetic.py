"""`synthetic`: a function of (seed, split, index), balanced, distinct."""

import pytest
import torch

from visgen.config import UserError, build, plugin_config


def synthetic(split="train", **options):
    return build(plugin_config("visgen.data", "synthetic", **options), split)


def test_a_sample_is_a_function_of_seed_split_and_index():
    data = synthetic(n=40, n_held_out=8, classes=8)
    again = synthetic(n=4000, classes=8)
    assert torch.equal(data.get(17)["pixels"], again.get(17)["pixels"])
    others = [synthetic(seed=1, classes=8), synthetic("held_out", classes=8)]
    assert all(not torch.equal(data.get(1)["pixels"], other.get(1)["pixels"]) for other in others)
    assert (len(data), len(synthetic("held_out", n_held_out=8))) == (40, 8)
    assert [data.get(i)["label"] for i in range(40)] == data.labels.tolist() == [i % 8 for i in range(40)]


def test_pictures_show_a_shape_in_the_middle():
    data = synthetic(n=32, classes=8, image_size=24)
    many = data.get_many(range(32))
    pixels = many["pixels"]
    assert (pixels.shape, pixels.dtype) == ((32, 1, 3, 24, 24), torch.uint8)
    assert data.image_size == (24, 24)
    edges = (pixels.float().diff(dim=-1).abs().sum(3) > 60).sum((1, 2, 3))
    assert (edges > 0).all()  # each has an outline
    flat = pixels.flatten(1).float()
    assert (torch.cdist(flat, flat) + 1e9 * torch.eye(32)).min() > 500  # all differ


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"classes": 9}, r"classes 9 must lie in 1\.\.8: disc"),
        ({"image_size": 4}, "image_size 4"),
        ({"n": 0}, "n 0"),
        ({"seed": -1}, "seed -1"),
    ],
)
def test_bad_options(options, text):
    with pytest.raises(UserError, match=text):
        synthetic(**options)
    with pytest.raises(IndexError):
        synthetic(n=3).get(3)
