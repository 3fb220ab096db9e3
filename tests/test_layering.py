"""Import direction: a module imports only from layers below its own, and plugin files never import each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = (
    "__version__ checks installed interrupts / program yaml_files parser files image_files / tensors arrays / "
    "config layout / "
    "nn data metrics launch run_files / quantizers conditions heads / "
    "tokenizers controls decode / backbones / model / samplers / objectives / "
    "checkpoint prompts hints sampling images / conditioned / generate / "
    "loading known pictures captions scored_data / encode convert prepare sample evaluate speed exactness mutants / "
    "small_set clip_score maps trajectories vectors enumeration lossless speed_blocks scale tally / "
    "control_set rollout sweep / "
    "sweep_report / train / programs"
)
RANK = {name: rank for rank, layer in enumerate(LAYERS.split(" / ")) for name in layer.split()}
ONLY = {
    "data": {"checks", "config", "files", "image_files", "arrays"},
    "metrics": {"config", "files", "image_files", "tensors"},
}  # stricter than their layer
PLUGINS = "quantizers tokenizers conditions controls heads backbones samplers objectives data"
LAZY = {  # imports inside a function that may point upwards, each with its reason
    (
        "objectives/next_token.py",
        "checkpoint",
    ): "setup reads the tokenizer's file, which building the nets does not need",
    (
        "objectives/vq.py",
        "checkpoint",
    ): "setup reads the tokenizer to start from, which building the nets does not need",
    ("objectives/_tokens.py", "checkpoint"): "setup reads the tokenizer's file, which building the nets does not need",
    ("objectives/_tokens.py", "encode"): "setup decodes a few cached tokens back with the program's own check",
    ("objectives/_distilled.py", "checkpoint"): "setup reads the stage before, which building the nets does not need",
    ("samplers/_teacher.py", "checkpoint"): "a teacher is read where a student is trained or helped, which few are",
    ("samplers/_draft.py", "checkpoint"): "init reads the draft model, which no other sampler needs",
}


def imports(source: str) -> Iterator[tuple[list[str], bool]]:
    """(parts of an imported visgen module after `visgen`, inside a function?)"""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, lazy) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((f"{node.module}.{alias.name}", lazy) for alias in node.names)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    yield from (
        (name.split(".")[1:], lazy) for name, lazy in visit(ast.parse(source), False) if name.startswith("visgen.")
    )


def violations(path: str, source: str) -> list[str]:
    """Forbidden imports of a file; `path` is relative to visgen/, or `programs` for what stands outside it."""
    home, _, rest = path.removesuffix(".py").partition("/")
    if home not in RANK:
        return [f"{path}: '{home}' has no layer; add it to LAYERS in tests/test_layering.py"]
    out = []
    for (target, *inner), lazy in imports(source):
        if target == home:
            sibling = inner[0] if inner and (ROOT / "visgen" / home / f"{inner[0]}.py").exists() else "_"
            if home in PLUGINS.split() and not sibling.startswith("_") and rest not in (sibling, "__init__"):
                out.append(f"{path} imports its sibling {sibling}; what they share moves down to nn/ or to a _file")
        else:
            below = RANK.get(target, RANK["train"]) < RANK[home] and target in ONLY.get(home, {target})
            if not below and not (lazy and (path, target) in LAZY):
                out.append(f"{path} imports visgen.{target}, which is not below {home}")
    return out


FILES = sorted((ROOT / "visgen").rglob("*.py"))
PROGRAMS = [ROOT / "train.py", ROOT / "sample.py", *sorted((ROOT / "eval").glob("*.py"))]


@pytest.mark.parametrize("file", FILES[1:], ids=lambda f: str(f.relative_to(ROOT)))  # [0]: visgen/__init__.py, the door
def test_visgen_imports_downwards(file: Path) -> None:
    assert not violations(str(file.relative_to(ROOT / "visgen")), file.read_text())


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda f: str(f.relative_to(ROOT)))
def test_programs_import_visgen_alone_and_are_imported_by_nobody(file: Path) -> None:
    assert not violations("programs", file.read_text())
    other = [p.stem for p in PROGRAMS] + ["eval", "tests"]
    names = [n for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Import) for n in node.names]
    modules = [n.name for n in names] + [
        node.module or "" for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    assert not [m for m in modules if m.split(".")[0] in other]


def test_the_door_imports_nothing_before_it_is_used() -> None:
    tree = ast.parse(FILES[0].read_text())
    assert not [n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("visgen")]


def test_every_lazy_exception_is_used() -> None:
    for path, target in LAZY:
        assert [target] in [t[:1] for t, lazy in imports((ROOT / "visgen" / path).read_text()) if lazy], (path, target)


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("nn/mlp.py", "from visgen.backbones import ar", 1),
        ("nn/mlp.py", "from visgen import config, model", 1),
        ("nn/mlp.py", "import visgen.model as m", 1),
        ("nn/mlp.py", "def f():\n    from visgen.checkpoint import load", 1),
        ("nn/mlp.py", "class A:\n    def f(self):\n        import visgen.train.loop", 1),
        ("nn/mlp.py", "import torch\nfrom visgen.layout import Layout\nfrom visgen.nn.norm import RMSNorm", 0),
        ("data/folder.py", "from visgen.layout import Layout", 1),
        ("data/folder.py", "from visgen.data.fashion_mnist import read_idx", 1),
        ("data/folder.py", "from visgen.data import fashion_mnist", 1),
        ("data/folder.py", "from visgen.data import Data, _images\nfrom visgen.data._source import ImageData", 0),
        ("heads/categorical.py", "from visgen.conditions import Prefix", 1),
        ("objectives/next_token.py", "from visgen.checkpoint import load_tokenizer", 1),
        ("objectives/next_token.py", "def f():\n    from visgen.checkpoint import load_tokenizer", 0),
        ("objectives/next_token.py", "def f():\n    from visgen.train.loop import fit", 1),
        ("samplers/ar.py", "from visgen import load", 1),
        ("unheard/of.py", "", 1),
        ("programs", "from visgen.train.main import main\nfrom visgen import load", 0),
    ],
)
def test_the_check_sees_planted_violations(path: str, source: str, found: int) -> None:
    assert len(violations(path, source)) == found
