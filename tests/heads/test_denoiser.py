"""The denoising head: squared error of a prediction, guided in float32."""

from __future__ import annotations

import torch

from visgen.heads.denoiser import Config, Denoiser

H = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(0))  # [K, B, W, D]
TARGET = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))


def made() -> Denoiser:
    torch.manual_seed(0)
    head = Denoiser(Config(), 16, 5)
    torch.nn.init.normal_(head.output.weight)
    return head


def test_it_starts_at_zero_so_the_first_loss_is_the_targets_power() -> None:
    loss = Denoiser(Config(), 16, 5).loss(H[0], TARGET)
    assert torch.allclose(loss, TARGET.square().mean(-1))


def test_the_loss_is_per_token_in_float32() -> None:
    head = made()
    loss = head.loss(H[0], TARGET)
    assert torch.allclose(loss, (head.output(H[0]) - TARGET).square().mean(-1)) and loss.shape == (3, 4)
    loss.mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert head.bfloat16().loss(H[0].bfloat16(), TARGET).dtype == torch.float32


def test_guidance_extrapolates_from_the_null_branch() -> None:
    head = made()
    weights = torch.stack([torch.full((1, 4), -1.5), torch.full((1, 4), 2.5)])
    null, given = head.output(H[0]), head.output(H[1])
    assert torch.allclose(head.dist(H, weights), null + 2.5 * (given - null), atol=1e-5)
    assert head.bfloat16().dist(H.bfloat16(), weights).dtype == torch.float32
