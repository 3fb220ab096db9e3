"""Captions: their features by the program, samples that read them, training and control over them, and a prompt."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from PIL import Image
from safetensors.torch import load_file

import visgen
from visgen import captions as program
from visgen import run_files
from visgen.conditions.text import Config as Condition
from visgen.config import UserError, build, plugin_config
from visgen.prompts import encode
from visgen.train import main as trainer

TEXTS = ["a red bird", "the sea", ["a bird on the sea", "sea"], "the red bird on the sea a bird", "a red bird", ""]
CONDITION = {"tokens": 6, "channels": 16, "clean": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six pictures of one colour each, of odd sizes, and their lines."""
    lines = []
    for i, text in enumerate(TEXTS):
        (tmp_path / "pictures").mkdir(exist_ok=True)
        Image.new("RGB", (20 + i, 24), (40 * i, 0, 0)).save(tmp_path / "pictures" / f"{i}.png")
        lines.append(json.dumps({"image": f"pictures/{i}.png", "text": text}))
    (tmp_path / "captions.jsonl").write_text("\n".join([*lines, "", ""]))
    return tmp_path


def write(folder: Path, encoder: Path, *more: str, name: str = "captions.jsonl") -> Path:
    values = {**CONDITION, "encoder": encoder}
    flags = [word for k, v in values.items() for word in (f"--condition.{k}", str(v))]
    flags[flags.index("--condition.clean") : flags.index("--condition.clean") + 2] = ["--condition.no-clean"]
    program.main(["--files", str(folder / name), "--out", str(folder / "text"), *flags, "--cpu", *more])
    return folder / "text"


def opened(folder: Path, split: Any = "train", **values: Any) -> Any:
    given = {"file": folder / "captions.jsonl", "features": folder / "text", "image_size": 16}
    return build(plugin_config("visgen.data", "captions", **{**given, "held_out_fraction": 0.0, **values}), split)


# ------------------------------------------------------------------------------------------------------- features


def test_features_are_those_of_a_prompt(folder: Path, text_encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, text_encoder, "--batch", "3", "--shard", "4")
    assert "6 captions have features, 6 of them new, 1 of the new ones cut to 6 tokens" in capsys.readouterr().out
    data = opened(folder)
    for i, text in enumerate(TEXTS[:-1]):
        plain = text if isinstance(text, str) else text[0]
        wanted = encode([plain], Condition(encoder=str(text_encoder), **CONDITION))  # type: ignore[arg-type]
        sample = data.get(i)
        assert sample["text"].dtype == torch.float16 and sample["text"].shape == (6, 16)
        assert torch.allclose(sample["text"].float(), wanted.text[0], atol=2e-3)
        assert torch.equal(sample["text_mask"], wanted.mask[0])
    assert data.get(5)["text_mask"].sum() == 1, "an empty caption has its end"
    assert data.get(0)["label"] == 0 and data.classes == ["all"]


def test_one_of_many_captions_is_drawn_in_training_and_the_first_without(folder: Path, text_encoder: Path) -> None:
    write(folder, text_encoder)
    data = opened(folder)
    plain = data.get(2)
    drawn = [data.get(2, np.random.default_rng(seed)) for seed in range(12)]
    counts = {int(sample["text_mask"].sum()) for sample in drawn}
    assert counts == {2, 6} and plain["text_mask"].sum() == 6
    assert all(torch.equal(sample["pixels"], plain["pixels"]) for sample in drawn)
    held_out = opened(folder, "held_out", held_out_file=folder / "captions.jsonl")
    assert all(held_out.get(2, np.random.default_rng(s))["text_mask"].sum() == 6 for s in range(12))


