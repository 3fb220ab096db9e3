"""`visgen.load(...).sample(...)`: labels, seeds, batches, known pixels, and what loading refuses."""

from __future__ import annotations

import io
import math
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sample_program import run, settings_of
from torch import Tensor

import visgen
from visgen import checkpoint, run_files
from visgen.config import UserError, dump, load, plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.generate import Generator, stream
from visgen.images import grid, pooled
from visgen.metrics.images import to_uint8
from visgen.samplers.ar import AR, Config
from visgen.sampling import EngineConfig, SamplingConfig

N, SIDE, SIZE = 64, 8, 16


@pytest.fixture(scope="module")
def generator(checkpoint_dir: Path) -> Generator:
    return visgen.load(str(checkpoint_dir), device="cpu", batch=3)


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------ labels


@pytest.mark.parametrize("name", [2, "2", "coat", "COAT", np.int64(2), np.uint8(2), torch.tensor(2)])
def test_labels_by_number_and_name(generator: Generator, name: Any) -> None:
    assert generator.label(name) == 2 and type(generator.label(name)) is int


@pytest.mark.parametrize(
    ("known", "asked"), [("caf\u00e9", "Cafe\u0301"), ("CAFE\u0301", "caf\u00e9"), ("cafe\u0301", "cafe\u0301")]
)
def test_labels_in_another_unicode_form(
    generator: Generator, monkeypatch: pytest.MonkeyPatch, known: str, asked: str
) -> None:
    monkeypatch.setattr(generator, "classes", ["bag", known, "Coat"])
    assert generator.label(asked) == 1


@pytest.mark.parametrize("name", [3, "3", -1, "-1", np.int64(9)])
def test_labels_out_of_range(generator: Generator, name: Any) -> None:
    assert (
        refused(lambda: generator.label(name)) == f"label {name} is out of range: the checkpoint knows classes 0 to 2"
    )


@pytest.mark.parametrize("name", ["boot", "", "--1", "²", "1.0"])
def test_unknown_names_list_the_known_ones(generator: Generator, name: str) -> None:
    message = refused(lambda: generator.label(name))
    perhaps = " (perhaps 'Ankle boot')" if name == "boot" else ""
    assert message == f"label '{name}' is unknown{perhaps}; the checkpoint knows Ankle boot, bag, Coat"


@pytest.mark.parametrize("name", [None, 1.5, [0], torch.tensor(1.0)])
def test_what_is_no_label_at_all(generator: Generator, name: Any) -> None:
    message = refused(lambda: generator.label(name))
    assert message.endswith(" is no class; the checkpoint knows Ankle boot, bag, Coat")


def test_many_classes_are_not_all_listed(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "classes", [f"c{i}" for i in range(21)])
    assert refused(lambda: generator.label("x")).endswith(
        "knows " + ", ".join(generator.classes[:20]) + ", ... (21 in all)"
    )


def test_a_checkpoint_without_names_says_so(make_model: Callable[..., Any], generator: Generator) -> None:
    nameless = Generator(make_model(grid=(1, 8, 8)), generator.tokenizer, EngineConfig(device="cpu"))
    assert "ids 0 to 2 (no names recorded)" in refused(lambda: nameless.label("bag"))


# ---------------------------------------------------------------------------------------------------------- sampling


def test_images_are_the_decoded_tokens_of_the_engine(generator: Generator) -> None:
    images = generator.sample(["bag", 0], [7, 8], Guidance(2.0), Warp(0.9))
    engine = Engine(generator.model, Guidance(2.0), Warp(0.9))
    engine.begin({"label": torch.tensor([1, 0])})
    tokens = engine.run(AR(Config()), Noise(torch.tensor([7, 8]))).tokens
    assert torch.equal(images.tokens, tokens)
    with torch.no_grad():
        assert torch.equal(images.pixels, to_uint8(generator.tokenizer.decode(tokens)[:, 0]))
    assert images.pixels.dtype == torch.uint8 and images.pixels.shape == (2, 3, SIZE, SIZE)
    assert (images.labels, images.seeds, images.nfe) == ([1, 0], [7, 8], N) and images.seconds > 0
    assert [p.size for p in images.pil()] == [(SIZE, SIZE)] * 2
    assert np.array_equal(np.array(images.pil()[1]).transpose(2, 0, 1), images.pixels[1].numpy())


