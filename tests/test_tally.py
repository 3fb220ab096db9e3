"""References in files, the programs that make and use them, and the ADM suite's own numbers where its files are."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from programs import program

from visgen.config import UserError, run_program
from visgen.evaluate import World
from visgen.metrics.features import INCEPTION, FeatureExtractor, Spec, build_extractor
from visgen.metrics.report import Report
from visgen.tally import Bundle, Tally, load_bundle, make_bundle, require_reference

PARITY = os.environ.get("VISGEN_PARITY_DIR", "")
ADM = {  # admnet_guided_upsampled_imagenet256.npz by the ADM suite's own evaluator, and what a torch port may differ
    "inception_score": (215.84, 0.5),
    "fid": (3.9426, 0.01),
    "sfid": (6.1404, 0.01),
    "precision": (0.8265, 0.003),
    "recall": (0.5309, 0.004),
}


class Small(torch.nn.Module):
    """uint8 images to features of the names that Inception has."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.weights = torch.nn.Parameter(torch.randn(48, 30, generator=g))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = torch.nn.functional.adaptive_avg_pool2d(x.float() / 255, 4).flatten(1) @ self.weights
        return {"pool": y[:, :8].tanh(), "spatial": y[:, 8:14], "logits": y[:, 14:]}


def small_extractor(name: str = "adm-tf1") -> FeatureExtractor:
    return FeatureExtractor(
        Spec(name, {"pool": 8, "spatial": 6, "logits": 16}, Small(), lambda x: x, "none", "w"), "cpu", 7
    )


def images(n: int, seed: int = 0, size: int = 8) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(n, 3, size, size, generator=g) ** (1 + seed) * 255).to(torch.uint8)


def rows(x: torch.Tensor, batch: int = 9, rank: int = 0, world: int = 1) -> Any:
    for i, index in enumerate(torch.arange(len(x)).split(batch)):
        if i % world == rank:
            yield x[index], index


def npz(path: Path, x: torch.Tensor, **more: np.ndarray) -> Path:
    np.savez(path, arr_0=x.permute(0, 2, 3, 1).contiguous().numpy(), **more)
    return path


def test_a_reference_survives_its_file_and_says_what_it_is(tmp_path: Path) -> None:
    extractor = small_extractor()
    made = make_bundle("set", rows(images(90)), 90, extractor, World(), {"crop": "adm", "size": "8x8"}, kept=40)
    made.save(tmp_path / "r.safetensors")
    read = load_bundle(tmp_path / "r.safetensors", extractor, World())
    assert read.hash == made.hash and read.pool.n == 90 and read.facts["crop"] == "adm" and len(read.features) == 40
    x = extractor(images(90))
    assert torch.allclose(read.pool.mean, x["pool"].double().mean(0)), "of all images"
    assert torch.allclose(read.spatial.cov, torch.cov(x["spatial"].double().T), atol=1e-12)
    require_reference(read, (8, 8), "adm")
    for given, message in (((16, 16), "is of 8x8 px, the images are 16x16"), ((8, 8), "was cropped by 'adm'")):
        with pytest.raises(UserError, match=message):
            require_reference(read, given, "centre")
    with pytest.raises(UserError, match=r"is of extractor adm-tf1 .* this run has clean"):
        load_bundle(tmp_path / "r.safetensors", small_extractor("clean"), World())
    (tmp_path / "r.safetensors").write_bytes((tmp_path / "r.safetensors").read_bytes()[:-9])
    with pytest.raises(UserError, match="is truncated"):
        load_bundle(tmp_path / "r.safetensors", extractor, World())


def test_an_adm_file_gives_its_moments_and_its_images(tmp_path: Path) -> None:
    extractor = small_extractor()
    moments = {"mu": np.ones(8), "sigma": 2 * np.eye(8), "mu_s": np.zeros(6), "sigma_s": np.eye(6)}
    path = npz(tmp_path / "virtual.npz", images(30), **moments)
    found = load_bundle(path, extractor, World())
    assert torch.equal(found.pool.mean, torch.ones(8, dtype=torch.float64)) and found.pool.n == 0, (
        "exact, not recomputed"
    )
    assert torch.equal(found.features, extractor(images(30))["pool"]) and found.spatial.dim == 6
    with pytest.raises(UserError, match="go with --extractor adm-tf1, not clean"):
        load_bundle(path, small_extractor("clean"), World())
    np.savez(tmp_path / "bare.npz", mu=np.ones(8), sigma=np.eye(8))
    bare = load_bundle(tmp_path / "bare.npz", extractor, World())
    scores = tally(extractor, bare, images(40, 1))
    assert set(scores) == {"fid", "inception_score"}, "no spatial moments, no images"


