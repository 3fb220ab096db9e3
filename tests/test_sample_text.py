"""Images from prompts, by `sample.py --prompt` and `visgen.load(...).sample(prompts=...)`."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from PIL import Image
from safetensors.torch import save_file
from sample_program import refused, run, settings_of

import visgen
from visgen import captions as program
from visgen import prompts
from visgen.config import UserError, load
from visgen.convert import llamagen
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.generate import Generator
from visgen.images import stem
from visgen.sample import SampleConfig, main
from visgen.train.main import TrainConfig

WORDS = ["A red bird", "sea", "the red bird on the sea a bird"]  # 4, 2 and all 6 slots, the last one cut


@pytest.fixture(scope="module")
def generator(text_checkpoint_dir: Path) -> Generator:
    return visgen.load(str(text_checkpoint_dir), device="cpu", batch=16)


def hashed(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def captions(generator: Generator, path: Path) -> Path:
    """The features of `WORDS` as a file, without their padding in front."""
    found = generator.encode(WORDS)
    save_file({"text": found.text, "mask": found.mask.float()}, path)
    return path


# ------------------------------------------------------------------------------------------------------- from Python


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_an_image_depends_on_its_prompt_and_seed_alone(
    generator: Generator, text_checkpoint_dir: Path, batch: int
) -> None:
    wanted, seeds = [*WORDS, WORDS[0], WORDS[0]], [4, 5, 6, 7, 4]
    other = visgen.load(str(text_checkpoint_dir), device="cpu", batch=batch)
    images = other.sample(prompts=wanted, seeds=seeds, guidance=2.0)
    assert (images.prompts, images.seeds, images.labels) == (wanted, seeds, [])
    assert torch.equal(images.tokens[0], images.tokens[4]) and len(images.tokens.unique(dim=0)) == 4
    for i in range(4):
        alone = generator.sample(prompts=[wanted[i]], seeds=[seeds[i]], guidance=2.0)
        assert torch.equal(alone.tokens[0], images.tokens[i]), wanted[i]


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_tokens_are_those_of_a_full_pass_with_a_null_text_that_keeps_the_padding(
    generator: Generator, scale: float
) -> None:
    features = generator.encode(WORDS)
    tokens = generator.sample(prompts=features, guidance=scale, warp=Warp(temperature=0.0)).tokens
    state, condition = generator.model.state_dict(), generator.model.condition
    given = condition({"text": features.text}).vectors  # [3, 6, D]
    null = condition.cap_proj(condition.uncond_embedding).expand_as(given)
    logits, empty = (
        reference.ar_logits(state, prefix, tokens[:, :-1], (8, 8), 4, 4, features.mask) for prefix in (given, null)
    )
    assert torch.equal((empty + scale * (logits - empty)).argmax(-1), tokens)


def test_one_prompt_serves_every_seed(generator: Generator) -> None:
    images = generator.sample(prompts="sea", seeds=[3, 9])
    assert images.prompts == ["sea", "sea"] and not torch.equal(images.tokens[0], images.tokens[1])
    assert torch.equal(images.tokens, generator.sample(prompts=["sea", "sea"], seeds=[3, 9]).tokens)
    assert generator.sample(prompts=("sea", "a bird")).seeds == [0, 1]


def test_features_serve_several_calls_and_come_from_files(generator: Generator, tmp_path: Path) -> None:
    features = generator.encode(WORDS)
    images = generator.sample(prompts=features, seeds=[1, 2, 3])
    assert torch.equal(images.tokens, generator.sample(prompts=WORDS, seeds=[1, 2, 3]).tokens)
    found = prompts.read(captions(generator, tmp_path / "c.safetensors"), generator.model.config.condition)
    assert torch.equal(generator.sample(prompts=found, seeds=[1, 2, 3]).tokens, images.tokens)


def test_the_encoder_is_loaded_after_everything_is_checked(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_tokenizer", lambda *given: pytest.fail("the encoder is loaded"))
    for given in ({"warp": 3}, {"sampler": "ra"}, {"guidance": -1}, {"seeds": [1, 2]}, {"prompts": [""]}):
        with pytest.raises(UserError):
            generator.sample(**{"prompts": ["a"], **given})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"prompts": ["a", "sea"], "seeds": [1]},
            "2 prompts and 1 seeds; give at least one prompt, and one seed per",
        ),
        ({"prompts": []}, "0 prompts and 0 seeds"),
        ({"prompts": ["a", 3]}, "prompt 2 of 2 is 3; say in words what the image shall show"),
        ({"prompts": 3}, "prompt 1 of 1 is 3"),
        ({"prompts": ["a"], "labels": [0]}, "labels and prompts are both given"),
        ({"labels": [0]}, "this model is conditioned on text, not on class labels: give it prompts, as `--p"),
        ({}, "this model is conditioned on text, not on class labels"),
    ],
    ids=str,
)
def test_values_that_cannot_be_meant(generator: Generator, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        generator.sample(**given)
    assert str(caught.value).startswith(said)


def test_models_say_what_they_read(generator: Generator, checkpoint_dir: Path) -> None:
    classes = visgen.load(str(checkpoint_dir), device="cpu")
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: generator.label("bag"), "on text, not on class labels: give it prompts"),
        (lambda: generator.class_count, "on text, not on class labels"),
        (lambda: classes.sample(prompts=["a bird"]), "on class labels, not on text: give it labels, as `--l"),
        (lambda: classes.encode("a bird"), "it knows Ankle boot, bag, Coat"),
    ]
    for call, said in calls:
        with pytest.raises(UserError) as caught:
            call()
        assert str(caught.value).startswith("this model is conditioned on ") and said in str(caught.value)


# --------------------------------------------------------------------------------------------------- from the program


def test_writes_pictures_named_by_their_prompts(
    generator: Generator, text_checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num", "2", "--seed", "7", "--guidance.scale", "3", "--prompt", *WORDS]
    run(text_checkpoint_dir, tmp_path, *flags)
    stems = [
        f"{p.lower().replace(' ', '-')}-{hashed(p)}_{7 + 2 * i + k:06d}" for i, p in enumerate(WORDS) for k in (0, 1)
    ]
    assert sorted(p.stem for p in tmp_path.iterdir()) == sorted([*stems, "grid"])
    found, whole = settings_of(tmp_path / f"{stems[2]}.png"), settings_of(tmp_path / "grid.png")
    assert (found["prompt"], found["seed"], found["guidance"]["scale"]) == ("sea", 9, 3.0) and "label" not in found
    encoder = generator.model.config.condition.encoder
    assert found["text"] == {"encoder": encoder, "clean": False, "device": "cpu", "precision": "fp32"}
    assert whole["prompts"] == [p for p in WORDS for _ in "ab"] and whole["seeds"] == list(range(7, 13))
    expected = generator.sample(prompts=["sea"], seeds=[9], guidance=Guidance(3.0)).pixels[0]
    assert np.array_equal(np.array(Image.open(tmp_path / f"{stems[2]}.png")).transpose(2, 0, 1), expected.numpy())
    printed = capsys.readouterr()
    assert "6 images in" in printed.out and f"cut to 6 tokens: {WORDS[2]}\n" in printed.err
    run(text_checkpoint_dir, tmp_path, "--prompt", "sea", "--num", "1")
    assert "older images kept there: 6" in capsys.readouterr().out


def test_names_are_short_plain_and_distinct(text_checkpoint_dir: Path, tmp_path: Path) -> None:
    given = ["../sea " * 20, "a sea", "a: sea!"]
    run(text_checkpoint_dir, tmp_path, "--num", "1", "--prompt", *given)
    stems = ["sea-sea-sea-sea-sea-sea-sea-sea-sea-sea", "a-sea", "a-sea"]
    named = {f"{s}-{hashed(p)}_{i:06d}.png" for i, (s, p) in enumerate(zip(stems, given, strict=True))}
    assert {p.name for p in tmp_path.iterdir()} == named | {"grid.png"}
    assert stem("鸟") == f"prompt-{hashed('鸟')}"


def test_draws_ready_features(
    generator: Generator, text_checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = captions(generator, tmp_path / "c.safetensors")
    monkeypatch.setattr(prompts, "_tokenizer", lambda *given: pytest.fail("the encoder is loaded"))
    flags = ["--text.features", str(path), "--num", "1"]
    run(text_checkpoint_dir, tmp_path / "a", *flags)
    run(text_checkpoint_dir, tmp_path / "b", *flags, "--prompt", *WORDS)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    unnamed, named = settings_of(tmp_path / "a" / "grid.png"), settings_of(tmp_path / "b" / "grid.png")
    assert unnamed["prompts"] == [f"c.safetensors {digest} row {i}" for i in range(3)] and named["prompts"] == WORDS
    assert named["text"] == {"features": {"path": str(path), "sha256": digest}}
    pictures = [np.array(Image.open(tmp_path / name / "grid.png")) for name in "ab"]
    assert np.array_equal(*pictures)
    assert len(list((tmp_path / "a").glob(f"c-safetensors-{digest}-row-?-*_00000?.png"))) == 3


def test_another_encoder_and_a_yaml(text_checkpoint_dir: Path, text_encoder: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        f"checkpoint: {text_checkpoint_dir}\nprompt: [a red bird]\nnum: 1\nengine: {{device: cpu}}\n"
        f"text: {{encoder: {text_encoder}, clean: false, precision: bf16}}\n"
    )
    main([str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out")])
    assert settings_of(tmp_path / "out" / "grid.png")["text"]["precision"] == "bf16"


def test_a_known_picture_is_completed_under_a_prompt(text_checkpoint_dir: Path, tmp_path: Path) -> None:
    Image.new("RGB", (16, 16), "red").save(tmp_path / "known.png")
    flags = ["--prompt", "sea", "--num", "1", "--known.image", str(tmp_path / "known.png")]
    run(text_checkpoint_dir, tmp_path / "out", *flags)
    assert settings_of(tmp_path / "out" / "grid.png")["known"]["mask"] == "upper half"


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("text", [], "this model is conditioned on text, not on class labels: give it prompts, as `--prompt"),
        ("text", ["--label", "0"], "this model is conditioned on text, not on class labels"),
        ("text", ["--label", "0", "--prompt", "sea"], "--label is given beside a text; a checkpoint reads one of them"),
        ("text", ["--label", "0", "--text.features", "x"], "--label is given beside a text"),
        ("text", ["--prompt", "sea", ""], "prompt 2 of 2 is ''; say in words"),
        (
            "text",
            ["--text.encoder", "x"],
            "--text says how prompts become features: give --prompt TEXT, or --text.f",
        ),
        ("text", ["--prompt", "a", "--text.encoder", "nowhere/t5"], "text encoder 'nowhere/t5' cannot be loaded ("),
        ("text", ["--prompt", "a", "--text.encoder", "x", "--text.features", "y"], "text.features y needs no text.enc"),
        ("text", ["--text.features", "gone.safetensors"], "text.features gone.safetensors does not exist"),
        ("text", ["--prompt", "a", "--text.device", "gpu"], "text.device 'gpu' is no torch device"),
        ("text", ["--prompt", "a", "--num", "99999999999"], "--num asks for 99999999999 images"),
        ("text", ["--prompt", "a", "--seed", str(2**63 - 1)], f"seed {2**63 + 2} is no seed"),
        (
            "label",
            ["--prompt", "sea"],
            "this model is conditioned on class labels, not on text: give it labels, as `",
        ),
        ("label", ["--text.features", "x"], "this model is conditioned on class labels, not on text"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refusals_before_anything_is_drawn(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: str,
    flags: list[str],
    said: str,
) -> None:
    source = request.getfixturevalue("text_checkpoint_dir" if model == "text" else "checkpoint_dir")
    given = ["--checkpoint", str(source), "--out", str(tmp_path), "--engine.device", "cpu"]
    assert said in refused(capsys, *given, *flags)
    assert not list(tmp_path.iterdir())


def test_fp16_is_no_precision_of_an_encoder(
    text_checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--checkpoint", str(text_checkpoint_dir), "--out", str(tmp_path), "--prompt", "sea"]
    assert "fp16" in refused(capsys, *given, "--text.precision", "fp16")


def test_the_documented_commands_are_understood() -> None:
    lines = (Path(__file__).parents[1] / "docs" / "llamagen.md").read_text().splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("python ")]
    for command in commands:
        if command[0] == "sample.py":
            settings = load(SampleConfig, command[1:])
            assert settings.checkpoint and (settings.label or settings.prompt or settings.text.features)
        elif command[:2] == ["-m", "visgen.captions"]:
            written = load(program.Config, command[2:])
            assert written.files == (Path("captions.jsonl"),)
        elif command[0] == "train.py":
            named = str(Path(__file__).parents[1] / "configs" / "control" / "t2i_canny.yaml")
            data = load(TrainConfig, [named, *command[2:]]).data
            assert (data.file, data.features) == (*written.files, written.out)
        else:
            assert command[:3] == ["-m", "visgen.convert", "llamagen"]
            source, out, *options = command[3:]
            found = load(llamagen.Config, ["--source", source, "--out", out, *options])
            assert llamagen.resolution(Path(source).name, found.resolution) in (256, 384) and found.tokenizer
    assert len(commands) == 7
