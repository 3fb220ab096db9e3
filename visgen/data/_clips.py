"""Clips in and out: frames of a video file by PyAV, of an animation by Pillow; MP4 and GIF.

PyAV is an extra (`pip install 'visgen[video]'`) and imported where it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from visgen.config import UserError
from visgen.data._images import UNREADABLE, center_crop, to_pixels, to_rgb
from visgen.files import publishing

VIDEO = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg"})
ANIMATION = frozenset({".gif", ".webp", ".apng", ".png"})
REMEDY = "make room, what is there already stays"


def av() -> Any:
    """PyAV.

    Raises:
        UserError: it is not installed.
    """
    try:
        import av as found
    except ImportError:
        raise UserError("videos need PyAV, which is not installed; `pip install 'visgen[video]'`") from None
    return found


def read_clip(path: Path, size: int, frames: int, stride: int = 1, start: int = 0) -> Tensor:
    """uint8 [frames, 3, size, size]: every `stride`-th frame from `start` on, each by the centre crop of images.

    Raises:
        UserError: missing, unreadable, or shorter than that, whatever its header says.
    """
    wanted = range(start, start + (frames - 1) * stride + 1, stride)
    taken = [center_crop(f, size) for f in itertools.islice(pictures(path), wanted.start, wanted.stop, stride)]
    if len(taken) < frames:
        raise too_short(path, sum(1 for _ in pictures(path)), frames, stride, start)  # its header may say more
    return torch.cat([to_pixels(picture) for picture in taken])


def too_short(path: Path, found: int, frames: int, stride: int, start: int = 0) -> UserError:
    """The error for a clip that is shorter than what is asked of it."""
    needed = start + (frames - 1) * stride + 1
    fitting = (found - start - 1) // (frames - 1) if frames > 1 else 1
    remedy = f"a stride of {fitting} fits" if fitting > 0 else f"ask for at most {max(found - start, 1)} frames"
    return UserError(
        f"{path} has {found} frames; {frames} at a stride of {stride} need {needed}: {remedy}, or leave the clip out"
    )


def pictures(path: Path) -> Iterator[Image.Image]:
    """The frames of a file, RGB, as they come.

    Raises:
        UserError: missing or unreadable.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; pass the path of a video")
    if path.suffix.lower() in ANIMATION:
        try:
            with Image.open(path) as animation:
                for frame in ImageSequence.Iterator(animation):
                    yield to_rgb(frame.copy())
        except UNREADABLE as error:
            raise unreadable(path, error) from None
        return
    library = av()
    try:
        with library.open(str(path)) as container:
            for frame in container.decode(video=0):
                yield frame.to_image()
    except (library.error.FFmpegError, IndexError, OSError) as error:  # IndexError: no picture in it
        raise unreadable(path, error) from None


def unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a readable video ({' '.join(str(error).split())}); repair it, or leave it out")


def count(path: Path) -> int:
    """Number of frames of a file, decoded where its header does not tell."""
    if path.is_file() and path.suffix.lower() not in ANIMATION:
        library = av()
        try:
            with library.open(str(path)) as container:
                if container.streams.video and container.streams.video[0].frames:
                    return int(container.streams.video[0].frames)
        except (library.error.FFmpegError, OSError) as error:
            raise unreadable(path, error) from None
    return sum(1 for _ in pictures(path))


def write_mp4(path: Path, clip: Tensor, fps: int, comment: str = "") -> None:
    """uint8 [T, 3, H, W] -> H.264; small pictures are enlarged, and the comment is kept.

    Raises:
        UserError: PyAV is missing, or the file cannot be written.
    """
    library, frames = av(), _large(clip)
    with publishing(path, REMEDY) as unfinished:
        try:
            _encode(library, unfinished, frames, fps, comment)
        except library.error.FFmpegError as error:
            raise OSError(str(error)) from error


def _encode(library: Any, path: Path, frames: np.ndarray, fps: int, comment: str) -> None:
    with library.open(str(path), "w", format="mp4", options={"movflags": "use_metadata_tags"}) as container:
        container.metadata["comment"] = comment
        stream = container.add_stream("libx264", rate=fps, options={"crf": "12"})
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            for packet in stream.encode(library.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def write_gif(path: Path, clip: Tensor, fps: int, comment: str = "") -> None:
    """uint8 [T, 3, H, W] -> an endless GIF; small pictures are enlarged, and the comment is kept."""
    first, *rest = (Image.fromarray(frame) for frame in _large(clip))
    several: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": round(1000 / fps), "loop": 0}
    with publishing(path, REMEDY) as unfinished:
        first.save(unfinished, "GIF", comment=comment.encode(), **several)


def comment_of(path: Path) -> str:
    """Return the comment of a file that `write_mp4` or `write_gif` wrote."""
    if path.suffix == ".mp4":
        with av().open(str(path)) as container:
            return str(container.metadata["comment"])
    with Image.open(path) as animation:
        return bytes(animation.info["comment"]).decode()


def _large(clip: Tensor) -> np.ndarray:
    """[T, H, W, 3], enlarged to about 128 px, its sides even as video wants them."""
    factor = max(1, 128 // clip.shape[-1])
    clip = clip.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    height, width = (side // 2 * 2 for side in clip.shape[-2:])
    return clip[..., :height, :width].permute(0, 2, 3, 1).contiguous().numpy()