def tally(extractor: FeatureExtractor, ref: Bundle, x: torch.Tensor, world: int = 1) -> dict[str, Any]:
    parts = [Tally(extractor, ref, len(x), 5, World(r, world)) for r in range(world)]
    for rank, part in enumerate(parts):
        for pixels, index in rows(x, 6, rank, world):
            part.update(extractor(pixels), index)
    return parts[0].scores()


def test_all_scores_of_the_suite(tmp_path: Path) -> None:
    extractor = small_extractor()
    ref = make_bundle("set", rows(images(90)), 90, extractor, World(), {})
    scores = tally(extractor, ref, images(80, 1))
    assert set(scores) == {"fid", "sfid", "inception_score", "kid", "precision", "recall"}
    assert scores["fid"].se > 0 and scores["precision"].se >= 0 and scores["precision"].n_ref == 90
    assert scores["fid"].value > 10 * abs(tally(extractor, ref, images(90))["fid"].value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_all_scores_on_a_gpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        extractor = small_extractor()
        if device == "cuda":
            extractor.device, extractor.network = torch.device(device), extractor.network.to(device)
        ref = make_bundle("set", rows(images(90)), 90, extractor, World(), {})
        found.append(tally(extractor, ref, images(80, 1)))
    for name, score in found[0].items():
        assert found[1][name].value == pytest.approx(score.value, rel=1e-4), name


def test_nan_features_and_small_sets_are_refused() -> None:
    extractor = small_extractor()
    ref = make_bundle("set", rows(images(90)), 90, extractor, World(), {})
    with pytest.raises(UserError, match="n = 8 images is not above the 8 feature dimensions of adm-tf1"):
        Tally(extractor, ref, 8, 2, World())
    outputs = extractor(images(20))
    outputs["pool"][3, 2] = torch.nan
    with pytest.raises(UserError, match="features of image 3 are not finite; look at that image"):
        Tally(extractor, ref, 20, 2, World()).update(outputs, torch.arange(20))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """Runs a program; the line with which it refuses, or nothing."""

    def go(name: str, *flags: Any) -> str:
        out = [] if "--out" in flags else ["--out", str(tmp_path / "by_default")]
        monkeypatch.setattr(sys, "argv", [name, *map(str, flags), *out])
        try:
            run_program(program(name).main)
        except SystemExit:
            return capsys.readouterr().err.splitlines()[-1]
        return ""

    return go


def test_folder_against_folder_and_against_a_file_of_it(run: Callable[..., str], tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 0)):
        (tmp_path / name).mkdir()
        for i, image in enumerate(images(70, seed, 16)):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / name / f"{i:03d}.png")
    net = ("--extractor", "fd_debug", "--device", "cpu")
    kept = tmp_path / "b.safetensors"
    assert run("reference", "--images", tmp_path / "b", *net, "--out", kept) == ""
    found = {}
    for ref in ("b", "b.safetensors"):
        flags = ("--images", tmp_path / "a", "--reference", tmp_path / ref, *net, "--groups", "5", "--n", "70")
        assert run("files", *flags, "--out", tmp_path / "out") == ""
        found[ref] = json.loads((tmp_path / "out/report.json").read_text())
    assert found["b"]["metrics"]["fd"] == found["b.safetensors"]["metrics"]["fd"]
    assert found["b"]["protocol"]["hash"] == found["b.safetensors"]["protocol"]["hash"]
    assert {"fd", "kid", "precision", "recall"} == set(found["b"]["metrics"])
    assert found["b.safetensors"]["sampling"]["reference"]["git_sha"]
    Report.load(tmp_path / "out")
    flags = ("--images", tmp_path / "a", "--reference", tmp_path / "b", *net)
    assert "holds 70 images, --n says 50000" in run("files", *flags, "--n", 50000)
    assert "--images and --reference are needed" in run("files", *net)
    npz(tmp_path / "big.npz", images(70, 0, 8))
    assert run("reference", "--images", tmp_path / "big.npz", *net, "--out", tmp_path / "c.safetensors") == ""
    npz(tmp_path / "x.npz", images(70, 0, 16))
    flags = ("--images", tmp_path / "x.npz", "--reference", tmp_path / "c.safetensors", *net)
    assert "is of 8x8 px, the images are 16x16" in run("files", *flags)


