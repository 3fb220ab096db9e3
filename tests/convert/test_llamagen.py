"""LlamaGen's files: every wrapping, strict audit, resolution, and the same tokens after conversion."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import visgen
from visgen import prompts
from visgen.checkpoint import load_model, load_tokenizer, read_metadata
from visgen.config import UserError, build, plugin_config
from visgen.convert import llamagen
from visgen.convert.__main__ import main
from visgen.decode.warp import Warp

DATA = Path(__file__).parents[1] / "data"
State = dict[str, Tensor]


def recorded(name: str) -> tuple[State, State]:
    """(LlamaGen's weights as published: float32 without caches, everything else) of recorded vectors."""
    with safe_open(DATA / f"llamagen_{name}_a.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {k.removeprefix("state."): v.float() for k, v in tensors.items() if k.startswith("state.")}
    return {k: v for k, v in state.items() if "kv_cache" not in k}, tensors


def vq_state() -> State:
    """A tokenizer of stride 4 with the GPTs' 96 codes."""
    codes = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
    return recorded("vq")[0] | {"quantize.embedding.weight": codes, "quantize.codebook_used": torch.zeros(65536)}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("c2i", "t2i"):
        torch.save({"model": recorded(name)[0]}, tmp_path / f"{name}.pt")
    torch.save({"model": vq_state()}, tmp_path / "vq_ds4.pt")
    return tmp_path


def convert(source: Path, out: Path, **options: Any) -> str:
    return llamagen.convert(llamagen.Config(str(source), str(out), **options))


# ----------------------------------------------------------------------------------------------------- round trip


@pytest.mark.parametrize("scale", [1, 3])
def test_a_converted_class_model_samples_the_recorded_tokens(files: Path, scale: int) -> None:
    _, tensors = recorded("c2i")
    flags = ["--tokenizer", str(files / "vq_ds4.pt"), "--resolution", "16", "--heads", "4"]
    main(["llamagen", str(files / "c2i.pt"), str(files / "run"), *flags])
    generator = visgen.load(str(files / "run"), device="cpu")
    images = generator.sample(tensors["in.labels"][:2].tolist(), guidance=scale, warp=Warp(temperature=0.0))
    assert torch.equal(images.tokens, tensors[f"out.greedy_cfg{scale}"])
    assert images.pixels.shape == (2, 3, 16, 16)


@pytest.mark.parametrize("scale", [1, 3])
def test_a_converted_text_model_samples_the_recorded_tokens(files: Path, scale: int) -> None:
    _, tensors = recorded("t2i")
    convert(files / "t2i.pt", files / "run", tokenizer=str(files / "vq_ds4.pt"), resolution=16, heads=4)
    text, mask = tensors["in.text"], tensors["in.text_mask"].bool()
    rows = [torch.cat([t[m], t[~m]]) for t, m in zip(text, mask, strict=True)]  # padded behind, as an encoder does
    save_file({"text": torch.stack(rows), "mask": mask.flip(1).contiguous()}, files / "captions.safetensors")
    generator = visgen.load(str(files / "run"), device="cpu", batch=2)
    features = prompts.read(files / "captions.safetensors", generator.model.config.condition)
    images = generator.sample(prompts=features, guidance=scale, warp=Warp(temperature=0.0))
    assert torch.equal(images.tokens, tensors[f"out.greedy_cfg{scale}"])
    assert images.pixels.shape == (3, 3, 16, 16) and images.prompts == features.prompts and images.labels == []


def test_a_converted_text_model_records_what_sampling_needs(files: Path) -> None:
    told = convert(files / "t2i.pt", files / "run", resolution=64, heads=4)
    assert "t2i GPT, 3 layers, 4 heads, width 64, 64 px = 4 x 4 tokens, 6 slots of text by google/flan-t5-xl" in told
    assert "sampling needs --tokenizer" in told
    model = load_model(files / "run", grid=(1, 4, 4))
    wanted = {"tokens": 6, "channels": 24, "dropout": 0.1, "encoder": "google/flan-t5-xl", "clean": True}
    assert dataclasses.asdict(model.config.condition) == wanted
    null = recorded("t2i")[1]["state.cls_embedding.uncond_embedding"].float()
    assert torch.equal(model.condition.uncond_embedding, null), "the null text is loaded, never drawn"


def test_a_converted_tokenizer_gives_the_recorded_ids(tmp_path: Path) -> None:
    state, tensors = recorded("vq")
    torch.save({"model": state}, tmp_path / "vq.pt")
    assert "64 codes, stride 4, 32 px" in convert(tmp_path / "vq.pt", tmp_path / "run", resolution=32)
    tokenizer = load_tokenizer(tmp_path / "run", image_size=(32, 32), vocab=64)
    assert torch.equal(tokenizer.encode(tensors["in.pixels"][:, None]), tensors["out.indices"])


def test_a_tokenizer_converted_before_joins_at_the_models_resolution(files: Path) -> None:
    convert(files / "vq_ds4.pt", files / "vq", resolution=32)
    convert(files / "c2i.pt", files / "run", tokenizer=str(files / "vq"), resolution=16, heads=4)
    joined, alone = load_tokenizer(files / "run"), load_tokenizer(files / "vq")
    assert joined.image_size == (16, 16) and alone.image_size == (32, 32)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, joined.state_dict()[name]), name
    weights = files / "vq" / "step_0000000" / "model.safetensors"
    convert(files / "c2i.pt", files / "again", tokenizer=str(weights), resolution=16, heads=4)
    assert visgen.load(str(files / "again"), device="cpu").tokenizer.image_size == (16, 16)


def test_the_run_directory_records_where_it_came_from(files: Path) -> None:
    convert(files / "t2i.pt", files / "run", resolution=64, heads=4, dtype="bf16")
    step = files / "run" / "step_0000000"
    assert sorted(p.name for p in step.iterdir()) == ["meta.json", "model.safetensors"]
    facts, meta = read_metadata(step / "model.safetensors"), json.loads((step / "meta.json").read_text())
    assert meta["resolution"] == 64 and meta["prefix"] == 6 and meta["step"] == 0 and meta["dtype"] == "bf16"
    assert facts["resolution"] == "64" and facts["prefix"] == "6" and facts["source"] == "t2i.pt"
    assert len(facts["source_sha256"]) == 64
    with safe_open(step / "model.safetensors", "pt") as file:
        assert {file.get_slice(k).get_dtype() for k in file.keys() if "uncond" not in k} == {"BF16"}  # noqa: SIM118


# ------------------------------------------------------------------------------------------------------- wrappings


def attributed(state: State) -> State:
    """Tensors with an attribute are pickled through `_rebuild_from_type_v2`, as in the 3B file."""
    out = {k: v.clone() for k, v in state.items()}
    for tensor in out.values():
        tensor.mark = 1  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"model": s},
        lambda s: s,
        lambda s: {"module": s},
        lambda s: {"state_dict": s},
        lambda s: {
            "model": s,
            "optimizer": {"state": {0: torch.ones(2)}},
            "steps": 5,
            "args": argparse.Namespace(lr=1),
        },
        lambda s: {"model": s, "ema": {k: v + 1 for k, v in s.items()}},
        lambda s: {"model": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {"model": {f"_orig_mod.{k}": v for k, v in s.items()}},
        lambda s: {"model": {k: torch.nn.Parameter(v) for k, v in s.items()}},
        lambda s: s | {"freqs_cis": torch.zeros(17, 8, 2)},
        attributed,
    ],
    ids=["model", "bare", "module", "state_dict", "training", "ema", "ddp", "compiled", "params", "freqs", "3b"],
)
def test_every_wrapping_of_a_gpt(wrap: Callable[[State], dict[str, Any]], tmp_path: Path) -> None:
    state, _ = recorded("c2i")
    torch.save(wrap(state), tmp_path / "x.pt")
    convert(tmp_path / "x.pt", tmp_path / "run", resolution=64, heads=4)
    loaded = load_model(tmp_path / "run")
    assert torch.equal(loaded.head.output.weight, state["output.weight"])
    assert len(loaded.state_dict()) == len(state)


