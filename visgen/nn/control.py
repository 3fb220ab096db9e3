"""Spatial control by conditional decoding (ControlAR, arXiv:2410.02705, section 3.2).

A vision transformer turns a control map into one control token c_k per image token k, on the same grid. Before layers
0, L/3 and 2L/3 the slot that *predicts* token k gets alpha * M_j(c_k) added, so the sequence is no longer than without
control. Every map is free of biases, so the null control, zeros for c_k, adds exactly zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.checks import Depth, Positive, Range
from visgen.config import UserError
from visgen.layout import Grid
from visgen.nn.mlp import Projection

Resize = Literal["nearest", "bicubic"]
STRENGTHS = Range(0, 1000)  # far larger ones overflow half precision, and then every law is not-a-number
Strength = Annotated[float, STRENGTHS]


@dataclass(frozen=True)
class EncoderConfig:
    """The vision transformer that reads control maps.

    Attributes:
        name: a ViT of timm, such as `vit_small_patch14_dinov2.lvd142m`; empty: a small one of the next five fields.
        width, layers, heads: of the small one, whose patches are read by convolutions that see beyond them.
        patch: its patch in pixels; best the tokenizer's stride, for then maps need no resizing.
        side: cells in a row of its table of positions, which is resized to any other grid.
        weights: local file of the timm model's pretrained weights, read when a training starts; none: random ones.
    """

    name: str = ""
    width: Positive = 192
    layers: Depth = 4
    heads: Positive = 3
    patch: Positive = 16
    side: Positive = 16
    weights: Path | None = None


class Hint(NamedTuple):
    """A control map and how much it counts; several are mixed by the sum of what they add."""

    map: Tensor  # [B or 1, T, 3, H, W] in [-1, 1]
    strength: float | Sequence[float] = 1.0  # alpha, for all or for each of the J injections
    region: Tensor | None = None  # [B or 1, N], a weight per token: 1 where the map counts, 0 where it does not


def hints_of(batch: Mapping[str, Any]) -> list[Hint]:
    """The control of a batch: its `hints`, or its `map` at full strength, or none."""
    if "hints" in batch:
        return list(batch["hints"])
    return [Hint(batch["map"])] if "map" in batch else []


def places(injections: int, layers: int) -> list[int]:
    """The layers before which control is added: j L / J, evenly over the depth (ControlAR's j (L // 3) if 3 | L)."""
    return [j * layers // injections for j in range(injections)]


class ControlEncoder(nn.Module):
    """Maps [B, 3, H, W] in [-1, 1] -> features [B, h * w, C], one for each image token of an h x w grid.

    A map is resized to h x w patches, which for a 14-pixel patch and stride 16 is 14/16 of the image. There is no
    normalisation besides the range, as in ControlAR. Positions are resized without antialiasing, as in transformers.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.vit = _vit(config)
        self.patch: int = self.vit.patch_embed.patch_size[0]
        self.width: int = self.vit.embed_dim

    def forward(self, maps: Tensor, cells: tuple[int, int], resize: Resize = "bicubic") -> Tensor:
        from timm.layers import resample_abs_pos_embed

        vit = self.vit
        size = (cells[0] * self.patch, cells[1] * self.patch)
        x = resized(maps, size, resize).to(next(vit.patch_embed.parameters()).dtype)
        x = vit.patch_embed.proj(x).flatten(2).transpose(1, 2)  # [B, h w, C]
        extra = [t.expand(len(x), -1, -1) for t in (vit.cls_token, getattr(vit, "reg_token", None)) if t is not None]
        count = sum(t.shape[1] for t in extra)
        inside = 0 if vit.no_embed_class else count  # extra tokens that the table of positions holds as well
        table = resample_abs_pos_embed(vit.pos_embed, list(cells), num_prefix_tokens=inside, antialias=False)
        x = torch.cat([*extra, x], 1) + F.pad(table, (0, 0, count - inside, 0))
        x = vit.norm_pre(x)
        for block in vit.blocks:
            x = block(x)
        return vit.norm(x)[:, count:]

    def load_pretrained(self) -> None:
        """Reads `config.weights`, a file of timm's or of the model's authors.

        Raises:
            UserError: none such, or of another model.
        """
        path = self.config.weights
        if path is None:
            return
        if not self.config.name:
            raise UserError(
                "control.encoder.weights belong to a ViT of timm: set control.encoder.name too, or no weights"
            )
        if not path.is_file():
            raise UserError(
                f"control.encoder.weights {path} do not exist; pass a local file of timm's {self.config.name}"
            )
        import timm

        given = {"file": str(path), "hf_hub_id": None, "custom_load": False}
        try:
            made = timm.create_model(self.config.name, pretrained=True, num_classes=0, pretrained_cfg_overlay=given)
        except Exception as error:  # whatever a foreign file makes the loader raise
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"control.encoder.weights {path} are not {self.config.name}'s: {reason}") from None
        self.vit.load_state_dict(made.state_dict())


class ConditionalDecoding(nn.Module):
    """Control maps -> what is added to the transformer, [J, B, N, D].

    Args:
        config: the fields `encoder`, `injections` and `resize` of a control's config.
        width: D of the transformer.
        grid: of its tokens.
    """

    def __init__(self, config: Any, width: int, grid: Grid) -> None:
        super().__init__()
        self.grid, self.resize = grid, config.resize
        self.encoder = ControlEncoder(config.encoder)
        self.adapter = Projection(self.encoder.width, width)
        self.project = Projection(width, width)
        self.layers = nn.ModuleList(Projection(width, width) for _ in range(config.injections))
        # each keeps the variance of its input at every width (the reference draws N(0, 0.02), at a width of 1280 about
        # that); and a training begins at the plain model
        for module in (self.adapter, self.project, *self.layers):
            nn.init.kaiming_normal_(module.fc1.weight, nonlinearity="linear")
            nn.init.kaiming_normal_(module.fc2.weight, nonlinearity="relu")
        for layer in self.layers:
            nn.init.zeros_(layer.fc2.weight)  # type: ignore[union-attr, arg-type]

    def forward(self, hints: Sequence[Hint], drop: Tensor | None = None) -> Tensor:
        """The sum over the hints [J, B, N, D]; rows where drop [B] is true get the null control.

        Raises:
            UserError: a map that does not fit the grid.
        """
        total: Tensor | None = None
        for hint in hints:
            added = self.added(self.features(hint.map), drop)
            strength = torch.as_tensor(hint.strength, dtype=added.dtype, device=added.device)
            if strength.ndim and len(strength) != len(self.layers):
                raise UserError(
                    f"{len(strength)} control strengths for {len(self.layers)} injections; give one for each"
                )
            added = added * strength.view(-1, 1, 1, 1)
            if hint.region is not None:
                added = added * hint.region.to(added).unsqueeze(-1)
            total = added if total is None else total + added
        assert total is not None, "there is a hint"
        return total

    def features(self, maps: Tensor) -> Tensor:
        """Maps [B, T, 3, H, W] -> what the encoder makes of them, [B, N, C]."""
        check_map(maps, self.grid)
        frames, rows, columns = self.grid
        return self.encoder(maps.flatten(0, 1), (rows, columns), self.resize).unflatten(0, (-1, frames)).flatten(1, 2)

    def added(self, features: Tensor, drop: Tensor | None = None) -> Tensor:
        """Features [B, N, C] -> [J, B, N, D]: M_j(c_k) at token k."""
        tokens = self.adapter(features.to(self.adapter.fc1.weight.dtype))  # [B, N, D]
        if drop is not None:
            tokens = torch.where(drop[:, None, None], 0, tokens)
        tokens = self.project(tokens)
        return torch.stack([layer(tokens) for layer in self.layers])


def check_map(maps: Tensor, grid: Grid) -> None:
    """Raises `UserError` unless maps [B, T, 3, H, W] cover `grid` in square cells."""
    frames, rows, columns = grid
    shape = tuple(maps.shape)
    if len(shape) != 5 or shape[1:3] != (frames, 3) or shape[3] * columns != shape[4] * rows or shape[3] < rows:
        raise UserError(
            f"the control map is {list(shape)}, tokens of grid {grid} want [B, {frames}, 3, {rows} s, {columns} s], "
            "s being the tokenizer's stride; resize it to the image's size"
        )


def resized(maps: Tensor, size: tuple[int, int], resize: Resize) -> Tensor:
    """[B, 3, H, W] at another size: `nearest`, or `bicubic` with aligned corners (ControlAR, released code)."""
    if tuple(maps.shape[-2:]) == size:
        return maps
    if resize == "nearest":
        return F.interpolate(maps, size, mode="nearest")
    return F.interpolate(maps, size, mode="bicubic", align_corners=True)


def at_slots(control: Tensor, pos: Tensor | None, prefix: int, window: int) -> Tensor:
    """What control [J, B, N, D] adds to slots pos [B, W] (None: slots 0 to W - 1): [J, B, W, D].

    Slot P - 1 + k gets the k-th; the slots before P - 1, and the last one, which predicts no token, get zero.
    """
    count = control.shape[2]
    if pos is None:
        kept = min(count, max(window - prefix + 1, 0))
        return F.pad(control[:, :, :kept], (0, 0, prefix - 1, window - (prefix - 1) - kept))
    index = pos - (prefix - 1)
    taken = control.gather(
        2, index.clamp(0, count - 1)[None, :, :, None].expand(len(control), -1, -1, control.shape[-1])
    )
    return torch.where(((index >= 0) & (index < count)).unsqueeze(-1), taken, 0)


def _vit(config: EncoderConfig) -> Any:
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if not config.name:
        if config.width % config.heads:
            raise UserError(f"control.encoder.width {config.width} must be a multiple of its heads {config.heads}")
        vit = VisionTransformer(
            img_size=config.side * config.patch,
            patch_size=config.patch,
            embed_dim=config.width,
            depth=config.layers,
            num_heads=config.heads,
            num_classes=0,
            global_pool="",
            class_token=False,
            dynamic_img_size=True,
        )
        vit.patch_embed.proj = _stem(config.width, config.patch)
        return vit
    try:
        made = timm.create_model(config.name, pretrained=False, num_classes=0, dynamic_img_size=True)
    except (RuntimeError, TypeError) as error:  # no such name; a model that has no such option
        raise UserError(
            f"control.encoder.name {config.name} is no ViT of timm: {' '.join(str(error).split())}; "
            "timm.list_models('vit*') names them; leave it empty for the small one"
        ) from None
    if not isinstance(made, VisionTransformer) or made.pos_embed is None:
        raise UserError(f"control.encoder.name {config.name} is a {type(made).__name__}; name a plain ViT of timm")
    return made


def _stem(width: int, patch: int) -> nn.Sequential:
    """[B, 3, H, W] -> [B, width, H / patch, W / patch] by 3 x 3 convolutions (Xiao et al. 2021, arXiv:2106.14881).

    An edge says little by itself, and attention alone learns late which patches are near.
    """
    layers: list[nn.Module] = []
    channels = 3
    while patch > 1:
        stride = 2 if patch % 2 == 0 else patch
        patch //= stride
        out = width // 2 if patch > 1 else width
        layers += [nn.Conv2d(channels, out, stride + 1 - stride % 2, stride, padding=int(stride == 2)), nn.GELU()]
        channels = out
    for _ in range(2):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.GELU()]
        channels = width
    layers.append(nn.Conv2d(width, width, 1))
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    return nn.Sequential(*layers)
