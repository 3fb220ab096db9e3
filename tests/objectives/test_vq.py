"""Tokenizer objective: turns, gradients of each turn, two processes, saved state, previews, refusals."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pair import spawn_pair
from torch.nn.parallel import DistributedDataParallel

from visgen import checkpoint
from visgen.config import UserError, build
from visgen.nn import discriminator, perceptual
from visgen.objectives.vq import Config, Losses, psnr
from visgen.quantizers import vq
from visgen.tokenizers import conv_vq

RNG = torch.Generator()


def make(seed: int = 0, **settings):
    torch.manual_seed(seed)
    tokenizer = conv_vq.Config(
        image_size=16,
        width=8,
        multipliers=(1, 2),
        res_blocks=1,
        z_channels=8,
        norm_groups=4,
        quantizer=vq.Config(codes=32, channels=4, init_after=1, restart_below=0.3, decay=0.8),
    )
    wanted = {"gan_start": 2, "discriminator_start": 1, "losses": Losses(l1=0.5, lecam=0.1), **settings}
    wanted = {"discriminator": discriminator.Config(width=4, layers=2), **wanted}
    return build(Config(tokenizer=tokenizer, **wanted))


def batch(seed: int = 0, count: int = 4):
    rng = torch.Generator().manual_seed(seed)
    return {"pixels": torch.rand(count, 1, 3, 16, 16, generator=rng) * 2 - 1}


def untouched(net: torch.nn.Module) -> list[str]:
    return [name for name, p in net.named_parameters() if p.grad is None]


def test_turns():
    objective = make()
    assert [objective.turns(s) for s in (0, 1, 2)] == [["tokenizer"], *[["tokenizer", "discriminator"]] * 2]
    alone = make(losses=Losses(adversarial=0))
    assert set(alone.nets) == {"tokenizer"} and alone.turns(99) == ["tokenizer"]
    assert objective.export == "tokenizer" and objective.exported().image_size == (16, 16)
    with pytest.raises(UserError, match="discriminator_start is 5; it must not exceed gan_start"):
        make(discriminator_start=5)


def test_each_turn_reaches_all_of_its_net_and_nothing_else():
    objective, data = make(), batch()
    for step in range(3):
        for name in objective.turns(step):
            for net in objective.nets.values():
                net.zero_grad()
            loss, logs = objective.loss(name, objective.nets, data, step, RNG)
            loss.backward()
            assert untouched(objective.nets[name]) == []
            other = next(n for n in objective.nets if n != name)
            assert len(untouched(objective.nets[other])) == len(list(objective.nets[other].parameters()))
            assert all(v.ndim == 0 and not v.requires_grad for v in logs.values())
            assert ("adversarial" in logs) == (name == "tokenizer" and step >= 2)


def test_the_adversarial_gradient_is_that_of_the_discriminator():
    objective, data = make(), batch()
    for step in (1, 2):
        _, logs = objective.loss("tokenizer", objective.nets, data, step, RNG)
    fake = objective._fake(data["pixels"])
    wanted = -0.1 * objective.nets["discriminator"].model(fake[:, 0]).mean()
    torch.testing.assert_close(logs["adversarial"], wanted)


def test_loss_is_the_sum_of_its_parts():
    objective, data = make(), batch()
    objective.frozen["perceptual"] = perceptual.Perceptual()
    objective.nets["tokenizer"].losses = Losses(l1=0.5, l2=2.0, perceptual=0.7, perceptual_zoom=2)
    for step in range(3):
        loss, logs = objective.loss("tokenizer", objective.nets, data, step, RNG)
    parts = {"codebook", "commitment", "l1", "l2", "perceptual", "adversarial"}
    assert parts <= set(logs)
    torch.testing.assert_close(loss.detach(), sum(logs[p] for p in parts))
    fake = objective._fake(data["pixels"])
    torch.testing.assert_close(logs["l2"], 2 * (fake - data["pixels"]).square().mean())
    torch.testing.assert_close(logs["psnr"], psnr(fake[:, 0], data["pixels"][:, 0]))


def test_the_discriminator_needs_the_tokenizers_turn_on_the_same_batch():
    objective, first, second = make(), batch(0), batch(1)
    objective.loss("tokenizer", objective.nets, first, 2, RNG)  # two micro-batches
    objective.loss("tokenizer", objective.nets, second, 2, RNG)
    for data in (first, second):
        objective.loss("discriminator", objective.nets, data, 2, RNG)
    with pytest.raises(RuntimeError, match="must follow"):
        objective.loss("discriminator", objective.nets, batch(0), 2, RNG)


def test_bf16_autocast_keeps_losses_in_float32():
    objective, data = make(), batch()
    for step in range(3):
        for name in objective.turns(step):
            with torch.autocast("cpu", torch.bfloat16):
                loss, logs = objective.loss(name, objective.nets, data, step, RNG)
            loss.backward()
            assert {v.dtype for v in (loss, *logs.values())} == {torch.float32}
            assert torch.isfinite(loss)


def test_lecam_and_quantizer_state_survive_a_checkpoint():
    objective = make()
    for step in range(4):
        data = batch(step)
        for name in objective.turns(step):
            objective.loss(name, objective.nets, data, step, RNG)
    saved = {name: copy.deepcopy(net.state_dict()) for name, net in objective.nets.items()}
    assert saved["discriminator"]["lecam.updates"] == 3 and saved["discriminator"]["lecam.real"] != 0
    assert saved["tokenizer"]["model.quantizer.steps"] == 4
    again = make(seed=5)
    for name, net in again.nets.items():
        net.load_state_dict(saved[name])
    data = batch(9)
    for name in objective.turns(4):
        losses = [o.loss(name, o.nets, data, 4, RNG)[0] for o in (objective, again)]
        assert torch.equal(*losses)


def test_preview_puts_inputs_above_reconstructions():
    objective, data = make(), batch(count=16)
    model = objective.exported().eval()
    images = objective.preview(model, data, 0)
    assert images.shape == (16, 3, 16, 16)  # 4 x 4: two pairs of rows
    assert torch.equal(images[:4], data["pixels"][:4, 0]) and torch.equal(images[8:12], data["pixels"][4:8, 0])
    torch.testing.assert_close(images[12:], model.decode(model.encode(data["pixels"][4:8]))[:, 0])
    assert objective.preview(model, batch(count=1), 0).shape == (2, 3, 16, 16)


def test_setup_refuses_what_does_not_fit(tmp_path):
    objective = make()
    objective.setup(SimpleNamespace(image_size=(16, 16)))
    with pytest.raises(UserError, match=r"\(64, 64\), objective\.tokenizer\.image_size is \(16, 16\).*image_size 64"):
        objective.setup(SimpleNamespace(image_size=(64, 64)))
    with pytest.raises(UserError, match="cached codes"):
        objective.setup(SimpleNamespace(image_size=(16, 16), grid=(1, 8, 8)))
    with pytest.raises(UserError, match=r"perceptual is 1\.0 but perceptual_weights names no file.*convert hed"):
        make(losses=Losses(perceptual=1.0)).setup(SimpleNamespace(image_size=(16, 16)))
    with pytest.raises(UserError, match="do not exist"):
        settings = Losses(perceptual=1.0, perceptual_weights=tmp_path / "none.safetensors")
        make(losses=settings).setup(SimpleNamespace(image_size=(16, 16)))


def test_construction_reads_nothing_and_works_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        objective = make(losses=Losses(perceptual=1.0, perceptual_weights=tmp_path / "none.safetensors"))
    assert {p.device.type for net in objective.nets.values() for p in net.parameters()} == {"meta"}


# --------------------------------------------------------------------------------------------------- two processes


def _rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    objective = make()
    nets = {n: DistributedDataParallel(net, broadcast_buffers=False) for n, net in objective.nets.items()}
    optimizers = {n: torch.optim.Adam(net.parameters(), 1e-3) for n, net in nets.items()}
    restarts = 0.0
    for step in range(6):
        data = batch(100 * rank + step)
        for name in objective.turns(step):
            loss, logs = objective.loss(name, nets, data, step, RNG)
            optimizers[name].zero_grad()
            loss.backward()
            assert untouched(nets[name]) == []
            optimizers[name].step()
            restarts += logs["restarts"].item() if name == "tokenizer" else 0.0
    state = {f"{n}.{k}": v for n, net in objective.nets.items() for k, v in net.state_dict().items()}
    torch.save({"state": state, "restarts": restarts, "data": data["pixels"]}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_keep_equal_parameters_and_statistics(tmp_path):
    spawn_pair(_rank, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert not torch.equal(first["data"], second["data"])
    assert first["restarts"] == second["restarts"] >= 32
    for name, value in first["state"].items():
        assert torch.equal(value, second["state"][name]), name


# ---------------------------------------------------------------------------- decoder alone, features discriminator


def decoder_alone(path, **settings):
    """An objective that trains the decoder of a saved tokenizer, set up; and that tokenizer."""
    first = make(seed=1)
    found = first.exported()
    with torch.no_grad():
        found.quantizer.steps.fill_(9)
    checkpoint.save_module(path / "t.safetensors", found, found.config)
    objective = make(start=path / "t.safetensors", train="decoder", **settings)
    objective.setup(SimpleNamespace(image_size=(16, 16)))
    return objective, found.eval()


def test_training_the_decoder_keeps_codes_and_their_hash(tmp_path):
    objective, start = decoder_alone(tmp_path)
    model, data = objective.exported().train(), batch()
    trained = [p for p in objective.nets["tokenizer"].parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.1)
    for step in range(3):
        for name in objective.turns(step):
            loss, _ = objective.loss(name, objective.nets, data, step, RNG)
            loss.backward()
        optimizer.step()
    assert untouched(model.decoder) == untouched(model.from_code) == []
    assert torch.equal(model.encode(data["pixels"]), start.encode(data["pixels"]))
    assert not torch.equal(model.decode(start.encode(data["pixels"])), start.decode(start.encode(data["pixels"])))
    assert all(
        torch.equal(p, start.state_dict()[n]) for n, p in model.state_dict().items() if n[:2] in ("en", "to", "qu")
    )
    assert checkpoint.tokenizer_hash(model) == checkpoint.tokenizer_hash(start)
    with torch.no_grad():
        model.quantizer.table[0] += 1
    assert checkpoint.tokenizer_hash(model) != checkpoint.tokenizer_hash(start)


def test_frozen_codes_know_no_dropout():
    model = build(conv_vq.Config(image_size=16, width=8, multipliers=(1, 2), res_blocks=1, norm_groups=4, dropout=0.9))
    model.freeze_codes()
    pixels = batch()["pixels"]
    assert torch.equal(model.train()(pixels).ids, model.eval().encode(pixels))
    assert model.train().decoder.training and not model.encoder.training


def test_start_is_refused_without_a_file_or_with_another_config(tmp_path):
    with pytest.raises(UserError, match="names no tokenizer"):
        make(train="decoder")
    other = build(conv_vq.Config(image_size=16, width=16, multipliers=(1, 2), res_blocks=1, norm_groups=4))
    checkpoint.save_module(tmp_path / "t.safetensors", other, other.config)
    with pytest.raises(UserError, match=r"set in the latter: width 16, .*quantizer.codes 16384"):
        make(start=tmp_path / "t.safetensors").setup(SimpleNamespace(image_size=(16, 16)))


def test_features_discriminator_in_every_turn(tmp_path, monkeypatch):
    torch.manual_seed(0)
    network = perceptual.Perceptual()
    monkeypatch.setattr("visgen.objectives.vq.load_perceptual", lambda path, heads: network)
    critic = discriminator.Config(kind="features", width=8, layers=2)
    losses = Losses(perceptual_weights=tmp_path / "vgg", adversarial=0.1)
    objective = make(discriminator=critic, losses=losses)
    objective.setup(SimpleNamespace(image_size=(16, 16)))
    data = batch()
    for name in ("tokenizer", "discriminator"):
        loss, _ = objective.loss(name, objective.nets, data, 2, RNG)
        loss.backward()
        assert untouched(objective.nets[name]) == []
    assert untouched(network) == [n for n, _ in network.named_parameters()]
    with pytest.raises(UserError, match="perceptual_weights names no file"):
        make(discriminator=critic)
    with pytest.raises(UserError, match="is 9; the feature network has 5 maps"):
        make(discriminator=discriminator.Config(kind="features", layers=9), losses=losses)
