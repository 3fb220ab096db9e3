"""Flip single bits in every kind of file that carries numbers, and load each file as the programs do.

    python tests/bit_flips.py --seed 0 --flips 200

Half of the flips fall anywhere in a file, half into its first 512 bytes, where headers are. A flip is refused if
loading ends with one line, harmless if every loaded number is as it was, and silent if one differs. The exit code is 1
if one is silent.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("ACCELERATE_USE_CPU", "true")
sys.path += [str(Path(__file__).parent / "train")]

import freedoom_set
import numpy as np
import torch
from PIL import Image
from toy import plugins, train

from visgen import checkpoint, evaluate, run_files, tensors
from visgen.conditions.text import Config as Text
from visgen.config import UserError, build, plugin_config
from visgen.data import captions, codes, pairs
from visgen.image_files import Unreadable, read_image
from visgen.metrics.chunks import ChunkStore
from visgen.metrics.features import build_extractor
from visgen.metrics.frechet import Stats
from visgen.model import Model, ModelConfig
from visgen.prompts import read as read_features
from visgen.tally import load_bundle, make_bundle
from visgen.train import state as states

HEADER = 512  # bytes
CLASSES = ["a", "b", "c"]


@dataclass(frozen=True)
class Case:
    """A file, and what a program makes of it: any nest of numbers, texts, arrays and tensors."""

    path: Path
    load: Callable[[], Any]


class Loaded(BaseException):
    """Ends a training that has read its state."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--flips", type=int, default=200, help="over all files together")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = run(Path(folder), asked.seed, asked.flips)
    for name, found in sorted(counts.items()):
        print(f"{name:42} " + "  ".join(f"{kind} {found[kind]:3}" for kind in ("refused", "harmless", "silent")))
    silent = sum(found["silent"] for found in counts.values())
    print(f"{silent} of {asked.flips} silent, seed {asked.seed}, {len(counts)} files")
    raise SystemExit(1 if silent else 0)


def run(folder: Path, seed: int, flips: int) -> dict[str, Counter[str]]:
    """Return how many flips of each file were refused, harmless and silent."""
    torch.manual_seed(0)
    rng, counts = random.Random(seed), {}
    with plugins():
        cases = [case for make in (weights, training, references, caches, evaluations) for case in make(folder)]
        for number in range(flips):
            case = cases[number % len(cases)]
            name = str(case.path.relative_to(folder))
            counts.setdefault(name, Counter())[flip(case, rng)] += 1
    return counts


def flip(case: Case, rng: random.Random) -> str:
    """Flip one bit of a case's file, load it, put the bit back, and say what came of it."""
    whole = case.path.read_bytes()
    bit = rng.randrange(8 * (min(HEADER, len(whole)) if rng.random() < 0.5 else len(whole)))
    before, damaged = digest(case.load()), bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    case.path.write_bytes(damaged)
    try:
        return "harmless" if digest(case.load()) == before else "silent"
    except (UserError, Unreadable) as error:
        assert "\n" not in str(error), f"{case.path}, bit {bit}: {error}"
        return "refused"
    finally:
        case.path.write_bytes(whole)


