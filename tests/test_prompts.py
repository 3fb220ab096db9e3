"""Prompts to features: cleaning, a T5 alone with each of them, padding on the left, and ready features of a file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from visgen import prompts
from visgen.conditions.text import Config as Condition
from visgen.conditions.text import left_pad
from visgen.config import UserError
from visgen.prompts import Features, TextConfig, clean_caption, encode, read

DATA = Path(__file__).parent / "data" / "llamagen_t2i_a.safetensors"
WORDS = ["a red bird", "sea", "the red bird on the sea"]


@pytest.fixture
def condition(text_encoder: Path) -> Condition:
    return Condition(tokens=6, channels=16, encoder=str(text_encoder), clean=False)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- an encoder


def test_features_are_those_of_the_padded_batch_moved_to_the_right_end(condition: Condition) -> None:
    """The reference's procedure: pad to the full length on the right, mask, encode together, then rotate."""
    from transformers import AutoTokenizer, T5EncoderModel

    found = encode(WORDS, condition)
    given = AutoTokenizer.from_pretrained(condition.encoder)(
        WORDS, max_length=6, padding="max_length", truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        whole = T5EncoderModel.from_pretrained(condition.encoder)(**given).last_hidden_state
    for row, n in enumerate(given["attention_mask"].sum(1).tolist()):
        rotated = torch.cat([whole[row, n:] * 0, whole[row, :n]])
        assert torch.allclose(found.text[row], rotated, atol=1e-5)
        assert found.mask[row].tolist() == [False] * (6 - n) + [True] * n
    assert found.mask.sum(1).tolist() == [4, 2, 6], "words and the end of sequence"
    assert found.text[~found.mask].abs().sum() == 0 and (found.text[found.mask].abs().sum(-1) > 0).all()
    assert found.text.dtype == torch.float32 and found.prompts == WORDS
    assert found.about == {"encoder": condition.encoder, "clean": False, "device": "cpu", "precision": "fp32"}


def test_a_prompts_features_depend_on_itself_alone(condition: Condition) -> None:
    together = encode([*WORDS, WORDS[0]], condition)
    for row, prompt in enumerate([*WORDS, WORDS[0]]):
        alone = encode([prompt], condition)
        assert torch.equal(alone.text[0], together.text[row]) and torch.equal(alone.mask[0], together.mask[row])


def test_long_prompts_lose_their_end_which_is_said(condition: Condition) -> None:
    long = "a red bird on the sea the red bird"
    found = encode(["a red bird on the", long, long], condition)
    assert found.cut == [long] and found.mask.all()
    ends = encode(["a red bird on the"], condition).text
    assert torch.allclose(found.text[1], ends[0], atol=1e-6), "its first words and the end of sequence are kept"


def test_rows_and_batches(condition: Condition) -> None:
    found = encode(WORDS, condition)
    turned = found.rows([2, 0, 0])
    assert turned.prompts == [WORDS[2], WORDS[0], WORDS[0]] and torch.equal(turned.text[1], found.text[0])
    assert len(turned) == 3 and turned.about == found.about
    batch = turned.batch(torch.device("cpu"))
    assert {k: list(v.shape) for k, v in batch.items()} == {"text": [3, 6, 16], "text_mask": [3, 6]}


def test_half_precision_is_asked_for(condition: Condition) -> None:
    half = encode(WORDS, condition, TextConfig(precision="bf16"))
    whole = encode(WORDS, condition)
    assert half.about["precision"] == "bf16" and half.text.dtype == torch.float32
    assert not torch.equal(half.text, whole.text) and torch.allclose(half.text, whole.text, atol=0.1)


def test_another_encoder_may_be_named(condition: Condition, text_encoder: Path, tmp_path: Path) -> None:
    recorded = Condition(tokens=6, channels=16, encoder=str(tmp_path / "gone"), clean=False)
    found = encode(["sea"], recorded, TextConfig(encoder=str(text_encoder)))
    assert torch.equal(found.text, encode(["sea"], condition).text)


def broken(source: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> str:
    """A copy of an encoder after `change` of its config and its weights."""
    shutil.copytree(source, out)
    config, weights = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    change(config, weights)
    (out / "config.json").write_text(json.dumps(config))
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return str(out)


def fewer_words(config: dict[str, Any], weights: dict[str, Tensor], count: int) -> None:
    config["vocab_size"], weights["shared.weight"] = count, weights["shared.weight"][:count].clone()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, w: c.update(d_model=32), "gives features of width 32, the model reads 16; pass the encoder that it"),
        (lambda c, w: c.update(model_type="bert"), "is a model of kind bert; a T5 is needed"),
        (lambda c, w: c.update(model_type="none"), "cannot be loaded ("),
        (lambda c, w: c.update(d_model="x"), "cannot be loaded ("),
        (lambda c, w: c.update(d_ff=64), "cannot be loaded ("),
        (
            lambda c, w: w.update({"shared.weight": w["shared.weight"][:5].clone()}) or c.update(vocab_size=5),
            "has 5 tok",
        ),
        (lambda c, w: w.pop("encoder.block.1.layer.1.DenseReluDense.wo.weight"), "lacks 1 weights, such as encoder.bl"),
        (lambda c, w: w["shared.weight"].fill_(torch.nan), "gives values for 'sea' that are not finite in fp32"),
    ],
)
def test_encoders_that_do_not_serve(
    condition: Condition, text_encoder: Path, tmp_path: Path, change: Callable[..., object], message: str
) -> None:
    name = broken(text_encoder, tmp_path / "t5", change)
    said = refused(lambda: encode(["sea"], condition, TextConfig(encoder=name)))
    assert f"text encoder '{name}'" in said and message in said


