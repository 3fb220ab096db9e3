"""Text condition: padding on the left, masks that the null half keeps."""

from __future__ import annotations

import pytest
import torch

from visgen.conditions.text import Config, Text, left_pad
from visgen.config import UserError, plugin_config
from visgen.model import Model, ModelConfig

TINY = Config(tokens=4, channels=6)


def text(seed: int = 0, width: int = 8) -> Text:
    torch.manual_seed(seed)
    return Text(TINY, width).eval().requires_grad_(False)


def test_left_pad_moves_what_is_real_to_the_end_and_zeroes_the_rest() -> None:
    features = torch.arange(1.0, 9.0).view(2, 4, 1)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    moved, visible = left_pad(features, mask)
    assert moved.squeeze(-1).tolist() == [[0, 0, 1, 2], [5, 6, 7, 8]]
    assert visible.dtype == torch.bool and visible.tolist() == [[False, False, True, True], [True] * 4]
    again = left_pad(moved, visible)
    assert torch.equal(again[0], moved) and torch.equal(again[1], visible)
    gaps, _ = left_pad(features[:1], torch.tensor([[True, False, True, False]]))
    assert gaps.squeeze(-1).tolist() == [[0, 0, 1, 3]], "the order stays"
    broken = left_pad(torch.full((1, 4, 1), torch.nan), torch.tensor([[False] * 4]))
    assert broken[0].abs().sum() == 0, "padding is zero whatever stood there"


def test_projection_is_two_matrices_around_the_tanh_gelu() -> None:
    condition = text()
    x = torch.randn(2, 4, 6)
    hidden = x @ condition.cap_proj.fc1.weight.T
    gelu = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
    expected = gelu @ condition.cap_proj.fc2.weight.T
    assert torch.allclose(condition({"text": x}).vectors, expected, atol=1e-6)
    assert condition({"text": torch.zeros(1, 4, 6)}).vectors.abs().sum() == 0


def test_null_is_the_stored_buffer_and_keeps_the_captions_mask() -> None:
    condition = text()
    mask = torch.tensor([[False, False, True, True], [True] * 4])
    given = condition({"text": torch.randn(2, 4, 6), "text_mask": mask})
    null = condition.null(given)
    assert torch.equal(null.visible, mask) and torch.equal(given.visible, mask)
    assert torch.equal(null.vectors[0], condition.cap_proj(condition.uncond_embedding))
    assert torch.equal(null.vectors[0], null.vectors[1])
    assert "uncond_embedding" in condition.state_dict() and "uncond_embedding" not in dict(condition.named_parameters())
    assert Text(Config(), 4).uncond_embedding.std() == pytest.approx(2048**-0.5, rel=0.02)


def test_padding_changes_nothing_and_visible_text_does() -> None:
    config = ModelConfig(
        grid=(1, 2, 2),
        vocab=8,
        backbone=plugin_config("visgen.backbones", "ar", layers=2, heads=2, width=16, mlp_multiple_of=8),
        condition=TINY,
    )
    torch.manual_seed(0)
    model = Model(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    tokens, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[False, False, True, True]])
    features = torch.randn(1, 4, 6)

    def loss(changed: int | None) -> torch.Tensor:
        other = features.clone()
        if changed is not None:
            other[:, changed] += 1
        return model.loss(tokens, {"text": other, "text_mask": mask}, None)

    assert torch.equal(loss(0), loss(None)) and torch.equal(loss(1), loss(None))
    for slot in (2, 3):
        assert not torch.allclose(loss(slot), loss(None), atol=1e-3), slot
    assert torch.isfinite(loss(None)).all(), "a padding slot sees itself, so no row is empty"


def test_features_of_another_encoder_are_refused() -> None:
    with pytest.raises(UserError, match=r"text features are \[1, 3, 6\], the model wants \[B, 4, 6\]; pad them with"):
        text()({"text": torch.zeros(1, 3, 6)})
    with pytest.raises(UserError, match=r"text_mask is \[1, 3\], it must be \[1, 4\]"):
        text()({"text": torch.zeros(1, 4, 6), "text_mask": torch.ones(1, 3)})


def test_data_without_texts_are_refused() -> None:
    with pytest.raises(UserError, match=r"no `text` features \(tokens, label only\), on which this model"):
        text()({"tokens": torch.zeros(1, 4), "label": torch.zeros(1)})


def test_half_precision_weights_take_float_features() -> None:
    vectors = text().bfloat16()({"text": torch.randn(1, 4, 6)}, torch.tensor([True])).vectors
    assert vectors.dtype == torch.bfloat16
