"""MAR's released weights (arXiv 2406.11838): checkpoint-last.pth of mar_{base,large,huge} -> a run directory of ours.

`python -m visgen.convert mar checkpoint-last.pth runs/mar_b --tokenizer runs/kl16`. Sizes, those of the head too, are
read from the tensors; the number of attention heads, which they do not show, is that of the published width.
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
from visgen.checks import Positive
from visgen.config import UserError, plugin_config
from visgen.convert import Precision, audit
from visgen.convert._files import check_finite, read_weights, require_new, sha256_of, tensors_of, write_run
from visgen.model import Model, ModelConfig
from visgen.nn.ancestral import chain, kept_times, log_variance

State = Mapping[str, Tensor]
HEADS = {768: 12, 1024: 16, 1280: 16}  # by width, of all published sizes
RECORDED_EPS = 1e-5  # of the layer norms of recorded vectors: the default of MAR's class; published sizes have 1e-6
TABLE = "condition.embedding_table.weight"


@dataclass(frozen=True)
class Config:
    source: str = ""  # a .pth file
    out: str = ""  # run directory to write: new or empty
    tokenizer: str | None = None  # a converted autoencoder's directory, to keep beside it
    weights: Literal["model_ema", "model"] = "model_ema"  # which of the file's; published numbers are of the average
    heads: Positive | None = None  # attention heads, of a width that is not published
    dtype: Precision = "fp32"  # of the converted weights


def convert(config: Config) -> str:
    """Reads, checks and writes the weights; `out` is untouched unless all of them fit."""
    path, out = Path(config.source), Path(config.out)
    if not path.is_file():
        raise UserError(f"{config.source or 'IN'} does not exist; pass a .pth file")
    require_new(out)
    content = read_weights(path)
    if not isinstance(content.get(config.weights), dict):
        raise UserError(f"{path} holds {', '.join(list(content)[:6])}; of MAR it must hold `{config.weights}`")
    found = tensors_of(content[config.weights])
    with torch.device("meta"):
        model = Model(model_config(found, str(path), config.heads))
    fill(model, found, str(path))
    beside = None if config.tokenizer is None else load_tokenizer(config.tokenizer)
    if beside is not None:
        model.check_tokenizer(beside, f"--tokenizer {config.tokenizer}")
    check_finite(model, config.dtype)
    facts = {"step": 0, "origin": "mar", "source": path.name, "source_sha256": sha256_of(path)}
    write_run(out, model, facts, config.dtype, beside)
    count, backbone, head = sum(p.numel() for p in model.parameters()), model.config.backbone, model.config.head
    kept = "; tokenizer beside it" if beside else "; sampling needs --tokenizer"
    return (
        f"{out}: MAR, {backbone.layers} + {backbone.layers} layers, width {backbone.width}, head {head.layers} x "
        f"{head.width}, grid {model.grid}, {model.config.channels} channels a token, {count:,} parameters, "
        f"{config.dtype}{kept}"
    )


def model_config(found: State, source: str, heads: int | None = None, **backbone_values: Any) -> ModelConfig:
    """What the tensors say of a model; heads and further values of its backbone they do not show."""
    shapes = {}
    for name, axes in (
        ("z_proj.weight", 2),
        ("class_emb.weight", 2),
        ("encoder_pos_embed_learned", 3),
        ("diffusion_pos_embed_learned", 3),
        ("diffloss.net.input_proj.weight", 2),
    ):
        if name not in found or found[name].ndim != axes:
            audit({k: found[k] for k in (name,) if k in found}, {name: (1,) * axes}, source)
        shapes[name] = found[name].shape
    (width, channels), tokens = shapes["z_proj.weight"], shapes["diffusion_pos_embed_learned"][1]
    side, heads = round(tokens**0.5), heads or HEADS.get(width)
    if side**2 != tokens:
        raise UserError(f"{source}: its {tokens} tokens are no square; it is no file of MAR")
    if heads is None:
        known = ", ".join(map(str, HEADS))
        raise UserError(f"{source}: width {width} is none of the published {known}; pass the number of --heads")
    backbone = plugin_config(
        "visgen.backbones",
        "mar",
        layers=_count(found, r"encoder_blocks\.(\d+)\."),
        heads=heads,
        width=width,
        buffer=shapes["encoder_pos_embed_learned"][1] - tokens,
        **backbone_values,
    )
    head = plugin_config(
        "visgen.heads",
        "diffusion",
        layers=_count(found, r"diffloss\.net\.res_blocks\.(\d+)\."),
        width=shapes["diffloss.net.input_proj.weight"][0],
    )
    condition = plugin_config("visgen.conditions", "label", classes=shapes["class_emb.weight"][0])
    return ModelConfig(grid=(1, side, side), channels=channels, backbone=backbone, condition=condition, head=head)


def _count(found: State, pattern: str) -> int:
    return 1 + max((int(m[1]) for k in found if (m := re.match(pattern, k))), default=0)


def key(name: str) -> str:
    """Our name of a weight in MAR's; the table of classes is two of theirs."""
    for ours, theirs in (
        (r"^backbone\.embed\.", "z_proj."),
        (r"^backbone\.embed_norm\.", "z_proj_ln."),
        (r"^backbone\.(encoder|decoder|head)_positions$", r"\1_pos_embed_learned"),
        (r"^head_pos", "diffusion_pos"),
        (r"^backbone\.(encoder|decoder)\.", r"\1_blocks."),
        (r"^backbone\.(encoder|decoder)_norm\.", r"\1_norm."),
        (r"^backbone\.bridge\.", "decoder_embed."),
        (r"^backbone\.", ""),
        (r"\.attention_norm\.", ".norm1."),
        (r"\.ffn_norm\.", ".norm2."),
        (r"\.attention\.", ".attn."),
        (r"\.out\.", ".proj."),
        (r"\.ffn\.0\.", ".mlp.fc1."),
        (r"\.ffn\.3\.", ".mlp.fc2."),
        (r"^head\.time\.", "diffloss.net.time_embed.mlp."),
        (r"^head\.condition\.", "diffloss.net.cond_embed."),
        (r"^head\.input\.", "diffloss.net.input_proj."),
        (r"^head\.output\.", "diffloss.net.final_layer.linear."),
        (r"^head\.modulation\.", "diffloss.net.final_layer.adaLN_modulation.1."),
        (r"^head\.blocks\.(\d+)\.norm\.", r"diffloss.net.res_blocks.\1.in_ln."),
        (r"^head\.blocks\.(\d+)\.modulation\.", r"diffloss.net.res_blocks.\1.adaLN_modulation.1."),
        (r"^head\.blocks\.", "diffloss.net.res_blocks."),
    ):
        name = re.sub(ours, theirs, name)
    return name


