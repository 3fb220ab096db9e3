"""ControlAR's published weights (arXiv:2410.02705): LlamaGen's text-to-image GPT, DINOv2 and conditional decoding.

`python -m visgen.convert controlar canny_MR.safetensors runs/canny --tokenizer vq_ds16_t2i.pt`, then sample from it
with `--prompt` and `--control.image`. The encoder's tensors have the names of transformers 4 (5 renamed those of the
attention: both are read, and nothing is skipped in silence). What no tensor shows is recorded in the config: the kind
of control, its polarity and resizing, from the file's name or `--control`; the grid, from the size of an unused table
(1024 or 2304 cells). Files of 2304 cells were trained at many resolutions with the positions of rows of 48 tokens,
whatever the width.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen.config import UserError, plugin_config
from visgen.convert import Precision, audit
from visgen.convert._files import check_finite, sha256_of, write_run
from visgen.convert.llamagen import STRIDE, State, dropped, gpt_config, gpt_key, read, tokenizer_for, weights_file
from visgen.model import Model, ModelConfig
from visgen.nn.control import EncoderConfig
from visgen.tokenizers import Tokenizer

Kind = Literal["canny", "hed", "lineart", "depth", "seg", "edge"]
ENCODERS = {384: "vit_small_patch14_dinov2.lvd142m", 768: "vit_base_patch14_dinov2.lvd142m"}  # by width
OURS = "control.encoder.vit."
DEAD = ("condition_embeddings.weight", "condition_norm.weight")  # never used by the reference
TABLE = "condition_mlp.uncond_embedding"  # zeros, one row a cell of the grid
MANY = 48 * 48  # rows of that table of weights of many resolutions
SIDE = 512  # pixels at which all weights work


@dataclass(frozen=True)
class Config:
    source: str = ""  # a .safetensors file of ControlAR
    out: str = ""  # run directory to write: new or empty
    tokenizer: str | None = None  # LlamaGen's vq_ds16_t2i.pt, or a converted one's directory, to keep beside it
    control: Kind | None = None  # where the file's name does not tell it; edge: canny, hed and lineart in one
    resolution: int = SIDE  # side in pixels; other sizes than 512 need weights of many resolutions (MR)
    heads: int | None = None  # attention heads, which the tensors do not show; default: as in the published sizes
    dtype: Precision = "fp32"  # of the converted weights; a tokenizer kept beside them stays fp32


def convert(config: Config) -> str:
    """Reads, checks and writes the weights; `out` is untouched unless all of them fit."""
    path = weights_file(config.source)
    kind, found = read(path)
    if kind != "gpt" or "adapter_mlp.fc1.weight" not in found:
        raise UserError(f"{path} holds no control (adapter_mlp); convert LlamaGen's own files with origin llamagen")
    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT {out} exists and is not empty; choose a new directory")
    asked = kind_of_file(path.name, config.control)
    cells = _cells(found, str(path))
    tokens, rest = divmod(config.resolution, STRIDE)
    if rest or not 0 < tokens**2 <= cells or (cells != MANY and tokens**2 != cells):
        sizes = f"up to {48 * STRIDE}" if cells == MANY else f"of {round(cells**0.5) * STRIDE}"
        raise UserError(
            f"--resolution {config.resolution}: {path} was made for images {sizes} px, in steps of {STRIDE}"
        )
    beside: Tokenizer | None = None
    if config.tokenizer is not None:
        beside = tokenizer_for(config.tokenizer, config.resolution)
    settings = model_config(found, asked, (1, tokens, tokens), config.heads, str(path))
    with torch.device("meta"):
        module = Model(settings)
    fill(module, found, str(path))
    if beside is not None:
        module.check_tokenizer(beside, f"--tokenizer {config.tokenizer}")
    check_finite(module, config.dtype)
    facts: dict[str, Any] = {"step": 0, "origin": "controlar", "source": path.name, "source_sha256": sha256_of(path)}
    facts |= {"resolution": config.resolution, "prefix": module.condition.prefix, "cells": cells}
    write_run(out, module, facts, config.dtype, beside)
    count = sum(p.numel() for p in module.parameters())
    kept = "; tokenizer beside it" if beside else "; sampling needs --tokenizer"
    many = ", positions of 48 columns" if settings.backbone.rope_columns else ""
    return (
        f"{out}: {asked} control by {settings.control.encoder.name}, {settings.backbone.layers} layers, width "
        f"{settings.backbone.width}, {config.resolution} px = {tokens} x {tokens} tokens{many}, {count:,} parameters, "
        f"{config.dtype}{kept}"
    )


def kind_of_file(name: str, said: Kind | None) -> Kind:
    """The control that the option or the published file's name tells."""
    kinds: tuple[Kind, ...] = ("canny", "hed", "lineart", "depth", "seg", "edge")
    named = [k for k in kinds if re.search(rf"(?<![a-z]){k}", name.lower())]
    if said is not None:
        if named and named != [said]:
            raise UserError(f"--control {said} contradicts the file's name {name}, which says {', '.join(named)}")
        return said
    if len(named) != 1:
        raise UserError(f"{name} does not tell its kind of control; pass --control, one of {', '.join(kinds)}")
    return named[0]


def control_config(kind: Kind, encoder: EncoderConfig) -> Any:
    """How maps of a published checkpoint look and are resized.

    `edge_base` was trained on lines of several kinds, all light on dark: line drawings are inverted for it, and its
    maps are resized bicubically, canny's too (inferred from the released demo).
    """

    def one(name: str, **values: Any) -> Any:
        return plugin_config("visgen.controls", name, encoder=encoder, **values)

    if kind == "edge":
        lines = one("hed", beside=one("lineart", polarity="light_on_dark"))
        return one("canny", resize="bicubic", beside=lines)
    return one(kind, **({"norm": "max"} if kind == "depth" else {}))


