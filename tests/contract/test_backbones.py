"""Every backbone: one forward that trains and decodes, over the layout it was given.

A backbone has one of three forms, read from its attributes: causal windows over a cache; blocks that are denoised over
a cache of clean ones; or passes over the tokens that are known, without a cache. A form says what a full pass is, what
it may depend on, and how the same hidden states come about in decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen import checkpoint
from visgen.backbones import Backbone
from visgen.conditions import Prefix
from visgen.config import UserError, build, implementation, plugin_config
from visgen.layout import Grid, Layout
from visgen.model import Model, ModelConfig

PACKAGE = "backbones"
B, VOCAB = 2, 12  # VOCAB: channels where tokens are vectors
GRID: Grid = (1, 2, 3)
CPU = torch.device("cpu")
Small = Callable[..., Any]


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config_of(small: Small, kind: str, grid: Grid = GRID) -> Any:
    """At toy size; a block, where there are blocks, is a row of the grid."""
    return small(PACKAGE, kind, block=(1, 1, grid[2]), buffer=3)


# --------------------------------------------------------------------------------------------------------- three forms


class Causal:
    """Slots of a causal sequence, behind two slots of the condition."""

    prefix = 2

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.tokens = backbone, backbone.layout.tokens

    def sequence(self) -> Tensor:
        return torch.randint(VOCAB, (B, self.tokens), generator=torch.Generator().manual_seed(0))

    def changed(self, tokens: Tensor, k: int) -> Tensor:
        """Other values of token k."""
        return tokens.index_copy(1, torch.tensor([k]), (tokens[:, k : k + 1] + 1) % VOCAB)

    def full(self, tokens: Tensor, cond: Prefix, **told: Any) -> Tensor:
        """The training pass, [B, slots, D]."""
        return self.backbone(tokens, None, cond=cond, **told)

    def sees(self) -> Tensor:
        """Which tokens a slot of the full pass depends on, [slots, N] bool."""
        slots, tokens = torch.arange(self.prefix + self.tokens), torch.arange(self.tokens)
        return slots.unsqueeze(1) >= self.prefix + tokens

    def decoded(self, tokens: Tensor, cond: Prefix, **told: Any) -> Tensor:
        """The same by windows over a cache."""
        cache = self.backbone.make_cache(B, CPU, cond.vectors.dtype)
        before = torch.cat([torch.full((B, self.prefix), 7), tokens], 1)  # 7: ignored at prefix slots
        cuts, parts = [0, 1, 3, before.shape[1]], []
        for start, end in pairwise(cuts):
            pos = torch.arange(start, end).expand(B, -1)
            parts.append(self.backbone(before[:, start:end], pos, cond=cond, cache=cache, **told))
        return torch.cat(parts, 1)


class Blocks:
    """Noised blocks, each given the clean ones before it; tokens are the clean ones."""

    prefix = 1

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.tokens, self.size = backbone, backbone.layout.tokens, backbone.layout.block
        self.noised = draw(B, self.tokens, VOCAB, seed=5)
        self.times = torch.linspace(5, 990, self.tokens // self.size)

    def sequence(self) -> Tensor:
        return draw(B, self.tokens, VOCAB)

    def changed(self, tokens: Tensor, k: int) -> Tensor:
        return tokens.index_copy(1, torch.tensor([k]), tokens[:, k : k + 1] + 1)

    def full(self, tokens: Tensor, cond: Prefix) -> Tensor:
        rows = len(tokens)
        streams = torch.cat([tokens[:, : self.tokens - self.size], self.noised[-rows:].to(tokens.dtype)], 1)
        return self.backbone(streams, None, cond=cond, level=self.times.expand(rows, -1))

    def sees(self) -> Tensor:
        block = torch.arange(self.tokens) // self.size
        return block.unsqueeze(1) > block

    def decoded(self, tokens: Tensor, cond: Prefix) -> Tensor:
        make: Any = self.backbone.make_cache
        cache, parts = make(B, CPU, cond.vectors.dtype, blocks=len(self.times)), []
        for i, time in enumerate(self.times):
            here = torch.arange(i * self.size, (i + 1) * self.size)
            told = {"pos": here.unsqueeze(0), "cond": cond, "cache": cache}
            parts.append(self.backbone(self.noised[:, here], level=time.view(1), **told))
            self.backbone(tokens[:, here], level=torch.tensor([-1.0]), **told)
        return torch.cat(parts, 1)


class Masked(Blocks):
    """All places, given the tokens at even ones."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.tokens = backbone, backbone.layout.tokens
        self.known = torch.arange(0, self.tokens, 2)

    def full(self, tokens: Tensor, cond: Prefix) -> Tensor:
        level = torch.zeros(len(tokens), self.tokens).index_fill(1, self.known, -1.0)  # 0 hides
        return self.backbone(tokens, None, cond=cond, level=level)

    def sees(self) -> Tensor:
        return (torch.arange(self.tokens) % 2 == 0).expand(self.tokens, -1)

    def decoded(self, tokens: Tensor, cond: Prefix) -> Tensor:
        """By a pass over the known tokens alone, in another order; there is no cache."""
        with pytest.raises(UserError, match="cache"):
            self.backbone.make_cache(B, CPU, torch.float32)
        order = self.known.flip(0)
        return self.backbone(tokens[:, order], order.expand(B, -1), cond=cond)


