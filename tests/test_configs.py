"""Every YAML under configs/ is a claim: its header names a command, and that program loads it."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from visgen.config import UserError, build, kind_of, load
from visgen.model import Model
from visgen.objectives.acdit import Config as ACDiTConfig
from visgen.objectives.masked import Config as MaskedConfig
from visgen.objectives.next_token import Config as NextTokenConfig
from visgen.objectives.vq import Config as VQConfig
from visgen.sample import SampleConfig
from visgen.train.main import TrainConfig
from visgen.train.rehearsal import parameters, rehearse

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*.yaml"))
ACCELERATE = [c for c in CONFIGS if c.startswith("configs/accelerate/")]
CLAIMS = [c for c in CONFIGS if c not in ACCELERATE]
HOME = {"sample": "sample.py", "eval": "eval/"}  # the program of a folder; train.py of all others

PUBLISHED = {  # parameters of the papers' models, millions of `model` unless exact
    "ar_b": 110.9,
    "ar_l": 342.9,
    "ar_xl": 774.7,
    "ar_xxl": 1411.0,
    "ar_3b": 3096.7,
    "acdit_b": 130.31,
    "acdit_l": 457.85,
    "acdit_xl": 674.86,
    "acdit_h": 950.96,
    "mar_b": 207.92,
    "mar_l": 478.33,
    "mar_h": 942.40,
    "vq16": 71_883_403,
    "vq8": 70_109_835,
}


def header(text: str) -> str:
    """The comment lines that a file begins with."""
    lines = text.splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(lines[:count])


def program_of(path: str, text: str) -> str:
    """The program that the header starts with this file: `train.py`, `eval/fid.py`, `visgen.encode`, ..."""
    program = r"(?:-m (visgen[\w.]+)|([\w/]+\.py))"
    command = rf"(?:^|[\s`])(?:python|accelerate launch)\s(?:.*\s)?{program}\s+{re.escape(path)}(?:\s|`|$)"
    found = re.search(command, header(text), re.MULTILINE)
    assert found, f"the first lines of {path} must hold its command, such as `# python train.py {path}`"
    return found[1] or found[2]


@functools.cache  # programs are no modules: loaded again, their classes are others
def config_class(program: str) -> type:
    """The dataclass that a program fills."""
    known = {"train.py": TrainConfig, "sample.py": SampleConfig}
    if program in known:
        return known[program]
    if program.startswith("visgen."):
        module: Any = importlib.import_module(program)
    else:
        name = "program_" + Path(program).stem
        spec = importlib.util.spec_from_file_location(name, ROOT / program)
        assert spec and spec.loader
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # programs are no package
        spec.loader.exec_module(module)
    used = re.search(r"\bload\((\w+), ", Path(module.__file__).read_text())
    assert used, f"{program} loads no config"
    return getattr(module, used[1])


@functools.cache  # 0.3 s each
def claimed(path: str) -> Any:
    return load(config_class(program_of(path, (ROOT / path).read_text())), [str(ROOT / path)])


TRAINED = [c for c in CLAIMS if c.split("/")[1] not in HOME]


def test_there_are_configs() -> None:
    assert len(CLAIMS) >= 4 and ACCELERATE


@pytest.mark.parametrize("path", CLAIMS)
def test_the_program_of_the_header_loads_it(path: str) -> None:
    program = program_of(path, (ROOT / path).read_text())
    assert program.startswith(HOME.get(path.split("/")[1], "train.py"))
    assert (ROOT / program).is_file() or program.startswith("visgen.")
    assert type(claimed(path)) is config_class(program)


@pytest.mark.parametrize("path", TRAINED)
def test_its_nets_can_be_built(path: str) -> None:
    counts = parameters(rehearse(claimed(path).objective))
    assert counts and all(n > 0 for n in counts.values())
    wanted = PUBLISHED.get(Path(path).stem) if path.startswith("configs/imagenet256/") else None
    if isinstance(wanted, int):
        assert counts["tokenizer"] == wanted
    elif wanted is not None:
        assert round(counts["model"] / 1e6, len(str(wanted).partition(".")[2])) == wanted


@pytest.mark.parametrize("path", TRAINED)
def test_parameters_that_the_header_claims_are_true(path: str) -> None:
    said = re.search(r"([\d,]{5,}) parameters", header((ROOT / path).read_text()))
    if said:
        config = claimed(path)
        with torch.device("meta"):
            exported = build(config.objective).exported()
        assert sum(p.numel() for p in exported.parameters()) == int(said[1].replace(",", ""))


@pytest.mark.parametrize("path", TRAINED)
def test_a_generator_fits_the_tokenizer_that_another_config_trains(path: str) -> None:
    """`tokenizer: runs/X` is what configs/*/X.yaml leaves there."""
    objective = claimed(path).objective
    if not isinstance(objective, NextTokenConfig | ACDiTConfig | MaskedConfig) or objective.tokenizer is None:
        return
    makers = [c for c in TRAINED if Path(c).stem == objective.tokenizer.name and c != path]
    makers = [c for c in makers if isinstance(claimed(c).objective, VQConfig)]
    for maker in makers:
        with torch.device("meta"):
            tokenizer = build(claimed(maker).objective.tokenizer)
            Model(objective.model).check_tokenizer(tokenizer, maker)
        size = getattr(claimed(path).data, "image_size", None)
        assert size is None or (size, size) == tuple(tokenizer.image_size), maker


@pytest.mark.parametrize("path", ACCELERATE)
def test_accelerate_reads_it(path: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    text = (ROOT / path).read_text()
    assert f"accelerate launch --config_file {path} train.py" in header(text)
    config = load_config_from_file(str(ROOT / path))
    assert config.num_processes == yaml.safe_load(text)["num_processes"] >= 1
    assert config.mixed_precision in ("no", None), "the config of the run decides the precision"


# ------------------------------------------------------------------------------------------- the checks themselves


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("# python train.py configs/a/b.yaml\nx: 1", "train.py"),
        ("# About.\n# Command: python eval/fid.py configs/a/b.yaml --n 5\nx: 1", "eval/fid.py"),
        ("# accelerate launch --config_file configs/c.yaml train.py configs/a/b.yaml", "train.py"),
        ("# `python -m visgen.encode configs/a/b.yaml`", "visgen.encode"),
        ("x: 1\n# python train.py configs/a/b.yaml", None),
        ("# python train.py configs/a/other.yaml", None),
        ("# python train.py", None),
    ],
)
def test_the_command_is_found_in_the_header_alone(text: str, program: str | None) -> None:
    if program is None:
        with pytest.raises(AssertionError, match="must hold its command"):
            program_of("configs/a/b.yaml", text)
    else:
        assert program_of("configs/a/b.yaml", text) == program


def test_a_typo_in_a_claim_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"base: {ROOT / TRAINED[0]}\nlop: {{steps: 3}}\n")
    with pytest.raises(UserError, match="unknown key 'lop', did you mean 'loop"):
        load(TrainConfig, [str(tmp_path / "a.yaml")])
    assert kind_of(claimed(TRAINED[0]).objective)
