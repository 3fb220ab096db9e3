"""`encode`: codes equal the tokenizer's, resume after a kill, settings that changed, preflight."""

import contextlib
import dataclasses
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import visgen.encode as program
from visgen import checkpoint
from visgen.config import UserError, build, plugin_config, run_program
from visgen.data import codes as cache
from visgen.encode import encode, preflight
from visgen.tokenizers import Tokenizer


class PatchColours(Tokenizer):
    """Four levels per channel of each 4 x 4 patch's mean colour: 64 codes, exact in floating point."""

    def __init__(self, size=16, vocab=64):
        super().__init__()
        self.image_size, self.grid, self.vocab, self.channels = (size, size), (1, size // 4, size // 4), vocab, 3
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pixels):
        raise NotImplementedError

    def encode(self, pixels):
        assert not self.training
        mean = nn.functional.avg_pool2d(pixels[:, 0] * self.scale, 4).flatten(2)  # [B, 3, N]
        level = ((mean + 1) * 2).floor().clamp(0, 3).long()
        return level[:, 0] * 16 + level[:, 1] * 4 + level[:, 2]

    def decode(self, tokens):
        level = torch.stack([tokens // 16 % 4, tokens // 4 % 4, tokens % 4], 1)  # [B, 3, N]
        small = ((level + 0.5) / 2 - 1).unflatten(2, self.grid[1:])
        return nn.functional.interpolate(small, scale_factor=4)[:, None]

    def embed(self, ids):
        raise NotImplementedError


def synthetic(n=22, split="train", **options):
    options = {"image_size": 16, "n": n, "n_held_out": n, **options}
    return build(plugin_config("visgen.data", "synthetic", **options), split)


def read(out, split="train"):
    return build(cache.Config(out), split)


def all_codes(out):
    data = read(out)
    return np.stack([data.tokens(i) for i in range(len(data))])


def direct(data, kind, ranges=(1.1,)):
    pixels = data.views(range(len(data)), kind, ranges)["pixels"]
    ids = PatchColours(data.image_size[0]).eval().encode(pixels.flatten(0, 1).float() / 127.5 - 1)
    return ids.unflatten(0, pixels.shape[:2]).numpy()


@pytest.fixture
def photos(tmp_path):
    """`folder` with 6 pictures of 40 x 30."""
    root = tmp_path / "photos"
    for i in range(6):
        (root / f"c{i % 2}").mkdir(parents=True, exist_ok=True)
        small = np.random.default_rng(i).integers(0, 256, (5, 6, 3), dtype=np.uint8)
        Image.fromarray(small).resize((40, 30)).save(root / f"c{i % 2}" / f"{i}.png")
    return build(plugin_config("visgen.data", "folder", root=root, image_size=16, held_out_fraction=0), "train")


@pytest.mark.parametrize("kind", ["center", "flip"])
@pytest.mark.parametrize("workers", [0, 2])
def test_codes_are_the_tokenizers(tmp_path, kind, workers):
    data = synthetic()
    tokenizer = PatchColours()
    assert encode(tokenizer, data, tmp_path, "t", views=kind, batch=5, shard=8, workers=workers) == tmp_path / "train"
    assert np.array_equal(all_codes(tmp_path), direct(data, kind))
    found = read(tmp_path)
    assert torch.equal(found.labels, data.labels)
    assert found.tokens(0).dtype == np.uint16
    assert sorted(p.name for p in (tmp_path / "train").iterdir()) == [
        *(f"codes_{i:05d}.npy" for i in range(3)),
        "index.json",
        *(f"labels_{i:05d}.npy" for i in range(3)),
    ]
    seen = preflight(tokenizer, found)
    assert seen.matched > seen.shuffled + 3
    assert seen.agreement == 1


def test_ten_crops_at_both_ranges(tmp_path, photos):
    encode(PatchColours(), photos, tmp_path, "t", views="ten_crop", ranges=(1.1, 1.5), batch=32, shard=4)
    found = all_codes(tmp_path)
    assert found.shape == (6, 20, 16)
    assert np.array_equal(found, direct(photos, "ten_crop", (1.1, 1.5)))
    assert preflight(PatchColours(), read(tmp_path)).matched > 15


class Killed(Exception):
    pass


def kill_at(data, image):
    """`data` whose views fail from one image on."""
    views = data.views

    def failing(indices, kind, ranges=(1.1,)):
        if max(indices) >= image:
            raise Killed
        return views(indices, kind, ranges)

    data.views = failing
    return data


def test_a_killed_run_goes_on_after_its_last_whole_shard(tmp_path):
    options = {"views": "flip", "batch": 4, "shard": 8}
    encode(PatchColours(), synthetic(), tmp_path / "whole", "t", **options)
    with pytest.raises(Killed):
        encode(PatchColours(), kill_at(synthetic(), 20), tmp_path / "cut", "t", **options)
    folder = tmp_path / "cut" / "train"
    with pytest.raises(UserError, match=r"incomplete, 2 of 3 shards"):
        read(tmp_path / "cut")
    before = {p.name: p.stat().st_mtime_ns for p in folder.glob("codes_*")}
    assert sorted(before) == ["codes_00000.npy", "codes_00001.npy"]

    data, asked = synthetic(), []
    views = data.views
    data.views = lambda indices, *rest: asked.extend(indices) or views(indices, *rest)
    encode(PatchColours(), data, tmp_path / "cut", "t", **options)
    assert asked == list(range(16, 22))
    assert all((folder / name).stat().st_mtime_ns == then for name, then in before.items())
    for path in (tmp_path / "whole" / "train").iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()

    asked.clear()
    encode(PatchColours(), data, tmp_path / "cut", "t", **options)
    assert not asked  # complete: nothing to do


@pytest.mark.parametrize("damage", ["delete", "truncate", "labels"])
def test_a_complete_cache_that_lost_a_shard_is_repaired(tmp_path, damage):
    encode(PatchColours(), synthetic(), tmp_path, "t", views="center", shard=8)
    path = tmp_path / "train" / ("labels_00002.npy" if damage == "labels" else "codes_00002.npy")
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    if damage == "delete":
        path.unlink()
    with pytest.raises(UserError, match=r"00002\.npy"):
        read(tmp_path)
    encode(PatchColours(), synthetic(), tmp_path, "t", views="center", shard=8)
    assert path.read_bytes() == whole
    read(tmp_path)


def test_changed_settings_are_refused_by_name(tmp_path):
    options = {"views": "center", "shard": 8}
    with pytest.raises(Killed):
        encode(PatchColours(), kill_at(synthetic(), 20), tmp_path, "t", **options)
    for text, change in {
        "tokenizer t, now it is u": lambda: encode(PatchColours(), synthetic(), tmp_path, "u", **options),
        "views center, now it is flip": lambda: encode(
            PatchColours(), synthetic(), tmp_path, "t", views="flip", shard=8
        ),
        r"data\.seed 0, now it is 1": lambda: encode(PatchColours(), synthetic(seed=1), tmp_path, "t", **options),
        r"data\.n 22, now it is 23": lambda: encode(PatchColours(), synthetic(23), tmp_path, "t", **options),
        "shard_images 8, now it is 9": lambda: encode(
            PatchColours(), synthetic(), tmp_path, "t", views="center", shard=9
        ),
        "vocab 64, now it is 100": lambda: encode(PatchColours(vocab=100), synthetic(), tmp_path, "t", **options),
    }.items():
        with pytest.raises(UserError, match=f"was written with {text}; delete the folder"):
            change()


def test_what_does_not_fit_is_refused_before_any_work(tmp_path, photos):
    out = tmp_path / "out"

    def refused(text, tokenizer=None, data=None, **options):
        with pytest.raises(UserError, match=text):
            encode(tokenizer or PatchColours(), data or synthetic(), out, "t", **options)
        assert not out.exists()

    refused("made for 32x32 px but the data has 16x16 px", PatchColours(32))
    refused("not float32", PatchColours().bfloat16())
    refused(r"crop_ranges \(0\.5,\)", data=photos, views="ten_crop", ranges=(0.5,))
    refused(r"crop_ranges \(\)", data=photos, views="ten_crop", ranges=())
    refused("belongs to --views ten_crop, not shift", data=photos, views="shift", ranges=(1.05,))
    refused("batch 0", batch=0)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/train cannot be written .*choose another --out"):
        encode(PatchColours(), synthetic(), tmp_path / "file", "t")
    with pytest.raises(UserError, match=r"codes \d+\.\.\d+ lie outside the vocabulary of 3"):
        encode(PatchColours(vocab=3), synthetic(), out, "t")


def rewrite(out, change):
    """Replaces all codes of a one-shard cache by `change(codes)`."""
    data = read(out)
    codes, labels = change(np.array(data.tokens(0).base[:])), data.labels.numpy()
    cache.write_shard(out / "train", data.index, 0, codes, labels)
    data.index.shards = [cache.read_record(out / "train", data.index, 0)]
    cache.write_index(out / "train", data.index)
    (out / "train" / "done_00000.json").unlink()


def test_preflight_refuses_what_does_not_look_like_its_source(tmp_path):
    encode(PatchColours(), synthetic(), tmp_path, "t", views="flip")
    preflight(PatchColours(), read(tmp_path))

    rewrite(tmp_path, lambda codes: np.roll(codes, 1, 0))
    with pytest.raises(UserError, match=r"does not match its source: encoding image \d+ gives \d+% of its codes"):
        preflight(PatchColours(), read(tmp_path))
    rewrite(tmp_path, lambda codes: np.roll(codes, -1, 0))
    preflight(PatchColours(), read(tmp_path))

    rewrite(tmp_path, lambda codes: codes[:, ::-1])
    with pytest.raises(UserError, match="does not match its source"):
        preflight(PatchColours(), read(tmp_path))
    rewrite(tmp_path, lambda codes: codes[:, ::-1] + 64)
    with pytest.raises(UserError, match=r"codes_00000\.npy holds code \d+, the vocabulary has 64"):
        preflight(PatchColours(), read(tmp_path))


def test_preflight_refuses_a_tokenizer_that_shows_nothing(tmp_path):
    class Blank(PatchColours):
        def decode(self, tokens):
            return super().decode(tokens.flip(0))

    encode(Blank(), synthetic(), tmp_path, "t")
    with pytest.raises(UserError, match=r"does not look like its source: \d+\.\d dB to its own images, \d+\.\d dB to"):
        preflight(Blank(), read(tmp_path))
    assert preflight(Blank(), read(tmp_path), margin_db=-50).agreement == 1


def test_a_cache_that_is_refused_is_not_complete(tmp_path):
    """Nothing is trained on it; the same command looks at it again."""

    def refuse(codes):
        raise UserError(f"{len(codes)} images look wrong")

    for shard in (8, 8):  # when it is made, and again when it is whole
        with pytest.raises(UserError, match="22 images look wrong"):
            encode(PatchColours(), synthetic(), tmp_path, "t", shard=shard, accept=refuse)
        with pytest.raises(UserError, match="is incomplete, 3 of 3 shards"):
            read(tmp_path)
    seen = []
    encode(PatchColours(), synthetic(), tmp_path, "t", shard=8, accept=lambda codes: seen.append(len(codes)))
    assert seen == [22] == [len(read(tmp_path))]
    with pytest.raises(UserError, match="22 images look wrong"):  # of a complete one
        encode(PatchColours(), synthetic(), tmp_path, "t", shard=8, accept=refuse)
    with pytest.raises(UserError, match="is incomplete, 3 of 3 shards"):
        read(tmp_path)


def test_preflight_refuses_another_source_size_and_takes_one_image(tmp_path):
    encode(PatchColours(), synthetic(1), tmp_path / "one", "t")
    assert preflight(PatchColours(), read(tmp_path / "one")).agreement == 1
    encode(PatchColours(), synthetic(), tmp_path, "t")
    index = cache.read_index(tmp_path / "train")
    index.source["n"] = 30
    cache.write_index(tmp_path / "train", index)
    with pytest.raises(UserError, match="has 22 images but its source 30"):
        preflight(PatchColours(), read(tmp_path))


def test_processes_share_the_shards_out(tmp_path, monkeypatch):
    barrier = threading.Barrier(2)
    # threads stand in for processes here, and would race for the one precision of their process
    monkeypatch.setattr(program, "exact_float32", contextlib.nullcontext)

    class State:
        num_processes = 2

        def __init__(self, rank):
            self.process_index, self.is_main_process = rank, rank == 0
            self.wait_for_everyone = barrier.wait

    asked: dict[int, set[int]] = {0: set(), 1: set()}

    def run(rank):
        data = synthetic(40)
        views = data.views
        data.views = lambda indices, *rest: asked[rank].update(indices) or views(indices, *rest)
        encode(PatchColours(), data, tmp_path / "two", "t", shard=8, state=State(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked[0] == {*range(8), *range(16, 24), *range(32, 40)}
    assert asked[1] == {*range(8, 16), *range(24, 32)}
    encode(PatchColours(), synthetic(40), tmp_path / "one", "t", shard=8)
    assert np.array_equal(all_codes(tmp_path / "one"), all_codes(tmp_path / "two"))


def test_float32_whatever_the_caller_set_and_torch_can_be_asked_afterwards(tmp_path):
    seen = set()

    class Probe(PatchColours):
        def encode(self, pixels):
            seen.add((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")))
            return super().encode(pixels)

    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            encode(Probe(), synthetic(4), tmp_path, "t")
        assert seen == {("highest", False)} and torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.backends.cudnn.allow_tf32 in (True, False), "raises where the two ways of asking for TF32 were mixed"


def test_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "load_tokenizer", lambda path: PatchColours().eval())
    monkeypatch.setattr(checkpoint, "tokenizer_hash", lambda tokenizer: "t")
    argv = [*("--tokenizer", "x", "--out", str(tmp_path), "--data.kind", "synthetic", "--cpu"), "--data.image-size"]
    program.main([*argv, "16", "--data.n-held-out", "12", "--split", "held_out", "--views", "flip"])
    assert "12 images x 2 views x 16 codes" in capsys.readouterr().out
    data = read(tmp_path, "held_out")
    assert dataclasses.asdict(data.source().config)["n_held_out"] == 12
    data.check("t")
    with pytest.raises(SystemExit, match="2"):
        run_program(lambda: program.main([*argv, "32"]))
    assert capsys.readouterr().err.startswith("error: the tokenizer was made for 16x16 px")
    with pytest.raises(UserError, match="tokenizer is not set; pass --tokenizer"):
        program.main(["--data.kind", "synthetic"])


@pytest.mark.slow
def test_two_launched_processes_write_what_one_writes(tmp_path):
    tokenizer = {"image_size": 16, "width": 8, "multipliers": (1, 1), "res_blocks": 1, "z_channels": 8}
    config = plugin_config("visgen.tokenizers", "conv_vq", **tokenizer, attention=False, norm_groups=4)
    checkpoint.save_module(tmp_path / "t.safetensors", build(config), config)
    flags = [*("--tokenizer", str(tmp_path / "t.safetensors"), "--data.kind", "synthetic", "--data.image-size", "16")]
    flags += [*("--data.n", "50", "--shard", "8", "--preflight-db", "-100", "--cpu", "--out")]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml"]
    subprocess.run([*launch, "-m", "visgen.encode", *flags, str(tmp_path / "two")], check=True, timeout=300)
    program.main([*flags, str(tmp_path / "one")])
    for path in (tmp_path / "one" / "train").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / "train" / path.name).read_bytes()


# ------------------------------------------------------------------------------------------------ continuous tokens


def continuous(small):
    torch.manual_seed(0)
    return build(small("tokenizers", "conv_kl", kl=0.0, patch=1)).eval()


def test_latents_are_cached_in_half_precision(small, tmp_path):
    data, tokenizer = synthetic(), continuous(small)
    encode(tokenizer, data, tmp_path, checkpoint.tokenizer_hash(tokenizer), shard=9, batch=8)
    kept = read(tmp_path)
    assert (kept.grid, kept.vocab, kept.channels, kept.view_count) == ((1, 8, 8), None, 4, 2)
    sample = kept.get(3)["tokens"]
    wanted = tokenizer.encode(data.get(3)["pixels"][None].float() / 127.5 - 1)[0]
    assert sample.dtype == torch.float32 and sample.shape == (64, 4)
    assert torch.allclose(sample, wanted, atol=2e-3, rtol=1e-3)
    assert kept.get_many([3, 4])["tokens"].shape == (2, 64, 4)
    assert preflight(tokenizer, kept, margin_db=-100).agreement == 1
    with torch.no_grad():
        tokenizer.encoder.conv_out.weight.mul_(3)
    with pytest.raises(UserError, match="does not match its source"):
        preflight(tokenizer, kept, margin_db=-100)