def form_of(backbone: Backbone) -> Any:
    if backbone.denoises:
        return Blocks(backbone)
    return Masked(backbone) if backbone.continuous else Causal(backbone)


def made(small: Small, kind: str, grid: Grid = GRID, std: float = 0.3) -> Any:
    """The form of a backbone in eval mode, with random weights everywhere."""
    torch.manual_seed(0)
    config = config_of(small, kind, grid)
    cls: Any = implementation(config)
    prefix = 1 if cls.continuous else Causal.prefix
    backbone = build(config, cls.arrange(config, grid, prefix), VOCAB).eval()
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), std)
    return form_of(backbone)


def condition(form: Any, visible: Tensor | None = None) -> Prefix:
    return Prefix(draw(B, form.prefix, form.backbone.width), visible)


# --------------------------------------------------------------------------------------------------------- the contract


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_size_builds_on_the_meta_device(kind: str) -> None:
    config = plugin_config("visgen.backbones", kind)
    with torch.device("meta"):
        layout = implementation(config).arrange(config, (1, 16, 16), 1)  # type: ignore[attr-defined]
        backbone = build(config, layout, 16384)
    assert backbone.width == config.width and all(p.is_meta for p in backbone.parameters())


def test_a_full_pass_trains_every_parameter(kind: str, small: Small) -> None:
    form = made(small, kind)
    h = form.full(form.sequence(), condition(form))
    assert h.shape == (B, len(form.sees()), form.backbone.width) and h.isfinite().all() and h.std() > 0.1
    h.square().sum().backward()
    silent = [
        name
        for name, p in form.backbone.named_parameters()
        if p.grad is None or not p.grad.isfinite().all() or not p.grad.any()
    ]
    assert silent == []


def test_decoding_equals_the_full_pass(kind: str, small: Small) -> None:
    form = made(small, kind)
    tokens = form.sequence()
    padding = (None, torch.tensor([[True, True], [False, True]])) if form.prefix > 1 else (None,)
    with torch.no_grad():
        for visible in padding:
            cond = condition(form, visible)
            assert torch.allclose(form.decoded(tokens, cond), form.full(tokens, cond), atol=1e-4)


def test_a_slot_depends_on_what_it_may_see_alone(kind: str, small: Small) -> None:
    form = made(small, kind)
    tokens, cond, sees = form.sequence(), condition(form), form.sees()
    with torch.no_grad():
        plain = form.full(tokens, cond)
        for k in range(form.tokens):
            moved = form.full(form.changed(tokens, k), cond) - plain  # [B, slots, D]
            assert not moved[:, ~sees[:, k]].any(), f"token {k} is seen too early"
            assert (moved[:, sees[:, k]].abs().amax(-1) > 1e-3).all(), f"token {k} is not seen"


