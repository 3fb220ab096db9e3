"""A folder of clips: which frames are taken, one mirror for all of them, and clips that are too short."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from visgen.config import UserError, build, plugin_config
from visgen.data._clips import count, read_clip, write_gif, write_mp4
from visgen.data.video import Video


def ramp(frames: int, side: int = 16) -> torch.Tensor:
    """Frame t is of brightness 8 t, brighter on its right half."""
    clip = torch.full((frames, 3, side, side), 0, dtype=torch.uint8)
    clip += (8 * torch.arange(frames, dtype=torch.uint8))[:, None, None, None]
    clip[..., side // 2 :] += 40
    return clip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, lengths in (("jump", (12, 7)), ("run", (20,))):
        (tmp_path / name).mkdir()
        for i, frames in enumerate(lengths):
            write_gif(tmp_path / name / f"{i}.gif", ramp(frames), 10)
    return tmp_path


def made(folder: Path, split: Any = "train", **values: Any) -> Video:
    given = {"root": folder, "image_size": 16, "frames": 3, "stride": 3, "held_out_fraction": 0.0, **values}
    return build(plugin_config("visgen.data", "video", **given), split)


def times(sample: dict[str, Any]) -> list[int]:
    return (sample["pixels"][:, 0, 8, 2].float() / 8).round().int().tolist()


def test_plain_clips_lie_in_the_middle_and_training_ones_anywhere(folder: Path) -> None:
    data = made(folder)
    assert data.classes == ["jump", "run"] and data.labels.tolist() == [0, 0, 1] and data.frames == 3
    assert [times(data.get(i)) for i in range(3)] == [[2, 5, 8], [0, 3, 6], [6, 9, 12]]
    starts = {times(data.get(2, np.random.default_rng(s)))[0] for s in range(60)}
    assert starts == set(range(14)), "20 frames, 7 spanned"
    assert times(pickle.loads(pickle.dumps(data)).get(0)) == [2, 5, 8]


def test_all_frames_are_mirrored_alike(folder: Path) -> None:
    data, seen = made(folder, hflip=True), set()
    for seed in range(20):
        clip = data.get(1, np.random.default_rng(seed))["pixels"].float()
        right = (clip[..., 12] - clip[..., 3]).mean((1, 2))
        assert (right > 20).all() or (right < -20).all()
        seen.add(bool(right[0] > 0))
    assert seen == {True, False}


def test_a_clip_that_is_too_short_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"0\.gif has 12 frames; 5 at a stride of 3 need 13: a stride of 2 fits"):
        made(folder, frames=5).get(0)
    with pytest.raises(UserError, match=r"1\.gif has 7 frames; 8 at a stride of 1 need 8: ask for at most 7 frames"):
        made(folder, frames=8, stride=1).get(1)


def test_what_cannot_be_read_is_replaced_by_the_next_one_if_wanted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "jump" / "0.gif").write_bytes(b"GIF89a")
    with pytest.raises(UserError, match=r"0\.gif cannot be read .*, or pass --data\.on-error skip"):
        made(folder, frames=3).get(0)
    data = made(folder, frames=5, on_error="skip")  # 1.gif has 7 frames of 13
    for _ in range(2):
        sample = data.get(0)
        assert len(sample["pixels"]) == 5 and sample["label"] == 1, "of the clip that was taken"
    assert data.skipped == 2 and caplog.text.count("skipped") == 2
    with pytest.raises(UserError, match="nothing readable from sample 2 on: 3 of 3 are damaged"):
        made(folder, frames=30, on_error="skip").get(2)


def test_a_header_that_promises_too_much_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visgen.data._clips.count", lambda path: 100)
    with pytest.raises(UserError, match=r"1\.gif has 7 frames; 3 at a stride of 3 need 9: a stride of 2 fits"):
        read_clip(folder / "jump" / "1.gif", 16, 3, 3, start=2)


def test_folders_that_hold_no_clips_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no folder"):
        made(tmp_path / "none")
    with pytest.raises(UserError, match="holds no clip"):
        made(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.gif").write_bytes(b"GIF89a")
    with pytest.raises(UserError, match="cannot be read"):
        made(tmp_path).get(0)


def test_a_given_split_is_used(folder: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        write_gif(tmp_path / split / "a" / f"{split}.gif", ramp(9), 10)
    assert [p.stem for s in ("train", "held_out") for p in made(tmp_path, s)._paths] == ["train", "val"]


def test_videos_are_read_and_written_by_pyav(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    clip = ramp(12)
    path = tmp_path / "a" / "x.mp4"
    write_mp4(path, clip, 10, "about")
    assert count(path) == 12
    assert (read_clip(path, 16, 4, 3).float() - clip[::3].float()).abs().mean() < 6
    assert times(made(tmp_path).get(0)) == pytest.approx([2, 5, 8], abs=1)
    path.write_bytes(b"no video")
    with pytest.raises(UserError, match="cannot be read"):
        read_clip(path, 16, 1)
    with pytest.raises(UserError, match=r"y\.mp4 does not exist"):
        read_clip(tmp_path / "y.mp4", 16, 1)


TURNED = {  # what a player shows of a file that stores this, written with these settings
    "plain": ((0, False, False), lambda clip: clip),
    "left": ((90, False, False), lambda clip: clip.rot90(1, (-2, -1))),
    "half": ((180, False, False), lambda clip: clip.rot90(2, (-2, -1))),
    "right": ((270, False, False), lambda clip: clip.rot90(3, (-2, -1))),
    "mirrored": ((0, True, False), lambda clip: clip.flip(-1)),
    "upside down": ((0, False, True), lambda clip: clip.flip(-2)),
}


def write_video(
    path: Path, clip: torch.Tensor, turn: tuple[int, bool, bool] = (0, False, False), **options: Any
) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10, options={"crf": "0"})
        stream.height, stream.width, stream.pix_fmt = *clip.shape[-2:], "yuv444p"
        if any(turn):
            stream.set_display_rotation(turn[0], hflip=turn[1], vflip=turn[2])
        stream.metadata.update(options.get("metadata", {}))
        if "ratio" in options:
            stream.codec_context.sample_aspect_ratio = options["ratio"]
        for frame in clip.permute(0, 2, 3, 1).contiguous().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def corners(side: int = 32) -> torch.Tensor:
    """Two frames whose quarters have four brightnesses."""
    quarters = torch.tensor([[20, 90], [160, 230]], dtype=torch.uint8)
    return quarters.repeat_interleave(side // 2, 0).repeat_interleave(side // 2, 1).expand(2, 3, side, side).clone()


@pytest.mark.parametrize("kind", TURNED)
@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_a_clip_stands_as_a_player_shows_it(kind: str, suffix: str, tmp_path: Path) -> None:
    turn, shown = TURNED[kind]
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"x.{suffix}"
    write_video(path, corners(), turn)
    expected = shown(corners()).float()
    assert (read_clip(path, 32, 2).float() - expected).abs().max() < 6
    assert (made(tmp_path, image_size=32, frames=2, stride=1).get(0)["pixels"].float() - expected).abs().max() < 6


def test_an_angle_kept_as_text_and_oblong_pixels_count_too(tmp_path: Path) -> None:
    write_video(tmp_path / "x.mkv", corners(), metadata={"rotate": "90"})  # clockwise
    assert (read_clip(tmp_path / "x.mkv", 32, 2).float() - corners().rot90(-1, (-2, -1)).float()).abs().max() < 6
    narrow = corners()[..., ::2].contiguous()  # 32 x 16 pixels, each twice as wide as high
    write_video(tmp_path / "y.mp4", narrow, ratio=2)
    assert (read_clip(tmp_path / "y.mp4", 32, 2).float() - corners().float()).abs().mean() < 6


def test_every_usual_name_of_a_held_out_part_is_known(folder: Path, tmp_path: Path) -> None:
    for split in ("Train", "Validation"):
        (tmp_path / "root" / split / "a").mkdir(parents=True)
        write_gif(tmp_path / "root" / split / "a" / f"{split}.gif", ramp(9), 10)
    found = [p.stem for s in ("train", "held_out") for p in made(tmp_path / "root", s)._paths]
    assert found == ["Train", "Validation"]


def test_clips_that_are_pipes_or_very_thin_are_skipped(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(folder / "jump" / "pipe.mp4")
    write_gif(folder / "jump" / "0.gif", ramp(3, 4000)[..., :2, :], 10)
    data = made(folder, image_size=512, frames=2, stride=1, on_error="skip")
    assert len(data) == 3 and data.get(0)["label"] == 0 and data.skipped == 1
    assert "0.gif cannot be read" in caplog.text and "pipe.mp4" in caplog.text


def test_a_clip_that_cannot_be_read_takes_no_draw_from_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its header promises frames that it lacks, so that its start is drawn before it is read."""
    monkeypatch.setattr("visgen.data.video.count", lambda path: 20)
    write_gif(folder / "jump" / "1.gif", ramp(20), 10)
    write_gif(folder / "jump" / "0.gif", ramp(2), 10)
    data = made(folder, on_error="skip")
    first, again = (times(data.get(0, np.random.default_rng(5))) for _ in range(2))
    assert data.skipped == 1 and first == again == times(data.get(1, np.random.default_rng(5)))
