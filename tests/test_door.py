"""What a user meets first: how OpenMP's threads wait, how programs name themselves, and what imports take."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from sample_program import refused

import visgen
from visgen import installed, sample
from visgen.config import UserError, load
from visgen.train import main as training

ROOT = Path(__file__).parents[1]
PROGRAMS = [ROOT / "train.py", ROOT / "sample.py", *sorted((ROOT / "eval").glob("*.py"))]
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize("chosen", [None, *WAITING])
def test_threads_soon_sleep_unless_the_user_says_otherwise(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards, also where it is not set now
        monkeypatch.delenv(name)
    if chosen:
        monkeypatch.setenv(chosen, "mine")
    importlib.reload(visgen)
    found = {name: os.environ[name] for name in WAITING if name in os.environ}
    assert found == ({chosen: "mine"} if chosen else {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_every_program_imports_visgen_before_torch(program: Path) -> None:
    """OpenMP reads its settings when torch loads."""
    nodes = [n for n in ast.parse(program.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
    foreign = [name.split(".")[0] for name in names if name.split(".")[0] not in sys.stdlib_module_names]
    assert "visgen" in foreign and "torch" not in foreign[: foreign.index("visgen")]


@pytest.fixture
def from_a_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `visgen-sample`, far from any clone."""
    monkeypatch.setattr(installed, "REPOSITORY", tmp_path)


def test_beside_a_wheel_no_message_names_what_a_clone_holds(
    from_a_wheel: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/visgen-train"])
    said = [refused(capsys), refused(capsys, "gone.yaml")]
    with pytest.raises(UserError) as caught:
        training.train([])
    assert "visgen-train needs a config" in str(caught.value)
    for message in (*said, str(caught.value)):
        assert not [word for word in ("assets", "configs/", "train.py", "sample.py") if word in message]


@pytest.mark.parametrize(
    ("called", "name"), [("/usr/bin/visgen-sample", "visgen-sample"), ("x/sample.py", "sample.py")]
)
def test_help_names_the_command_that_was_called(
    called: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [called])
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    assert capsys.readouterr().out.startswith(f"usage: {name} ")


def test_an_editable_install_is_a_path() -> None:
    """A path wins over a clone, called visgen, that lies in the current folder; a finder does not."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert settings["package-dir"] == {"": "."}


def test_every_program_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load(sample.SampleConfig, ["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"visgen {visgen.__version__}\n")


def test_sampling_waits_for_no_import_that_it_does_not_need() -> None:
    """Each of these takes a second or more; torchvision brings the compiler."""
    code = (
        "import sys, torch, visgen.sample, visgen.images\n"
        "visgen.images.grid(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), 2)\n"
        "print(*sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    slow = {"torchvision", "diffusers", "timm", "wandb", "scipy", "transformers", "accelerate", "torch._dynamo"}
    assert not slow & set(done.stdout.split())
