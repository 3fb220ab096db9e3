"""Features of clips: I3D's, whose Fréchet distance is FVD, and an offline one of frame features and their differences.

FVD (Unterthiner et al. 2018, arXiv 1812.01717) in the form of StyleGAN-V (Skorokhodov et al. 2022, arXiv 2112.14683):
I3D as a TorchScript file that the user gives, called on values 0 .. 255 [B, 3, T, H, W], which it rescales and resizes
itself; 400 logits. `fd_clips` needs no file beyond that of a frame extractor. Its numbers are no FVD: they have a name
of their own, and compare with nothing but themselves.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.metrics.features import FeatureExtractor, exact_float32

WIDTH = 64  # of a frame's projected features
SHORTEST = 10  # frames that I3D needs
I3D = "i3d_torchscript.pt of the StyleGAN-V repository"


class ClipExtractor(ABC):
    """A fixed function of uint8 clips, with the attributes of a `FeatureExtractor`."""

    id: str
    dims: dict[str, int]
    resize: str
    fingerprint: str
    device: torch.device
    batch: int

    def __call__(self, clips: Tensor) -> dict[str, Tensor]:
        """uint8 clips [B, T, 3, H, W] -> {"pool": float32 [B, D]} on `device`."""
        if clips.dtype != torch.uint8 or clips.ndim != 5:
            raise UserError(f"extractor {self.id}: {clips.dtype} of shape {tuple(clips.shape)} is no uint8 clip")
        with exact_float32():
            return {"pool": torch.cat([self.features(part.to(self.device)) for part in clips.split(self.batch)])}

    @abstractmethod
    def features(self, clips: Tensor) -> Tensor:
        """At most `batch` clips on `device` -> [B, D]."""


class I3DFeatures(ClipExtractor):
    """The 400 logits of a user's I3D file.

    Raises:
        UserError: no file, no TorchScript, or outputs of another shape.
    """

    def __init__(self, weights: str | Path | None, device: torch.device | str, batch: int) -> None:
        if weights is None or not Path(weights).is_file():
            lack = "needs an I3D file" if weights is None else f": I3D file {weights} does not exist"
            raise UserError(
                f"--extractor fvd {lack}; pass --weights with {I3D}, or --extractor fd_clips, which needs none"
            )
        path = Path(weights)
        try:
            self.network = torch.jit.load(str(path), map_location=device).eval()
        except (RuntimeError, ValueError) as error:
            reason = (str(error).splitlines() or [""])[0][:120]
            raise UserError(f"extractor fvd: {path} is no TorchScript file ({reason}); pass {I3D}") from None
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self.id, self.resize, self.fingerprint = "fvd", "i3d-224", digest[:16]
        self.device, self.batch = torch.device(device), batch
        self.dims = {"pool": 400}
        probe = self(torch.zeros(1, SHORTEST, 3, 64, 64, dtype=torch.uint8))["pool"]
        if probe.ndim != 2:
            raise UserError(f"extractor fvd: {path} returns {tuple(probe.shape)}, not [B, D]; pass {I3D}")
        self.dims = {"pool": probe.shape[1]}

    def features(self, clips: Tensor) -> Tensor:
        if clips.shape[1] < SHORTEST:
            raise UserError(
                f"extractor fvd: clips have {clips.shape[1]} frames, I3D needs {SHORTEST}; score longer ones"
            )
        values = clips.transpose(1, 2).float()  # [B, 3, T, H, W]
        return self.network(values, rescale=True, resize=True, return_features=True).float()


class FrameDifferences(ClipExtractor):
    """[mean z_t | mean |z_t+1 - z_t| | mean |z_t+2 - 2 z_t+1 + z_t|], with z a frame's features under one fixed
    orthonormal projection: what is seen, how fast it changes and how evenly. A frozen clip has no second part, a
    shuffled one too much of both."""

    def __init__(self, frames: FeatureExtractor) -> None:
        self.frames = frames
        width = frames.dims["pool"]
        generator = torch.Generator().manual_seed(0)
        basis = torch.linalg.qr(torch.randn(width, min(WIDTH, width), generator=generator, dtype=torch.float64))[0]
        self.basis = basis.float().to(frames.device)
        self.id, self.resize = f"fd_clips-{frames.id.removeprefix('fd_')}", frames.resize
        self.fingerprint = hashlib.sha256(f"{frames.fingerprint} {basis.shape[1]} v1".encode()).hexdigest()[:16]
        self.device, self.batch = frames.device, 64
        self.dims = {"pool": 3 * basis.shape[1]}

    def features(self, clips: Tensor) -> Tensor:
        if clips.shape[1] < 3:
            raise UserError(f"extractor {self.id}: clips have {clips.shape[1]} frames, it needs 3; score longer ones")
        z = (self.frames(clips)["pool"] @ self.basis).unflatten(0, clips.shape[:2])  # [B, T, W]
        moved = z.diff(dim=1)
        return torch.cat([z.mean(1), moved.abs().mean(1), moved.diff(dim=1).abs().mean(1)], 1)
