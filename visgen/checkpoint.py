"""Weight files, of run directories (`run_files.py`) and others.

A weight file is safetensors whose metadata say how to build the module again:
`{"format": "visgen/2", "config": JSON of {"package": ..., "kind": ..., fields}, "crc32": ...}` (`tensors.py`). A file
of format visgen/1 has no checksum of its own; in a step, its `meta.json` has it. Nothing is unpickled here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen import files, tensors
from visgen.config import REPOSITORY, UserError
from visgen.model import Model, ModelConfig
from visgen.run_files import META, TOKENIZER, WEIGHTS, find_step, is_step, older_steps, read_meta
from visgen.tokenizers import Tokenizer

FORMATS = ("visgen/1", files.FORMAT)
MODEL = "visgen.model"
MOST_TOKENS = 1 << 20  # of a grid: a model makes tables of its places, which no file holds
PACKAGES = (MODEL, "visgen.tokenizers", "visgen.quantizers")  # of which there are weight files

# ------------------------------------------------------------------------------------------------ weight files


def save_module(
    path: Path | str,
    module: nn.Module,
    config: Any,
    dtype: torch.dtype | None = None,
    extra_metadata: Mapping[str, Any] | None = None,
    part: str = "",
) -> None:
    """Write `module`'s state and `config` to one safetensors file; see `tensors.write`.

    Args:
        config: the `Config` of a plugin file, or a `ModelConfig`.
        dtype: of the floating-point parameters, None leaves them; buffers keep theirs.
        extra_metadata: more entries of the file's metadata, as text.
        part: write this sub-module's tensors alone; `extra_metadata` then name the `base` that has the others
            (`weights_hash`) and the `base_path` where it lay.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    kept = {}
    for name, tensor in module.state_dict().items():
        if not name.startswith(f"{part}." if part else ""):
            continue
        cast = dtype if name in parameters and tensor.is_floating_point() else None
        kept[name] = tensor.detach().to("cpu", cast, copy=True)
    metadata = {"config": json.dumps(describe(config), sort_keys=True)}
    metadata |= {k: str(v) for k, v in (extra_metadata or {}).items()} | ({"part": part} if part else {})
    tensors.write(Path(path), kept, metadata)


def load_module(path: Path | str, package: str | None = None, expect: Mapping[str, Any] | None = None) -> nn.Module:
    """The module in a weight file, in eval mode on the CPU; parameters are float32 whatever the file's precision.

    Args:
        package: what it must be, `visgen.tokenizers` or `visgen.model`; None takes anything.
        expect: attributes it must have, e.g. `{"image_size": (256, 256), "vocab": 1024}`.

    Raises:
        UserError: a missing or truncated file, another kind, other values, or weights that do not fit the config.
    """
    path = Path(path)
    config, metadata = _described(path)
    if "part" in metadata:
        raise UserError(
            f"{path} holds the {metadata['part']} of a model alone; pass its run directory to load it whole"
        )
    if package is not None and config["package"] != package:
        raise UserError(
            f"{path} holds {_name(config['package'])} ({_label(config)}), {_name(package)} is needed; "
            f"pass the run directory of {_name(package)}"
        )
    found = tensors.load(path, _remedy(path))
    module = _build(config, path, found)
    for name, value in (expect or {}).items():
        mine = getattr(module, name, None)
        if _plain(mine) != _plain(value):
            raise UserError(f"{path}: its {name} is {_plain(mine)}, {_plain(value)} is needed; pass one that has it")
    module.load_state_dict(found)
    return module.eval()


def read_metadata(path: Path | str) -> dict[str, str]:
    """Return the metadata of a weight file; its weights are not read.

    Raises:
        UserError: a missing or damaged file, or an entry that is not what its name says.
    """
    path = Path(path)
    _require(path)
    metadata = tensors.read_header(path, _remedy(path)).metadata
    if metadata.get("format") in FORMATS:
        classes_of(metadata, path)
        if not metadata.get("step", "0").isdecimal():
            raise _edited(path, f"its step is '{metadata['step']}', not a number")
        if "part" in metadata and not metadata.get("base"):
            raise _edited(path, f"it holds the part '{metadata['part']}' and names no base")
    return metadata


def classes_of(metadata: Mapping[str, str], path: Path) -> list[str]:
    """Return the class names in the metadata of the weight file `path`; [] where there are none.

    Raises:
        UserError: the entry is no list of names.
    """
    try:
        classes = json.loads(metadata.get("classes", "[]"))
    except (ValueError, RecursionError):
        classes = None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise _edited(path, f"its classes are {metadata['classes'][:60]!r}, not a list of names")
    return classes


