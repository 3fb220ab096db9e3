"""`freedoom`: views and clips from disk, their maps and actions, windows and mirrors, damaged and missing sets."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import freedoom_set
import numpy as np
import pytest
import torch

from visgen.config import UserError, build, plugin_config
from visgen.controls.seg import colours
from visgen.data import Data, codes, to_batch
from visgen.data import freedoom as sets
from visgen.encode import encode


def opened(root: Path, split: Any = "train", **settings: Any) -> Any:
    return build(plugin_config("visgen.data", "freedoom", root=root, **settings), split)


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("views")
    freedoom_set.write(root, "train", freedoom_set.views(18))
    freedoom_set.write(root, "held_out", freedoom_set.views(7))
    freedoom_set.write(root, "same_maps", freedoom_set.views(6))
    return root


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clips")
    freedoom_set.write(root, "train", freedoom_set.clips(9, 6, 8))
    return root


class Fixed:
    """A generator whose draws are given: the start of a window, and below 0.5 a mirror."""

    def __init__(self, start: int, share: float) -> None:
        self.start, self.share = start, share

    def integers(self, high: int) -> int:
        assert self.start < high
        return self.start

    def random(self) -> float:
        return self.share


# ----------------------------------------------------------------------------------------------------- samples


def test_views_are_what_was_stored(views: Path) -> None:
    stored, data = freedoom_set.views(18), opened(views)
    assert (len(data), data.frames, data.image_size, len(data.classes)) == (18, 1, (64, 64), 18)
    assert data.labels.tolist() == list(range(18)) and not data.has_maps
    for i in (0, 4, 5, 17):  # shards hold 5
        sample = data.get(i)
        assert sample.keys() == {"pixels", "label"} and sample["label"] == i
        assert np.array_equal(sample["pixels"].permute(0, 2, 3, 1).numpy(), stored["pixels"][i])
    assert np.array_equal(data.about["pose"], stored["pose"])


def test_maps_are_grey_depth_and_the_colours_of_control(views: Path) -> None:
    stored, many = freedoom_set.views(18), [3, 11]
    depth = opened(views, maps="depth")
    assert depth.has_maps
    for channel in range(3):
        assert np.array_equal(depth.get_many(many)["map"][:, :, channel].numpy(), stored["depth"][many])
    seg = opened(views, maps="seg").get_many(many)["map"]
    assert torch.equal(seg.permute(0, 1, 3, 4, 2), colours()[torch.from_numpy(stored["seg"][many].astype(np.int64))])
    batch = to_batch(opened(views, maps="depth").get_many(many), "cpu")
    assert batch["map"].min() >= -1 and batch["map"].max() <= 1 and batch["map"].shape == (2, 1, 3, 64, 64)


def test_the_held_out_split_is_new_maps_or_the_same_ones(views: Path) -> None:
    assert len(opened(views, "held_out")) == 7
    assert len(opened(views, "held_out", held_out="same_maps")) == 6
    assert len(opened(views, "train", held_out="same_maps")) == 18


def test_a_mirror_takes_pixels_maps_and_actions_along(views: Path, clips: Path) -> None:
    data = opened(views, maps="seg", hflip=True)
    plain, mirrored = data.get(2), data.get(2, Fixed(0, 0.4))
    for name in ("pixels", "map"):
        assert torch.equal(mirrored[name], plain[name].flip(-1)) and not torch.equal(mirrored[name], plain[name])
    assert torch.equal(data.get(2, Fixed(0, 0.6))["pixels"], plain["pixels"])
    held_out = opened(views, "held_out", hflip=True)
    assert torch.equal(held_out.get(2, Fixed(0, 0.4))["pixels"], held_out.get(2)["pixels"])
    walks = opened(clips, frames=6, hflip=True)
    names = [[walks.actions[a] for a in walks.get(4, Fixed(0, share))["action"]] for share in (0.9, 0.1)]
    swapped = [name.replace("left", "LEFT").replace("right", "left").replace("LEFT", "right") for name in names[0]]
    assert swapped == names[1] != names[0]


def test_a_mirror_of_actions_is_its_own_inverse_and_keeps_what_has_no_side() -> None:
    names = ["stay", "turn left", "forward right", "turn right", "shoot", "forward left"]
    swap = sets.mirrored(names)
    assert [names[i] for i in swap] == ["stay", "turn right", "forward left", "turn left", "shoot", "forward right"]
    assert swap[swap].tolist() == list(range(6))


def test_a_window_has_the_actions_between_its_frames(clips: Path) -> None:
    stored, data = freedoom_set.clips(9, 6, 8), opened(clips, frames=3)
    assert (data.frames, data.get(7)["pixels"].shape) == (3, (3, 3, 8, 8))
    for start, sample in ((0, data.get(7)), (2, data.get(7, Fixed(2, 1.0)))):
        assert np.array_equal(sample["pixels"].permute(0, 2, 3, 1).numpy(), stored["pixels"][7, start : start + 3])
        assert sample["action"].tolist() == [0, *stored["action"][7, start + 1 : start + 3]]
        assert sample["action"].dtype == torch.int64 and sample["label"] == stored["label"][7, 0]
    starts = {tuple(data.get(7, np.random.default_rng(i))["action"].tolist()) for i in range(40)}
    assert len(starts) == 4, "every window of three of six frames comes up"
    assert data.get_many([7, 1])["action"].shape == (2, 3)


def test_a_copy_for_a_worker_holds_no_pictures_and_reads_the_same(views: Path) -> None:
    data: Data = opened(views)
    packed = pickle.dumps(data)
    assert len(packed) < 12_000
    assert torch.equal(pickle.loads(packed).get(3)["pixels"], data.get(3)["pixels"])


# ------------------------------------------------------------------------------------------------ what is refused


def test_a_missing_set_names_the_builder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m visgen\.prepare\.freedoom --out .*" + tmp_path.name):
        opened(tmp_path)


def test_settings_that_the_set_has_not_are_refused(views: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.frames 2"):
        opened(views, frames=2)
    freedoom_set.write(tmp_path, "train", freedoom_set.views(3), has_maps=False)
    assert len(opened(tmp_path)) == 3
    with pytest.raises(UserError, match=r"data\.maps seg"):
        opened(tmp_path, maps="seg")


def test_an_incomplete_set_is_refused(tmp_path: Path) -> None:
    index = freedoom_set.write(tmp_path, "train", freedoom_set.views(3))
    sets.write_index(tmp_path / "train", dataclasses.replace(index, complete=False))
    with pytest.raises(UserError, match="incomplete"):
        opened(tmp_path)


@pytest.mark.parametrize("name", ["pixels", "depth", "about"])
def test_a_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    freedoom_set.write(tmp_path, "train", freedoom_set.views(7))
    path = sets.array_path(tmp_path / "train", name, 1)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=f"{path.name} is damaged"):
        opened(tmp_path, maps="depth")
    if name == "depth":
        assert len(opened(tmp_path)) == 7, "what is not read is not compared"


def test_files_of_another_set_are_found(tmp_path: Path) -> None:
    freedoom_set.write(tmp_path / "a", "train", freedoom_set.views(7))
    freedoom_set.write(tmp_path / "b", "train", {k: v[::-1] for k, v in freedoom_set.views(7).items()})
    path = sets.array_path(tmp_path / "a" / "train", "pixels", 0)
    path.write_bytes(sets.array_path(tmp_path / "b" / "train", "pixels", 0).read_bytes())
    with pytest.raises(UserError, match=r"pixels_00000\.npy is damaged"):
        opened(tmp_path / "a")


@pytest.mark.parametrize(
    ("name", "value"),
    [("label", 18), ("label", -1), ("action", 10), ("level", 1)],
)
def test_numbers_without_a_name_are_refused(tmp_path: Path, name: str, value: int) -> None:
    values = freedoom_set.views(4)
    freedoom_set.write(tmp_path, "train", {**values, name: np.full((4, 1), value)}, classes=list(map(str, range(18))))
    with pytest.raises(UserError, match=f"holds a {name}"):
        opened(tmp_path)


def test_parts_without_a_colour_are_refused(tmp_path: Path) -> None:
    values = freedoom_set.views(4)
    freedoom_set.write(tmp_path, "train", {**values, "seg": np.full_like(values["seg"], 9)})
    with pytest.raises(UserError, match="holds part 9"):
        opened(tmp_path, maps="seg")


@pytest.mark.parametrize(
    "changed",
    [{"samples": 0}, {"image_size": [64]}, {"frames": 0}, {"colours": [[0, 0, 0]]}, {"complete": True}, {"levels": []}],
)
def test_an_index_of_impossible_sizes_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"its|it is"):
        freedoom_set.make_index(freedoom_set.views(4), "train", 5, **changed)


# -------------------------------------------------------------------------------------------------- cached codes


@pytest.mark.parametrize("maps", ["depth", "seg"])
def test_cached_codes_keep_maps_and_actions_of_every_view(clips: Path, tmp_path: Path, small: Any, maps: str) -> None:
    data = opened(clips, frames=2, maps=maps)
    tokenizer = build(small("tokenizers", "conv_vq", image_size=8)).eval()
    encode(tokenizer, data, tmp_path, "hash", views="flip", batch=4, shard=4)
    cached = build(plugin_config("visgen.data", "codes", root=tmp_path), "train")
    assert cached.has_maps
    views = data.views(range(9), "flip")
    for i in (0, 3, 8):
        assert torch.equal(cached.get(i)["map"], data.get(i)["map"]), "the plain view"
        assert torch.equal(cached.get(i)["action"], data.get(i)["action"])
        for view, sample in ((view, cached.get(i, Fixed(view, 0.0))) for view in (0, 1)):
            assert torch.equal(sample["map"], views["map"][i, view].expand(-1, 3, -1, -1))
            assert torch.equal(sample["action"], views["action"][i, view]) and sample["view"] == view
    assert torch.equal(views["map"][:, 1], views["map"][:, 0].flip(-1))
    assert views["action"][:, 1].tolist() == sets.mirrored(data.actions)[views["action"][:, 0]].tolist()
    path = codes.shard_path(tmp_path / "train", 1, "map")
    changed = bytearray(path.read_bytes())
    changed[-30] ^= 1
    path.write_bytes(changed)
    with pytest.raises(UserError, match=r"map_00001\.npy is damaged"):
        build(plugin_config("visgen.data", "codes", root=tmp_path), "train")


def test_cached_codes_of_views_without_maps_hold_none(views: Path, tmp_path: Path, small: Any) -> None:
    data = opened(views)
    encode(build(small("tokenizers", "conv_vq", image_size=64)).eval(), data, tmp_path, "hash", shard=9)
    cached = build(plugin_config("visgen.data", "codes", root=tmp_path), "train")
    assert not cached.has_maps and cached.get(2).keys() == {"tokens", "label", "view"}