def digest(value: Any) -> str:
    """Return a hash of all that a program loaded."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            part = part.detach().contiguous()
            found.update(f"{part.dtype} {tuple(part.shape)}".encode())
            found.update(part.reshape(-1).view(torch.uint8).numpy().tobytes() if part.numel() else b"")
        elif isinstance(part, np.ndarray):
            found.update(f"{part.dtype} {part.shape}".encode() + part.tobytes())
        elif isinstance(part, Mapping):
            for key in sorted(part, key=str):
                add(str(key))
                add(part[key])
        elif isinstance(part, list | tuple):
            found.update(f"[{len(part)}".encode())
            for item in part:
                add(item)
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            add({field.name: getattr(part, field.name) for field in dataclasses.fields(part)})
        else:
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()


# ------------------------------------------------------------------------------------------------------- the files


def weights(folder: Path) -> Iterator[Case]:
    """A run as sampling reads it."""
    quantizer = plugin_config("visgen.quantizers", "fsq", levels=(3, 5))
    small = {"image_size": 8, "width": 8, "multipliers": (1, 1), "res_blocks": 1, "z_channels": 8, "norm_groups": 4}
    tokenizer = build(plugin_config("visgen.tokenizers", "conv_vq", quantizer=quantizer, **small))
    model = Model(
        ModelConfig(
            grid=(1, 4, 4), vocab=15, backbone=plugin_config("visgen.backbones", "ar", width=16, layers=1, heads=2)
        )
    )
    step = folder / "run" / run_files.step_name(8)
    step.mkdir(parents=True)
    facts = {"step": 8, "classes": '["a"]', "tokenizer": checkpoint.tokenizer_hash(tokenizer)}
    checkpoint.save_module(step / run_files.WEIGHTS, model, model.config, torch.bfloat16, facts)
    checkpoint.save_module(step.parent / run_files.TOKENIZER, tokenizer, tokenizer.config)
    best = {"metric": "nats_per_token", "step": 8, "value": 1.25, "since": 0}
    run_files.write_meta(step, {"step": 8, "samples": 80, "best": best, "crc32": run_files.checksums(step)})

    def loaded(path: Path, load: Callable[[Path], torch.nn.Module]) -> list[Any]:
        module = load(path)
        return [module.state_dict(), module.config, checkpoint.read_metadata(path)]

    for path, load in (
        (step / run_files.WEIGHTS, checkpoint.load_model),
        (step.parent / run_files.TOKENIZER, checkpoint.load_tokenizer),
    ):
        yield Case(path, lambda path=path, load=load: loaded(path, load))
    yield Case(step / run_files.META, lambda: run_files.read_meta(run_files.find_step(step.parent)))


def training(folder: Path) -> Iterator[Case]:
    """A step as training resumes from it."""
    with quiet():
        step = train(folder / "training", "--loop.save-every", "4") / run_files.step_name(4)
        for later in run_files.find_steps(step.parent)[1:]:
            later.rename(folder / later.name)

    def resumed() -> Any:
        real, kept = states.load, []

        def load(state: states.State, path: Path) -> int:
            done = real(state, path)
            nets = {name: net.state_dict() for name, net in state.nets.items()}
            optimizers = {name: each.state_dict() for name, each in state.optimizers.items()}
            kept.append([done, nets, optimizers, state.ema.state_dict(), state.objective.state_dict(), state.best])
            raise Loaded

        with quiet(), mock.patch.object(states, "load", load), contextlib.suppress(Loaded):
            train(step.parent, "--loop.save-every", "4")
        for damaged in step.parent.glob("damaged_*"):
            damaged.rename(step)
        return kept[0]

    for path in [step / run_files.META, *sorted((step / states.STATE).iterdir())]:
        yield Case(path, resumed)


def references(folder: Path) -> Iterator[Case]:
    """Statistics that samples are scored against."""
    extractor, data = build_extractor("fd_debug"), synthetic()
    rows = iter([(data.get_many(range(40))["pixels"][:, 0], torch.arange(40))])
    bundle, cache, npz = (folder / name for name in ("bundle.safetensors", "cache.safetensors", "stats.npz"))
    made = make_bundle("set", rows, 40, extractor, evaluate.World(), {"crop": "none", "size": "16x16"})
    made.save(bundle)
    made.pool.save(folder / "stats.safetensors")
    np.savez(npz, mu=made.pool.mean.numpy(), sigma=made.pool.cov.numpy())
    evaluate.reference(data, extractor, cache=cache)
    yield Case(bundle, lambda: load_bundle(bundle, extractor, evaluate.World()))
    yield Case(cache, lambda: evaluate.reference(data, extractor, cache=cache))
    yield Case(folder / "stats.safetensors", lambda: Stats.load(folder / "stats.safetensors")[0])
    yield Case(npz, lambda: Stats.load(npz)[0])


def caches(folder: Path) -> Iterator[Case]:
    """What training reads instead of pixels, captions and a teacher."""
    data, rng = synthetic(), np.random.default_rng(0)
    for name, shape in (("codes", {"vocab": 300}), ("vectors", {"vocab": 0, "channels": 2})):
        root = folder / name
        settings = {"views": "flip", "ranges": [], "shard_images": 20, "tokenizer": "abc", "grid": [1, 2, 2]}
        index = codes.make_index(data, **settings, **shape)
        for number in range(index.shard_count):
            values = rng.integers(0, 300, index.shape(number))
            (root / "held_out").mkdir(parents=True, exist_ok=True)
            codes.write_shard(root / "held_out", index, number, values, data.labels[list(index.shard(number))].numpy())
            index.shards.append(codes.read_record(root / "held_out", index, number) or {})
            codes.shard_path(root / "held_out", number, "done").unlink()
        index.complete = True
        codes.write_index(root / "held_out", index)
        yield from folder_cases(root / "held_out", lambda root=root: codes.Codes(codes.Config(root), "held_out"))
    text = folder / "text"
    captions.write_index(text, captions.Index(encoder="t5", clean=False, tokens=5, channels=8))
    parts = [rng.standard_normal((n, 8)).astype(np.float16) for n in (2, 5, 3)]
    captions.write_shard(text, 0, ["a", "b", "c"], parts)
    yield from folder_cases(text, lambda: captions.Features(text))
    origin = {"guidance": {}, "warp": {}, "map_steps": 30, "precision": "fp32", "teacher": "t", "tokenizer": "k"}
    shape = {"classes": CLASSES, "image_size": [16, 16], "grid": [1, 2, 2], "vocab": 300}
    index = pairs.Index(split="train", pairs=30, shard_pairs=20, first_seed=7, **shape, **origin)
    pairs.write_index(folder / "pairs" / "train", index)
    for number in range(2):
        tokens = rng.integers(0, 300, (len(index.shard(number)), 4))
        pairs.write_shard(folder / "pairs" / "train", index, number, tokens)
    yield from folder_cases(folder / "pairs" / "train", lambda: pairs.Pairs(pairs.Config(folder / "pairs"), "train"))
    freedoom_set.write(folder / "clips", "train", freedoom_set.clips(7, 3, 8))
    clips = plugin_config("visgen.data", "freedoom", root=folder / "clips", frames=2, maps="seg")
    yield from folder_cases(folder / "clips" / "train", lambda: build(clips, "train"))


def folder_cases(folder: Path, opened: Callable[[], Any]) -> Iterator[Case]:
    def everything() -> Any:
        found = opened()
        rows = range(len(found))
        return [found.index, getattr(found, "keys", None), [found.get(i) for i in rows]]

    for path in sorted(folder.iterdir()):
        yield Case(path, everything)


def evaluations(folder: Path) -> Iterator[Case]:
    """Chunks of a long evaluation, ready features of prompts, and control maps."""
    identity = {"model": "m"}
    store = ChunkStore(folder / "chunks", identity, 6, 3)
    for i in range(2):
        store.save(i, {"feature.pool": torch.randn(3, 8), "keys": torch.arange(3)})

    def chunks() -> Any:
        again = ChunkStore(folder / "chunks", identity, 6, 3)
        done, missing = again.shares(0, 1, lambda x: x)
        if missing:
            raise UserError(f"chunk {missing} is made again")
        return [again.load(i) for i in done]

    for path in sorted((folder / "chunks").iterdir()):
        yield Case(path, chunks)
    prompts = folder / "prompts.safetensors"
    tensors.write(prompts, {"text": torch.randn(2, 6, 8), "mask": torch.ones(2, 6)})
    condition = Text(tokens=6, channels=8)
    yield Case(prompts, lambda: read_features(prompts, condition, ["a", "b"]).batch(torch.device("cpu")))
    control = folder / "map.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)).save(control)
    yield Case(control, lambda: np.array(read_image(control)))


def synthetic() -> Any:
    config = plugin_config("visgen.data", "synthetic", n=40, n_held_out=40, image_size=16, classes=3)
    return build(config, "held_out")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