def verify(path: Path) -> None:
    """Compare a weight file with its checksum: its own, or the one that the `meta.json` beside it records.

    Raises:
        UserError: the file is missing, truncated or changed.
    """
    _require(path)
    header = tensors.verify(path, _remedy(path))
    if not header.crc32 and (path.parent / META).is_file():
        wanted = read_meta(path.parent).get("crc32", {}).get(path.name)
        if wanted is not None and files.crc32(path) != wanted:
            raise UserError(f"{path} is damaged (checksum: not that of {META}); {_remedy(path)}")


def load_tokenizer(path: Path | str, **expect: Any) -> Tokenizer:
    """The tokenizer in a weight file, of a run (its newest step, or the one kept beside a model) or of one step.

    Raises:
        UserError: see `load_module`; `expect` are attributes it must have, as `image_size=(256, 256)`.
    """
    path = Path(path)
    beside = [path / TOKENIZER, path.parent / TOKENIZER] if is_step(path) else [path / TOKENIZER]
    kept = next((p for p in beside if path.is_dir() and p.is_file()), None)
    return load_module(kept or _weights(path), "visgen.tokenizers", expect)  # type: ignore[return-value]


def load_model(path: Path | str, base: Path | str | None = None, **expect: Any) -> Model:
    """The generative model in a weight file, of a run (its newest step) or of one step. Raises as `load_module`.

    Args:
        base: of a file that holds a part of a model alone, such as its control: the run or step that has the rest;
            default: where it lay when the part was trained, or a run of that name beside the part's.
    """
    return _load_model(Path(path), base, expect)


def _load_model(path: Path, base: Path | str | None, expect: dict[str, Any], over: tuple[Path, ...] = ()) -> Model:
    weights = _weights(path)
    facts = read_metadata(weights)
    if "part" in facts:
        return _joined(weights, base, over)
    if base is not None:
        raise UserError(f"{weights} is a whole model, which has no base; leave --base out")
    model: Model = load_module(weights, MODEL, expect)  # type: ignore[assignment]
    model.teacher = facts.get("teacher", "")
    return model


def base_of(weights: Path, given: Path | str | None = None, over: tuple[Path, ...] = ()) -> tuple[Path, Model]:
    """Where the rest of a model lies of which `weights` holds a part, and that model; see `load_model`.

    Args:
        over: files of parts that rest on this one, which cannot be its base.

    Raises:
        UserError: it is not found, or what is there is another model.
    """
    facts = read_metadata(weights)
    recorded = Path(facts.get("base_path", ""))
    run = weights.parent.parent if is_step(weights.parent) else weights.parent
    places = [run.parent / recorded.name, recorded, REPOSITORY / recorded] if given is None else [Path(given)]
    wanted, others, over = facts.get("base", ""), [], (*over, weights.resolve())
    for place in dict.fromkeys(places):
        if given is None and not place.exists():
            continue
        if _weights(place).resolve() in over:
            others.append(f"{place} is this part itself")
            continue
        model = _load_model(place, None, {}, over)
        found = weights_hash(model)
        if found == wanted:
            return place, model
        others.append(f"{place} is {found[:12]}")
    what = f"; {', '.join(others)}" if others else f"; it is not at {' or '.join(map(str, dict.fromkeys(places)))}"
    raise UserError(
        f"{weights} holds {facts['part']} alone, over the weights of {recorded} ({wanted[:12]}){what}: pass that run "
        "as --base"
    )


def _joined(weights: Path, base: Path | str | None, over: tuple[Path, ...]) -> Model:
    """Return the model of a file that holds a part of it; the other tensors are its base's."""
    config, _ = _described(weights)
    part = tensors.load(weights, _remedy(weights))
    _, rest = base_of(weights, base, over)
    joined = rest.state_dict() | part
    model: Model = _build(config, weights, joined)  # type: ignore[assignment]
    model.load_state_dict(joined)
    return model.eval()


def weights_hash(model: Model) -> str:
    """sha256 of what a model without control computes with: the config's own choices, dropout apart, and every tensor
    (floats as float32). Equal for the file and the trained weights that it rounded, if they were read from it."""
    described = {
        k: v
        for k, v in configs.flat(_choices(model.config)).items()
        if "drop" not in k and not k.startswith("control.")
    }
    return _digest(described, {k: v for k, v in model.state_dict().items() if not k.startswith("control.")})


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """sha256 of the config's own choices and of every tensor (name, shape, bytes; floats as float32) of the parts that
    tokens depend on: equal hash, equal tokens of equal meaning. A decoder that was trained further alone keeps the
    hash, and so does a tokenizer whose Config gained a field since, at its default."""
    parts = tokenizer.code_parts
    kept = {k: v for k, v in tokenizer.state_dict().items() if not parts or k.partition(".")[0] in parts}
    return _digest(_choices(tokenizer.config), kept)