@pytest.mark.parametrize("part", ["model.safetensors", "tokenizer.json", "config.json"])
def test_damaged_files_of_an_encoder(condition: Condition, text_encoder: Path, tmp_path: Path, part: str) -> None:
    name = str(shutil.copytree(text_encoder, tmp_path / "t5"))
    (tmp_path / "t5" / part).write_bytes((text_encoder / part).read_bytes()[:400])
    said = refused(lambda: encode(["sea"], condition, TextConfig(encoder=name)))
    assert said.startswith(f"text encoder '{name}' cannot be loaded (") and said.endswith("whole one, or a Hub id")


def test_a_tokenizer_that_knows_no_word(condition: Condition, text_encoder: Path, tmp_path: Path) -> None:
    assert "knows no word of '鸟'; say it in others" in refused(lambda: encode(["a", "鸟"], condition))
    name = str(shutil.copytree(text_encoder, tmp_path / "t5"))
    for part in ("tokenizer.json", "tokenizer_config.json"):  # transformers may then make an empty one
        (tmp_path / "t5" / part).unlink()
    said = refused(lambda: encode(["sea"], condition, TextConfig(encoder=name)))
    assert f"'{name}' knows no word of 'sea'" in said or f"'{name}' cannot be loaded" in said


def test_an_encoder_that_does_not_fit(condition: Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(transformers.T5EncoderModel, "to", full)
    assert refused(lambda: encode(["a"], condition)).endswith("does not fit on cpu; pass --text.device cpu")


def test_an_absent_encoder(condition: Condition, tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), "nobody/nothing"):
        said = refused(lambda name=name: encode(["a"], condition, TextConfig(encoder=name)))
        assert said.startswith(f"text encoder '{name}' cannot be loaded (") and said.endswith("whole one, or a Hub id")


def test_missing_packages_are_said_with_the_remedy(condition: Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    said = refused(lambda: encode(["a"], condition, TextConfig(clean=True)))
    assert said.startswith("cleaning prompts needs ftfy")
    assert "`pip install 'visgen[text]'`, or pass --text.clean False" in said
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refused(lambda: encode(["a"], condition))
    assert said.startswith("encoding prompts needs transformers: install what is missing with `pip install ")
    assert said.endswith("'visgen[text]'`, or pass ready features with --text.features")


def test_nothing_of_it_is_imported_before_it_is_needed() -> None:
    code = "import sys, visgen.sample; sys.exit(bool({'transformers', 'diffusers', 'ftfy', 'bs4'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("given", "said"), [([""], "prompt 1 of 1 is ''"), (["a", " "], "2 of 2"), ([3], "is 3; say")])
def test_what_is_no_prompt(condition: Condition, given: list[Any], said: str) -> None:
    assert said in refused(lambda: encode(given, condition))


def test_settings_that_contradict_or_cannot_be(condition: Condition) -> None:
    message = refused(lambda: TextConfig(encoder="t5", features=Path("x")))
    assert message == "text.features x needs no text.encoder; leave one of them out"
    assert "text.device 'gpu' is no torch device" in refused(lambda: encode(["a"], condition, TextConfig(device="gpu")))


# --------------------------------------------------------------------------------------------------------- cleaning


def test_cleaning_is_as_the_model_was_trained(condition: Condition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "clean_caption", str.lower)
    monkeypatch.setattr(prompts, "check_packages", lambda clean: None)
    small, as_is = encode(["a red bird"], condition).text, encode(["A red BIRD"], condition)
    assert Condition().clean and not torch.equal(as_is.text, small)
    cleaned = encode(["A red BIRD"], condition, TextConfig(clean=True))
    assert torch.equal(cleaned.text, small) and cleaned.prompts == ["A red BIRD"] and cleaned.about["clean"]
    monkeypatch.setattr(prompts, "clean_caption", lambda caption: "")
    said = refused(lambda: encode(["http://a.com"], condition, TextConfig(clean=True)))
    assert said.startswith("prompt 'http://a.com' is empty once cleaned")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("caption", "cleaned"),
    [
        ("  A Red BIRD ", "a red bird"),
        ("a bird, see https://birds.com/red <b>now</b>", "a bird, see now"),
        ("“a bird” — on ‘the’ sea", "\"a bird\" - on 'the' sea"),
        ("鸟 a bird @someone #12", "a bird"),
        ("my_red_bird_on_the_sea.png", ""),
        ("this-is-my-red-bird", "this is my red bird"),
        ("a bird (red), 10x10, free shipping", "a bird red ,"),
        ("('a bird')", "a bird"),
    ],
)
def test_captions_are_cleaned_twice_over(caption: str, cleaned: str) -> None:
    assert clean_caption(caption) == cleaned


