"""What is known of a long evaluation so far, on disk: one file a chunk of the plan, so that a kill costs one chunk.

    FOLDER/manifest.json         what is evaluated (a hash by name) and how it is cut up
    FOLDER/chunk_00003.safetensors    features, image hashes and more of one contiguous range of indices, in their order

A file is written beside its place and moved there when it is complete. Chunks belong to nobody: those that are missing
are dealt out anew to however many processes there are. A chunk carries its own checksum and the hash of what it is of:
one that a full or failing disk has damaged is made again, and so is one of another evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from visgen import tensors
from visgen.config import UserError
from visgen.files import read_json, write_json
from visgen.metrics.images import AllReduce

MANIFEST = "manifest.json"


class ChunkStore:
    """The chunks of one evaluation.

    Args:
        folder: where they lie.
        identity: what they depend on, by name; another value of any refuses to go on.
        n: images in all.
        size: images of a chunk.

    Raises:
        UserError: the folder holds chunks of something else; the message names what differs.
    """

    def __init__(self, folder: Path, identity: Mapping[str, str], n: int, size: int, rank: int = 0) -> None:
        self.folder, self.n, self.size, self.rank = folder, n, size, rank
        self.wanted = {**{k: str(v) for k, v in identity.items()}, "n": str(n), "chunk": str(size)}
        self.hash = hashlib.sha256(json.dumps(self.wanted, sort_keys=True).encode()).hexdigest()[:16]
        self._told = False  # whether the manifest is known to be there
        path = folder / MANIFEST
        if path.is_file() and any(folder.glob("chunk_*.safetensors")):
            held = read_json(path, f"delete {folder} to begin anew")
            for name in sorted({*held, *self.wanted}):
                if held.get(name) != self.wanted.get(name):
                    there, here = difference(held.get(name), self.wanted.get(name))
                    raise UserError(
                        f"{folder} holds chunks of {name} {there}, this run has {here}; delete it, or pass another "
                        "--out"
                    )
            self._told = True

    def __len__(self) -> int:
        return -(-self.n // self.size)

    def part(self, i: int) -> range:
        """The indices of chunk i."""
        return range(i * self.size, min((i + 1) * self.size, self.n))

    def shares(self, rank: int, world: int, all_reduce: AllReduce) -> tuple[list[int], list[int]]:
        """(chunks that are there, chunks to make) of this process, each chunk in one share exactly.

        The main process looks, so that all agree, whatever others have made since.
        """
        there = torch.zeros(len(self), dtype=torch.int64)
        if rank == 0:
            there = torch.tensor([int(self._intact(i)) for i in range(len(self))])
        there = all_reduce(there)
        done, missing = (torch.nonzero(there == value).flatten().tolist() for value in (1, 0))
        return done[rank::world], missing[rank::world]

    def save(self, i: int, chunk: Mapping[str, Tensor]) -> None:
        """Write chunk i: tensors on the CPU.

        Raises:
            UserError: it cannot be written, for example because the disk is full; chunks that are there stay.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be made ({error.strerror}); pass another --out") from error
        if not self._told:
            write_json(self.folder / MANIFEST, self.wanted)
            self._told = True
        tensors.write(self._path(i), chunk, {"evaluation": self.hash})

    def load(self, i: int) -> dict[str, Tensor]:
        """The tensors of chunk i.

        Raises:
            UserError: it is not there or damaged.
        """
        found = self._read(i)
        if found is None:
            raise UserError(f"{self._path(i)} is missing or damaged; run the command again, it makes this chunk anew")
        return found

    def remove(self) -> None:
        """Deletes the chunks and the manifest."""
        for path in [*self.folder.glob("chunk_*.safetensors"), *self.folder.glob(".chunk_*.tmp")]:
            path.unlink()
        (self.folder / MANIFEST).unlink(missing_ok=True)
        self.folder.rmdir()

    def _path(self, i: int) -> Path:
        return self.folder / f"chunk_{i:05d}.safetensors"

    def _intact(self, i: int) -> bool:
        return self._path(i).is_file() and self._read(i) is not None

    def _read(self, i: int) -> dict[str, Tensor] | None:
        try:
            found, about = tensors.read(self._path(i), "it is made again", finite=False)
        except UserError:
            return None
        return found if about.get("evaluation") == self.hash else None


def difference(held: str | None, wanted: str | None) -> tuple[str | None, str | None]:
    """Two values of an identity; of settings as JSON the part that differs alone."""
    try:
        there, here = json.loads(held or ""), json.loads(wanted or "")
    except (TypeError, ValueError, RecursionError):
        return held, wanted
    path = ""
    while isinstance(there, dict) and isinstance(here, dict):
        key = next((k for k in sorted({*there, *here}) if there.get(k) != here.get(k)), None)
        if key is None:
            break
        path, there, here = f"{path}.{key}" if path else key, there.get(key), here.get(key)
    return f"{path} {json.dumps(there)}".strip(), f"{path} {json.dumps(here)}".strip()