def model_config(found: State, kind: Kind, grid: tuple[int, int, int], heads: int | None, source: str) -> ModelConfig:
    """What the tensors and the kind of control say of the model."""
    base = gpt_config(found, grid, heads, source)
    width = found["adapter_mlp.fc1.weight"].shape[-1]
    if width not in ENCODERS:
        raise UserError(f"{source}: its encoder is {width} wide; known are {', '.join(map(str, ENCODERS))} (DINOv2)")
    if _cells(found, source) == MANY:
        base = dataclasses.replace(base, backbone=dataclasses.replace(base.backbone, rope_columns=48))
    return dataclasses.replace(base, control=control_config(kind, EncoderConfig(ENCODERS[width])))


def _cells(found: State, source: str) -> int:
    """The rows of the table of null controls, which must be zeros."""
    table = found.get(TABLE)
    if table is None or table.ndim != 2 or table.any():
        what = "is missing" if table is None else "is not a table of zeros"
        raise UserError(f"{source}: {TABLE} {what}, so it is no released ControlAR file; fetch it again")
    return len(table)


# ------------------------------------------------------------------------------------------------------ key maps


def control_key(name: str) -> str:
    """Our name of a weight in ControlAR's, the encoder's apart."""
    for ours, theirs in (
        ("control.adapter.", "adapter_mlp."),
        ("control.project.", "condition_mlp.cap_proj."),
        ("control.layers.", "condition_layers."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return gpt_key(name) or name


def encoder_state(found: State, prefix: str, source: str) -> dict[str, Tensor]:
    """Tensors of transformers' `Dinov2Model` under the names of timm's ViT, queries, keys and values packed.

    Raises:
        UserError: a layer lacks one of them, or there is a tensor that no name of ours has.
    """
    out: dict[str, Tensor] = {}
    packed: dict[str, dict[str, Tensor]] = {}
    simple = {
        "embeddings.cls_token": "cls_token",
        "embeddings.position_embeddings": "pos_embed",
        "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
        "layernorm.": "norm.",
    }
    inside = {
        "attention.output.dense.": "attn.proj.",
        "attention.o_proj.": "attn.proj.",
        "layer_scale1.lambda1": "ls1.gamma",
        "layer_scale2.lambda1": "ls2.gamma",
    }
    for key, tensor in found.items():
        name = key.removeprefix(prefix)
        if not key.startswith(prefix) or name == "embeddings.mask_token":
            continue
        layer = re.match(r"encoder\.layer\.(\d+)\.(.+)", name)
        if layer is None:
            theirs = next((t for t in simple if name.startswith(t)), None)
            out[name if theirs is None else simple[theirs] + name.removeprefix(theirs)] = tensor
            continue
        block, rest = f"blocks.{layer[1]}.", layer[2]
        one = re.fullmatch(r"attention\.(?:attention\.(query|key|value)|([qkv])_proj)\.(weight|bias)", rest)
        if one is not None:
            packed.setdefault(f"{block}attn.qkv.{one[3]}", {})[(one[1] or one[2])[0]] = tensor
            continue
        theirs = next((t for t in inside if rest.startswith(t)), None)
        out[block + (rest if theirs is None else inside[theirs] + rest.removeprefix(theirs))] = tensor
    for name, parts in packed.items():
        if set(parts) != set("qkv"):
            raise UserError(f"{source}: {prefix}* has {', '.join(sorted(parts))} of {name} alone; fetch the file again")
        out[name] = torch.cat([parts[p] for p in "qkv"])
    return out


def fill(module: Model, found: State, source: str) -> None:
    """Puts ControlAR's tensors into our module without a copy, after a strict audit under their names."""
    adapter = "adapter.model."
    encoder = {OURS + k: v for k, v in encoder_state(found, adapter, source).items()}
    used = {k: v for k, v in found.items() if not (k.startswith(adapter) or dropped(k) or k in DEAD or k == TABLE)}
    ours = module.state_dict()
    names = {name: name if name.startswith(OURS) else control_key(name) for name in ours}
    audit(used | encoder, {theirs: ours[name].shape for name, theirs in names.items()}, source)
    module.load_state_dict({name: (used | encoder)[theirs] for name, theirs in names.items()}, assign=True)
    module.eval().requires_grad_(False)


# ------------------------------------------------------------------------------------------- replay of recorded vectors


def replay(config: Mapping[str, Any], state: State, inputs: State, wanted: Collection[str]) -> dict[str, Tensor]:
    """Outputs of recorded vectors of origin `controlar`: logits under given features of the encoder."""
    side = int(config["block_size"] ** 0.5)
    settings = model_config(state, config["condition_type"], (1, side, side), config["n_head"], "state")
    width = state["adapter_mlp.fc1.weight"].shape[-1]
    stand_in = dataclasses.replace(settings.control, encoder=EncoderConfig(width=width, layers=1, heads=1, side=1))
    model = Model(dataclasses.replace(settings, control=stand_in))
    assert model.control is not None
    model.control.encoder = nn.Identity()  # type: ignore[assignment]  # the vectors begin behind it
    fill(model, state, "state")
    batch = {"text": inputs["text"], "text_mask": inputs["text_mask"].bool()}
    added = model.control.added(inputs["control_features"])
    h = model.backbone(inputs["tokens"][:, :-1], None, cond=model.condition(batch), control=added)
    h = h[:, model.condition.prefix - 1 :]
    return {"logits": model.head.dist(h.unsqueeze(0), h.new_ones(1, *h.shape[:2])).logits}