def test_fsdp_directories_old_pickles_and_safetensors(tmp_path: Path) -> None:
    state, _ = recorded("c2i")
    (tmp_path / "fsdp").mkdir()
    torch.save(state, tmp_path / "fsdp" / "consolidated.pth")
    torch.save({"model": state}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(tmp_path / "old.pt")
    save_file(state, tmp_path / "x.safetensors")
    for i, source in enumerate(("fsdp", "old.pt", "x.safetensors")):
        convert(tmp_path / source, tmp_path / f"run{i}", resolution=64, heads=4)
        assert torch.equal(load_model(tmp_path / f"run{i}").head.output.weight, state["output.weight"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"without consolidated\.pth"):
        convert(tmp_path / "empty", tmp_path / "run", resolution=64)


@pytest.mark.parametrize("wrapper", ["ema", "model", "state_dict", "bare"])
def test_wrappings_of_a_tokenizer_prefer_the_average(wrapper: str, tmp_path: Path) -> None:
    state = vq_state()
    other = {k: v + 1 for k, v in state.items()}
    content = {"ema": {"ema": state, "model": other, "discriminator": {"a": torch.ones(1)}}, "bare": state}
    torch.save(content.get(wrapper, {wrapper: state}), tmp_path / "vq.pt")
    convert(tmp_path / "vq.pt", tmp_path / "run", resolution=16)
    assert torch.equal(load_tokenizer(tmp_path / "run").to_code.weight, state["quant_conv.weight"])


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("c2i", lambda s: s.pop("layers.1.ffn_norm.weight"), r"1 missing: layers\.1\.ffn_norm\.weight"),
        ("c2i", lambda s: s.pop("tok_embeddings.weight"), r"1 missing: tok_embeddings\.weight"),
        ("c2i", lambda s: s.pop("layers.0.attention.wqkv.weight"), r"1 missing: layers\.0\.attention\.wqkv\.weight"),
        ("c2i", lambda s: s.update({"extra.weight": torch.ones(2)}), r"1 unexpected: extra\.weight"),
        ("c2i", lambda s: s.update({"norm.weight": torch.ones(2)}), r"norm\.weight \(2,\) instead of \(64,\)"),
        ("c2i", lambda s: s.update({"norm.weight": torch.full((64,), torch.nan)}), "not finite in fp32"),
        ("c2i", lambda s: s.update({"norm.weight": torch.ones(64, dtype=torch.int8)}), r"norm\.weight is torch\.int8"),
        ("c2i", lambda s: [s.pop(k) for k in [*s] if k.startswith("layers.1.")], r"missing: layers\.1\."),
        ("t2i", lambda s: s.pop("cls_embedding.uncond_embedding"), r"missing: cls_embedding\.embedding_table\.weight"),
        ("t2i", lambda s: s.pop("cls_embedding.cap_proj.fc1.weight"), r"missing: cls_embedding\.cap_proj\.fc1\.weight"),
    ],
)
def test_the_audit_names_what_does_not_fit(
    name: str, change: Callable[[State], object], message: str, tmp_path: Path
) -> None:
    state, _ = recorded(name)
    change(state)
    torch.save({"model": state}, tmp_path / "x.pt")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "x.pt", tmp_path / "run", resolution=64, heads=4)
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("decoder.mid.1.q.bias"), r"1 missing: decoder\.mid\.1\.q\.bias"),
        (lambda s: s.update({"quantize.ema": torch.ones(1)}), r"1 unexpected: quantize\.ema"),
        (lambda s: s.update({"quant_conv.bias": torch.ones(2)}), r"quant_conv\.bias \(2,\) instead of \(8,\)"),
        (lambda s: s.pop("quantize.embedding.weight"), r"1 missing: quantize\.embedding\.weight"),
    ],
)
def test_the_audit_of_a_tokenizer(change: Callable[[State], object], message: str, tmp_path: Path) -> None:
    state = vq_state()
    change(state)
    torch.save({"model": state}, tmp_path / "vq.pt")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "vq.pt", tmp_path / "run", resolution=16)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def test_pickled_code_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state, _ = recorded("c2i")
    for old in (False, True):
        torch.save({"model": state, "x": Payload()}, tmp_path / "x.pt", _use_new_zipfile_serialization=not old)
        with pytest.raises(UserError, match=r"holds pickled code \(\w+\.mkdir\), which is not run"):
            convert(tmp_path / "x.pt", tmp_path / "run", resolution=64, heads=4)
    assert not (tmp_path / "ran").exists()


