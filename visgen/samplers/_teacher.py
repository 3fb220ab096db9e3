"""A teacher of one-step students: an autoregressive model whose every token is a function of its own noise.

Token i is where the flow of the teacher's law (guided, then filtered) carries noise i (`nn/mixture.fm_map`). Over all
noise that is what `ar` draws; given the noise, which an image's seed fixes, it is one sequence, the student's target
(Distilled Decoding 1, arXiv 2412.17153, figures 5 and 6).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visgen.config import UserError, kind_of
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.model import Model
from visgen.nn.mixture import fm_map, scale_of
from visgen.samplers import Forward, Sampler
from visgen.tokenizers import Tokenizer


@dataclass
class Teacher:
    """What `read_teacher` found.

    Attributes:
        hash: of its weights (`checkpoint.weights_hash`).
        tokenizer_hash: of its tokenizer (`checkpoint.tokenizer_hash`).
    """

    model: Model
    tokenizer: Tokenizer
    hash: str
    tokenizer_hash: str


def read_teacher(path: Path | None, guidance: Guidance, where: str) -> Teacher:
    """The model and the tokenizer of a run.

    Args:
        guidance: that its probabilities shall have.
        where: the setting that names the run.

    Raises:
        UserError: no such run, a model that is no teacher, or one that cannot be guided.
    """
    from visgen.checkpoint import load_model, load_tokenizer, tokenizer_hash, weights_hash

    if path is None or str(path) == ".":  # "." is what an empty flag becomes
        raise UserError(f"{where} is needed: the run directory of an autoregressive model")
    try:
        model, tokenizer = load_model(path), load_tokenizer(path)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if model.continuous or model.backbone.taught is not None:
        kind = kind_of(model.config.backbone)
        what = "draws vectors" if model.continuous else "is a student itself"
        raise UserError(f"{where} {path}, of kind {kind}, {what}; a teacher draws codes one by one, as ar does")
    if guidance.branches > 1 and getattr(model.config.condition, "dropout", 0) == 0:
        raise UserError(f"{where} {path} was trained without a null class; set the student's guidance.scale to 1")
    model.check_tokenizer(tokenizer, f"{where} {path}")
    return Teacher(model.requires_grad_(False), tokenizer, weights_hash(model), tokenizer_hash(tokenizer))


@torch.no_grad()
def codes_of(tokenizer: Tokenizer) -> Tensor:
    """The codes that the map runs on, [V, C] float32, as the tokenizer decodes them but scaled to unit variance."""
    device = next(tokenizer.parameters()).device
    codes = tokenizer.embed(torch.arange(tokenizer.vocab or 0, device=device).unsqueeze(0))[0].float()
    return codes * scale_of(codes)


def noise_of(noise: Noise, index: Tensor, channels: int) -> Tensor:
    """The noise [B, W, C] of the tokens at index [B, W], the same for teacher and student."""
    return noise.normal(index, channels, Stream.DENOISE)


def mapped(law: Any, noise: Tensor, codes: Tensor) -> Tensor:
    """Where a law of one token carries its noise [B, 1, C]: ids [B, 1]."""
    return fm_map(noise[:, 0], law.logits[:, -1].float().log_softmax(-1), codes).unsqueeze(1)


@dataclass
class State:
    tokens: Tensor  # [B, N]
    index: Tensor  # [B, 1], the token that comes next


class Mapped(Sampler):
    """Token by token, as `ar`, each from its own noise.

    Args:
        codes: [V, C], of `codes_of`.
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes
        self.config = f"codes at {codes.data_ptr()}"  # by which a captured engine knows whose graph it has

    def init(self, engine: Engine, noise: Noise) -> State:
        tokens = torch.zeros(engine.batch, engine.tokens, dtype=torch.int64, device=engine.device)
        return State(tokens, tokens.new_zeros(engine.batch, 1))

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        law = forward(state.tokens, state.index)
        drawn = mapped(law, noise_of(noise, state.index, self.codes.shape[1]), self.codes)
        state.tokens.scatter_(1, state.index, drawn)
        state.index += 1

    def iterations(self, engine: Engine) -> int:
        return engine.tokens


def make_pairs(engine: Engine, codes: Tensor, batch: dict[str, Any], seeds: Tensor) -> Tensor:
    """The tokens [B, N] of images of these seeds [B]: what a student shall make of the same noise.

    Training on the fly and `python -m visgen.trajectories` both call this. In float32 they depend on seed and label
    alone, but for rounding, which turns a token whose noise lies within it of a border of the map.

    Args:
        engine: of the teacher, with its guidance and filters.
        batch: what the teacher's condition reads.
    """
    engine.begin(batch)
    return engine.run(Mapped(codes), Noise(seeds)).tokens.clone()  # no inference tensor: training saves it
