"""From a run directory, one of its steps or a Hub id to a `Generator`: what `visgen.load` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visgen import config as configs
from visgen.checkpoint import base_of, classes_of, load_model, load_tokenizer, read_metadata, tokenizer_hash
from visgen.config import UserError
from visgen.files import crc32
from visgen.generate import Generator
from visgen.run_files import TOKENIZER, WEIGHTS, Step, find_step
from visgen.sampling import EngineConfig


def load(
    source: str | Path,
    step: Step = None,
    engine: EngineConfig | None = None,
    base: str | Path | None = None,
    **options: Any,
) -> Generator:
    """Loads a run directory, one of its steps, or a Hugging Face Hub id ("owner/name").

    Args:
        source: directory with `step_*/model.safetensors` and `tokenizer.safetensors`, or a Hub id of such a tree.
        step: which step, or "best" (of `loop.keep_best`); default the newest.
        engine: device, precision, batch; or its fields as keywords (`device="cpu"`).
        base: of a control over frozen weights, the run or step that has them; default: where they were in training, or
            a run of that name beside this one.

    Raises:
        UserError: nothing there, damaged files, or files that do not belong together.
    """
    directory = Path(source)
    if not directory.exists():
        directory = _from_hub(str(source))
    found = find_step(directory, step)
    model = load_model(found, base)
    info = read_metadata(found / WEIGHTS)
    run = found if (found / TOKENIZER).is_file() else found.parent
    if "part" in info and not (run / TOKENIZER).is_file():
        run = base_of(found / WEIGHTS, base)[0]
    if not (run / TOKENIZER).is_file():
        raise UserError(f"{run}: {TOKENIZER} is missing; copy the tokenizer of that training run beside the steps")
    tokenizer = load_tokenizer(run / TOKENIZER)
    model.check_tokenizer(tokenizer, str(run / TOKENIZER))
    wanted, given = info.get("tokenizer"), tokenizer_hash(tokenizer)
    if wanted and wanted != given:  # files from before this entry have none
        raise UserError(
            f"{run / TOKENIZER} ({given[:12]}) is not the tokenizer that {found} was trained on ({wanted[:12]}), "
            "so its images would be noise; copy that one here, as it lies beside the training run"
        )
    _check_config(run / "config.yaml")
    meta: dict[str, Any] = {"step": int(info.get("step", 0)), "params": sum(p.numel() for p in model.parameters())}
    meta |= {"model_crc32": _crc32(found / WEIGHTS), "tokenizer_crc32": _crc32(run / TOKENIZER)}
    meta |= {"tokenizer": given[:12]} | ({"base": info["base"][:12]} if "base" in info else {})
    classes = classes_of(info, found / WEIGHTS)
    return Generator(model, tokenizer, engine or EngineConfig(**options), classes, meta)


def _crc32(path: Path) -> str:
    """Return the checksum of a weight file: the one that it carries, or that of its bytes."""
    return read_metadata(path).get("crc32") or f"{crc32(path):08x}"


def _check_config(path: Path) -> None:
    """Refuses a damaged config of a training run: sampling does not need it, but its damage is not to be hidden."""
    if not path.is_file():
        return
    remedy = "copy it again, or remove it, for sampling does not need it"
    try:
        values = configs.read_yaml(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    if not values:
        raise UserError(f"config {path} is empty; {remedy}")


def _from_hub(name: str) -> Path:
    parts = name.split("/")
    if len(parts) != 2 or name.startswith((".", "/", "~")) or not all(parts):
        raise UserError(f"checkpoint '{name}' is neither a directory nor a Hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(name))
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # not found, no such name, offline
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"checkpoint '{name}' is no local directory, and the Hub did not give it: {reason}") from None