def test_truncated_and_foreign_files_are_refused(files: Path) -> None:
    whole = (files / "c2i.pt").read_bytes()
    for share in (0, 0.1, 0.5, 0.99):
        (files / "cut.pt").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(UserError, match=r"cannot be read.*fetch it again"):
            convert(files / "cut.pt", files / "run", resolution=64, heads=4)
    torch.save({"weight": torch.ones(2)}, files / "other.pt")
    with pytest.raises(UserError, match="holds neither a GPT nor a VQ tokenizer of LlamaGen; its first keys: weight"):
        convert(files / "other.pt", files / "run", resolution=64)
    torch.save([torch.ones(2)], files / "list.pt")
    with pytest.raises(UserError, match="holds a list"):
        convert(files / "list.pt", files / "run", resolution=64)
    with pytest.raises(UserError, match="does not exist"):
        convert(files / "none.pt", files / "run")


@pytest.mark.parametrize(
    ("name", "said", "found"),
    [
        ("c2i_B_256.pt", None, 256),
        ("t2i_XL_stage2_512.pt", None, 512),
        ("c2i_3B_384.pt", 384, 384),
        ("model1256.pt", None, None),
        ("consolidated.pth", 384, 384),
        ("mine.pt", 64, 64),
        ("from_256_to_512.pt", 512, 512),
    ],
)
def test_resolution_of_a_name(name: str, said: int | None, found: int | None) -> None:
    assert llamagen.resolution(name, said) == found


