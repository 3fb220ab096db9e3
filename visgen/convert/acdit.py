"""ACDiT's released weights (arXiv 2412.07720): ACDiT-{XL,H}-{img,vid}.pt -> a run directory of ours.

`python -m visgen.convert acdit ACDiT-XL-img.pt runs/acdit_xl --tokenizer runs/sd_vae`. The file holds `model` (and, of
a training run, `ema`) beside the arguments of the training, which say image size, patch and block. The rotation of the
released code is kept (`rope: acdit_legacy`), for its weights need it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from visgen.checkpoint import load_tokenizer
from visgen.config import UserError, plugin_config
from visgen.convert import Precision, audit
from visgen.convert._files import check_finite, read_weights, require_new, sha256_of, tensors_of, write_run
from visgen.layout import Grid
from visgen.model import Model, ModelConfig

State = Mapping[str, Tensor]
HEAD_DIM = 64  # of all published sizes
ARGUMENTS = ("vae_latent_size", "patch_size", "block_size", "ar_len", "num_frames", "image_size", "vae_patch_pixels")


@dataclass(frozen=True)
class Config:
    source: str = ""  # a .pt file
    out: str = ""  # run directory to write: new or empty
    tokenizer: str | None = None  # a converted autoencoder's directory (`convert kl`), to keep beside it
    weights: Literal["model", "ema"] = "model"  # which of the file's; the samplers of the authors read model
    dtype: Precision = "fp32"  # of the converted weights


def convert(config: Config) -> str:
    """Reads, checks and writes the weights; `out` is untouched unless all of them fit."""
    path, out = Path(config.source), Path(config.out)
    if not path.is_file():
        raise UserError(f"{config.source or 'IN'} does not exist; pass a .pt file")
    require_new(out)
    content = read_weights(path)
    arguments = content.get("args")
    if not isinstance(content.get(config.weights), dict) or arguments is None:
        raise UserError(
            f"{path} holds {', '.join(list(content)[:6])}; of ACDiT it must hold `{config.weights}` and `args`"
        )
    found = tensors_of(content[config.weights])
    grid, block = _shape(vars(arguments), str(path))
    with torch.device("meta"):
        model = Model(model_config(found, grid, block, str(path)))
    fill(model, found, str(path))
    beside = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    if beside is not None:
        model.check_tokenizer(beside, f"--tokenizer {config.tokenizer}")
    check_finite(model, config.dtype)
    facts = {"step": 0, "origin": "acdit", "source": path.name, "source_sha256": sha256_of(path)}
    write_run(out, model, facts, config.dtype, beside)
    count, backbone = sum(p.numel() for p in model.parameters()), model.config.backbone
    kept = "; tokenizer beside it" if beside else "; sampling needs --tokenizer"
    return (
        f"{out}: ACDiT, {backbone.layers} layers, width {backbone.width}, grid {grid}, block {block}, "
        f"{model.config.channels} channels a token, {count:,} parameters, {config.dtype}{kept}"
    )


def _shape(arguments: Mapping[str, Any], source: str) -> tuple[Grid, Grid]:
    """Grid and block of the training's arguments."""
    missing = [name for name in ARGUMENTS if not isinstance(arguments.get(name), int)]
    if missing:
        raise UserError(f"{source}: its args do not say {', '.join(missing)}; it is no file of ACDiT")
    side = arguments["image_size"] // (arguments["vae_patch_pixels"] * arguments["patch_size"])
    grid = (arguments["num_frames"], side, side)
    return grid, block_of(grid, arguments["block_size"], arguments["ar_len"], source)