def test_the_condition_reaches_every_slot(kind: str, small: Small) -> None:
    form = made(small, kind)
    tokens, cond = form.sequence(), condition(form)
    with torch.no_grad():
        moved = form.full(tokens, Prefix(cond.vectors.flip(-1))) - form.full(tokens, cond)
    assert (moved.abs().amax(-1) > 1e-3).all()


def test_rows_are_independent(kind: str, small: Small) -> None:
    form = made(small, kind)
    tokens, cond = form.sequence(), condition(form)
    with torch.no_grad():
        both, alone = form.full(tokens, cond), form.full(tokens[1:], Prefix(cond.vectors[1:]))
    assert torch.allclose(both[1:], alone, atol=1e-5)


def test_a_pass_in_eval_mode_draws_nothing(kind: str, small: Small) -> None:
    form = made(small, kind)
    tokens, cond, before = form.sequence(), condition(form), torch.get_rng_state()
    with torch.no_grad():
        first = form.full(tokens, cond)
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(1)
        assert torch.equal(form.full(tokens, cond), first)


def test_bf16_weights_give_bf16_that_is_near(kind: str, small: Small) -> None:
    form = made(small, kind, std=0.1)
    tokens, cond = form.sequence(), condition(form)
    with torch.no_grad():
        wanted = form.full(tokens, cond)
        form.backbone.bfloat16()
        found = form.full(tokens, Prefix(cond.vectors.bfloat16()))
    assert found.dtype == torch.bfloat16 and 0 < (found - wanted).abs().max() < 0.1 * wanted.abs().max()


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 3, 5), (1, 7, 1), (3, 1, 2)])
def test_odd_grids_are_trained_and_decoded(kind: str, grid: Grid, small: Small) -> None:
    form = made(small, kind, grid)
    tokens, cond = form.sequence(), condition(form)
    with torch.no_grad():
        whole = form.full(tokens, cond)
        assert whole.shape[1] == len(form.sees()) and whole.isfinite().all()
        assert torch.allclose(form.decoded(tokens, cond), whole, atol=1e-4)


