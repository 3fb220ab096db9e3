"""Discriminator: size, independence of images, LeCAM's state."""

import pytest
import torch
import torch.nn.functional as F

from visgen.nn.discriminator import (
    Config,
    LeCam,
    PatchDiscriminator,
    build_discriminator,
    hinge_discriminator,
    hinge_generator,
)


def test_size_of_the_three_layer_one():
    with torch.device("meta"):
        parameters = sum(p.numel() for p in PatchDiscriminator(Config()).parameters())
    assert parameters == 2_765_633  # LlamaGen's, whose BatchNorm has as many as our GroupNorm


@pytest.mark.parametrize("norm", ["group", "none"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_an_image_depends_on_no_other(norm, layers):
    torch.manual_seed(0)
    net, images = PatchDiscriminator(Config(width=4, layers=layers, norm=norm)), torch.randn(3, 3, 32, 32)
    together = net(images)
    assert together.shape[:2] == (3, 1)
    torch.testing.assert_close(together[1:2], net(images[1:2]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("layers", "field"), [(1, 16), (2, 34), (3, 70)])
def test_receptive_field(layers, field):
    net = PatchDiscriminator(Config(width=2, layers=layers, norm="none"))
    image = torch.randn(1, 3, 128, 128, requires_grad=True)
    logits = net(image)
    logits[0, 0, logits.shape[2] // 2, logits.shape[3] // 2].backward()
    seen = image.grad.abs().sum((0, 1)).nonzero()
    assert (seen.max(0).values - seen.min(0).values + 1).tolist() == [field, field]


def test_hinges():
    real, fake = torch.tensor([2.0, 0.0]), torch.tensor([-3.0, 1.0])
    assert hinge_discriminator(real, fake) == 0.5 * ((0 + 1) / 2 + (0 + 2) / 2)
    assert hinge_generator(fake) == 1.0


def test_lecam_means_are_saved_and_restored():
    lecam = LeCam(0.9)
    real, fake = torch.full((4,), 2.0), torch.full((4,), -1.0)
    assert lecam(real, fake) == 0  # nothing to compare with yet
    found = lecam(real, fake)  # bias-corrected means are 2 and -1
    assert found == pytest.approx((2 + 1) ** 2 + (2 + 1) ** 2, rel=1e-5)
    again = LeCam(0.9)
    again.load_state_dict(lecam.state_dict())
    assert again(real, fake) == lecam(real, fake)
    assert set(lecam.state_dict()) == {"real", "fake", "updates"}
    before = again.eval().state_dict()["updates"].clone()
    again(real, fake)
    assert again.updates == before


def test_lecam_pulls_sides_together():
    lecam = LeCam(0.9)
    logits = torch.tensor([3.0, -3.0], requires_grad=True)
    lecam(logits[:1].detach(), logits[1:].detach())
    lecam(logits[:1], logits[1:]).backward()
    assert logits.grad[0] > 0 > logits.grad[1]


def test_features_discriminator_gives_a_logit_per_map_and_patch_and_weighs_maps_alike():
    torch.manual_seed(0)
    model = build_discriminator(Config(kind="features", width=8, layers=3, norm="none"))
    maps = [F.normalize(torch.randn(2, c, s, s), dim=1) for c, s in ((64, 32), (128, 16), (256, 8), (512, 4))]
    logits = model(torch.zeros(2, 3, 32, 32), lambda pixels: maps)
    assert logits.shape == (2, 3, 8, 8) and logits.dtype == torch.float32
    fine = model.heads[0](maps[0] * 8)
    torch.testing.assert_close(logits[:, 0].mean(), fine.mean())
