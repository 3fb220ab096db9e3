"""Convolutional VQ tokenizer: published sizes, parity with LlamaGen, the contract, and a collapse sentinel."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from visgen.config import UserError, build, plugin_config
from visgen.convert import llamagen
from visgen.quantizers import fsq, vq
from visgen.tokenizers.conv_vq import Config

VECTORS = Path(__file__).parents[1] / "data" / "llamagen_vq_a.safetensors"
TINY = {"image_size": 16, "width": 8, "multipliers": (1, 2), "res_blocks": 1, "z_channels": 8, "norm_groups": 4}


def tiny(seed: int = 0, quantizer=None, **settings):
    torch.manual_seed(seed)
    quantizer = quantizer or vq.Config(codes=16, channels=4)
    return build(Config(**{**TINY, "quantizer": quantizer, **settings}))


@pytest.mark.parametrize(
    ("multipliers", "parameters", "side"), [((1, 1, 2, 2, 4), 71_883_403, 16), ((1, 2, 2, 4), 70_109_835, 32)]
)
def test_published_sizes(multipliers, parameters, side):
    with torch.device("meta"):
        tokenizer = build(plugin_config("visgen.tokenizers", "conv_vq", multipliers=multipliers))
    assert sum(p.numel() for p in tokenizer.parameters()) == parameters
    assert (tokenizer.grid, tokenizer.vocab, tokenizer.channels) == ((1, side, side), 16384, 8)
    assert tokenizer.image_size == (256, 256)


def test_a_local_encoder_gives_equal_patches_one_code():
    tokenizer = tiny(local_encoder=True, attention=False).eval()
    pixels = torch.full((1, 1, 3, 16, 16), 0.3)
    pixels[..., :4, :4] = torch.rand(3, 4, 4)
    ids = tokenizer.encode(pixels).view(8, 8)
    assert len(ids[3:-1, 3:-1].unique()) == 1
    with pytest.raises(UserError, match="set attention to false"):
        tiny(local_encoder=True)


# -------------------------------------------------------------------------------------------- LlamaGen's weights


@pytest.fixture(scope="module")
def recorded():
    with safe_open(VECTORS, "pt") as file:
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
    state = {k.removeprefix("state."): v.float() for k, v in tensors.items() if k.startswith("state.")}
    tokenizer = llamagen.vq(state, 32, "vectors")
    return tokenizer, tensors


def test_llamagen_encode(recorded):
    tokenizer, tensors = recorded
    assert torch.equal(tokenizer.encode(tensors["in.pixels"][:, None]), tensors["out.indices"])


def test_llamagen_reconstruction(recorded):
    tokenizer, tensors = recorded
    with torch.no_grad():
        out = tokenizer(tensors["in.pixels"][:, None])
    torch.testing.assert_close(out.pixels[:, 0], tensors["out.reconstruction"], atol=1e-4, rtol=0)
    vectors = tokenizer.embed(out.ids).transpose(1, 2).reshape(tensors["out.quantized"].shape)
    torch.testing.assert_close(vectors, tensors["out.quantized"], atol=1e-4, rtol=0)


def test_llamagen_decode(recorded):
    tokenizer, tensors = recorded
    with torch.no_grad():
        pixels = tokenizer.decode(tensors["in.random_indices"])
    torch.testing.assert_close(pixels[:, 0], tensors["out.decoded_random"].clamp(-1, 1), atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("quantizer", [vq.Config(codes=16, channels=4), fsq.Config((4, 3, 5))])
def test_interface(quantizer):
    tokenizer = tiny(quantizer=quantizer, decoder_width=12).eval()
    pixels = torch.rand(2, 3, 3, 16, 16) * 2 - 1  # three frames
    ids = tokenizer.encode(pixels)
    assert ids.shape == (2, 3 * 64) and ids.dtype == torch.int64
    assert tokenizer.embed(ids).shape == (2, 192, tokenizer.channels)
    made = tokenizer.decode(ids)
    assert made.shape == pixels.shape and made.abs().max() <= 1
    assert torch.equal(made, tokenizer.decode(tokenizer.embed(ids)))
    assert torch.equal(ids[:, 64:128], tokenizer.encode(pixels[:, 1:2]))  # frame by frame
    out = tokenizer(pixels)
    assert torch.equal(out.ids, ids) and out.pixels.shape == pixels.shape
    torch.testing.assert_close(out.pixels.clamp(-1, 1), made, atol=1e-5, rtol=1e-4)


def test_gradients_reach_every_parameter_and_vectors_decode_with_gradient():
    tokenizer = tiny()
    out = tokenizer(torch.rand(2, 1, 3, 16, 16))
    (out.pixels.square().mean() + sum(out.losses.values())).backward()
    assert [n for n, p in tokenizer.named_parameters() if p.grad is None] == []
    vectors = torch.randn(1, 64, 4, requires_grad=True)
    tokenizer.decode(vectors).mean().backward()
    assert vectors.grad.abs().sum() > 0


def test_other_resolutions():
    tokenizer = tiny().eval()
    pixels = torch.rand(1, 1, 3, 20, 12)
    ids = tokenizer.encode(pixels)
    assert ids.shape == (1, 60)
    assert tokenizer.grid_of(pixels) == (1, 10, 6)
    assert tokenizer.decode(ids, (1, 10, 6)).shape == pixels.shape
    with pytest.raises(UserError, match=r"cannot decode 60 tokens as a grid of \(0, 8, 8\)"):
        tokenizer.decode(ids)
    with pytest.raises(UserError, match="the image is 20 x 13 px; its sides must be multiples of the stride 2"):
        tokenizer.encode(torch.rand(1, 1, 3, 20, 13))
    with pytest.raises(UserError, match=r"tokenizer\.image_size is 17 x 17 px.*e\.g\. 16"):
        tiny(image_size=17)


def test_weights_are_enough_to_restore_it():
    first, second = tiny(0).eval(), tiny(1).eval()
    second.load_state_dict(first.state_dict())
    pixels = torch.rand(1, 1, 3, 16, 16)
    assert torch.equal(first.encode(pixels), second.encode(pixels))
    with torch.device("meta"):
        empty = tiny(quantizer=fsq.Config((4, 3)))
    full = tiny(quantizer=fsq.Config((4, 3))).eval()
    empty.load_state_dict(full.state_dict(), assign=True)  # no buffer may be left behind on the meta device
    assert torch.equal(empty.eval().encode(pixels), full.encode(pixels))


# --------------------------------------------------------------------------------------------- collapse sentinel


def shapes(count: int, rng: torch.Generator) -> torch.Tensor:
    """Soft discs of random colour, place and size on a random ground, [count, 1, 3, 16, 16]."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    place, size, inside, ground = (torch.rand(count, n, 1, 1, generator=rng) * 2 - 1 for n in (2, 1, 3, 3))
    distance = ((x - place[:, :1]) ** 2 + (y - place[:, 1:]) ** 2).sqrt()
    mask = torch.sigmoid(12 * (0.6 + 0.3 * size - distance))
    return (inside * mask + ground * (1 - mask))[:, None]


def train(quantizer: vq.Config, steps: int = 100) -> tuple[float, float]:
    """Usage over the rolling window that training reports, and usage of held-out images, after `steps`."""
    tokenizer, rng = tiny(quantizer=quantizer, attention=False), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(tokenizer.parameters(), 3e-3, betas=(0.9, 0.95))
    for _ in range(steps):
        pixels = shapes(16, rng)
        out = tokenizer(pixels)
        loss = F.mse_loss(out.pixels, pixels) + sum(out.losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held_out = tokenizer.eval().encode(shapes(64, rng))
    return out.metrics["usage"].item(), held_out.unique().numel() / 64


HEALTHY = 0.9


def test_codes_stay_in_use():
    reported, held_out = train(vq.Config(codes=64, channels=4, init_after=20, restart_below=0.1, decay=0.9, window=40))
    assert min(reported, held_out) >= HEALTHY, (reported, held_out)


def test_the_sentinel_sees_a_collapse():
    """Neither drawn from the batch nor ever restarted: most codes start far from every vector and stay there."""
    reported, held_out = train(vq.Config(codes=64, channels=4, window=40))
    assert max(reported, held_out) < 0.5, (reported, held_out)