def test_the_program_goes_on_with_what_is_new(
    folder: Path, text_encoder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder, text_encoder, "--shard", "2")
    before = {path.name: path.read_bytes() for path in (folder / "text").iterdir()}
    (folder / "text" / "keys_00001.npy").unlink()  # as if killed while it was written
    (folder / "more.jsonl").write_text('{"image": "pictures/0.png", "text": "the red sea"}')
    capsys.readouterr()
    write(folder, text_encoder, "--shard", "2")
    assert "6 captions have features, 2 of them new" in capsys.readouterr().out
    write(folder, text_encoder, name="more.jsonl")
    assert "7 captions have features, 1 of them new" in capsys.readouterr().out
    assert all((folder / "text" / name).read_bytes() == data for name, data in before.items() if "00000" in name)
    assert len(opened(folder)) == 6 and len(opened(folder, file=folder / "more.jsonl")) == 1
    write(folder, text_encoder)
    assert "7 captions have features, 0 of them new" in capsys.readouterr().out


def test_an_unreadable_picture_is_replaced_with_its_caption(folder: Path, text_encoder: Path) -> None:
    write(folder, text_encoder)
    (folder / "pictures" / "0.png").write_text("no picture")
    data = opened(folder, on_error="skip")
    assert torch.equal(data.get(0)["text"], data.get(1)["text"]) and data.skipped == 1
    with pytest.raises(UserError, match=r"pictures/0\.png cannot be read"):
        opened(folder).get(0)


def test_captions_travel_to_workers_without_their_files(folder: Path, text_encoder: Path) -> None:
    write(folder, text_encoder)
    data = opened(folder)
    again = pickle.loads(pickle.dumps(data))
    assert again.features._maps == [] and torch.equal(again.get(3)["text"], data.get(3)["text"])


def test_maps_are_given_beside_captions(folder: Path, text_encoder: Path) -> None:
    write(folder, text_encoder)
    Image.new("L", (7, 9), 200).save(folder / "depth.png")
    lines = [json.loads(line) for line in (folder / "captions.jsonl").read_text().split("\n") if line]
    whole = [json.dumps({**line, "map": "depth.png"}) for line in lines]
    (folder / "mapped.jsonl").write_text("\n".join(whole))
    sample = opened(folder, file=folder / "mapped.jsonl").get(1)
    assert sample["map"].shape == (1, 3, 16, 16) and sample["map"].unique().tolist() == [200] and "text" in sample
    (folder / "mapped.jsonl").write_text("\n".join([*whole[:4], json.dumps(lines[4])]))
    with pytest.raises(UserError, match="4 of 5 lines have a `map`; give all one, or none"):
        opened(folder, file=folder / "mapped.jsonl")


def test_without_features_samples_are_pictures(folder: Path) -> None:
    data = opened(folder, features=None)
    assert sorted(data.get(0)) == ["label", "pixels"] and data.features is None
    halves = [opened(folder, split, features=None, held_out_fraction=0.5) for split in ("train", "held_out")]
    assert sum(map(len, halves)) == 6


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no line"),
        ('{"image": "a.png"', "line 1 is no JSON"),
        ('{"image": "a.png", "text": "a"}\n[3]', "line 2: `image` is None"),
        ('{"image": "", "text": "a"}', "line 1: `image` is ''"),
        ('{"image": "a.png"}', "line 1: `text` is None"),
        ('{"image": "a.png", "text": []}', r"line 1: `text` is \[\]"),
        ('{"image": "a.png", "text": ["a", 3]}', "it must be a caption, or a list of captions"),
        ('{"image": "a.png", "text": "a", "map": 3}', "line 1: `map` is 3"),
        ("[" * 100_000, "line 1 is no JSON"),
        ('{"image": "a.png", "text": "\\ud83d"}', "line 1 is no JSON"),
        (None, "does not exist"),
    ],
)
def test_lines_that_are_none(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "captions.jsonl").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        opened(tmp_path, features=None)
    assert "\n" not in str(caught.value)


