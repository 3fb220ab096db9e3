"""Weight files, of run directories (`run_files.py`) and others.

A weight file is safetensors whose metadata say how to build the module again:
`{"format": "visgen/1", "config": JSON of {"package": ..., "kind": ..., fields}}`. Nothing is unpickled here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from visgen import config as configs
from visgen.config import REPOSITORY, UserError
from visgen.model import Model, ModelConfig
from visgen.run_files import TOKENIZER, WEIGHTS, find_step, is_step, older_steps
from visgen.tokenizers import Tokenizer

FORMAT = "visgen/1"
MODEL = "visgen.model"

# ------------------------------------------------------------------------------------------------ weight files


def save_module(
    path: Path | str,
    module: nn.Module,
    config: Any,
    dtype: torch.dtype | None = None,
    extra_metadata: Mapping[str, Any] | None = None,
    part: str = "",
) -> None:
    """Writes `module`'s state and `config` to one safetensors file, first under a temporary name.

    Args:
        config: the `Config` of a plugin file, or a `ModelConfig`.
        dtype: of the floating-point parameters, None leaves them; buffers keep theirs.
        extra_metadata: more entries of the file's metadata, as text.
        part: write this sub-module's tensors alone; `extra_metadata` then name the `base` that has the others
            (`weights_hash`) and the `base_path` where it lay.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    tensors = {}
    for name, tensor in module.state_dict().items():
        if not name.startswith(f"{part}." if part else ""):
            continue
        cast = dtype if name in parameters and tensor.is_floating_point() else None
        tensors[name] = tensor.detach().to("cpu", cast, copy=True).contiguous()
    metadata = {"format": FORMAT, "config": json.dumps(describe(config), sort_keys=True)}
    metadata |= {k: str(v) for k, v in (extra_metadata or {}).items()} | ({"part": part} if part else {})
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    save_file(tensors, temporary, metadata)
    _sort_metadata(temporary)
    temporary.chmod(0o644)  # safetensors makes it private
    os.replace(temporary, path)


def load_module(path: Path | str, package: str | None = None, expect: Mapping[str, Any] | None = None) -> nn.Module:
    """The module in a weight file, in eval mode on the CPU; parameters are float32 whatever the file's precision.

    Args:
        package: what it must be, `visgen.tokenizers` or `visgen.model`; None takes anything.
        expect: attributes it must have, e.g. `{"image_size": (256, 256), "vocab": 1024}`.

    Raises:
        UserError: a missing or truncated file, another kind, other values, or weights that do not fit the config.
    """
    path = Path(path)
    tensors, metadata = _read(path)
    config = _described(metadata, path)
    if "part" in metadata:
        raise UserError(
            f"{path} holds the {metadata['part']} of a model alone; pass its run directory to load it whole"
        )
    if package is not None and config["package"] != package:
        raise UserError(
            f"{path} holds {_name(config['package'])} ({_label(config)}), {_name(package)} is needed; "
            f"pass the run directory of {_name(package)}"
        )
    module = _build(config, path)
    for name, value in (expect or {}).items():
        found = getattr(module, name, None)
        if _plain(found) != _plain(value):
            raise UserError(f"{path}: its {name} is {_plain(found)}, {_plain(value)} is needed; pass one that has it")
    _audit(path, module, tensors)
    module.load_state_dict(tensors)
    return module.eval()


def read_metadata(path: Path | str) -> dict[str, str]:
    """The metadata of a weight file, its weights unread."""
    return _open(Path(path)).metadata() or {}


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
    weights = _weights(Path(path))
    facts = read_metadata(weights)
    if "part" in facts:
        return _joined(weights, base)
    if base is not None:
        raise UserError(f"{weights} is a whole model, which has no base; leave --base out")
    model: Model = load_module(weights, MODEL, expect)  # type: ignore[assignment]
    model.teacher = facts.get("teacher", "")
    return model


def base_of(weights: Path, given: Path | str | None = None) -> tuple[Path, Model]:
    """Where the rest of a model lies of which `weights` holds a part, and that model; see `load_model`.

    Raises:
        UserError: it is not found, or what is there is another model.
    """
    facts = read_metadata(weights)
    recorded = Path(facts.get("base_path", ""))
    run = weights.parent.parent if is_step(weights.parent) else weights.parent
    places = [run.parent / recorded.name, recorded, REPOSITORY / recorded] if given is None else [Path(given)]
    wanted, others = facts.get("base", ""), []
    for place in dict.fromkeys(places):
        if given is None and not place.exists():
            continue
        model = load_model(place)
        found = weights_hash(model)
        if found == wanted:
            return place, model
        others.append(f"{place} is {found[:12]}")
    what = f"; {', '.join(others)}" if others else f"; it is not at {' or '.join(map(str, dict.fromkeys(places)))}"
    raise UserError(
        f"{weights} holds {facts['part']} alone, over the weights of {recorded} ({wanted[:12]}){what}: pass that run "
        "as --base"
    )


def _joined(weights: Path, base: Path | str | None) -> Model:
    """The model of a file that holds a part of it, the other tensors being its base's."""
    tensors, metadata = _read(weights)
    _, rest = base_of(weights, base)
    model: Model = _build(_described(metadata, weights), weights)  # type: ignore[assignment]
    joined = rest.state_dict() | tensors
    _audit(weights, model, joined)
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


def _digest(described: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for name, tensor in sorted(tensors.items()):
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


def _build(config: dict[str, Any], path: Path) -> nn.Module:
    values = {k: v for k, v in config.items() if k not in ("package", "kind")}
    package = config["package"]
    try:
        if package == MODEL:
            return Model(configs.load(ModelConfig, values=values))
        if not re.fullmatch(r"visgen(\.\w+)+", package):
            raise UserError(f"package '{package}' is not part of visgen")
        kind = type(configs.plugin_config(package, config["kind"]))
        return configs.build(configs.load(kind, values=values))
    except (UserError, ImportError) as error:
        raise UserError(f"{path}: its config cannot be used here: {error}") from None


def _sort_metadata(path: Path) -> None:
    """safetensors writes the metadata in an order of chance; sorted, equal contents are equal files."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "a JSON header changed its length by sorting"
        file.seek(8)
        file.write(text.ljust(length))


def _open(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"checkpoint {path} does not exist; pass a run directory, one of its steps or a .safetensors")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        older = older_steps(path.parent)
        raise UserError(
            f"{path} is truncated or not a safetensors file ({error}); copy it again"
            + (f" or use the earlier {older[-1].name}" if older else "")
        ) from None


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with _open(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _described(metadata: dict[str, str], path: Path) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise UserError(
            f"{path} was not written by visgen (its format is {metadata.get('format')!r}, not {FORMAT!r}); "
            "convert it with `python -m visgen.convert`"
        )
    return json.loads(metadata["config"])


def _audit(path: Path, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Raises `UserError` that lists missing, unexpected and misshapen tensors."""
    wanted = module.state_dict()
    shapes = [
        f"{n} {list(tensors[n].shape)} for {list(wanted[n].shape)}"
        for n in wanted
        if n in tensors and tensors[n].shape != wanted[n].shape
    ]
    found = {
        "missing": [n for n in wanted if n not in tensors],
        "unexpected": [n for n in tensors if n not in wanted],
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
    return config.get("kind") or config.get("backbone", {}).get("kind", "?")


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _weights(path: Path) -> Path:
    return path if path.is_file() or path.suffix == ".safetensors" else find_step(path) / WEIGHTS
