"""Rows of images and their features: chosen, dealt out, matched by class."""

from __future__ import annotations

import dataclasses
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import visgen
from visgen import evaluate as ev
from visgen.config import UserError, build, plugin_config
from visgen.data import codes
from visgen.data.synthetic import Config, Synthetic
from visgen.evaluate import World
from visgen.images import Images
from visgen.metrics.features import build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.sampling import SamplingConfig
from visgen.scored_data import build_pictures

DATA = Synthetic(Config(image_size=16, classes=3, n_held_out=23), "held_out")
ALL = DATA.get_many(range(23))["pixels"][:, 0]


@pytest.mark.parametrize(("size", "batch"), [(1, 4), (1, 100), (3, 2), (4, 5), (30, 2)])
def test_pictures_are_dealt_out_once(size: int, batch: int) -> None:
    chosen = [22, 0, 7, 7, 13, 1, 2, 3, 4, 5]
    seen: list[int] = []
    for rank in range(size):
        for pixels, index in ev.pictures(DATA, chosen, World(rank, size), batch):
            assert 1 <= len(index) <= batch and set((index % size).tolist()) == {rank}
            assert torch.equal(pixels, ALL[[chosen[i] for i in index]])
            seen += index.tolist()
    assert sorted(seen) == list(range(10))


def test_round_trip_is_the_tokenizers(checkpoint_dir: Path) -> None:
    tokenizer = visgen.load(str(checkpoint_dir), device="cpu").tokenizer
    chosen = [5, 3, 17]
    rows = list(ev.round_trip(tokenizer, ev.pictures(DATA, chosen, batch=2)))
    truth = ev.reconstruct(tokenizer, DATA.get_many(chosen)["pixels"])[1][:, 0]
    assert torch.allclose(torch.cat([p for p, _ in rows]), truth, atol=1e-5)
    assert torch.cat([i for _, i in rows]).tolist() == [0, 1, 2]


def test_codes_are_no_pictures_but_say_what_they_were_made_from(tmp_path: Path) -> None:
    config = plugin_config("visgen.data", "codes", root=tmp_path)

    def said() -> str:
        with pytest.raises(UserError) as found:
            build_pictures(config, "held_out")
        return str(found.value)

    assert said().startswith(f"data.kind codes ({tmp_path}) gives tokens, pictures are needed: pass --data.kind")
    assert "(one of captions, emoji, fashion_mnist, folder, " in said() and "codes," not in said()
    (tmp_path / "held_out").mkdir()
    index = codes.make_index(DATA, tokenizer="", grid=[1, 4, 4], vocab=8, views="center", ranges=[], shard_images=9)
    codes.write_index(tmp_path / "held_out", index)
    assert said().endswith("that the codes were made from (synthetic)")
    assert len(build_pictures(DATA.config, "held_out")) == 23


def test_collect_orders_features_by_index() -> None:
    extractor = build_extractor("fd_debug")
    order = torch.randperm(23)
    told: list[tuple[int, int]] = []
    rows = ((ALL[part], part) for part in order.split(5))
    features, audit = ev.collect(rows, 23, extractor, on_step=lambda *at: told.append(at))
    assert torch.equal(features, extractor(ALL)["pool"]) and told == [(n, 23) for n in (5, 10, 15, 20, 23)]
    assert audit.checks()["images"] == 23
    with pytest.raises(UserError, match="did not come exactly once"):
        ev.collect(((ALL[part], part) for part in order[1:].split(5)), 23, extractor)


def test_a_reference_of_chosen_pictures() -> None:
    extractor = build_extractor("fd_debug")
    whole, part = ev.reference(DATA, extractor), ev.reference(DATA, extractor, chosen=[4, 2, 9])
    assert torch.equal(part.features, whole.features[[4, 2, 9]]) and part.n == 3
    assert part.hash != whole.hash and part.hash != ev.reference(DATA, extractor, chosen=[2, 4, 9]).hash
    assert part.name == whole.name == "synthetic/held_out" and ev.reference(DATA, extractor, n=9).n == 9