def test_features_that_are_not_there(folder: Path, text_encoder: Path) -> None:
    with pytest.raises(UserError, match=r"no features of captions at .*text; write them with `python -m visgen\.capti"):
        opened(folder)
    write(folder, text_encoder)
    with open(folder / "captions.jsonl", "a") as file:
        file.write('\n{"image": "pictures/0.png", "text": "a new one"}')
    with pytest.raises(UserError, match=r"1 of the 8 captions of .* have no features in .*'a new one'"):
        opened(folder)
    with pytest.raises(UserError, match=r"were made with tokens 6, now it is 7; choose another --out"):
        write(folder, text_encoder, "--condition.tokens", "7")
    (folder / "text" / "features_00000.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match=r"features_00000\.npy cannot be read"):
        opened(folder)


def test_what_the_program_refuses(folder: Path, text_encoder: Path) -> None:
    with pytest.raises(UserError, match="files is not set"):
        program.main([])
    with pytest.raises(UserError, match="gives features of width 16, the model reads 8"):
        write(folder, text_encoder, "--condition.channels", "8")
    with pytest.raises(UserError, match="text encoder 'nowhere' cannot be loaded"):
        write(folder, Path("nowhere"))


def test_features_that_overflow_are_refused(folder: Path, text_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from visgen.prompts import TextEncoder

    monkeypatch.setattr(
        TextEncoder, "features", lambda self, rows, batch: [torch.full((len(r), 16), 1e6) for r in rows]
    )
    with pytest.raises(UserError, match="that float16 cannot hold"):
        write(folder, text_encoder)
    assert not list((folder / "text").glob("keys_*"))


# -------------------------------------------------------------------------------------------------------- training

SHARED = """--log.no-wandb --loop.workers 0 --loop.precision fp32 --loop.batch 4 --loop.log-every 1 --loop.steps 2
    --data.image-size 16"""
TOKENIZER = """--objective.kind vq --objective.tokenizer.image-size 16 --objective.tokenizer.width 8
    --objective.tokenizer.multipliers 1 2 2 --objective.tokenizer.res-blocks 1 --objective.tokenizer.z-channels 8
    --objective.tokenizer.norm-groups 4 --objective.tokenizer.quantizer.codes 16 --objective.losses.adversarial 0
    --loop.preview-every 0 --data.kind captions"""
MODEL = """--objective.kind next_token --objective.model.grid 1 4 4 --objective.model.vocab 16
    --objective.model.backbone.layers 3 --objective.model.backbone.heads 2 --objective.model.backbone.width 16
    --objective.model.condition.kind text --objective.model.condition.tokens 6
    --objective.model.condition.channels 16 --objective.preview.images 3 --loop.preview-every 2"""
CONTROL = """--objective.model.control.kind canny --objective.model.control.encoder.width 16
    --objective.model.control.encoder.layers 1 --objective.model.control.encoder.heads 2
    --objective.model.control.encoder.patch 4 --objective.model.control.encoder.side 4"""


def train(out: Path, *flags: str) -> Path:
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    trainer.train([*SHARED.split(), *flags, "--loop.out", str(out)])
    return out


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / run_files.step_name(2) / run_files.WEIGHTS)


def test_from_captions_to_an_image_under_a_control(folder: Path, text_encoder: Path, tmp_path: Path) -> None:
    """A tokenizer, a model of texts, and a control over it, all of the same captions; then a prompt and a picture."""
    write(folder, text_encoder)
    lines = str(folder / "captions.jsonl")
    data = ["--data.file", lines, "--data.held-out-file", lines]
    text = ["--data.kind", "captions", "--data.features", str(folder / "text"), *data]
    vq = train(tmp_path / "vq", *TOKENIZER.split(), *data, "--data.features", "None")
    model = [*MODEL.split(), "--objective.model.condition.encoder", str(text_encoder)]
    model += ["--objective.model.condition.no-clean", "--objective.tokenizer", str(vq), *text]
    plain = train(tmp_path / "plain", *model, "--loop.eval-every", "2")
    assert weights(plain)["condition.cap_proj.fc1.weight"].abs().sum() > 0
    control = [*CONTROL.split(), "--objective.init", str(plain), "--objective.train", "control_only"]
    controlled = train(tmp_path / "control", *model, *control)
    assert weights(controlled) and all(name.startswith("control.") for name in weights(controlled))
    whole = train(tmp_path / "all", *model, *CONTROL.split(), "--objective.init", str(plain), "--optim.lr", "1e-2")
    moved = [k for k, v in weights(plain).items() if not torch.equal(v, weights(whole)[k])]
    assert any(k.startswith("condition.cap_proj") for k in moved) and "condition.uncond_embedding" not in moved

    generator = visgen.load(str(whole), device="cpu")
    edges = torch.full((1, 3, 16, 16), -1.0)
    edges[..., 8, :] = 1
    found = generator.sample(prompts=["a red bird", "the sea"], seeds=[0, 1], guidance=2.0, control=edges)
    added = generator.model.controlled({"map": edges.unsqueeze(1)})
    assert added is not None and added.abs().max() > 0
    assert found.prompts == ["a red bird", "the sea"] and found.pixels.shape == (2, 3, 16, 16)
    assert generator.encode(["a red bird"]).about["encoder"] == str(text_encoder)
    null = visgen.load(str(controlled), device="cpu").sample(prompts=["a red bird", "the sea"], seeds=[0, 1])
    base = visgen.load(str(plain), device="cpu").sample(prompts=["a red bird", "the sea"], seeds=[0, 1])
    assert torch.equal(null.tokens, base.tokens), "without a map it is the base"


def test_texts_change_what_is_learned(folder: Path, text_encoder: Path, tmp_path: Path) -> None:
    """The loss of a batch depends on its captions."""
    from visgen.data import to_batch
    from visgen.model import Model, ModelConfig
    from visgen.objectives.next_token import NextTokenNet

    write(folder, text_encoder)
    batch = to_batch(opened(folder).get_many([0, 1]), "cpu")
    condition = Condition(encoder=str(text_encoder), **CONDITION)  # type: ignore[arg-type]
    backbone = plugin_config("visgen.backbones", "ar", layers=1, heads=2, width=16)
    torch.manual_seed(0)
    net = NextTokenNet(Model(ModelConfig(grid=(1, 4, 4), vocab=16, backbone=backbone, condition=condition))).eval()
    torch.nn.init.normal_(net.model.head.output.weight)
    tokens = torch.arange(16).expand(2, -1)
    one = net(tokens, batch, None)[0]
    turned: Any = {**batch, "text": batch["text"].flip(0), "text_mask": batch["text_mask"].flip(0)}
    same: Any = {**batch, "text": batch["text"][[0, 0]], "text_mask": batch["text_mask"][[0, 0]]}
    assert torch.allclose(net(tokens, turned, None)[0], one) and not torch.allclose(net(tokens, same, None)[0], one)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data.kind", "synthetic"], r"data\.kind 'synthetic' gives no features of any; use data\.kind captions"),
        (
            ["--objective.model.condition.tokens", "7"],
            r"were made with tokens 6, .*tokens is 7",
        ),
        (["--objective.model.condition.encoder", "x"], r"objective\.model\.condition\.encoder is x; set it to that"),
        (["--objective.model.condition.clean"], r"were made with clean False, .*clean is True"),
    ],
)
def test_texts_that_are_not_the_models(
    folder: Path, text_encoder: Path, tmp_path: Path, flags: list[str], said: str
) -> None:
    write(folder, text_encoder)
    given = [*MODEL.split(), "--objective.model.condition.encoder", str(text_encoder)]
    given += ["--objective.model.condition.no-clean"]
    if "synthetic" not in flags:
        given += ["--data.kind", "captions", "--data.file", str(folder / "captions.jsonl")]
        given += ["--data.features", str(folder / "text")]
    with pytest.raises(UserError, match=said):
        train(tmp_path / "run", *given, *flags)
