"""LlamaGen's published weights (arXiv:2406.06525): GPT (c2i, t2i) and VQ files -> a run directory of ours.

`python -m visgen.convert llamagen c2i_B_256.pt runs/llamagen_b --tokenizer vq_ds16_c2i.pt`, then sample from it. All
published wrappings are read: `{"model"}`, `"ema"`, `"module"`, `"state_dict"`, bare, FSDP's `consolidated.pth`, and
safetensors. Kind, sizes, vocabulary and prefix come from the tensors; the resolution is not in them, so it comes from
the file's name or `--resolution`: the same weights load into any resolution, and are wrong in all but one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visgen import checkpoint
from visgen.config import UserError, build, plugin_config
from visgen.convert import Precision, audit
from visgen.convert._files import check_finite, read_weights, require_new, sha256_of, tensors_of, write_run
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model, ModelConfig
from visgen.tokenizers import Tokenizer
from visgen.tokenizers.conv_vq import Config as ConvVQConfig
from visgen.tokenizers.conv_vq import ConvVQ

RESOLUTIONS = (256, 384, 512)
WRAPPERS = {"gpt": ("model", "module", "state_dict"), "vq": ("ema", "model", "module", "state_dict")}  # best first
HEAD_DIMS = {3200: 100, 4096: 128}  # by width: the 3B and 7B sizes; 64 elsewhere
STRIDE = 16  # of the tokenizer that every published GPT was trained with
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Config:
    source: str = ""  # a .pt, .pth or .safetensors file, or a directory that holds consolidated.pth
    out: str = ""  # run directory to write: new or empty
    tokenizer: str | None = None  # VQ file, or a converted one's directory, to keep beside a GPT
    resolution: int | None = None  # side in pixels; needed where the file's name does not tell it
    heads: int | None = None  # attention heads, which the tensors do not show; default: as in the published sizes
    dtype: Precision = "fp32"  # of the converted weights; a tokenizer kept beside a GPT stays fp32


def convert(config: Config) -> str:
    """Reads, checks and writes the weights; `out` is untouched unless all of them fit."""
    path = weights_file(config.source)
    kind, found = read(path)
    out = Path(config.out)
    require_new(out)
    said = resolution(path.name, config.resolution)
    beside: Tokenizer | None = None
    module: nn.Module
    facts: dict[str, Any]
    if kind == "vq":
        if config.tokenizer is not None:
            raise UserError(f"{path} is a tokenizer itself; --tokenizer goes with a GPT file")
        if config.heads is not None:
            raise UserError(f"{path} is a tokenizer, which has no --heads to choose")
        size = said or ConvVQConfig().image_size  # fully convolutional: any size can be named
        module = vq(found, size, str(path))
        _check_stride(path.name, module.stride)
        facts = {"resolution": size}
        text = f"tokenizer of {module.vocab:,} codes, stride {module.stride}, {size} px"
    else:
        if said is None:
            raise UserError(
                f"{path}: its resolution is neither in the tensors nor in the name; "
                f"pass --resolution, one of {', '.join(map(str, RESOLUTIONS))} for published files"
            )
        beside = None if config.tokenizer is None else tokenizer_for(config.tokenizer, said)
        grid = (1, said // STRIDE, said // STRIDE) if beside is None else beside.grid
        if beside is None and said % STRIDE:
            raise UserError(f"resolution {said} is no multiple of {STRIDE}; pass the tokenizer with --tokenizer")
        with torch.device("meta"):
            module = Model(gpt_config(found, grid, config.heads, str(path)))
        fill(module, found, gpt_key, str(path))
        if beside is not None:
            module.check_tokenizer(beside, f"--tokenizer {config.tokenizer}")
        facts = {"resolution": said, "prefix": module.condition.prefix}
        backbone, condition = module.config.backbone, module.config.condition
        family, asked = "c2i", f"{getattr(condition, 'classes', 0)} classes"
        if hasattr(condition, "encoder"):
            family, asked = "t2i", f"{condition.tokens} slots of text by {condition.encoder}, {condition.channels} wide"
        text = (
            f"{family} GPT, {backbone.layers} layers, {backbone.heads} heads, width {backbone.width}, "
            f"{said} px = {grid[1]} x {grid[2]} tokens, {asked}"
        )
    check_finite(module, config.dtype)
    facts = {"step": 0, "origin": "llamagen", "source": path.name, "source_sha256": sha256_of(path)} | facts
    write_run(out, module, facts, config.dtype, beside)
    count = sum(p.numel() for p in module.parameters())
    kept = "" if kind == "vq" else ("; tokenizer beside it" if beside else "; sampling needs --tokenizer")
    return f"{out}: {text}, {count:,} parameters, {config.dtype}{kept}"


# ------------------------------------------------------------------------------------------------------ key maps


def gpt_key(name: str) -> str | None:
    """Our name of a GPT weight in LlamaGen's."""
    return re.sub(r"^condition\.", "cls_embedding.", re.sub(r"^(backbone|head)\.", "", name))