def test_unknown_and_contradicting_resolutions_are_refused(files: Path) -> None:
    with pytest.raises(UserError, match=r"--resolution 384 contradicts the file's name c2i_B_256\.pt, which says 256"):
        llamagen.resolution("c2i_B_256.pt", 384)
    with pytest.raises(UserError, match=r"names several resolutions \(256, 512\)"):
        llamagen.resolution("from_256_to_512.pt", None)
    with pytest.raises(UserError, match="its resolution is neither in the tensors nor in the name; pass --resolution"):
        convert(files / "c2i.pt", files / "run", heads=4)
    with pytest.raises(UserError, match="resolution 60 is no multiple of 16"):
        convert(files / "c2i.pt", files / "run", heads=4, resolution=60)
    with pytest.raises(UserError, match="its sides must be multiples of the stride 4"):
        convert(files / "vq_ds4.pt", files / "run", resolution=18)


def test_what_does_not_belong_together_is_refused(files: Path) -> None:
    torch.save({"model": recorded("vq")[0]}, files / "small.pt")
    (files / "vq_ds4.pt").rename(files / "vq_ds16.pt")
    for source, options, message in (
        (
            "c2i.pt",
            {"tokenizer": str(files / "small.pt"), "resolution": 16, "heads": 4},
            "its vocab is 64, the model's",
        ),
        ("c2i.pt", {"tokenizer": str(files / "t2i.pt"), "resolution": 16, "heads": 4}, "is a GPT; pass a VQ file"),
        ("vq_ds16.pt", {"resolution": 16}, "says stride 16, its tensors have stride 4"),
        ("small.pt", {"tokenizer": str(files / "small.pt")}, "is a tokenizer itself"),
        ("small.pt", {"heads": 4}, "has no --heads"),
        ("c2i.pt", {"resolution": 64, "heads": 5}, "--heads 5 must divide the width 64"),
        ("c2i.pt", {"resolution": 64, "heads": 32}, "multiples of 4"),
    ):
        with pytest.raises(UserError, match=message):
            convert(files / source, files / "run", **options)
    assert not (files / "run").exists()