def test_what_was_counted_and_chosen_is_recorded(generator: Generator) -> None:
    plain = generator.sample(["bag", 0, 1, 2], [7, 8, 9, 10])
    assert plain.nfe_per_image == [N] * 4 and plain.notes == {}
    sampler = plugin_config("visgen.samplers", "sjd", drafting="pure_gumbel", window=8)
    images = generator.sample(["bag", 0, 1, 2], [7, 8, 9, 10], sampler=sampler)
    assert torch.equal(images.tokens, plain.tokens) and images.rounds.shape == (4, N)
    assert images.nfe_per_image == images.rounds.amax(1).tolist() and max(images.nfe_per_image) < N
    assert images.nfe == min(images.nfe_per_image[:3]) + images.nfe_per_image[3], "a row takes the fourth as well"
    auto = plugin_config("visgen.samplers", "sjd", drafting="pure_gumbel", window="auto")
    first, second = (generator.sample([0], [seed], sampler=auto) for seed in (1, 2))
    assert first.notes["window"] >= 1 and first.notes == second.notes, "chosen once"


def test_an_image_depends_on_its_label_and_seed_alone(generator: Generator, checkpoint_dir: Path) -> None:
    labels, seeds = [0, 1, 2, 0, 1, 2, 0], [5, 5, 6, 7, 8, 9, 5]
    images = generator.sample(labels, seeds)
    assert torch.equal(images.tokens[0], images.tokens[6]) and not torch.equal(images.tokens[0], images.tokens[1])
    assert images.nfe == 3 * N, "batches of 3, 3 and 1"
    whole = visgen.load(str(checkpoint_dir), device="cpu", batch=16).sample(labels, seeds)
    assert torch.equal(whole.tokens, images.tokens) and torch.equal(whole.pixels, images.pixels)
    assert torch.equal(generator.sample([1], [8]).tokens[0], images.tokens[4])


def test_defaults_are_plain_sampling_and_seeds_from_zero(generator: Generator) -> None:
    explicit = generator.sample([0, 1], [0, 1], Guidance(), Warp(), plugin_config("visgen.samplers", "ar"))
    assert torch.equal(generator.sample([0, 1]).tokens, explicit.tokens)
    assert torch.equal(
        generator.sample([0, 1], guidance=3.0).tokens, generator.sample([0, 1], None, Guidance(3.0)).tokens
    )
    assert not torch.equal(generator.sample([0, 1], guidance=3.0).tokens, explicit.tokens)


def test_progress_counts_over_all_batches(generator: Generator) -> None:
    seen: list[tuple[int, int]] = []
    generator.sample([0] * 4, on_step=lambda done, total: seen.append((done, total)))
    assert seen == [(k + 1, 2 * N) for k in range(2 * N)]


def test_streaming_gives_the_same_images_in_batches(generator: Generator) -> None:
    plan = [(i % 3, 20 + i) for i in range(5)]
    settings = SamplingConfig(guidance=Guidance(1.5), engine=EngineConfig(batch=2))
    parts = list(stream(generator, plan, settings))
    assert [len(p.labels) for p in parts] == [2, 2, 1]
    whole = generator.sample([p[0] for p in plan], [p[1] for p in plan], 1.5)
    assert torch.equal(torch.cat([p.pixels for p in parts]), whole.pixels)


@pytest.mark.parametrize(("labels", "seeds"), [([], None), ([0, 1], [3]), ([0], [1, 2])])
def test_labels_and_seeds_must_agree(generator: Generator, labels: list[int], seeds: list[int] | None) -> None:
    message = refused(lambda: generator.sample(labels, seeds))
    assert f"{len(labels)} labels and {len(seeds or [])} seeds" in message


