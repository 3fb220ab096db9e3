"""Run directories and weight files.

A run directory holds `config.yaml`, `step_0000100/{model.safetensors, state/, meta.json}` and, where its model needs
one, `tokenizer.safetensors`. A weight file is safetensors whose metadata say how to build the module again:
`{"format": "visgen/1", "config": JSON of {"package": ..., "kind": ..., fields}}`. Nothing is unpickled here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
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
from visgen.tokenizers import Tokenizer

FORMAT = "visgen/1"
WEIGHTS, TOKENIZER, META = "model.safetensors", "tokenizer.safetensors", "meta.json"
MODEL = "visgen.model"
Step = int | str | None  # which step of a run; "best": of its held-out metric; None: the newest

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
    beside = [path / TOKENIZER, path.parent / TOKENIZER] if _is_step(path) else [path / TOKENIZER]
    kept = next((p for p in beside if path.is_dir() and p.is_file()), None)
    return load_module(kept or _weights(path), "visgen.tokenizers", expect)  # type: ignore[return-value]


def load_model(path: Path | str, base: Path | str | None = None, **expect: Any) -> Model:
    """The generative model in a weight file, of a run (its newest step) or of one step. Raises as `load_module`.

    Args:
        base: of a file that holds a part of a model alone, such as its control: the run or step that has the rest;
            default: where it lay when the part was trained, or a run of that name beside the part's.
    """
    weights = _weights(Path(path))
    if "part" in read_metadata(weights):
        return _joined(weights, base)
    if base is not None:
        raise UserError(f"{weights} is a whole model, which has no base; leave --base out")
    return load_module(weights, MODEL, expect)  # type: ignore[return-value]


def base_of(weights: Path, given: Path | str | None = None) -> tuple[Path, Model]:
    """Where the rest of a model lies of which `weights` holds a part, and that model; see `load_model`.

    Raises:
        UserError: it is not found, or what is there is another model.
    """
    facts = read_metadata(weights)
    recorded = Path(facts.get("base_path", ""))
    run = weights.parent.parent if _is_step(weights.parent) else weights.parent
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


# --------------------------------------------------------------------------------------------- run directories


def step_name(step: int) -> str:
    """Directory of the state after `step` steps."""
    return f"step_{step:07d}"


def find_steps(run: Path | str) -> list[Path]:
    """Complete step directories of a run, oldest first."""
    found = [p for p in Path(run).glob("step_*") if _is_step(p) and (p / META).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def older_steps(step: Path) -> list[Path]:
    """Complete step directories of the same run that come before the directory `step`, oldest first."""
    steps = find_steps(step.parent)
    return steps[: steps.index(step)] if step in steps else []


def find_step(path: Path | str, step: Step = None) -> Path:
    """The directory of step `step` (None: the newest) of a run; a directory that holds weights is its own answer.

    Raises:
        UserError: no such directory, none complete inside, not this step, no best one, or a damaged `meta.json`.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"checkpoint {path} {what}; pass a run directory or one of its steps")
    if (path / WEIGHTS).is_file():
        if step is not None:
            raise UserError(f"{path} is a step itself; pass its run directory, or leave --step out")
        if (path / META).is_file():
            read_meta(path)
        return path
    steps = {int(p.name.removeprefix("step_")): p for p in path.glob("step_*") if _is_step(p) and _is_filled(p)}
    if not steps:
        if _is_step(path):
            raise UserError(f"{path / WEIGHTS} is missing; copy the step again")
        if (path / "config.yaml").is_file():
            raise UserError(f"{path} is the directory of a run that has saved no step yet; train it first")
        raise UserError(f"{path} holds no complete checkpoint ({step_name(0)[:5]}*/{META}); pass the run directory")
    if step == "best":
        best = read_best(steps[max(steps)])
        if best is None:
            raise UserError(f"{path} knows no best step: it was trained without loop.keep_best; leave --step out")
        step = best["step"]
    if step is not None and step not in steps:
        raise UserError(
            f"{path} holds no step {step}; it holds {', '.join(map(str, sorted(steps)))}: choose one of them, 'best' "
            "(of a run with loop.keep_best), or none for the newest"
        )
    found = steps[max(steps) if step is None else int(step)]
    read_meta(found)
    return found


def read_meta(step: Path) -> dict[str, Any]:
    """What the `meta.json` of a step says.

    Raises:
        UserError: it is missing, or it is no JSON object.
    """
    path = step / META
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing, so {step.name} may be half a copy; copy it again, or pass the directory {step} itself"
        ) from None
    except (ValueError, OSError) as error:
        raise _damaged(step, error) from None
    return found


def read_best(step: Path) -> dict[str, Any] | None:
    """What the metadata of a step say of the best step so far: metric, value, step, since. None: nothing.

    Raises:
        UserError: as `read_meta`.
    """
    best = read_meta(step).get("best")
    if best is not None and not (isinstance(best, dict) and isinstance(best.get("step"), int)):
        raise _damaged(step, f"its 'best' is {best!r}, which names no step")
    return best


def _damaged(step: Path, reason: Exception | str) -> UserError:
    older = older_steps(step)
    hint = f" or use the earlier {older[-1].name}" if older else ""
    return UserError(f"{step / META} is damaged ({reason}); copy the step again{hint}")


def unfinished(final: Path) -> Path:
    """Where a directory is written before `publish` gives it its name."""
    return final.with_name(f".{final.name}.tmp")


def publish(final: Path) -> None:
    """Names a complete directory in one rename: a kill leaves none under the final name, or a whole one, and so does a
    power cut, since its files are on the disk before."""
    temporary = unfinished(final)
    for path in (*temporary.rglob("*"), temporary):
        _flush(path)
    if final.exists():
        _remove(final)
    os.replace(temporary, final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    """Waits until a file or a directory is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def set_aside(step: Path) -> None:
    """Renames a damaged step, so that it counts no more as one of its run."""
    name = step.with_name(f"damaged_{step.name}")
    shutil.rmtree(name, ignore_errors=True)  # of an earlier time
    os.replace(step, name)


def keep_last(run: Path, keep: int, best: int = 0) -> None:
    """Removes all but the newest `keep` steps of a run and step `best`; 0 keeps all."""
    for path in find_steps(run)[:-keep] if keep else []:
        if path.name != step_name(best):
            _remove(path)


def clean(run: Path) -> None:
    """Removes what a killed process left under temporary names."""
    for path in Path(run).glob(".step_*"):
        shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Takes the name away first, so that no half-removed directory bears it."""
    hidden = path.with_name(f".{path.name}.old")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def _is_step(path: Path) -> bool:
    return re.fullmatch(r"step_\d+", path.name) is not None


def _is_filled(step: Path) -> bool:
    return (step / META).is_file() or (step / WEIGHTS).is_file()


def _weights(path: Path) -> Path:
    return path if path.is_file() or path.suffix == ".safetensors" else find_step(path) / WEIGHTS
