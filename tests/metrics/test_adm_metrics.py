"""Precision, recall, Inception Score and image files, each against an independent implementation or by counting."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visgen.config import UserError
from visgen.metrics.frechet import Moments, frechet_distance
from visgen.metrics.image_files import FolderImages, NpzImages, write_npz
from visgen.metrics.inception_score import InceptionScore
from visgen.metrics.prdc import precision_recall
from visgen.metrics.report import diagnose
from visgen.pictures import save_png


def normal(n: int, dim: int = 6, seed: int = 0, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) + shift


# ----------------------------------------------------------------------------------------- precision and recall


def test_precision_and_recall_equal_torch_fidelity() -> None:
    import torch_fidelity.metric_prc as prc

    x, y = normal(300, seed=1, shift=0.5).double(), normal(220, seed=2).double()
    theirs = prc.calculate_precision_recall_full(x, y, 3)
    ours = precision_recall(x, y)
    assert 0.2 < theirs[0] < 0.9 and [ours["precision"].value, ours["recall"].value] == pytest.approx(list(theirs))


def test_a_subset_is_precise_and_a_point_recalls_nothing() -> None:
    y = normal(200)
    assert precision_recall(y[:60], y)["precision"].value == 1
    assert precision_recall(y[:1].repeat(60, 1) + 1e-6 * normal(60), y)["recall"].value < 0.05


def test_their_error_is_the_true_spread_of_overlapping_sets() -> None:
    values: dict[str, list[float]] = {"precision": [], "recall": []}
    errors: dict[str, list[float]] = {"precision": [], "recall": []}
    for seed in range(60):
        got = precision_recall(normal(400, seed=2 * seed, shift=0.3), normal(400, seed=2 * seed + 1))
        for name, score in got.items():
            values[name].append(score.value)
            errors[name].append(score.se or 0.0)
    for name in values:
        ratio = np.mean(errors[name]) / np.std(values[name], ddof=1)
        assert 0.8 < ratio < 1.3, (name, ratio)


def test_precision_and_recall_refuse() -> None:
    bad = normal(50)
    bad[7] = math.nan
    with pytest.raises(UserError, match="generated features of image 7 are not finite"):
        precision_recall(bad, normal(50))
    with pytest.raises(UserError, match="more than k = 3 reference images, got 3"):
        precision_recall(normal(50), normal(3))
    assert precision_recall(normal(50), normal(5))["recall"].se is not None
    assert precision_recall(normal(50), normal(5))["precision"].se is None, "five points make no two manifolds"


# ----------------------------------------------------------------------------------------------- Inception Score


def test_inception_score_equals_torch_fidelity() -> None:
    import torch_fidelity.metric_isc as isc

    logits = 2 * normal(400, 30)
    theirs = isc.isc_features_to_metric(logits, splits=4, shuffle=False)
    sums = InceptionScore(30, 400, chunk=100)
    for index in torch.randperm(400).split(37):
        sums.update(logits[index], index)
    score = sums.score()
    assert score.value == pytest.approx(theirs["inception_score_mean"], rel=1e-10) and score.value > 2
    assert score.terms["sd"] == pytest.approx(theirs["inception_score_std"] * math.sqrt(4 / 3), rel=1e-10)
    assert score.terms["single"] == pytest.approx(
        isc.isc_features_to_metric(logits, splits=1, shuffle=False)["inception_score_mean"]
    )


def test_inception_score_of_a_sorted_file_is_too_low_and_processes_add_up() -> None:
    labels = torch.arange(10).repeat_interleave(20)
    logits = 8.0 * torch.nn.functional.one_hot(labels, 10)
    mixed = torch.randperm(200, generator=torch.Generator().manual_seed(0))

    def value(x: torch.Tensor, parts: int = 1) -> float:
        shares = [InceptionScore(10, 200, chunk=40) for _ in range(parts)]
        for i, index in enumerate(torch.arange(200).split(50)):
            shares[i % parts].update(x[index], index)
        for share in shares[1:]:
            for mine, theirs in zip(shares[0].sums(), share.sums(), strict=True):
                mine += theirs
        return shares[0].score().value

    assert value(logits) < 2.1 and value(logits[mixed]) > 7
    whole = InceptionScore(10, 200, chunk=40)
    whole.update(logits, torch.arange(200))
    assert "sorted by class?" in diagnose({"inception_score": whole.score()}, {})[0]
    assert value(logits[mixed], 3) == pytest.approx(value(logits[mixed]), rel=1e-12)
    with pytest.raises(UserError, match="0 of 200 images were scored"):
        InceptionScore(10, 200).score()


def test_frechet_distance_equals_torch_fidelity() -> None:
    import torch_fidelity.metric_fid as fid

    x, y = 3 * normal(500, 64, seed=1, shift=0.2) + 5, normal(400, 64, seed=2).abs() + 5
    theirs = fid.fid_statistics_to_metric(*(fid.fid_features_to_statistics(v) for v in (x, y)), verbose=False)
    moments = [Moments(64, len(v), 1) for v in (x, y)]
    for m, v in zip(moments, (x, y), strict=True):
        m.update(v, torch.arange(len(v)))
    ours = frechet_distance(*moments).value
    assert ours == pytest.approx(theirs["frechet_inception_distance"], rel=1e-6) and ours > 1


# --------------------------------------------------------------------------------------------------------- files


def pictures(n: int, size: tuple[int, int] = (8, 6)) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (n, 3, *size), generator=g, dtype=torch.uint8)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("world", [1, 3])
def test_an_npz_is_read_as_a_stream(tmp_path: Path, save, world: int) -> None:  # type: ignore[no-untyped-def]
    images = pictures(23)
    save(tmp_path / "a.npz", arr_0=images.permute(0, 2, 3, 1).contiguous().numpy(), mu=np.zeros(3))
    found = NpzImages(tmp_path / "a.npz")
    assert (found.n, found.size) == (23, (8, 6))
    parts = [part for rank in range(world) for part in found.rows(4, rank, world)]
    index = torch.cat([i for _, i in parts])
    assert sorted(index.tolist()) == list(range(23)) and torch.equal(torch.cat([p for p, _ in parts]), images[index])


def test_what_is_written_is_what_numpy_reads(tmp_path: Path) -> None:
    images, path = pictures(10), tmp_path / "samples.npz"
    write_npz(path, 10, (8, 6), images.split(4))
    with np.load(path) as arrays:
        assert arrays.files == ["arr_0"] and arrays["arr_0"].dtype == np.uint8
        assert np.array_equal(arrays["arr_0"], images.permute(0, 2, 3, 1).numpy())
    assert torch.equal(next(NpzImages(path).rows(10))[0], images)
    with pytest.raises(UserError, match="3 of 10 images were written"):
        write_npz(tmp_path / "short.npz", 10, (8, 6), [images[:3]])
    assert [p.name for p in tmp_path.iterdir()] == ["samples.npz"]
    with pytest.raises(UserError, match=r"images torch.float32 \[2, 3, 8, 6\] do not fit"):
        write_npz(tmp_path / "b.npz", 2, (8, 6), [images[:2].float()])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((5, 8, 6, 3), np.float32), "'arr_0' is float32 [5, 8, 6, 3]; expected uint8 [N, H, W, 3]"),
        (np.zeros((5, 3, 8, 6), np.uint8), "'arr_0' is uint8 [5, 3, 8, 6]; expected uint8 [N, H, W, 3]"),
        (np.zeros((5, 8, 3), np.uint8), "'arr_0' is uint8 [5, 8, 3]; "),
        (np.asfortranarray(np.zeros((5, 8, 6, 3), np.uint8)), "in Fortran order; expected"),
    ],
)
def test_an_npz_of_other_things_is_refused(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "a.npz", arr_0=array)
    with pytest.raises(UserError) as error:
        NpzImages(tmp_path / "a.npz")
    assert message in str(error.value)


def test_files_that_are_no_images_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", mu=np.zeros(3))
    (tmp_path / "b.npz").write_bytes(b"no zip")
    for name, message in (("a.npz", "holds mu, but no images under 'arr_0'"), ("b.npz", "no .npz"), ("c", "no file")):
        with pytest.raises(UserError, match=message):
            NpzImages(tmp_path / name)
    images = pictures(4)
    np.savez(tmp_path / "d.npz", arr_0=images.permute(0, 2, 3, 1).contiguous().numpy())
    cut = bytearray((tmp_path / "d.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "d.npz") as archive:
        start = archive.getinfo("arr_0.npy").header_offset + 200
    cut[start : start + 4] = bytes(255 - b for b in cut[start : start + 4])
    (tmp_path / "d.npz").write_bytes(bytes(cut))
    with pytest.raises(UserError, match="is damaged"):
        list(NpzImages(tmp_path / "d.npz").rows(4))


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    images = pictures(5)
    for i, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{i}.png")
    Image.new("RGB", (3, 3)).save(tmp_path / "9.png")
    found = FolderImages(tmp_path)
    parts = [*found.rows(2, 0, 2), *found.rows(2, 1, 2)]
    assert [i.tolist() for _, i in parts] == [[0, 2], [4], [1, 3], [5]]
    assert torch.equal(parts[0][0], images[[0, 2]]) and parts[-1][0].shape == (1, 3, 3, 3)
    Image.new("RGB", (3, 3)).save(tmp_path / "z.jpg")
    with pytest.raises(UserError, match=r"z\.jpg is lossy .\.jpg., which changes what is scored"):
        FolderImages(tmp_path)
    assert FolderImages(tmp_path, lossy=True).n == 7
    with pytest.raises(UserError, match="holds no image"):
        (tmp_path / "empty").mkdir()
        FolderImages(tmp_path / "empty")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(np.full((4, 4), 40_000, np.uint16)), "more than 8 bits a channel"),
        (Image.new("RGBA", (4, 4), (9, 9, 9, 128)), "is transparent in places"),
    ],
)
def test_files_of_no_one_meaning_are_refused(tmp_path: Path, image: Image.Image, message: str) -> None:
    Image.new("RGBA", (4, 4), (9, 9, 9, 255)).save(tmp_path / "a.png")
    assert next(FolderImages(tmp_path).rows(1))[0].unique().tolist() == [9]
    image.save(tmp_path / "b.png")
    with pytest.raises(UserError, match=message):
        list(FolderImages(tmp_path).rows(1))


def test_what_is_no_sample_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(2):
        save_png(Image.new("RGB", (4, 4)), tmp_path / f"0001_{seed:06d}.png", {"label": 1, "seed": seed})
    Image.new("RGB", (4, 4)).save(tmp_path / "other.png")
    save_png(Image.new("RGB", (9, 9)), tmp_path / "grid.png", {"labels": [1], "seeds": [0]})
    save_png(Image.new("RGB", (9, 9)), tmp_path / "renamed.png", {"labels": [1], "seeds": [0]})
    Image.new("RGB", (9, 9)).save(tmp_path / "control_cat-0123abcd.png")
    for folder in (".thumbs", "__MACOSX"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (9, 9)).save(tmp_path / folder / "0.png")
    (tmp_path / "far").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "far" / "0.png")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "far")
    os.mkfifo(tmp_path / "set" / "pipe.png")
    found = FolderImages(tmp_path)
    assert [str(p.relative_to(tmp_path)) for p in found.files] == [
        *("0001_000000.png", "0001_000001.png", "far/0.png", "other.png", "set/linked/0.png"),
    ]
    assert len(list(found.rows(5))) == 1
    assert "3 left out, grids and control maps of sample.py (control_cat-0123abcd.png, ...)" in caplog.text
    assert "1 left out, pipes or devices, no regular files (set/pipe.png)" in caplog.text


@pytest.mark.parametrize("name", ["x.jfif", "x.gif", "x.avif"])
def test_other_lossy_files_are_not_left_out_silently(tmp_path: Path, name: str) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    Image.new("RGB", (16, 16)).save(tmp_path / name, "JPEG")
    with pytest.raises(UserError, match=f"{name} is lossy"):
        FolderImages(tmp_path)


def test_a_bad_picture_ends_a_scoring_with_one_line(tmp_path: Path) -> None:
    data = Path(__file__).parents[1] / "data"
    for name in ("damaged.avif", "odd_exif.jpg"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    found = FolderImages(tmp_path, lossy=True)
    assert found._read(1).shape == (3, 40, 24)  # turned
    with pytest.raises(UserError, match=r"damaged\.avif cannot be read .*; convert it to PNG or JPEG, or delete it"):
        found._read(0)