def test_seeds_lie_in_their_range(generator: Generator) -> None:
    assert generator.sample([0, 0], [0, 2**63 - 1]).seeds == [0, 2**63 - 1]
    for seed in (-1, 2**63):
        message = refused(lambda seed=seed: generator.sample([0, 0], [0, seed]))
        assert message == f"seed {seed} is no seed; it must lie within 0 and 2^63 - 1"


@pytest.mark.parametrize("label", [2, "Coat", "2", np.int64(2), torch.tensor(2)])
def test_one_label_serves_every_seed(generator: Generator, label: Any) -> None:
    images = generator.sample(label, seeds=[4, 9])
    assert images.labels == [2, 2] and torch.equal(images.tokens, generator.sample([2, 2], [4, 9]).tokens)
    assert generator.sample(label).seeds == [0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"seeds": ["a"]}, "seeds ['a'] must be whole numbers, one per image, such as [0, 1]"),
        ({"seeds": [1.5]}, "seeds [1.5] must be whole numbers"),
        ({"seeds": 3}, "seeds 3 must be whole numbers, one per image"),
        ({"seeds": torch.full((9, 9), 0.5)}, "must be whole numbers"),
        (
            {"labels": None},
            "labels are missing: pass ids or names of classes, as labels=[0]; the checkpoint knows Ankle",
        ),
        ({"seed": 1, "seeds": [1]}, "seed and seeds are both given"),
        ({"seed": 1.5}, "seed 1.5 must be a whole number"),
        ({"seed": -1}, "seed -1 is no seed"),
        ({"num": 0}, "num 0 must be at least 1"),
        ({"num": 2, "seeds": [1]}, "2 labels and 1 seeds"),
        ({"top_k": 5, "warp": Warp()}, "top_k and warp are both given"),
        ({"top_k": "few"}, "top_k 'few' must be a whole number"),
        ({"top_p": 0}, "top_p 0.0 must be in (0, 1]"),
        ({"temperature": [1]}, "temperature [1] must be a number"),
        ({"lables": [0]}, "sample() has no argument 'lables'; did you mean 'labels'? It takes labels, seeds, guidance"),
        ({"guidance_scale": 2}, "did you mean 'guidance'?"),
        ({"labels": 2.5}, "label 2.5 is no class"),
        ({"guidance": "big"}, "guidance 'big' must be its scale, a number, or a `Guidance`"),
        ({"guidance": [2]}, "guidance [2] must be its scale"),
        ({"guidance": -1}, "guidance.scale -1.0 must be a finite number"),
        ({"warp": 0.9}, "warp 0.9 is no `visgen.decode.warp.Warp`, such as Warp(top_p=0.97)"),
        ({"sampler": "ra"}, "kind: unknown kind 'ra'; allowed: ar"),
    ],
    ids=str,
)
def test_values_that_cannot_be_meant(generator: Generator, given: dict[str, Any], named: str) -> None:
    assert named in refused(lambda: generator.sample(**{"labels": [0], **given}))


def test_what_the_program_takes_as_options_python_takes_as_arguments(generator: Generator) -> None:
    images = generator.sample(["bag", 0], num=2, seed=5, temperature=0.9, top_k=3, top_p=0.8, guidance=2.0)
    same = generator.sample([1, 1, 0, 0], [5, 6, 7, 8], 2.0, Warp(0.9, 3, 0.8))
    assert (images.labels, images.seeds) == (same.labels, same.seeds) and torch.equal(images.tokens, same.tokens)
    assert generator.sample("bag", num=3).seeds == [0, 1, 2]


def test_a_model_of_one_class_needs_no_label(make_model: Callable[..., Any], generator: Generator) -> None:
    single = Generator(make_model(grid=(1, 8, 8), classes=1), generator.tokenizer, EngineConfig(device="cpu"))
    assert single.sample(num=2).labels == [0, 0]


