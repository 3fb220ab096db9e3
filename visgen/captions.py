"""Captions -> cached text features, which `data.kind captions` reads.

    python -m visgen.captions --files captions.jsonl --out data_cache/captions --condition.encoder google/flan-t5-xl

Each caption goes through a frozen T5 once, without padding, as a prompt does when an image is drawn (`prompts.py`). It
can be killed at any time: shards are written whole, and the same command goes on with the captions that have no
features yet, be they new ones. Under `accelerate launch` the processes share them out.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState

from visgen.checks import Positive
from visgen.conditions.text import Config as Condition
from visgen.config import UserError, load, run_program
from visgen.data import captions as store
from visgen.launch import Progress, on_cpu, writable
from visgen.prompts import TextConfig, TextEncoder


@dataclass(frozen=True)
class Config:
    """Writes the features of captions.

    Attributes:
        files: files of JSON lines, see `data/captions.py`.
        out: folder of the features.
        condition: encoder, cleaning, length and width, as `objective.model.condition` of the model has them.
        batch: captions of equal length encoded at once.
        shard: captions per file.
        cpu: do not use a GPU.
    """

    files: tuple[Path, ...] = ()
    out: Path = Path("data_cache/captions")
    condition: Condition = dataclasses.field(default_factory=Condition)
    batch: Positive = 64
    shard: Positive = 2048
    cpu: bool = False


def main(argv: Sequence[str]) -> None:
    config = load(Config, argv, prog="python -m visgen.captions")
    if not config.files:
        raise UserError("files is not set; pass --files with one or more files of JSON lines")
    texts = dict.fromkeys(text for path in config.files for line in store.read_lines(path) for text in line.texts)
    out, state = writable(config.out, "out"), PartialState(cpu=on_cpu(config.cpu))
    made, cut = encode(list(texts), out, config, state)
    if state.is_main_process:
        shorter = f", {cut} of the new ones cut to {config.condition.tokens} tokens" if cut else ""
        print(f"{out}: {len(store.Features(out))} captions have features, {made} of them new{shorter}")


def encode(captions: Sequence[str], folder: Path, config: Config, state: PartialState) -> tuple[int, int]:
    """Writes the features that `folder` lacks; (how many, how many of this process's were cut).

    Raises:
        UserError: the folder's features are of another encoder, or some are not finite.
    """
    asked = config.condition
    encoder = TextEncoder(asked, TextConfig(), state.device)
    index = store.Index(encoder.name, encoder.clean, asked.tokens, asked.channels)
    _agree(folder, index)
    state.wait_for_everyone()  # all have compared their settings
    if state.is_main_process:
        store.write_index(folder, index)
    state.wait_for_everyone()
    known = {key.tobytes() for key in store.Features(folder).keys}
    missing = [text for text in captions if store.key_of(text) not in known]
    parts = [missing[k : k + config.shard] for k in range(0, len(missing), config.shard)]
    first, cut, done = max(store.shard_numbers(folder), default=-1) + 1, 0, 0
    state.wait_for_everyone()  # all have seen what is there
    mine = list(range(state.process_index, len(parts), state.num_processes))
    with Progress("captions") as step:
        for number in mine:
            ids = [encoder.ids(text, any_text=True) for text in parts[number]]
            cut += sum(long for _, long in ids)
            found = encoder.features([row for row, _ in ids], config.batch)
            halves = [row.half() for row in found]
            bad = [text for text, row in zip(parts[number], halves, strict=True) if not torch.isfinite(row).all()]
            if bad:
                raise UserError(f"text encoder '{encoder.name}' gives values for '{bad[0]}' that float16 cannot hold")
            store.write_shard(folder, first + number, parts[number], (row.numpy() for row in halves))
            done += len(ids)
            step(done, sum(len(parts[i]) for i in mine))
    state.wait_for_everyone()
    return len(missing), cut


def _agree(folder: Path, wanted: store.Index) -> None:
    """Refuses a folder of features of other settings."""
    if not (folder / "index.json").is_file():
        return
    old, new = dataclasses.asdict(store.read_index(folder)), dataclasses.asdict(wanted)
    for name in old:
        if old[name] != new[name]:
            raise UserError(
                f"the features in {folder} were made with {name} {old[name]}, now it is {new[name]}; choose another "
                "--out, or delete the folder"
            )


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