def block_of(grid: Grid, size: int, count: int, source: str) -> Grid:
    """The published blocks: squares of an image, whole frames of a clip."""
    frames, height, width = grid
    side = round(size**0.5)
    block = (1, side, side) if frames == 1 else (size // (height * width), height, width)
    if block[0] * block[1] * block[2] != size or size * count != frames * height * width:
        raise UserError(f"{source}: {count} blocks of {size} tokens do not make up a grid of {grid}")
    return block


def model_config(found: State, grid: Grid, block: Grid, source: str) -> ModelConfig:
    """What the tensors say of a model."""
    for name in ("x_embedder.weight", "y_embedder.embedding_table.weight"):
        if name not in found or found[name].ndim != 2:
            audit({k: found[k] for k in (name,) if k in found}, {name: (1, 1)}, source)
    width, channels = found["x_embedder.weight"].shape
    if width % HEAD_DIM:
        raise UserError(f"{source}: width {width} is no multiple of {HEAD_DIM}, the head dimension of all sizes")
    backbone = plugin_config(
        "visgen.backbones",
        "acdit",
        block=block,
        layers=1 + max((int(m[1]) for k in found if (m := re.match(r"blocks\.(\d+)\.", k))), default=0),
        heads=width // HEAD_DIM,
        width=width,
        rope="acdit_legacy",
    )
    classes = found["y_embedder.embedding_table.weight"].shape[0] - 1  # the last row is the null class
    return ModelConfig(
        grid=grid,
        channels=channels,
        backbone=backbone,
        condition=plugin_config("visgen.conditions", "label", classes=classes),
        head=plugin_config("visgen.heads", "denoiser"),
    )


def key(name: str) -> str:
    """Our name of a weight in ACDiT's."""
    for ours, theirs in (
        (r"^condition\.", "y_embedder."),
        (r"^head\.output\.", "final_layer.linear."),
        (r"^backbone\.embed\.", "x_embedder."),
        (r"^backbone\.time\.", "t_embedder.mlp."),
        (r"^backbone\.norm\.", "final_layer.norm_final."),
        (r"^backbone\.modulation\.", "final_layer.adaLN_modulation.1."),
        (r"^backbone\.layers\.", "blocks."),
        (r"\.attention_norm\.", ".norm1."),
        (r"\.ffn_norm\.", ".norm2."),
        (r"\.attention\.", ".attn."),
        (r"\.query_norm\.", ".q_norm."),
        (r"\.key_norm\.", ".k_norm."),
        (r"\.out\.", ".proj."),
        (r"\.ffn\.0\.", ".mlp.fc1."),
        (r"\.ffn\.2\.", ".mlp.fc2."),
        (r"(blocks\.\d+)\.modulation\.", r"\1.adaLN_modulation.1."),
    ):
        name = re.sub(ours, theirs, name)
    return name


def fill(model: Model, found: State, source: str) -> None:
    """Puts ACDiT's tensors into our model without a copy, after a strict audit under their names."""
    names = {name: key(name) for name in model.state_dict()}
    ours = model.state_dict()
    audit(found, {theirs: ours[name].shape for name, theirs in names.items()}, source)
    model.load_state_dict({name: found[theirs] for name, theirs in names.items()}, assign=True)
    model.eval().requires_grad_(False)


def replay(config: Mapping[str, Any], state: State, inputs: State, wanted: Collection[str]) -> dict[str, Tensor]:
    """Outputs of recorded vectors of origin `acdit`: the training forward, and block by block with a cache."""
    side = round((config["spatial_len"]) ** 0.5)
    grid = (config["temporal_len"], side, side)
    block = block_of(grid, config["block_size"], config["ar_len"], "state")
    model = Model(model_config(state, grid, block, "state"))
    fill(model, state, "state")
    clean, noised, times = (inputs[name].float() for name in ("clean", "noised", "t"))  # [B, blocks, W, C]
    cond = model.condition({"label": inputs["labels"]})
    streams = torch.cat([clean[:, :-1].flatten(1, 2), noised.flatten(1, 2)], 1)
    h = model.backbone(streams, None, cond=cond, level=times)
    made = {"prediction": _predicted(model, h).view_as(noised)}
    make: Any = model.backbone.make_cache
    cache = make(len(clean), torch.device("cpu"), torch.float32, blocks=clean.shape[1])
    parts = []
    size = clean.shape[2]
    for i in range(clean.shape[1]):
        pos = torch.arange(i * size, (i + 1) * size).unsqueeze(0)
        rows = []
        for row, time in enumerate(inputs["inference_t"]):  # a window has one time; the recorded images have their own
            h = model.backbone(noised[:, i], pos, cond=cond, level=time.float().view(1), cache=cache)
            rows.append(_predicted(model, h)[row])
        parts.append(torch.stack(rows))
        model.backbone(clean[:, i], pos, cond=cond, level=torch.tensor([-1.0]), cache=cache)
    return made | {"inference_prediction": torch.stack(parts, 1)}


def _predicted(model: Model, h: Tensor) -> Tensor:
    return model.head.dist(h.unsqueeze(0), h.new_ones(1, *h.shape[:2]))
