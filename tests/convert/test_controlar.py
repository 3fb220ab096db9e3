"""ControlAR's files: the recorded logits, DINOv2 against transformers, key names of both generations, strict audit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from visgen.checkpoint import load_model, read_metadata
from visgen.config import UserError
from visgen.convert import controlar
from visgen.convert.__main__ import main
from visgen.convert.check import check
from visgen.model import Model
from visgen.nn.control import ControlEncoder, EncoderConfig, Hint, resized

DATA = Path(__file__).parents[1] / "data" / "controlar_t2i_a.safetensors"
SMALL = "vit_small_patch14_dinov2.lvd142m"
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def dinov2() -> Any:
    """DINOv2-S of transformers, random weights, layer scales that matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = transformers.Dinov2Config(hidden_size=384, num_hidden_layers=12, num_attention_heads=6, image_size=518)
        model = transformers.Dinov2Model(config).eval().requires_grad_(False)
        for name, parameter in model.named_parameters():
            if "lambda1" in name or "position" in name or "cls_token" in name or "bias" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def aged(state: State) -> State:
    """Names of transformers 4."""
    out = {}
    for key, tensor in state.items():
        for new, old in (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value")):
            key = key.replace(f"attention.{new}.", f"attention.attention.{old}.")
        out[key.replace("attention.o_proj.", "attention.output.dense.")] = tensor
    return out


def published(dinov2: Any, cells: int = 16, change: Callable[[State], object] | None = None) -> State:
    """A file as ControlAR publishes them: the recorded model's weights, and DINOv2 under old names."""
    with safe_open(DATA, "pt") as file:
        keys = [k for k in file.keys() if k.startswith("state.")]  # noqa: SIM118
        state = {k.removeprefix("state."): file.get_tensor(k).float() for k in keys}
    state |= {f"adapter.model.{k}": v.half() for k, v in aged(dinov2.state_dict()).items()}
    state["condition_mlp.uncond_embedding"] = torch.zeros(cells, 48)
    if change is not None:
        change(state)
    return {k: v.contiguous() for k, v in state.items()}


def test_recorded_logits() -> None:
    lines, passed = check(DATA)
    assert passed and any(line.split()[:1] == ["logits"] and line.endswith("ok") for line in lines)


@pytest.mark.parametrize(
    "key", ["adapter_mlp.fc1.weight", "condition_mlp.cap_proj.fc2.weight", "condition_layers.2.fc1.weight"]
)
def test_every_part_of_control_matters_to_the_recorded_logits(key: str, tmp_path: Path) -> None:
    with safe_open(DATA, "pt") as file:
        tensors, facts = {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118
    tensors[f"state.{key}"] = tensors[f"state.{key}"] * 1.05
    save_file(tensors, tmp_path / "x.safetensors", facts)
    assert not check(tmp_path / "x.safetensors")[1]


@pytest.mark.parametrize("names", [aged, dict], ids=["transformers 4", "transformers 5"])
def test_the_encoder_is_transformers_dinov2(dinov2: Any, names: Callable[[State], State]) -> None:
    encoder = ControlEncoder(EncoderConfig(SMALL)).eval()
    state = {f"a.{k}": v for k, v in names(dinov2.state_dict()).items()}
    encoder.vit.load_state_dict(controlar.encoder_state(state, "a.", "file"))
    maps = torch.rand(2, 3, 48, 80, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.inference_mode():
        found = encoder(maps, (3, 5), "bicubic")
        wanted = dinov2(resized(maps, (42, 70), "bicubic")).last_hidden_state[:, 1:]
    assert wanted.std() > 0.3 and torch.allclose(found, wanted, atol=2e-4)


def test_a_converted_file_computes_what_the_parts_do(dinov2: Any, tmp_path: Path) -> None:
    save_file(published(dinov2), tmp_path / "hed.safetensors")
    main(["controlar", str(tmp_path / "hed.safetensors"), str(tmp_path / "run"), "--resolution", "64", "--heads", "3"])
    model = load_model(tmp_path / "run", grid=(1, 4, 4))
    control = model.config.control
    assert (model.config.backbone.rope_columns, control.resize, control.polarity) == (None, "bicubic", "light_on_dark")
    facts = read_metadata(next((tmp_path / "run").glob("step_*/model.safetensors")))
    assert (facts["origin"], facts["cells"], facts["resolution"]) == ("controlar", "16", "64")
    maps = torch.rand(3, 1, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert model.control is not None
    with torch.inference_mode():
        features = dinov2(resized(maps[:, 0], (56, 56), "bicubic")).last_hidden_state[:, 1:]
        found, wanted = model.control([Hint(maps)]), model.control.added(features)
    assert wanted.std() > 1e-4 and torch.allclose(found, wanted, rtol=0.01, atol=0.01 * float(wanted.std()))


def test_weights_of_many_resolutions_keep_48_columns(dinov2: Any) -> None:
    config = controlar.model_config(published(dinov2, 2304), "depth", (1, 2, 30), 3, "file")
    assert config.backbone.rope_columns == 48 and config.control.norm == "max"
    coords: Any = Model(dataclasses.replace(config, control=None)).backbone.coords
    wanted = [[0, 0, 0], [0, 0, 29], [0, 0, 30], [0, 0, 47], [0, 1, 0], [0, 1, 11]]
    assert coords[6:][[0, 29, 30, 47, 48, 59]].tolist() == wanted and (coords[:6] == -1).all()
    true = dataclasses.replace(config.backbone, rope_columns=None)
    coords = Model(dataclasses.replace(config, control=None, backbone=true)).backbone.coords
    assert coords[6:][[29, 30, 59]].tolist() == [[0, 0, 29], [0, 1, 0], [0, 1, 29]]


@pytest.mark.parametrize(
    ("name", "said", "kind"),
    [
        ("canny_MR.safetensors", None, "canny"),
        ("depth_base.safetensors", None, "depth"),
        ("seg_cocostuff.safetensors", None, "seg"),
        ("edge_base.safetensors", None, "edge"),
        ("x.safetensors", "lineart", "lineart"),
    ],
)
def test_the_kind_of_a_published_file(name: str, said: Any, kind: str) -> None:
    assert controlar.kind_of_file(name, said) == kind
    config = controlar.control_config(controlar.kind_of_file(name, said), EncoderConfig())
    wanted = {"canny": "nearest", "seg": "nearest"}.get(kind, "bicubic")
    assert config.resize == wanted
    if kind == "edge":
        assert config.beside.beside.polarity == "light_on_dark", "line drawings are inverted for it"
    if kind == "lineart":
        assert config.polarity == "dark_on_light"


def test_a_name_that_tells_no_kind_or_another_is_refused() -> None:
    with pytest.raises(UserError, match=r"weights\.safetensors does not tell its kind of control; pass --control"):
        controlar.kind_of_file("weights.safetensors", None)
    with pytest.raises(UserError, match="--control depth contradicts the file's name canny_MR"):
        controlar.kind_of_file("canny_MR.safetensors", "depth")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda s: s.pop("condition_layers.1.fc2.weight"), {}, "1 missing: condition_layers.1.fc2.weight"),
        (lambda s: s.update({"adapter.model.extra": torch.zeros(2)}), {}, "1 unexpected: control.encoder.vit.extra"),
        (lambda s: s.pop("adapter.model.encoder.layer.3.attention.attention.key.bias"), {}, r"has q, v of blocks\.3"),
        (lambda s: s.pop("condition_mlp.uncond_embedding"), {}, "uncond_embedding is missing"),
        (lambda s: s["condition_mlp.uncond_embedding"].add_(1), {}, "is not a table of zeros"),
        (lambda s: s.pop("adapter_mlp.fc1.weight"), {}, "holds no control .*convert LlamaGen's own files"),
        (
            lambda s: s.update({"adapter_mlp.fc1.weight": torch.zeros(48, 100)}),
            {},
            "its encoder is 100 wide; known are",
        ),
        (lambda s: None, {"resolution": 128}, "--resolution 128: .* was made for images of 64 px"),
        (lambda s: None, {"resolution": 70}, "--resolution 70"),
    ],
)
def test_what_does_not_fit_is_named(
    dinov2: Any, tmp_path: Path, change: Callable[[State], object], options: Any, message: str
) -> None:
    path = tmp_path / "canny.safetensors"
    save_file(published(dinov2, change=change), path)
    settings = controlar.Config(str(path), str(tmp_path / "run"), heads=3, **{"resolution": 64, **options})
    with pytest.raises(UserError, match=message):
        controlar.convert(settings)
    assert not (tmp_path / "run").exists()


def test_the_metadata_of_the_vectors_are_the_references_own() -> None:
    with safe_open(DATA, "pt") as file:
        assert file.metadata()["origin"] == "controlar" and json.loads(file.metadata()["config"])["n_layer"] == 6
