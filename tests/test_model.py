"""The model: parity with LlamaGen's recorded logits, causality, sizes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from visgen.config import UserError, plugin_config
from visgen.convert import llamagen
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model, ModelConfig
from visgen.samplers.ar import AR, Config

MakeModel = Callable[..., Model]
VECTORS = Path(__file__).parent / "data" / "llamagen_c2i_a.safetensors"

# ------------------------------------------------------------------------------------------------- recorded vectors


@pytest.fixture(scope="module")
def recorded() -> tuple[Model, dict[str, Tensor]]:
    with safe_open(str(VECTORS), "pt") as file:
        settings = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    state = {k.removeprefix("state."): v.float() for k, v in tensors.items() if k.startswith("state.")}
    side = int(settings["block_size"] ** 0.5)
    return llamagen.gpt(state, (1, side, side), settings["n_head"], "vectors"), tensors


def test_teacher_forced_logits_equal_llamagens(recorded: tuple[Model, dict[str, Tensor]]) -> None:
    model, tensors = recorded
    tokens, labels = tensors["in.tokens"], tensors["in.labels"]
    h = model.backbone(tokens[:, :-1], None, cond=model.condition({"label": labels}))
    assert tensors["out.logits"].std() > 0.1
    assert (model.head.output(h) - tensors["out.logits"]).abs().max() < 1e-4


@pytest.mark.parametrize("scale", [1, 3])
def test_greedy_guided_decoding_equals_llamagens(recorded: tuple[Model, dict[str, Tensor]], scale: int) -> None:
    model, tensors = recorded
    engine = Engine(model, Guidance(float(scale)), Warp(temperature=0.0))
    engine.begin({"label": tensors["in.labels"][:2]})
    tokens = engine.run(AR(Config()), Noise(torch.tensor([0, 1]))).tokens
    assert tokens.tolist() == tensors[f"out.greedy_cfg{scale}"].tolist()
    assert tensors["out.greedy_cfg1"].tolist() != tensors["out.greedy_cfg3"].tolist(), "guidance matters"


# ------------------------------------------------------------------------------------------------------ behaviour


def test_a_token_changes_no_logits_up_to_its_own(make_model: MakeModel) -> None:
    model, tokens = make_model(), torch.randint(16, (2, 16), generator=torch.Generator().manual_seed(0))

    def logits(given: Tensor) -> Tensor:
        h = model.backbone(given[:, :-1], None, cond=model.condition({"label": torch.tensor([0, 1])}))
        return model.head.output(h)

    before = logits(tokens)
    for k in range(15):
        changed = tokens.clone()
        changed[:, k] = (changed[:, k] + 1) % 16
        after = logits(changed)
        assert torch.equal(after[:, : k + 1], before[:, : k + 1]), k
        assert not torch.allclose(after[:, k + 1], before[:, k + 1], atol=1e-3), (
            f"token {k} is not seen by its successor"
        )


def test_loss_is_the_cross_entropy_of_every_token(make_model: MakeModel) -> None:
    model, tokens = make_model(), torch.randint(16, (2, 16), generator=torch.Generator().manual_seed(0))
    batch = {"label": torch.tensor([2, 0])}
    h = model.backbone(tokens[:, :-1], None, cond=model.condition(batch))
    expected = -model.head.output(h).log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    found = model.loss(tokens, batch, None)
    assert found.shape == (2, 16) and torch.allclose(found, expected, atol=1e-5)


def test_label_drop_and_null_use_the_last_row(make_model: MakeModel) -> None:
    condition = make_model(classes=3).condition
    table = condition.embedding_table.weight
    labels = torch.tensor([0, 1, 2])
    kept = condition({"label": labels}, torch.tensor([False, True, False])).vectors
    assert torch.equal(kept[:, 0], table[torch.tensor([0, 3, 2])])
    assert torch.equal(condition.null(condition({"label": labels})).vectors[:, 0], table[[3, 3, 3]])


def test_initial_weights_follow_llamagen() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        grid=(1, 4, 4),
        vocab=512,
        backbone=plugin_config("visgen.backbones", "ar", layers=2, heads=4, width=64),
        condition=plugin_config("visgen.conditions", "label", classes=100),
    )
    for name, parameter in Model(config).requires_grad_(False).named_parameters():
        if name.startswith("head."):
            assert (parameter == 0).all()
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            assert abs(float(parameter.std()) - 0.02) < 0.001 and abs(float(parameter.mean())) < 0.001, name


@pytest.mark.parametrize(
    ("layers", "heads", "width", "millions"),
    [
        (12, 12, 768, 110.9),
        (24, 16, 1024, 342.9),
        (36, 20, 1280, 774.7),
        (48, 24, 1536, 1411.0),
        (24, 32, 3200, 3096.7),
    ],
)
def test_parameter_counts_of_llamagen(layers: int, heads: int, width: int, millions: float) -> None:
    with torch.device("meta"):
        model = Model(
            ModelConfig(backbone=plugin_config("visgen.backbones", "ar", layers=layers, heads=heads, width=width))
        )
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == millions


def test_bf16_agrees_with_fp32_roughly(make_model: MakeModel) -> None:
    tokens, label = torch.arange(16).unsqueeze(0), {"label": torch.tensor([1])}
    exact = make_model().loss(tokens, label, None)
    model = make_model().bfloat16()
    assert torch.allclose(model.loss(tokens, label, None), exact, atol=0.3)
    assert model.loss(tokens, label, None).dtype == torch.float32


def test_a_foreign_tokenizer_is_refused(make_model: MakeModel) -> None:
    model = make_model(grid=(1, 4, 4), vocab=16)
    model.check_tokenizer(SimpleNamespace(grid=[1, 4, 4], vocab=16))
    for grid, vocab, named in (
        ((1, 8, 8), 16, r"grid is \(1, 8, 8\), the model's is \(1, 4, 4\)"),
        ((1, 4, 4), 512, "vocab is 512"),
    ):
        with pytest.raises(UserError, match=f"^runs/x: its {named}.*use the tokenizer"):
            model.check_tokenizer(SimpleNamespace(grid=grid, vocab=vocab), "runs/x")
