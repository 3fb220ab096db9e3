"""Clips in and out: frames of a video file by PyAV, of an animation by Pillow; MP4 and GIF.

PyAV is an extra (`pip install 'visgen[video]'`) and imported where it is used.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Generator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

from visgen.config import UserError
from visgen.data._images import center_crop, to_pixels
from visgen.files import publishing
from visgen.image_files import decoding, opened, require_regular, require_resizable, to_rgb, upright

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
    taken: list[Tensor] = []
    with _reading(path), closing(pictures(path)) as shown:
        for picture in itertools.islice(shown, wanted.start, wanted.stop, stride):
            require_resizable(picture.size, size)
            taken.append(to_pixels(center_crop(picture, size)))
    if len(taken) < frames:
        with _reading(path):
            found = sum(1 for _ in pictures(path))  # its header may say more
        raise too_short(path, found, frames, stride, start)
    return torch.cat(taken)


def too_short(path: Path, found: int, frames: int, stride: int, start: int = 0) -> UserError:
    """The error for a clip that is shorter than what is asked of it."""
    needed = start + (frames - 1) * stride + 1
    fitting = (found - start - 1) // (frames - 1) if frames > 1 else 1
    remedy = f"a stride of {fitting} fits" if fitting > 0 else f"ask for at most {max(found - start, 1)} frames"
    return UserError(
        f"{path} has {found} frames; {frames} at a stride of {stride} need {needed}: {remedy}, or leave the clip out"
    )


def _reading(path: Path) -> AbstractContextManager[None]:
    """While the frames of a file are read: whatever is wrong with it becomes `Unreadable`."""
    if not path.exists():
        raise UserError(f"{path} does not exist; pass the path of a video")
    return decoding(path, "video", "convert it to MP4, or leave it out")


def pictures(path: Path) -> Generator[Image.Image]:
    """The frames of a file, RGB, as they come and as a player shows them. Raises anything for a damaged file."""
    if path.suffix.lower() in ANIMATION:
        with opened(path) as animation:
            for frame in ImageSequence.Iterator(animation):
                yield to_rgb(upright(frame.copy(), path))
        return
    require_regular(path)
    with av().open(str(path)) as container:
        for frame in container.decode(video=0):
            yield _as_shown(frame, container.streams.video[0])


def _as_shown(frame: Any, stream: Any) -> Image.Image:
    """A decoded frame with square pixels, turned and mirrored as the file says: phones store how they were held."""
    image: Image.Image = frame.to_image()
    ratio = float(stream.sample_aspect_ratio or 1)  # width to height of a pixel
    width, height = round(image.width * max(ratio, 1)), round(image.height / min(ratio, 1))
    if (width, height) != image.size:
        require_resizable((width, height), min(width, height))
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:  # files of older programs have the angle, clockwise, as text
        told = {name.lower(): text for name, text in stream.metadata.items()}.get("rotate", "0")
        return image.rotate(-90 * round(float(told) / 90), expand=True)
    a, b, _, c, d = struct.unpack("9i", bytes(matrix))[:5]  # (x, y) goes to (a x + c y, b x + d y)
    if max(abs(a), abs(d)) < max(abs(b), abs(c)):
        image, a, d = image.transpose(Image.Transpose.TRANSPOSE), c, b
    image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if a < 0 else image
    return image.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if d < 0 else image


def count(path: Path) -> int:
    """Number of frames of a file, decoded where its header does not tell.

    Raises:
        UserError: missing or unreadable.
    """
    with _reading(path):
        if path.suffix.lower() not in ANIMATION:
            require_regular(path)
            with av().open(str(path)) as container:
                if container.streams.video and container.streams.video[0].frames:
                    return int(container.streams.video[0].frames)
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