def fill(model: Model, found: State, source: str) -> None:
    """Puts MAR's tensors into our model, after a strict audit under their names."""
    ours = model.state_dict()
    names = {name: key(name) for name in ours if name != TABLE}
    classes, width = ours[TABLE].shape
    wanted: dict[str, Any] = {theirs: ours[name].shape for name, theirs in names.items()}
    audit(found, wanted | {"class_emb.weight": (classes - 1, width), "fake_latent": (1, width)}, source)
    state = {name: found[theirs] for name, theirs in names.items()}
    state[TABLE] = torch.cat([found["class_emb.weight"], found["fake_latent"]])  # the last row is the null class
    model.load_state_dict(state, assign=True)
    model.eval().requires_grad_(False)


def replay(config: Mapping[str, Any], state: State, inputs: State, wanted: Collection[str]) -> dict[str, Tensor]:
    """Outputs of recorded vectors of origin `mar`: hidden states, the head's output, and one step of its chain."""
    model = Model(model_config(state, "state", config["heads"], norm_eps=RECORDED_EPS))
    fill(model, state, "state")
    head: Any = model.head
    level = inputs["mask"].float() - 1  # masked tokens are hidden
    h = model.backbone(inputs["latents"], None, cond=model.condition({"label": inputs["labels"]}), level=level)
    x, at = inputs["x_t"].float(), inputs["respaced_t"]
    given = head.condition(h.flatten(0, 1)[: len(x)])
    found, share = head.predict(x, head.about(inputs["t"]), given)
    made = {"z": h, "model_out": torch.cat([found, share], -1)}
    times = kept_times(config["sampling_steps"])
    table, low, high = chain(head.path, times)
    _, _, _, p, q, a, b, *_ = table[at].unsqueeze(-1).unbind(1)
    found, share = head.predict(x, head.about(torch.tensor(times)[at]), given)
    x0 = p * x + q * found
    variance = log_variance(share, low[at].unsqueeze(-1), high[at].unsqueeze(-1), head.config.variance)
    made |= {"kept_timesteps": torch.tensor(times), "pred_xstart": x0, "mean": a * x + b * x0}
    return made | {"log_variance": variance}