def test_diffusers_still_keeps_the_routine() -> None:
    """The test above is skipped where ftfy is missing, but the name that it goes by must not vanish unseen."""
    from diffusers.pipelines.pixart_alpha.pipeline_pixart_alpha import PixArtAlphaPipeline

    assert callable(PixArtAlphaPipeline._clean_caption) and PixArtAlphaPipeline.bad_punct_regex.pattern


# --------------------------------------------------------------------------------------------------- ready features


def recorded() -> tuple[Tensor, Tensor]:
    """LlamaGen's own features, left-padded, and their mask."""
    with safe_open(DATA, "pt") as file:
        return file.get_tensor("in.text"), file.get_tensor("in.text_mask").bool()


def right_padded() -> tuple[Tensor, Tensor]:
    """The recorded features as an encoder leaves them: padding, here not zero, after what is real."""
    text, mask = recorded()
    rows = [torch.cat([t[m], torch.full_like(t[~m], 7)]) for t, m in zip(text, mask, strict=True)]
    return torch.stack(rows), mask.flip(1)


def file(tmp_path: Path, **tensors: Tensor) -> Path:
    save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "captions.safetensors")
    return tmp_path / "captions.safetensors"


T2I = Condition(tokens=6, channels=24)


@pytest.mark.parametrize("extra", [-1, 0, 3])
def test_ready_features_become_the_recorded_ones_wherever_their_padding_stood(tmp_path: Path, extra: int) -> None:
    text, mask = right_padded()
    chosen = slice(0, 3) if extra >= 0 else slice(1, 3)  # the first row is full
    text = torch.nn.functional.pad(text[chosen], (0, 0, 0, extra))
    mask = torch.nn.functional.pad(mask[chosen], (0, extra))
    for dtype in (torch.bool, torch.float32, torch.int64):
        found = read(file(tmp_path, text=text, mask=mask.to(dtype)), T2I)
        assert torch.equal(found.text, recorded()[0][chosen]) and torch.equal(found.mask, recorded()[1][chosen])
    again = read(file(tmp_path, text=found.text, mask=found.mask), T2I)
    assert torch.equal(again.text, found.text) and torch.equal(left_pad(again.text, again.mask)[0], found.text)


def test_features_without_a_mask_are_all_real(tmp_path: Path) -> None:
    text = recorded()[0][:, 3:]  # [3, 3, 24]
    found = read(file(tmp_path, text=text.bfloat16()), T2I)
    assert found.mask.tolist() == [[False] * 3 + [True] * 3] * 3 and found.text.dtype == torch.float32
    assert torch.equal(found.text[:, 3:], text.bfloat16().float()) and found.text[:, :3].abs().sum() == 0


def test_rows_have_names(tmp_path: Path) -> None:
    path = file(tmp_path, text=recorded()[0])
    found = read(path, T2I)
    digest = found.about["features"]["sha256"]
    assert len(digest) == 12 and found.about["features"]["path"] == str(path)
    assert found.prompts == [f"captions.safetensors {digest} row {i}" for i in range(3)]
    assert read(path, T2I, ["a", "b", "c"]).prompts == ["a", "b", "c"] and found.cut == []
    assert refused(lambda: read(path, T2I, ["a"])).startswith("1 prompts name the 3 rows of ")
    assert isinstance(found, Features)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"other": torch.ones(1, 2, 24)}, "`text` is missing; it must be floats [B, S, C]"),
        ({"text": torch.ones(2, 24)}, "`text` is torch.float32 [2, 24]"),
        ({"text": torch.ones(1, 2, 24, dtype=torch.int64)}, "`text` is torch.int64"),
        ({"text": torch.ones(0, 2, 24)}, "[0, 2, 24]; it must be"),
        ({"text": torch.ones(1, 2, 16)}, "the model reads features of width 24; encode with the T5 that it was"),
        ({"text": torch.ones(1, 7, 24)}, "row 0 has 7 slots, the model reads 6; encode captions that are cut"),
        ({"text": torch.ones(1, 2, 24), "mask": torch.ones(2)}, "`mask` is [2], it must be [1, 2] as the features"),
        ({"text": torch.ones(2, 1, 24), "mask": torch.eye(2)[:, :1]}, "row 1 of `mask` has no real slot"),
        ({"text": torch.full((1, 2, 24), torch.nan)}, "`text` is not finite"),
    ],
)
def test_features_that_do_not_serve(tmp_path: Path, tensors: dict[str, Tensor], said: str) -> None:
    message = refused(lambda: read(file(tmp_path, **tensors), T2I))
    assert message.startswith(str(tmp_path / "captions.safetensors")) and said in message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "gone.safetensors does not exist" in refused(lambda: read(tmp_path / "gone.safetensors", T2I))
    path = file(tmp_path, text=recorded()[0])
    path.write_bytes(path.read_bytes()[:-9])
    assert "captions.safetensors cannot be read, it is truncated" in refused(lambda: read(path, T2I))