def test_images_show_themselves_in_one_line_and_in_a_notebook(generator: Generator) -> None:
    images = generator.sample(["bag", 0, 1, 2, 1], seed=7)
    assert repr(images) == "<5 images, 16 x 16 px, labels 1, 0, 1, 2, ... 1, seeds 7, 8, 9, 10, ... 11>"
    assert repr(generator.sample("bag")) == "<1 images, 16 x 16 px, labels 1, seeds 0>"
    with Image.open(io.BytesIO(images._repr_png_())) as shown:
        assert np.array_equal(np.array(shown), grid(images.pixels, 5))


def test_images_are_saved_as_the_program_saves_them(generator: Generator, checkpoint_dir: Path, tmp_path: Path) -> None:
    paths = generator.sample(["bag", 0], seed=3, top_k=9).save(tmp_path / "new" / "out")
    assert [p.name for p in paths] == ["0001_000003.png", "0000_000004.png"]
    run(checkpoint_dir, tmp_path / "other", "--label", "bag", "0", "--num", "1", "--seed", "3", "--warp.top-k", "9")
    found, wanted = settings_of(paths[0]), settings_of(tmp_path / "other" / "0001_000003.png")
    assert found.pop("engine").pop("batch") == 3 and wanted.pop("engine") and wanted.pop("checkpoint")
    assert found == wanted
    generator.sample("bag", seed=3, top_k=9).save(tmp_path / "new" / "out")
    assert len(list((tmp_path / "new" / "out").iterdir())) == 2, "the same image again"