def test_a_reference_of_a_data_set(run: Callable[..., str], tmp_path: Path) -> None:
    data = ["--data.kind", "synthetic", "--data.image-size", "16", "--data.n", "70", "--data.n-held-out", "66"]
    out = tmp_path / "r.safetensors"
    assert run("reference", *data, "--extractor", "fd_debug", "--device", "cpu", "--out", out) == ""
    read = load_bundle(out, build_extractor("fd_debug"), World())
    assert (read.name, read.pool.n, read.facts["crop"], read.facts["size"]) == ("synthetic/train", 70, "adm", "16x16")
    assert "one of --data.kind (a data set) and --images" in run("reference", "--out", out)
    assert "must end in .safetensors" in run("reference", *data, "--out", tmp_path / "r.npz")


def test_clean_fid_through_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small TorchScript net in the place of Inception: our features and distance are clean-fid's."""
    from cleanfid import fid
    from cleanfid.inception_torchscript import InceptionV3W

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.randn(12, 2048, generator=torch.Generator().manual_seed(0)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.adaptive_avg_pool2d(x, 2).flatten(1).matmul(self.weights)

    class Base(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Layers()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    path = tmp_path / "inception-2015-12-05.pt"
    torch.jit.script(Base()).save(str(path))
    folder = tmp_path / "images"
    folder.mkdir()
    for i, image in enumerate(images(9, 0, 24)):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i}.png")
    net = InceptionV3W(str(tmp_path), download=False)
    options = {"num_workers": 0, "device": torch.device("cpu"), "verbose": False}
    theirs = fid.get_folder_features(str(folder), model=net, **options)
    extractor = build_extractor("clean-fid", weights=path)
    ours = extractor(images(9, 0, 24))["pool"].numpy()
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    from visgen.metrics.frechet import frechet_from_features

    x, y = (np.random.default_rng(s).normal(size=(60, 5)) + s for s in (0, 1))
    root = fid.linalg.sqrtm  # which clean-fid calls with `disp`, unknown to scipy >= 1.18
    monkeypatch.setattr(fid.linalg, "sqrtm", lambda matrix, disp: (root(matrix), None))
    wanted = fid.fid_from_feats(x, y)
    assert frechet_from_features(*(torch.from_numpy(v) for v in (x, y)))["distance"] == pytest.approx(wanted, rel=1e-6)


def test_clean_fid_names_the_file_it_needs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"inception-2015-12-05\.pt .* not found"):
        build_extractor("clean-fid", weights=tmp_path / "none.pt")
    (tmp_path / "other.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"must be called inception-2015-12-05\.pt"):
        build_extractor("clean-fid", weights=tmp_path / "other.pt")


def test_the_adm_suites_published_numbers(run: Callable[..., str], tmp_path: Path) -> None:
    """The suite's own samples give the suite's own numbers. Needs its files, which cannot be shipped."""
    folder = Path(PARITY)
    needed = [INCEPTION.file, "VIRTUAL_imagenet256_labeled.npz", "admnet_guided_upsampled_imagenet256.npz"]
    lacking = [name for name in needed if not PARITY or not (folder / name).is_file()]
    if lacking:
        pytest.skip(f"VISGEN_PARITY_DIR={PARITY or '(not set)'} lacks {', '.join(lacking)}: parity with ADM not tested")
    weights, ref, samples = (folder / name for name in needed)
    flags = ("--images", samples, "--reference", ref, "--weights", weights, "--n", 50_000, "--out", tmp_path)
    assert run("files", *flags) == ""
    found = Report.load(tmp_path).scores
    for name, (value, within) in ADM.items():
        assert abs(found[name].value - value) <= within, (name, found[name].value)
