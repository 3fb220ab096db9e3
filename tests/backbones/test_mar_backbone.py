"""MAR's backbone: what is hidden is as if it were not given, and places, not order, say which token is which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from visgen.backbones.mar import MAR, Config
from visgen.config import UserError, plugin_config
from visgen.layout import Layout
from visgen.model import Model, ModelConfig

N, C = 16, 3
TOKENS = torch.randn(2, N, C, generator=torch.Generator().manual_seed(0))
ORDER = torch.rand(2, N, generator=torch.Generator().manual_seed(1)).argsort(1)
LABEL = {"label": torch.tensor([0, 2])}


def taken(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


@pytest.mark.parametrize("known", [0, 1, 9, N])
def test_hidden_tokens_are_as_if_not_given(make_masked: Callable[..., Any], known: int) -> None:
    model = make_masked()
    cond, seen = model.condition(LABEL), ORDER[:, :known]
    h = model.backbone(taken(TOKENS, seen), seen, cond=cond)
    assert h.shape == (2, N, 32)
    level = torch.zeros(2, N).scatter(1, seen, -1.0)
    for values in (TOKENS, torch.where((level < 0).unsqueeze(-1), TOKENS, 1e3)):
        assert torch.allclose(model.backbone(values, None, cond=cond, level=level), h, atol=1e-5)
    places = taken(level.unsqueeze(-1), ORDER).squeeze(-1)
    assert torch.allclose(model.backbone(taken(TOKENS, ORDER), ORDER, cond=cond, level=places), h, atol=1e-5)


def test_places_asked_for_are_those_of_all(make_masked: Callable[..., Any]) -> None:
    model, seen = make_masked(), ORDER[:, :5]
    cond, level = model.condition(LABEL), torch.tensor([-1.0, -1, 0, -1, -1]).expand(2, -1)
    asked = ORDER[:, [9, 2, 15, 9]]
    for told in ({}, {"level": level}):
        h = model.backbone(taken(TOKENS, seen), seen, cond=cond, **told)
        found = model.backbone(taken(TOKENS, seen), seen, cond=cond, asked=asked, **told)
        assert torch.allclose(found, taken(h, asked), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_fused_pass_is_the_forward(make_masked: Callable[..., Any], dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_masked().to(device)
    seen, asked = ORDER[:, :5].to(device), ORDER[:, [9, 2, 15]].to(device)
    cond = model.condition({"label": LABEL["label"].to(device)})
    level = torch.tensor([-1.0, -1, 0, -1, -1], device=device).expand(2, -1)
    for told in ({}, {"level": level}, {"level": level, "asked": asked}):
        wanted = model.float().backbone(taken(TOKENS.to(device), seen), seen, cond=cond, **told)
        half = model.to(dtype).backbone.fused_pass()
        found = half(taken(TOKENS.to(device), seen), seen, cond=cond, **told)
        assert found.dtype == dtype
        assert (found.float() - wanted).abs().max() < {torch.float32: 1e-5, torch.float16: 2e-2}[dtype] * wanted.std()


def test_the_half_precision_gelu_errs_less_than_rounding_does() -> None:
    """In place of erf it has tanh: at most 5e-4, in the mean square a small part of what bfloat16 loses anyway."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 1.5
    exact = torch.nn.functional.gelu(x)
    error = torch.nn.functional.gelu(x, approximate="tanh") - exact
    rounding = exact.bfloat16().float() - exact
    assert error.abs().max() < 5e-4 and error.std() < rounding.std() / 8


def test_every_known_token_and_the_condition_reach_every_place(make_masked: Callable[..., Any]) -> None:
    model = make_masked()
    seen = ORDER[:, :5]
    plain = model.backbone(taken(TOKENS, seen), seen, cond=model.condition(LABEL))
    for k in range(5):
        changed = taken(TOKENS, seen)
        changed[:, k] += 1
        after = model.backbone(changed, seen, cond=model.condition(LABEL))
        assert ((after - plain).abs().amax(-1) > 1e-4).all()
    other = model.backbone(taken(TOKENS, seen), seen, cond=model.condition({"label": torch.tensor([1, 1])}))
    assert ((other - plain).abs().amax(-1) > 1e-4).all()


def test_rows_are_independent_and_dropout_is_of_training(make_masked: Callable[..., Any]) -> None:
    model = make_masked()
    seen = ORDER[:, :7]
    both = model.backbone(taken(TOKENS, seen), seen, cond=model.condition(LABEL))
    one = model.backbone(taken(TOKENS, seen)[1:], seen[1:], cond=model.condition({"label": LABEL["label"][1:]}))
    assert torch.allclose(both[1:], one, atol=1e-5)
    model.train()
    assert not torch.allclose(model.backbone(taken(TOKENS, seen), seen, cond=model.condition(LABEL)), both, atol=1e-2)


@pytest.mark.parametrize(
    ("sizes", "head", "counted"),
    [
        ((12, 12, 768), (6, 1024), (207.92, 35.75)),
        ((16, 16, 1024), (8, 1280), (478.33, 72.23)),
        ((20, 16, 1280), (12, 1536), (942.40, 151.21)),
    ],
)
def test_published_sizes(sizes: Any, head: Any, counted: tuple[float, float]) -> None:
    layers, heads, width = sizes
    backbone = plugin_config("visgen.backbones", "mar", layers=layers, heads=heads, width=width)
    with torch.device("meta"):
        model = Model(
            ModelConfig(
                channels=16,
                backbone=backbone,
                head=plugin_config("visgen.heads", "diffusion", layers=head[0], width=head[1]),
            )
        )
    found = [sum(p.numel() for p in m.parameters()) / 1e6 for m in (model, model.head)]
    assert tuple(round(n, 2) for n in found) == counted


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="takes a condition of one vector, such as label; this one has 120"):
        MAR.arrange(Config(), (1, 4, 4), 120)
    with pytest.raises(UserError, match=r"no cache can hold; use --sampler\.kind masked"):
        MAR(Config(layers=1, width=24), Layout.full((1, 2, 2)), 3).make_cache(1, torch.device("cpu"), torch.float32)
    with pytest.raises(UserError, match=r"model\.head denoiser does not go with model\.backbone mar: use"):
        Model(
            ModelConfig(
                channels=4,
                backbone=plugin_config("visgen.backbones", "mar"),
                head=plugin_config("visgen.heads", "denoiser"),
            )
        )