def _digest(described: dict[str, Any], kept: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for name, tensor in sorted(kept.items()):
        tensor = tensor.detach().cpu().contiguous()
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _choices(config: Any) -> dict[str, Any]:
    """The kind of a plugin's config and the fields that differ from their defaults."""
    default = type(config)()
    chosen: dict[str, Any] = {"kind": configs.kind_of(config)}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(default, field.name):
            chosen[field.name] = _choices(value) if dataclasses.is_dataclass(value) else value
    return chosen


def describe(config: Any) -> dict[str, Any]:
    """A config as plain values from which `load_module` builds the module again."""
    if isinstance(config, ModelConfig):
        return {"package": MODEL, **configs.dump(config)}
    package = type(config).__module__.rpartition(".")[0]
    return {"package": package, "kind": configs.kind_of(config), **configs.dump(config)}


def _build(config: dict[str, Any], path: Path, found: Mapping[str, Tensor]) -> nn.Module:
    """Build the module of a config, once it is known that the tensors `found` fit.

    Raises:
        UserError: the config cannot be used, or its sizes are not those of the tensors.
    """
    try:
        with torch.device("meta"):  # without memory: a config may declare any size
            plan = _make(config)
    except Exception as error:  # a config that was edited makes constructors raise anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{path}: its config cannot be used here: {reason}") from None
    _audit(path, plan, found)
    return _make(config)


def _make(config: dict[str, Any]) -> nn.Module:
    values = {k: v for k, v in config.items() if k not in ("package", "kind")}
    package = config["package"]
    if package == MODEL:
        return Model(configs.load(ModelConfig, values=values))
    kind = type(configs.plugin_config(package, config["kind"]))
    return configs.build(configs.load(kind, values=values))


def _described(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the config and the metadata of a weight file, whose bytes are compared with their checksum.

    Raises:
        UserError: a missing or damaged file, or one without a config of ours.
    """
    verify(path)
    metadata = read_metadata(path)
    if metadata.get("format") not in FORMATS or "config" not in metadata:
        raise UserError(
            f"{path} was not written by visgen (its format is {metadata.get('format')!r}, not {files.FORMAT!r}); "
            "convert it with `python -m visgen.convert`"
        )
    try:
        config = json.loads(metadata["config"])
        package, kind = config["package"], config.get("kind")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _edited(path, f"its config is {metadata['config'][:60]!r}, not an object that names a package") from None
    if package not in PACKAGES:
        raise _edited(path, f"its config cannot be used here: package {package!r} is not part of visgen")
    grid = config.get("grid")
    if package == MODEL and isinstance(grid, list) and _product(grid) > MOST_TOKENS:
        raise _edited(path, f"its grid is {grid}; at most {MOST_TOKENS:,} tokens are possible")
    if package != MODEL and not isinstance(kind, str):
        raise _edited(path, f"its config names the kind {kind!r}")
    return config, metadata


def _product(values: list[Any]) -> float:
    """Return the product of the numbers among `values`."""
    return math.prod(value for value in values if isinstance(value, int | float))


def _require(path: Path) -> None:
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist; pass a run directory, one of its steps or a .safetensors")


def _remedy(path: Path) -> str:
    older = older_steps(path.parent)
    return "copy it again" + (f" or use the earlier {older[-1].name}" if older else "")


def _edited(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: {reason}; copy it again")


def _audit(path: Path, module: nn.Module, given: Mapping[str, Tensor]) -> None:
    """Raises `UserError` that lists missing, unexpected and misshapen tensors."""
    wanted = module.state_dict()
    shapes = [
        f"{n} {list(given[n].shape)} for {list(wanted[n].shape)}"
        for n in wanted
        if n in given and given[n].shape != wanted[n].shape
    ]
    found = {
        "missing": [n for n in wanted if n not in given],
        "unexpected": [n for n in given if n not in wanted],
        "of another shape": shapes,
    }
    faults = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in found.items()
        if names
    ]
    if faults:
        raise UserError(
            f"{path}: its tensors do not fit its config: {'; '.join(faults)}; it was edited, or written by "
            "another version of the code"
        )


def _name(package: str) -> str:
    noun = "model" if package == MODEL else package.rpartition(".")[2].removesuffix("s")
    return f"a{'n' if noun[0] in 'aeiou' else ''} {noun}"


def _label(config: dict[str, Any]) -> str:
    backbone = config.get("backbone")
    return config.get("kind") or (backbone.get("kind", "?") if isinstance(backbone, dict) else "?")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _weights(path: Path) -> Path:
    return path if path.is_file() or path.suffix == ".safetensors" else find_step(path) / WEIGHTS