def folder(root: Path, seed: int, count: int = 20) -> None:
    for i in range(count):
        path = root / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = torch.randint(256, (16, 16, 3), generator=torch.Generator().manual_seed(seed + i), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(path)


def tar(path: Path, seed: int) -> None:
    folder(path.parent / f"images_{seed}", seed)
    with tarfile.open(path, "w") as file:
        for image in sorted((path.parent / f"images_{seed}").rglob("*.png")):
            file.add(image, image.name)
            label = path.parent / "label.cls"
            label.write_text("0")
            file.add(label, f"{image.stem}.cls")


@pytest.mark.parametrize("kind", ["folder", "captions", "webdataset", "fashion_mnist"])
def test_a_reference_cache_is_of_the_images_that_it_was_made_from(tmp_path: Path, kind: str) -> None:
    cache, extractor, root = tmp_path / "cache.safetensors", build_extractor("fd_debug"), tmp_path / "data"
    root.mkdir()

    def fill(seed: int) -> Any:
        if kind == "webdataset":
            tar(root / "0.tar", seed)
            return {"shards": str(root / "0.tar")}
        if kind == "fashion_mnist":
            pixels = np.random.default_rng(seed).integers(0, 256, (20, 28, 28), np.uint8)
            for part in ("train", "t10k"):
                for name, array in (("images-idx3", pixels), ("labels-idx1", np.arange(20, dtype=np.uint8) % 10)):
                    header = (0x800 + array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes()
                    (root / f"{part}-{name}-ubyte").write_bytes(header + array.tobytes())
            return {"root": root}
        folder(root, seed)
        lines = [json.dumps({"image": str(p.relative_to(root)), "text": "x"}) for p in sorted(root.rglob("*.png"))]
        (root / "lines.jsonl").write_text("\n".join(lines))
        return {"root": root} if kind == "folder" else {"file": root / "lines.jsonl", "features": None}

    def made() -> ev.Reference:
        size = {} if kind == "fashion_mnist" else {"image_size": 16, "held_out_fraction": 0.5}
        data = build(plugin_config("visgen.data", kind, **values, **size), "held_out")
        return ev.reference(data, extractor, cache=cache)

    values = fill(0)
    first = made()
    assert torch.equal(made().features, first.features) and made().hash == first.hash
    fill(1)
    with pytest.raises(UserError, match=r"cache\.safetensors holds images .*, this run needs .*delete the file"):
        made()
    cache.unlink()
    assert made().hash != first.hash


def test_a_damaged_reference_cache_is_one_line(tmp_path: Path) -> None:
    cache, extractor = tmp_path / "cache.safetensors", build_extractor("fd_debug")
    ev.reference(DATA, extractor, cache=cache)
    whole = cache.read_bytes()
    for place in (3, 20, 200, len(whole) // 2, len(whole) - 1):
        cache.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"cache\.safetensors.*delete the file or pass another --reference-cache"):
            ev.reference(DATA, extractor, cache=cache)


def test_matched_takes_each_once_and_the_first_ones() -> None:
    labels, wanted = torch.tensor([2, 0, 1, 0, 2, 0, 1]), torch.tensor([0, 2, 0, 1])
    assert ev.matched(labels, wanted).tolist() == [1, 0, 3, 2]


def test_choose_follows_the_plan_or_names_the_class() -> None:
    plan = SamplePlan(21, 3, seed=4)
    chosen = ev.choose(DATA, plan)
    assert torch.equal(DATA.labels[chosen], plan.rows().label) and len(set(chosen)) == 21
    with pytest.raises(UserError, match=r"class triangle of the held_out split has 7 images, .*lower --n to 21"):
        ev.choose(DATA, SamplePlan(24, 3))


def test_labels_where_the_source_does_not_list_them() -> None:
    bare = Synthetic(Config(image_size=16, classes=3, n_held_out=23), "held_out")
    expected = bare.labels
    del bare.labels
    assert torch.equal(ev.labels_of(bare), expected)


def test_generated_takes_the_labels_that_the_plan_balances() -> None:
    class Echo:
        def refills(self, sampler: object) -> bool:
            return False

        def sample(self, labels: list[int], seeds: list[int], *settings: object) -> Images:
            pixels = torch.tensor(labels, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 2, 2)
            return Images(pixels, torch.tensor(seeds), labels, seeds, 0, 0.0, torch.ones(len(seeds), 1))

    plan, settings = SamplePlan(12, 4, seed=1), SamplingConfig()
    settings = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, batch=5))

    def drawn(labels: Tensor | None) -> list[int]:
        rows = list(ev.generated(Echo(), plan, settings, labels=labels))  # type: ignore[arg-type]
        assert torch.cat([index for _, index in rows]).tolist() == list(range(12))
        return torch.cat([pixels for pixels, _ in rows])[:, 0, 0, 0].tolist()

    assert drawn(None) == plan.rows().label.tolist()
    table = torch.tensor([7, 7, 9, 5])
    assert drawn(table) == table[plan.rows().label].tolist() and sorted(drawn(table)) == [5] * 3 + [7] * 6 + [9] * 3


def test_a_round_trip_that_is_not_finite_is_refused(checkpoint_dir: Path) -> None:
    tokenizer = visgen.load(str(checkpoint_dir), device="cpu").tokenizer
    next(tokenizer.decoder.parameters()).data.fill_(float("nan"))
    rows = ev.round_trip(tokenizer, ev.pictures(DATA, [5, 3], batch=2))
    with pytest.raises(UserError, match="pixels of the tokenizer's round trip of image 0 are not finite"):
        list(rows)


def test_everything_that_is_too_small_is_named_at_once() -> None:
    extractor = build_extractor("fd_debug")
    with pytest.raises(UserError) as found:
        ev.check_size(SamplePlan(8, 3), 70, extractor, 16, False, "clips")
    said = str(found.value)
    assert "n = 8 clips" in said and "--allow-small" in said and "pass --groups 8 or less" in said
    assert "small.py" not in said, "which scores images"
    ev.check_size(SamplePlan(8, 3), 70, extractor, 8, True, "clips")
    with pytest.raises(UserError, match=r"eval/small\.py"):
        ev.check_size(SamplePlan(8, 3), 70, extractor, 8, False)