def test_what_is_given_as_tensors_tells_saved_images_apart(generator: Generator, tmp_path: Path) -> None:
    mask = torch.ones(1, SIZE, SIZE, dtype=torch.bool)
    for known in (picture(), -picture()):
        generator.sample([0], known=(known, mask)).save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_no_memory_can_hold_is_refused_before_it_is_asked_for(
    generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(lambda: generator.sample(0, [0], size=(2**19, 2**19)))
    assert re.fullmatch(r"1 image of \d+ tokens at once take .* GB of memory; lower --size", said)
    monkeypatch.setattr("visgen.generate.memory_of", lambda device: 1000)
    assert "3 images of 64 tokens at once" in (said := refused(lambda: generator.sample(0, range(5))))
    assert said.endswith("lower --engine.batch")


def test_a_sampler_by_its_kind(generator: Generator) -> None:
    assert torch.equal(generator.sample([0], sampler="ar").tokens, generator.sample([0]).tokens)
    assert "sampler is a dict; pass a kind, such as 'ar'" in refused(
        lambda: generator.sample([0], sampler={"kind": "ar"})
    )


def test_pixels_that_are_no_numbers_are_said(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    real = generator.tokenizer.decode

    def broken(tokens: Tensor, **other: Any) -> Tensor:
        pixels = real(tokens, **other)
        pixels[1, ..., 0] = float("nan")
        return pixels

    monkeypatch.setattr(generator.tokenizer, "decode", broken)
    assert "the image of seed 8 has pixels that are not finite; try " in refused(lambda: generator.sample(1, [7, 8, 9]))


def test_guidance_needs_a_null_class(make_model: Callable[..., Any], generator: Generator) -> None:
    model = make_model(grid=(1, 8, 8), condition={"dropout": 0.0})
    nullless = Generator(model, generator.tokenizer, EngineConfig(device="cpu"))
    assert "guidance.scale must be 1" in refused(lambda: nullless.sample([0], guidance=2.0))
    assert nullless.sample([0]).pixels.shape == (1, 3, SIZE, SIZE)


def test_half_precision_is_the_transformers_alone(checkpoint_dir: Path) -> None:
    half = visgen.load(str(checkpoint_dir), device="cpu", precision="bf16")
    assert half.dtype == torch.bfloat16 and next(half.tokenizer.parameters()).dtype == torch.float32
    assert half.sample([0, 1], guidance=2.0).tokens.unique().numel() > 3
    assert EngineConfig(device="cpu").resolve() == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "gpu"}, "engine.device 'gpu' is no torch device"),
        ({"batch": 0}, "engine.batch 0 must be at least 1"),
    ],
)
def test_impossible_engines(checkpoint_dir: Path, options: dict[str, Any], named: str) -> None:
    assert named in refused(lambda: visgen.load(str(checkpoint_dir), **options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_said(checkpoint_dir: Path) -> None:
    assert "no CUDA GPU; use --engine.device cpu" in refused(lambda: visgen.load(str(checkpoint_dir), device="cuda"))


# ------------------------------------------------------------------------------------------------------ known pixels


def picture(rows: int = 1) -> Tensor:
    return torch.rand(rows, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_known_cells_keep_their_tokens_and_only_whole_cells_count(generator: Generator) -> None:
    mask = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    mask[:, :5] = True  # cells are 2 px: rows 0 and 1 whole, row 2 by half
    mask[:, 10, 3] = True
    kept = torch.zeros(SIDE, SIDE, dtype=torch.bool)
    kept[:2] = True
    with torch.no_grad():
        expected = generator.tokenizer.encode(picture().unsqueeze(1))[0]
    images = generator.sample([0, 1, 2, 0], known=(picture(), mask))
    free = generator.sample([0, 1, 2, 0])
    for row in range(4):
        assert torch.equal(images.tokens[row][kept.flatten()], expected[kept.flatten()])
        assert not torch.equal(images.tokens[row], free.tokens[row])
    assert not torch.equal(images.tokens[:, 16:24], expected[16:24].expand(4, -1))


def test_everything_known_is_the_reconstruction(generator: Generator) -> None:
    pixels, mask = picture(4), torch.ones(4, SIZE, SIZE, dtype=torch.bool)
    images = generator.sample([0, 1, 2, 0], known=(pixels, mask))
    with torch.no_grad():
        tokens = generator.tokenizer.encode(pixels.unsqueeze(1))
    assert torch.equal(images.tokens, tokens), "row by row, across batches of 3 and 1"


def test_known_pixels_stay_as_they_are_unless_tokens_alone_are_wanted(generator: Generator) -> None:
    mask = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    mask[:, :5, 3:] = True
    pasted, plain = (generator.sample([0, 1], known=(picture(), mask), paste=paste) for paste in (True, False))
    assert torch.equal(pasted.tokens, plain.tokens)
    kept = mask.unsqueeze(1).expand(2, 3, -1, -1)
    known = to_uint8(picture()).expand(2, -1, -1, -1)
    assert torch.equal(pasted.pixels[kept], known[kept]) and not torch.equal(plain.pixels[kept], known[kept])
    assert torch.equal(pasted.pixels[~kept], plain.pixels[~kept])


def test_one_mask_may_serve_many_pictures(generator: Generator) -> None:
    mask = torch.ones(1, SIZE, SIZE, dtype=torch.bool)
    with torch.no_grad():
        tokens = generator.tokenizer.encode(picture(2).unsqueeze(1))
    assert torch.equal(generator.sample([0, 1], known=(picture(2), mask)).tokens, tokens)


def test_known_pixels_that_do_not_fit(generator: Generator) -> None:
    mask = torch.ones(1, SIZE, SIZE, dtype=torch.bool)
    large = torch.zeros(1, 3, 32, 32)
    for pixels, shape in (
        (large, "[1, 3, 32, 32]"),
        (picture()[0], "[3, 16, 16]"),
        (picture()[:, :1], "[1, 1, 16, 16]"),
    ):
        message = refused(lambda pixels=pixels: generator.sample([0], known=(pixels, mask)))
        assert message.startswith(f"known pixels {shape} and mask [1, 16, 16] must be [B, 3, 16, 16] and [B, 16, 16]")
    whole = (picture() * 127).byte()
    assert "known pixels are torch.uint8; give floats" in refused(lambda: generator.sample([0], known=(whole, mask)))
    assert "lie within nan" in refused(lambda: generator.sample([0], known=(picture() * math.nan, mask)))
    message = refused(lambda: generator.sample([0], known=generator.sample([0]).pil() * 2))
    assert message.startswith(
        "known is of Image, Image; give (pixels [B, 3, 16, 16] in [-1, 1], mask [B, 16, 16] bool)"
    )
    message = refused(lambda: generator.sample([0] * 4, known=(picture(3), mask)))
    assert message == "3 known images and 1 masks for 4 images; give 1 or 4"


def test_notes_of_several_batches_are_one() -> None:
    one, other = ({"head_steps": 6, "rate": rate, "window": 4, "each": [rate]} for rate in (1.0, 2.0))
    assert pooled([(one, 3), (other, 1)]) == {"head_steps": 12, "rate": 1.25, "window": 4, "each": [2.0]}


def test_a_mask_that_keeps_no_token(generator: Generator) -> None:
    mask = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    mask[:, ::2] = True  # half of each cell
    message = refused(lambda: generator.sample([0], known=(picture(), mask)))
    assert message.startswith("the mask keeps no token: each is 2 x 2 px")


# ----------------------------------------------------------------------------------------------------------- loading


def test_the_newest_step_or_a_chosen_one(generator: Generator, checkpoint_dir: Path) -> None:
    assert generator.meta["step"] == 10 and generator.classes == ["Ankle boot", "bag", "Coat"]
    assert generator.meta["params"] == sum(p.numel() for p in generator.model.parameters())
    by_number = visgen.load(str(checkpoint_dir), step=5, device="cpu")
    by_folder = visgen.load(checkpoint_dir / "step_0000005", device="cpu")
    assert by_number.meta["step"] == by_folder.meta["step"] == 5
    five, ten = by_folder.sample([0]).tokens, generator.sample([0]).tokens
    assert torch.equal(by_number.sample([0]).tokens, five) and not torch.equal(five, ten)


def test_the_best_step(checkpoint_dir: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(checkpoint_dir, tmp_path / "copy")
    (copy / "step_0000010" / run_files.META).write_text('{"best": {"metric": "nats_per_token", "step": 5}}')
    assert visgen.load(copy, step="best", device="cpu").meta["step"] == 5
    assert visgen.load(copy, device="cpu").meta["step"] == 10


def test_a_step_with_its_tokenizer_is_enough_after_a_move(checkpoint_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint_dir / "step_0000010", tmp_path / "moved")
    shutil.copy(checkpoint_dir / run_files.TOKENIZER, tmp_path / "moved")
    moved = visgen.load(str(tmp_path / "moved"), device="cpu")
    assert torch.equal(moved.sample([1]).pixels, visgen.load(str(checkpoint_dir), device="cpu").sample([1]).pixels)


@pytest.fixture
def copy(checkpoint_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint_dir, tmp_path / "run"))


@pytest.mark.parametrize("content", ["", "a: [", "- 1", "base: gone.yaml"])
def test_a_damaged_config_is_said_and_a_missing_one_is_not(copy: Path, content: str) -> None:
    config = copy / "config.yaml"
    config.write_text(content)
    for source in (copy, copy / "step_0000005"):
        message = refused(lambda source=source: visgen.load(source))
        assert str(copy) in message and message.endswith("copy it again, or remove it, for sampling does not need it")
    config.write_text("a: 1")
    assert visgen.load(copy, device="cpu").meta["step"] == 10


def test_damaged_facts_of_a_step_are_said(copy: Path) -> None:
    (copy / "step_0000010" / run_files.META).write_text('{"step": 1')
    for source in (copy, copy / "step_0000010"):
        message = refused(lambda source=source: visgen.load(source))
        assert "step_0000010/meta.json is damaged" in message and "use the earlier step_0000005" in message
    assert visgen.load(copy, step=5, device="cpu").meta["step"] == 5
    (copy / "step_0000010" / run_files.META).unlink()
    assert "meta.json is missing" in refused(lambda: visgen.load(copy))
    assert visgen.load(copy / "step_0000010", device="cpu").meta["step"] == 10


def test_a_missing_tokenizer(copy: Path) -> None:
    (copy / run_files.TOKENIZER).unlink()
    message = refused(lambda: visgen.load(str(copy)))
    assert "tokenizer.safetensors is missing" in message and str(copy) in message


@pytest.mark.parametrize("keep", [0, 5, 2000])
def test_truncated_weights(copy: Path, keep: int) -> None:
    weights = copy / "step_0000010" / run_files.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:keep])
    assert str(weights) in refused(lambda: visgen.load(str(copy)))


def test_a_tokenizer_of_another_resolution(copy: Path, make_model: Callable[..., Any]) -> None:
    model = make_model(grid=(1, 4, 4), vocab=16)
    checkpoint.save_module(copy / "step_0000010" / run_files.WEIGHTS, model, model.config)
    message = refused(lambda: visgen.load(str(copy)))
    assert "its grid is (1, 8, 8), the model's is (1, 4, 4)" in message and run_files.TOKENIZER in message


def test_the_wrong_way_round(copy: Path) -> None:
    shutil.copy(copy / run_files.TOKENIZER, copy / "step_0000010" / run_files.WEIGHTS)
    assert "a tokenizer" in refused(lambda: visgen.load(str(copy)))


def test_no_such_step_lists_those_there(checkpoint_dir: Path) -> None:
    assert "holds no step 7; it holds 5, 10" in refused(lambda: visgen.load(str(checkpoint_dir), step=7))


def test_an_empty_directory(tmp_path: Path) -> None:
    assert str(tmp_path) in refused(lambda: visgen.load(str(tmp_path)))


@pytest.mark.parametrize("name", ["nowhere", "/no/such/directory", "./runs/x", "a/b/c", "~/x", "owner/"])
def test_names_that_can_be_no_hub_id(name: str) -> None:
    assert refused(lambda: visgen.load(name)).startswith(f"checkpoint '{name}' is neither a directory nor a Hub id")


@pytest.mark.parametrize("error", [OSError("gone\nreally"), ConnectionError(), None], ids=["os", "silent", "offline"])
def test_a_hub_that_does_not_answer(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    if error is not None:

        def fail(name: str) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refused(lambda: visgen.load("nobody/nothing"))
    assert message.startswith("checkpoint 'nobody/nothing' is no local directory, and the Hub did not give it: ")
    assert message.rpartition(": ")[2].strip()


def test_a_path_that_is_no_valid_hub_id() -> None:
    assert "is no local directory" in refused(lambda: visgen.load("runs/my run"))


def test_a_hub_directory_is_loaded_like_a_local_one(checkpoint_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(checkpoint_dir / name.split("/")[1]))
    assert visgen.load("somebody/step_0000005", device="cpu").meta["step"] == 5


@pytest.mark.parametrize("call", ["connect", "connect_ex"])
def test_no_test_reaches_the_network(call: str) -> None:
    """The guard of conftest.py, which code that falls back on `except Exception` cannot hide."""
    with (
        socket.socket() as outside,
        pytest.raises(BaseException, match=r"a test tried to connect to \('192\.0\.2\.1', 80\)"),
    ):
        getattr(outside, call)(("192.0.2.1", 80))
    with socket.socket() as server, socket.socket() as inside:
        server.bind(("127.0.0.1", 0))
        server.listen()
        inside.connect(server.getsockname())


def test_settings_survive_yaml() -> None:
    settings = SamplingConfig(guidance=Guidance(2.0, (0.1, 0.9), "cosine"), warp=Warp(0.5, 3, 0.4))
    assert load(SamplingConfig, values=dump(settings)) == settings


def test_a_class_named_by_a_number_is_meant_by_its_name(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "classes", ["1", "10", "2"])
    assert [generator.label(x) for x in ("10", "2", 2, "0")] == [1, 2, 2, 0]