def test_a_directory_in_use_is_left_alone(files: Path) -> None:
    (files / "run").mkdir()
    (files / "run" / "config.yaml").write_text("a: 1")
    with pytest.raises(UserError, match="exists and is not empty; choose a new directory"):
        convert(files / "c2i.pt", files / "run", resolution=64, heads=4)
    assert [p.name for p in (files / "run").iterdir()] == ["config.yaml"]


def test_values_too_large_for_fp16_are_refused(tmp_path: Path) -> None:
    state, _ = recorded("c2i")
    state["norm.weight"] = torch.full((64,), 1e5)
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(UserError, match=r"backbone\.norm\.weight: not finite in fp16; use --dtype fp32"):
        convert(tmp_path / "x.pt", tmp_path / "run", resolution=64, heads=4, dtype="fp16")


# ------------------------------------------------------------------------------------------------------ published sizes


@pytest.mark.parametrize(
    ("layers", "heads", "width", "hidden"),
    [
        (12, 12, 768, 2048),
        (24, 16, 1024, 2816),
        (36, 20, 1280, 3584),
        (48, 24, 1536, 4096),
        (24, 32, 3200, 8704),
        (22, 32, 2048, 5632),
        (48, 40, 2560, 6912),
        (32, 32, 4096, 11008),
    ],
)
@pytest.mark.parametrize("text", [False, True])
def test_published_sizes_are_recognised(layers: int, heads: int, width: int, hidden: int, text: bool) -> None:
    shapes = {"tok_embeddings.weight": (16384, width), "norm.weight": (width,), "output.weight": (16384, width)}
    for i in range(layers):
        block = {"attention.wqkv": (3 * width, width), "attention.wo": (width, width), "ffn_norm": (width,)}
        block |= {"attention_norm": (width,), "feed_forward.w1": (hidden, width), "feed_forward.w2": (width, hidden)}
        block |= {"feed_forward.w3": (hidden, width)}
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in block.items()}
    if text:
        shapes |= {"cls_embedding.uncond_embedding": (120, 2048), "cls_embedding.cap_proj.fc1.weight": (width, 2048)}
        shapes |= {"cls_embedding.cap_proj.fc2.weight": (width, width)}
    else:
        shapes |= {"cls_embedding.embedding_table.weight": (1001, width)}
    with torch.device("meta"):
        found = {key: torch.empty(shape) for key, shape in shapes.items()}
        model = llamagen.gpt(found, (1, 24, 24), None, "published")
    config = model.config.backbone
    assert (config.layers, config.heads, config.width, config.kv_heads) == (layers, heads, width, None)
    assert config.mlp_multiple_of == 256 and model.config.vocab == 16384
    assert model.condition.prefix == (120 if text else 1) and model.tokens == 576
    assert text or model.config.condition.classes == 1000


@pytest.mark.parametrize(("multipliers", "stride"), [((1, 1, 2, 2, 4), 16), ((1, 2, 2, 4), 8)])
def test_published_tokenizers_are_recognised(multipliers: tuple[int, ...], stride: int) -> None:
    config = plugin_config("visgen.tokenizers", "conv_vq", multipliers=multipliers)
    with torch.device("meta"):
        source = build(config).state_dict()
        found = {theirs: v for name, v in source.items() if (theirs := llamagen.vq_key(name)) is not None}
        made = llamagen.vq(found, 256, "published")
    assert made.config == config and made.stride == stride
    assert stride == 8 or len(found) == 343, "344 keys in vq_ds16, one of them the usage statistics"
    assert dataclasses.asdict(made.config)["quantizer"]["codes"] == 16384