def vq_key(name: str) -> str | None:
    """Our name of a tokenizer weight in LlamaGen's; None for our usage statistics, which LlamaGen has not."""
    if name in ("quantizer.steps", "quantizer.share", "quantizer.idle"):
        return None
    for ours, theirs in (
        ("quantizer.table", "quantize.embedding.weight"),
        ("from_code.", "post_quant_conv."),
        ("to_code.", "quant_conv."),
        (".levels.", ".conv_blocks."),
        (".resample.", ".downsample." if name.startswith("encoder.") else ".upsample."),
        (".skip.", ".nin_shortcut."),
        (".out.", ".proj_out."),
        (".middle.", ".mid."),
    ):
        name = name.replace(ours, theirs)
    return name


def dropped(key: str) -> bool:
    """Tensors of theirs that are no weights: position table, caches, usage statistics."""
    return key in ("freqs_cis", "quantize.codebook_used") or ".kv_cache." in key


def fill(module: nn.Module, found: State, key: Callable[[str], str | None], source: str) -> None:
    """Puts LlamaGen's tensors into our module without a copy, after a strict audit under their names."""
    names = {name: theirs for name in module.state_dict() if (theirs := key(name)) is not None}
    ours = module.state_dict()
    used = {k: v for k, v in found.items() if not dropped(k)}
    audit(used, {theirs: ours[name].shape for name, theirs in names.items()}, source)
    whole = next((k for k in names.values() if not used[k].is_floating_point()), None)
    if whole is not None:
        raise UserError(
            f"{source}: {whole} is {used[whole].dtype}; quantized weights are not read, get those of floats"
        )
    own = {name: tensor for name, tensor in ours.items() if name not in names}
    module.load_state_dict(own | {name: used[theirs] for name, theirs in names.items()}, assign=True)
    module.eval().requires_grad_(False)


# -------------------------------------------------------------------------------------- modules of LlamaGen's tensors