def test_a_model_is_saved_and_loaded(kind: str, small: Small, tmp_path: Path) -> None:
    form, config = made(small, kind), config_of(small, kind)
    head = "denoiser" if form.backbone.denoises else "diffusion" if form.backbone.continuous else "categorical"
    head_config = small("heads", head)
    if form.backbone.snaps:
        head_config = small("heads", "diffusion", predicts="velocity")
    size: dict[str, Any] = {"channels": VOCAB} if form.backbone.continuous else {"vocab": VOCAB}
    label = plugin_config("visgen.conditions", "label", classes=3)
    model = Model(ModelConfig(GRID, backbone=config, condition=label, head=head_config, **size)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    checkpoint.save_module(tmp_path / "model.safetensors", model, model.config)
    loaded = checkpoint.load_model(tmp_path / "model.safetensors")
    assert loaded.config == model.config
    passes = []
    for one in (model, loaded):
        cond = one.condition({"label": torch.tensor([0, 2])})
        form = form_of(one.backbone)
        passes.append(form.full(form.sequence(), cond))
    assert torch.equal(*passes)


def test_control_is_added_to_the_slot_that_predicts_or_refused(kind: str, small: Small) -> None:
    form = made(small, kind)
    backbone, tokens, cond = form.backbone, form.sequence(), condition(form)
    if backbone.continuous:
        head = small("heads", "denoiser" if backbone.denoises else "diffusion")
        parts = {"backbone": config_of(small, kind), "head": head, "control": small("controls", "canny")}
        with pytest.raises(UserError, match=r"model\.control"):
            Model(ModelConfig(GRID, channels=VOCAB, **parts))
        return
    control = draw(3, B, form.tokens, backbone.width, seed=2)
    with torch.no_grad():
        plain = form.full(tokens, cond)
        assert torch.equal(form.full(tokens, cond, control=torch.zeros_like(control)), plain)
        whole = form.full(tokens, cond, control=control)
        for k in range(form.tokens):
            one = torch.zeros_like(control)
            one[:, :, k] = control[:, :, k]
            after = form.full(tokens, cond, control=one)
            slot = form.prefix - backbone.shift + k
            assert torch.equal(after[:, :slot], plain[:, :slot])
            assert not torch.allclose(after[:, slot], plain[:, slot], atol=1e-3)
        assert torch.allclose(form.decoded(tokens, cond, control=control), whole, atol=2e-5)


def test_another_grid_shares_the_weights_or_is_refused(kind: str, small: Small) -> None:
    form, grid = made(small, kind), (1, 3, 2)
    config, backbone = config_of(small, kind), form.backbone
    if type(backbone).at is Backbone.at:
        with pytest.raises(UserError, match="leave size out"):
            backbone.at(Layout.raster(grid))
        return
    layout = implementation(config).arrange(config, grid, form.prefix)  # type: ignore[attr-defined]
    tokens, cond, before = form.sequence(), condition(form), backbone.layout
    other = backbone.at(layout)
    assert all(a is b for a, b in zip(other.parameters(), backbone.parameters(), strict=True))
    built = build(config, layout, VOCAB).eval()
    built.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        found, own = (form_of(b).full(tokens, cond) for b in (other, backbone))
        assert torch.equal(found, form_of(built).full(tokens, cond)) and not torch.allclose(found, own, atol=1e-3)
    assert backbone.layout is before


# ------------------------------------------------------------------------------------------------------ faster twins


FUSED, FUSED_PASS = {"ar"}, {"mar", "one_step", "flow_step"}  # kinds that must have them; others may


def test_the_fused_form_equals_windows_with_a_cache(kind: str, small: Small) -> None:
    """Images at places of their own, two branches, in ring order, over stale slots."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form = made(small, kind)
    backbone, prefix = form.backbone.to(device).requires_grad_(False), form.prefix
    fused = backbone.fused()
    if fused is None:
        assert kind not in FUSED
        return
    visible = torch.tensor([[True, True], [False, True]]).repeat(2, 1)
    tokens = form.sequence().to(device)
    for window in ([[0], [3]], [[2, 0, 1], [4, 5, 3]]):
        index = torch.tensor(window, device=device)
        previous, pos = tokens.gather(1, (index - 1).clamp(min=0)), (index + prefix - 1).repeat(2, 1)
        for given in (None, visible.to(device)):
            cond, caches = Prefix(draw(2 * B, prefix, backbone.width, seed=2).to(device), given), []
            for _ in range(2):
                cache = backbone.make_cache(2 * B, device, torch.float32)
                cache.keys.copy_(torch.linspace(-1, 1, cache.keys.numel()).view_as(cache.keys))
                cache.values.copy_(cache.keys.flip(-1))
                caches.append(cache)
            with torch.no_grad():
                wanted = backbone(previous.repeat(2, 1), pos, cond=cond, cache=caches[0])
            assert torch.allclose(fused(tokens, index, cond, caches[1], None), wanted, atol=1e-4)
            assert torch.allclose(caches[1].keys, caches[0].keys, atol=1e-4)


def test_the_fused_pass_equals_the_full_pass(kind: str, small: Small) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form = made(small, kind)
    backbone = form.backbone.to(device).requires_grad_(False)
    fused = backbone.fused_pass()
    if fused is None:
        assert kind not in FUSED_PASS
        return
    tokens, cond = form.sequence().to(device), Prefix(condition(form).vectors.to(device))
    with torch.no_grad():
        places = torch.arange(form.tokens, device=device).expand(B, -1) if backbone.continuous else None
        wanted, found = (run(tokens, places, cond=cond) for run in (backbone, fused))
    assert torch.allclose(found, wanted, atol=1e-4)
