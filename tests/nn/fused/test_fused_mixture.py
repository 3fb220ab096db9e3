"""The fused moments of the posterior over codes against the chunked ones, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visgen.nn.mixture import denoise, posterior, scale_of

fused = pytest.importorskip("visgen.nn.fused.mixture")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TIMES = (0.05, 0.15, 0.3, 0.7, 1.0)


def case(rows: int, vocab: int, channels: int, unit: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of all times, a law for each with half of the codes excluded, and codes; float32."""
    rng = torch.Generator().manual_seed(rows)
    codes = torch.randn(vocab, channels, generator=rng)
    codes = codes / codes.norm(dim=1, keepdim=True) if unit else codes
    codes = codes * scale_of(codes)
    logits = 2 * torch.randn(rows, vocab, generator=rng)
    logits[:, : vocab // 2] = -torch.inf  # whole steps of the kernel without a code that is possible
    t = torch.tensor(TIMES)[torch.arange(rows) % len(TIMES)].unsqueeze(1)
    ids = torch.randint(vocab, (rows,), generator=rng)
    x = (1 - t) * codes[ids] + t * torch.randn(rows, channels, generator=rng)
    return x.to(DEVICE), t.to(DEVICE), logits.log_softmax(1).to(DEVICE), codes.to(DEVICE)


def rounding(x: Tensor, t: Tensor, codes: Tensor) -> Tensor:
    """What a last bit of x . c, or of |x|^2, in float32 makes of each token's logits, [T]."""
    length = x.norm(dim=1) * torch.maximum(x.norm(dim=1), codes.norm(dim=1).max())
    return ((1 - t) / t.square()).squeeze(1).double() * length.double() * 2**-23


@pytest.mark.parametrize(("rows", "vocab", "channels"), [(70, 300, 8), (5, 130, 3), (33, 64, 16)])
def test_the_moments_are_those_of_the_chunks(rows: int, vocab: int, channels: int) -> None:
    for unit in (True, False):
        x, t, logp, codes = case(rows, vocab, channels, unit)
        exact = posterior(x.double(), t.double(), logp.double(), codes.double(), fused=False)
        for covariance in (True, False):
            found = posterior(x, t, logp, codes, covariance, fused=True)
            twin = posterior(x, t, logp, codes, covariance, fused=False)
            for name in ("mean", "covariance", "log_mass")[:: 1 if covariance else 2]:
                own, other, true = (getattr(p, name).double().view(rows, -1) for p in (found, twin, exact))
                least = 1e-4 if name == "log_mass" else 2e-5
                bound = torch.maximum(4 * (other - true).abs().max(), least + rounding(x, t, codes))
                assert ((own - true).abs().amax(1) <= bound).all(), name
            assert covariance or found.covariance is None


def test_laws_in_half_precision_and_with_a_stride() -> None:
    x, t, logp, codes = case(20, 100, 4)
    wide = torch.cat([logp, logp], 1)[:, 20:120].float()
    part = torch.cat([logp[:, 20:], logp[:, :20]], 1)
    turned = torch.cat([codes[20:], codes[:20]])
    for given in (wide, part.half()):
        found = posterior(x, t, given, turned, fused=True)
        wanted = posterior(x, t, given.float(), turned, fused=False)
        assert torch.allclose(found.mean, wanted.mean, atol=2e-5)


def test_the_gradient_is_the_closed_form() -> None:
    x, t, logp, codes = case(40, 200, 8)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    slopes = []
    for way in (True, False):
        own = x.clone().requires_grad_()
        slopes.append(torch.autograd.grad((denoise(own, t, logp, codes, fused=way) * g).sum(), own)[0])
    assert (slopes[0] - slopes[1]).norm() < 1e-3 * slopes[1].norm()


def test_a_token_does_not_depend_on_its_company() -> None:
    x, t, logp, codes = case(35, 150, 8)
    whole = posterior(x, t, logp, codes, covariance=False, fused=True)
    for size in (1, 16, 17):
        parts = [
            posterior(*each, codes, covariance=False, fused=True).mean
            for each in zip(x.split(size), t.split(size), logp.split(size), strict=True)
        ]
        same = torch.equal if DEVICE.type == "cuda" else torch.allclose  # the interpreter's products are a library's
        assert same(torch.cat(parts), whole.mean)


def test_codes_that_are_too_wide_are_left_to_the_chunks() -> None:
    assert fused.fits(8, True) and fused.fits(32, False) and not fused.fits(32, True)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="the choice is the GPU's")
def test_a_gpu_takes_the_kernel() -> None:
    x, t, logp, codes = case(512, 16384, 8)
    assert torch.equal(posterior(x, t, logp, codes).mean, posterior(x, t, logp, codes, fused=True).mean)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    posterior(x, t, logp, codes)
    extra = torch.cuda.max_memory_allocated() - before
    assert extra < logp.numel() * 4 / 2, "nothing of the size of log p"


def test_codes_of_any_scale() -> None:
    x, t, logp, codes = case(20, 100, 4)
    for scale in (1e-3, 300.0):
        sizes = scale * torch.tensor([1.0, 0.01, 1.0, 0.0], device=DEVICE)  # the last channel says nothing
        found = posterior(x, t, logp, codes * sizes, fused=True)
        wanted = posterior(x.double(), t.double(), logp.double(), (codes * sizes).double(), fused=False)
        rounded = rounding(x, t, codes * sizes).unsqueeze(1)
        assert ((found.mean - wanted.mean).abs() <= scale * (2e-6 + 2 * rounded)).all()
        assert found.mean[:, 3].eq(0).all()