def gpt_config(found: State, grid: tuple[int, int, int], heads: int | None, source: str) -> ModelConfig:
    """What the tensors say of a GPT; `heads` None: as in the published sizes (head dimension 64, 3B's 100)."""
    vocab, width = _shape(found, "tok_embeddings.weight", 2, source)
    layers = 1 + max((int(m[1]) for k in found if (m := re.match(r"layers\.(\d+)\.", k))), default=-1)
    if heads is None:
        head_dim = HEAD_DIMS.get(width, 64)
        if width % head_dim:
            raise UserError(f"{source}: width {width} is no published size; pass its number of attention --heads")
        heads = width // head_dim
    elif heads < 1 or width % heads or width // heads % 4:
        raise UserError(f"--heads {heads} must divide the width {width} into head dimensions that are multiples of 4")
    packed = _shape(found, "layers.0.attention.wqkv.weight", 2, source)[0]
    kv_heads, rest = divmod(packed - width, 2 * (width // heads))
    if rest or kv_heads < 1 or heads % kv_heads:
        raise UserError(f"{source}: {packed} rows of wqkv do not fit {heads} heads of width {width}; pass --heads")
    hidden = _shape(found, "layers.0.feed_forward.w1.weight", 2, source)[0]
    multiple = next((m for m in (256, 128, 64, 32, 16, 8, 4, 2, 1) if -(-int(8 * width / 3) // m) * m == hidden), None)
    if multiple is None:
        raise UserError(f"{source}: feed-forward width {hidden} is not 8/3 of {width} rounded up")
    return ModelConfig(
        grid=grid,
        vocab=vocab,
        backbone=plugin_config(
            "visgen.backbones",
            "ar",
            layers=layers,
            heads=heads,
            width=width,
            kv_heads=None if kv_heads == heads else kv_heads,
            mlp_multiple_of=multiple,
        ),
        condition=_condition(found, source),
    )


def gpt(found: State, grid: tuple[int, int, int], heads: int | None, source: str) -> Model:
    """The GPT of LlamaGen's tensors, on the CPU in eval mode."""
    model = Model(gpt_config(found, grid, heads, source))
    fill(model, found, gpt_key, source)
    return model


def vq(found: State, image_size: int, source: str) -> ConvVQ:
    """The tokenizer of LlamaGen's tensors, made for images of image_size, on the CPU in eval mode."""
    width = _shape(found, "encoder.conv_in.weight", 4, source)[0]
    levels = 1 + max((int(m[1]) for k in found if (m := re.match(r"encoder\.conv_blocks\.(\d+)\.", k))), default=-1)
    blocks = len([k for k in found if re.fullmatch(r"encoder\.conv_blocks\.0\.res\.\d+\.conv1\.weight", k)])
    outs = [_shape(found, f"encoder.conv_blocks.{i}.res.0.conv1.weight", 4, source)[0] for i in range(levels)]
    codes, channels = _shape(found, "quantize.embedding.weight", 2, source)
    decoder_width = _shape(found, "decoder.conv_out.weight", 4, source)[1]
    config = ConvVQConfig(
        image_size=image_size,
        width=width,
        decoder_width=None if decoder_width == width else decoder_width,
        multipliers=tuple(out // width for out in outs),
        res_blocks=blocks,
        z_channels=_shape(found, "encoder.conv_out.weight", 4, source)[0],
        quantizer=plugin_config("visgen.quantizers", "vq", codes=codes, channels=channels),
    )
    tokenizer = build(config)
    fill(tokenizer, found, vq_key, source)
    return tokenizer


def _condition(found: State, source: str) -> Any:
    if "cls_embedding.uncond_embedding" in found:
        tokens, channels = _shape(found, "cls_embedding.uncond_embedding", 2, source)
        return plugin_config("visgen.conditions", "text", tokens=tokens, channels=channels)
    rows = _shape(found, "cls_embedding.embedding_table.weight", 2, source)[0]  # the last row is the null class
    return plugin_config("visgen.conditions", "label", classes=rows - 1)


def _shape(found: State, key: str, dims: int, source: str) -> tuple[int, ...]:
    if key not in found or found[key].ndim != dims:
        audit({k: found[k] for k in (key,) if k in found}, {key: (1,) * dims}, source)
    return tuple(found[key].shape)


# ------------------------------------------------------------------------------------------- replay of recorded vectors


def replay_gpt(config: Mapping[str, Any], state: State, inputs: State, wanted: Collection[str]) -> dict[str, Tensor]:
    """Outputs of recorded vectors of origin `llamagen_gpt`: logits, and greedy tokens at guidance scale S."""
    side = int(config["block_size"] ** 0.5)
    model = gpt(state, (1, side, side), config["n_head"], "state")
    batch = {k: v for k, v in (("label", inputs.get("labels")), ("text", inputs.get("text"))) if v is not None}
    if "text_mask" in inputs:
        batch["text_mask"] = inputs["text_mask"].bool()
    cond = model.condition(batch)
    h = model.backbone(inputs["tokens"][:, :-1], None, cond=cond)[:, model.condition.prefix - 1 :]
    made = {"logits": model.head.dist(h.unsqueeze(0), h.new_ones(1, *h.shape[:2])).logits}
    sampler = build(plugin_config("visgen.samplers", "ar"))
    for name in wanted:
        if scale := re.fullmatch(r"greedy_cfg([\d.]+)", name):
            rows = 2 if "label" in batch else len(inputs["tokens"])  # LlamaGen's class runs recorded two images
            engine = Engine(model, Guidance(float(scale[1])), Warp(temperature=0.0))
            engine.begin({k: v[:rows] for k, v in batch.items()})
            made[name] = engine.run(sampler, Noise(torch.arange(rows))).tokens
    return made


def replay_vq(config: Mapping[str, Any], state: State, inputs: State, wanted: Collection[str]) -> dict[str, Tensor]:
    """Outputs of recorded vectors of origin `llamagen_vq`; pixels are compared before the clamp."""
    pixels = inputs["pixels"]
    tokenizer = vq(state, pixels.shape[-1], "state")
    out = tokenizer(pixels[:, None])

    def plane(ids: Tensor) -> Tensor:  # [B, N] -> code vectors [B, C, h, w]
        return tokenizer.embed(ids).transpose(1, 2).unflatten(-1, tokenizer.grid[1:])

    indices = tokenizer.encode(pixels[:, None])
    return {
        "indices": indices,
        "quantized": plane(indices),
        "reconstruction": out.pixels[:, 0],
        "decoded_random": tokenizer.decoder(tokenizer.from_code(plane(inputs["random_indices"]))),
    }


# ------------------------------------------------------------------------------------------------- reading and writing


def read(path: Path) -> tuple[str, dict[str, Tensor]]:
    """("gpt" or "vq", LlamaGen's tensors) of a file in any published wrapping; large files are mapped, not read.

    Raises:
        UserError: missing, truncated, holding pickled code, or without such weights.
    """
    content = read_weights(path)
    wrapped = [name for name in WRAPPERS["vq"] if isinstance(content.get(name), dict)]
    states = {name: tensors_of(content[name]) for name in wrapped} or {"": tensors_of(content)}
    for kind, order in WRAPPERS.items():
        mark = re.compile(r"(layers\.\d+\.|tok_embeddings\.)" if kind == "gpt" else r"(encoder\.|quantize\.)")
        for name in ("", *order):
            if any(mark.match(key) for key in states.get(name, ())):
                return kind, states[name]
    first = ", ".join(map(str, list(content)[:4]))
    raise UserError(f"{path} holds neither a GPT nor a VQ tokenizer of LlamaGen; its first keys: {first}")


def weights_file(source: str) -> Path:
    path = Path(source)
    if path.is_dir():
        inside = path / "consolidated.pth"
        if not inside.is_file():
            raise UserError(f"{path} is a directory without consolidated.pth (FSDP); pass the weights file itself")
        return inside
    if not path.is_file():
        raise UserError(f"{source or 'IN'} does not exist; pass a .pt, .pth or .safetensors file")
    return path


def resolution(name: str, said: int | None) -> int | None:
    """The resolution that the option or the file's name tells, None if neither does.

    Raises:
        UserError: they contradict each other, or the name tells several.
    """
    named = sorted({int(n) for n in re.findall(r"(?<!\d)\d+(?!\d)", name) if int(n) in RESOLUTIONS})
    if said is not None and said < 1:
        raise UserError(f"--resolution {said} must be a number of pixels, such as {RESOLUTIONS[0]}")
    if said is not None and named and said not in named:
        raise UserError(f"--resolution {said} contradicts the file's name {name}, which says {named[0]}")
    if said is None and len(named) > 1:
        raise UserError(f"{name} names several resolutions ({', '.join(map(str, named))}); pass --resolution")
    return said if said is not None else (named[0] if named else None)


def _check_stride(name: str, stride: int) -> None:
    said = re.search(r"ds(\d+)", name)
    if said and int(said[1]) != stride:
        raise UserError(f"{name} says stride {said[1]}, its tensors have stride {stride}; it is another file")


def tokenizer_for(source: str, size: int) -> Tokenizer:
    """A tokenizer for images of `size`, of a converted one or of LlamaGen's file."""
    path = Path(source)
    ours = path.is_dir() and not (path / "consolidated.pth").is_file()
    if not ours and path.is_file() and path.suffix == ".safetensors":
        ours = checkpoint.read_metadata(path).get("format") in checkpoint.FORMATS
    if not ours:
        kind, found = read(weights_file(source))
        if kind != "vq":
            raise UserError(f"--tokenizer {source} is a GPT; pass a VQ file, such as vq_ds16_c2i.pt")
        made = vq(found, size, source)
        _check_stride(path.name, made.stride)
        return made
    kept = checkpoint.load_tokenizer(path)
    if not isinstance(kept, ConvVQ):
        raise UserError(f"--tokenizer {source} is a {type(kept).__name__}, not one of LlamaGen's")
    resized = build(dataclasses.replace(kept.config, image_size=size))
    resized.load_state_dict(kept.state_dict())
    return resized.eval()
