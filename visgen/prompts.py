"""Prompts: captions -> the features that a text-conditioned model reads (LlamaGen, arXiv:2406.06525, section 3.2).

A prompt is cleaned as the training captions were, goes through a frozen T5 encoder alone and unpadded, so that its
features depend on nothing but itself, and is padded at the left end (`conditions.text.left_pad`). Or the features come
ready in a safetensors file. What cleaning, encoder, length and width a model wants, its `condition` records.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen import tensors
from visgen.conditions.text import Config as Condition
from visgen.conditions.text import left_pad
from visgen.config import UserError
from visgen.launch import device_of

EXTRA = "install what is missing with `pip install 'visgen[text]'`"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TextConfig:
    """How prompts become features.

    Attributes:
        encoder: a T5 with its tokenizer, a directory or Hub id; default: the one that the checkpoint records.
        features: a safetensors file of ready features instead of an encoder: `text` [B, S, C] and, where rows are
            padded at either end, `mask` [B, S]. Prompts then only name its rows.
        clean: whether prompts are cleaned as captions were for training; default: as the checkpoint records.
        device: of the encoder; "auto": where the images are drawn.
        precision: of the encoder, which overflows in fp16; "auto" is bf16 on a GPU and fp32 on a CPU.
    """

    encoder: str | None = None
    features: Path | None = None
    clean: bool | None = None
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"

    def __post_init__(self) -> None:
        if self.encoder is not None and self.features is not None:
            raise UserError(f"text.features {self.features} needs no text.encoder; leave one of them out")


@dataclass
class Features:
    """What B images shall show, as a text condition reads it.

    Attributes:
        text: [B, P, C] float32 on the CPU, left-padded with zeros.
        mask: [B, P] bool, true where a slot is real.
        prompts: B captions, or names of rows.
        cut: prompts that were too long, of which the end was left out.
        about: what made the features, for the metadata of an image.
    """

    text: Tensor
    mask: Tensor
    prompts: list[str]
    cut: list[str]
    about: dict[str, Any]

    def __len__(self) -> int:
        return len(self.prompts)

    def rows(self, index: Sequence[int]) -> Features:
        """Those rows, in that order."""
        chosen = list(index)
        return replace(self, text=self.text[chosen], mask=self.mask[chosen], prompts=[self.prompts[i] for i in chosen])

    def batch(self, device: torch.device) -> dict[str, Tensor]:
        """What `Text` reads, on `device`."""
        return {"text": self.text.to(device), "text_mask": self.mask.to(device)}


# -------------------------------------------------------------------------------------------------------- an encoder


def encode(
    prompts: Sequence[str], condition: Condition, config: TextConfig | None = None, device: torch.device | str = "cpu"
) -> Features:
    """Features of prompts by the text encoder, which is loaded for this call and let go at its end.

    Args:
        condition: what the model reads.
        device: what `config.device` "auto" means.

    Raises:
        UserError: a missing package, an encoder that is not there or not the model's, an empty prompt.
    """
    check_prompts(prompts)
    encoder = TextEncoder(condition, config or TextConfig(), device)
    once = list(dict.fromkeys(prompts))
    ids = {p: encoder.ids(p) for p in once}
    found = dict(zip(once, encoder.features([ids[p][0] for p in once]), strict=True))
    broken = [p for p, row in found.items() if not torch.isfinite(row).all()]
    if broken:
        raise UserError(
            f"text encoder '{encoder.name}' gives values for '{broken[0]}' that are not finite in {encoder.precision}"
        )
    text, mask = (torch.stack(x) for x in zip(*(_padded(found[p], condition.tokens) for p in prompts), strict=True))
    return Features(text, mask, list(prompts), [p for p in once if ids[p][1]], encoder.about)


class TextEncoder:
    """The T5 that a text condition wants; its weights are read when the first features are.

    Args:
        condition: what the model reads.
        device: what `config.device` "auto" means.

    Raises:
        UserError: a missing package, or an encoder that is not there or not the model's.
    """

    def __init__(self, condition: Condition, config: TextConfig, device: torch.device | str = "cpu") -> None:
        self.clean = condition.clean if config.clean is None else config.clean
        check_packages(self.clean)
        self.tokens, self.name = condition.tokens, config.encoder or condition.encoder
        self.device = torch.device(device) if config.device == "auto" else device_of(config.device, "text.device")
        on_gpu = self.device.type == "cuda"
        self.precision = config.precision if config.precision != "auto" else "bf16" if on_gpu else "fp32"
        self._model: Any = None
        with _loading(self.name):
            self._tokenizer = _tokenizer(self.name, condition.channels)

    @property
    def about(self) -> dict[str, Any]:
        """What made the features."""
        where = {"device": self.device.type, "precision": self.precision}
        return {"encoder": self.name, "clean": self.clean, **where}

    def ids(self, caption: str, any_text: bool = False) -> tuple[list[int], bool]:
        """(ids of a caption, at most `tokens` with the end-of-sequence one; was it cut?).

        Args:
            any_text: take a caption that is empty once cleaned, or of words that the tokenizer does not know.
        """
        sentence = clean_caption(caption) if self.clean else caption
        if not sentence and not any_text:
            raise UserError(f"prompt '{caption}' is empty once cleaned; say it in words, or pass --text.clean False")
        whole: list[int] = self._tokenizer(sentence, verbose=False)["input_ids"]
        if not any_text and not self._tokenizer.decode(whole, skip_special_tokens=True).strip():
            raise UserError(  # as of a tokenizer whose files are missing
                f"the tokenizer of '{self.name}' knows no word of '{sentence}'; say it in others, or copy the encoder "
                "again"
            )
        return self._tokenizer(sentence, max_length=self.tokens, truncation=True)["input_ids"], len(whole) > self.tokens

    @torch.no_grad()  # not inference mode: training may take the features
    def features(self, rows: Sequence[list[int]], batch: int = 1) -> list[Tensor]:
        """Features [n, C] float32 on the CPU of each row of n ids, at most `batch` of equal length at once: without
        padding, so that they depend on nothing but the row."""
        if self._model is None:
            with _loading(self.name):
                self._model = _model(self.name, self.device, DTYPES[self.precision])
        largest = max((max(row) for row in rows), default=0)
        if largest >= self._model.config.vocab_size:
            raise UserError(
                f"text encoder '{self._model.name_or_path}' has {self._model.config.vocab_size} tokens, its tokenizer "
                f"names number {largest}; put those together that belong together"
            )
        found: list[Tensor] = [torch.empty(0)] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for _, same in itertools.groupby(order, key=lambda i: len(rows[i])):
            alike = list(same)
            for part in (alike[k : k + batch] for k in range(0, len(alike), batch)):
                ids = torch.tensor([rows[i] for i in part], device=self.device)
                out = self._model(input_ids=ids).last_hidden_state.float().cpu()
                for i, row in zip(part, out, strict=True):
                    found[i] = row
        return found


def _padded(row: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """row [n, C] -> ([tokens, C], [tokens] bool), padding first."""
    empty = tokens - len(row)
    return F.pad(row, (0, 0, empty, 0)), torch.arange(tokens) >= empty


def _tokenizer(name: str, channels: int) -> Any:
    """The tokenizer of a T5 whose features have that width; reads small files only."""
    from transformers import AutoConfig, AutoTokenizer

    shape = AutoConfig.from_pretrained(name)
    if shape.model_type != "t5":
        raise UserError(f"text encoder '{name}' is a model of kind {shape.model_type}; a T5 is needed")
    if shape.d_model != channels:
        raise UserError(
            f"text encoder '{name}' gives features of width {shape.d_model}, the model reads {channels}; pass the "
            "encoder that it was trained with"
        )
    return AutoTokenizer.from_pretrained(name)


def _model(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The encoder in eval mode."""
    from transformers import T5EncoderModel

    loaded: Any = T5EncoderModel.from_pretrained(name, output_loading_info=True)
    model, missing = loaded[0], sorted(loaded[1]["missing_keys"])
    if missing:
        raise UserError(f"text encoder '{name}' lacks {len(missing)} weights, such as {missing[0]}; copy it again")
    try:
        return model.to(device, dtype).eval()
    except torch.OutOfMemoryError:
        raise UserError(f"text encoder '{name}' does not fit on {device}; pass --text.device cpu") from None


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    """Whatever transformers raises for absent or damaged files becomes one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise UserError(
            f"text encoder '{name}' cannot be loaded ({reason}); pass the directory of a whole one, or a Hub id"
        ) from None


def check_prompts(prompts: Sequence[str]) -> None:
    """Raises `UserError` for what is no caption."""
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) or not prompt.strip():
            raise UserError(f"prompt {i + 1} of {len(prompts)} is {prompt!r}; say in words what the image shall show")


def check_packages(clean: bool) -> None:
    """Raises `UserError` where a package is missing that encoding, or cleaning, needs."""
    for need, names, instead in (
        ("encoding prompts", ("transformers",), "pass ready features with --text.features"),
        ("cleaning prompts", ("ftfy", "bs4") if clean else (), "pass --text.clean False for other features"),
    ):
        missing = [name for name in names if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(f"{need} needs {' and '.join(missing)}: {EXTRA}, or {instead}")


def clean_caption(caption: str) -> str:
    """A caption as LlamaGen's training has it: the routine of DeepFloyd and PixArt, twice over.

    It lowers the case, takes out addresses, markup, file names and Chinese characters, and settles dashes and quotes.
    diffusers keeps that routine for PixArt. LlamaGen's has one more `strip` in its middle, which makes a difference
    only where what is taken out stood at an end of the caption and a quote or dash beside it.
    """
    from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import PixArtAlphaPipeline as PixArt

    clean: Any = PixArt._clean_caption
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a caption that looks like an address or a file is no mistake here
        for _ in range(2):
            caption = clean(PixArt, caption)
    return caption


# ---------------------------------------------------------------------------------------------------- ready features


def read(path: Path, condition: Condition, prompts: Sequence[str] = ()) -> Features:
    """The features in a safetensors file (see `TextConfig.features`), left-padded to the model's length.

    Args:
        prompts: names of the rows; default: file and number.

    Raises:
        UserError: a file that is missing, damaged or not for this model; not one prompt per row.
    """
    text, mask = _checked(_tensors(path), condition, path)
    check_prompts(prompts)
    if prompts and len(prompts) != len(text):
        raise UserError(f"{len(prompts)} prompts name the {len(text)} rows of {path}; give one per row, or none")
    text, mask = left_pad(text, mask)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    over = mask.shape[1] - condition.tokens
    if over > 0:
        long = mask[:, :over].any(1).nonzero().flatten().tolist()
        if long:
            raise UserError(
                f"{path}: row {long[0]} has {int(mask[long[0]].sum())} slots, the model reads {condition.tokens}; "
                "encode captions that are cut to that length"
            )
        text, mask = text[:, over:], mask[:, over:]
    else:
        text, mask = F.pad(text, (0, 0, -over, 0)), F.pad(mask, (-over, 0))
    names = list(prompts) or [f"{path.name} {digest} row {i}" for i in range(len(text))]
    return Features(text, mask, names, [], {"features": {"path": str(path), "sha256": digest}})


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"text.features {path} does not exist; pass a safetensors file with `text` [B, S, C]")
    return tensors.read(path, "copy it again", finite=False)[0]  # padding may be anything


def _checked(found: Mapping[str, Tensor], condition: Condition, path: Path) -> tuple[Tensor, Tensor]:
    """(text [B, S, C] float32, mask [B, S] bool) of a file's tensors."""
    text = found.get("text")
    if text is None or text.ndim != 3 or not text.is_floating_point() or not len(text):
        said = "is missing" if text is None else f"is {text.dtype} {list(text.shape)}"
        raise UserError(f"{path}: `text` {said}; it must be floats [B, S, C], a row per image")
    if text.shape[2] != condition.channels:
        raise UserError(
            f"{path}: `text` is {list(text.shape)}, the model reads features of width {condition.channels}; encode "
            f"with the T5 that it was trained with ({condition.encoder})"
        )
    mask = found.get("mask", torch.ones(text.shape[:2]))
    if mask.shape != text.shape[:2]:
        raise UserError(f"{path}: `mask` is {list(mask.shape)}, it must be {list(text.shape[:2])} as the features")
    mask = mask != 0
    empty = (~mask.any(1)).nonzero().flatten().tolist()
    if empty:
        raise UserError(f"{path}: row {empty[0]} of `mask` has no real slot; even an empty caption has its end")
    text = text.float()
    if not torch.isfinite(text[mask]).all():
        raise UserError(f"{path}: `text` is not finite; encode the captions again, in bf16 or fp32")
    return text, mask
