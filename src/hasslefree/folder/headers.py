"""The headers of safetensors files: which tensors they hold and where, without reading the tensors."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasslefree.errors import CheckpointError

ELEMENT_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. dtype: safetensors' name, such as BF16. start, stop: its bytes in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stop - self.start

    def read(self) -> bytes:
        """Its bytes, read from the file."""
        with self.file.open("rb") as handle:
            handle.seek(self.start)
            return handle.read(self.size)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder.

    Raises:
        CheckpointError: there is none, or one that the index lists is missing.
    """
    listed = read_index(folder)
    files = [folder / name for name in sorted(set(listed.values()))] or [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; download or copy it")
    return files


def read_index(folder: Path) -> dict[str, str]:
    """Which file holds which tensor, as model.safetensors.index.json says; empty where the model is in one file."""
    file = folder / "model.safetensors.index.json"
    if not file.is_file():
        return {}
    found = read_json(file).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(name, str) and "/" not in name for name in found.values()):
        raise CheckpointError(
            f"{file} has no valid weight_map (tensor name → name of a file in the same folder); download or copy it "
            "again"
        )
    return found


def read_json(file: Path, remedy: str = "download or copy it again") -> dict[str, Any]:
    """A JSON object in a file.

    Args:
        remedy: for the error where there is none.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; {remedy}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} does not contain a JSON object; {remedy}")
    return found


def read_headers(files: list[Path]) -> dict[str, Stored]:
    """All tensors of a model by name.

    Raises:
        CheckpointError: a file is not a safetensors file, is truncated, or lacks a tensor that the index lists.
    """
    found: dict[str, Stored] = {}
    for file in files:
        found |= _read_header(file)
    for name, holder in read_index(files[0].parent).items():
        if any(file.name == holder for file in files) and (name not in found or found[name].file.name != holder):
            raise CheckpointError(
                f"{files[0].parent / holder} does not contain {name}, which model.safetensors.index.json lists; "
                f"download or copy {holder} again"
            )
    return found


def _read_header(file: Path) -> dict[str, Stored]:
    if file.suffix != ".safetensors":
        raise CheckpointError(
            f"{file} is not a safetensors file, and compressed folders are read from safetensors only; download or "
            "copy the folder again"
        )
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = 8 + struct.unpack("<Q", handle.read(8).ljust(8, b"\xff"))[0]
        if start > size:
            raise CheckpointError(f"{file} is truncated (within its header); download or copy it again")
        try:
            header = dict(json.loads(handle.read(start - 8)))
        except (ValueError, TypeError):
            raise CheckpointError(f"the header of {file} is not valid; download or copy the file again") from None
    header.pop("__metadata__", None)
    found = {name: _stored(file, name, entry, start) for name, entry in header.items()}
    for name, tensor in found.items():
        if tensor.stop > size:
            raise CheckpointError(
                f"{file} is truncated: it has {size} bytes, and {name} ends at byte {tensor.stop}; download or copy it "
                "again"
            )
    if max((tensor.stop for tensor in found.values()), default=start) < size:
        raise CheckpointError(f"{file} has extra bytes after its last tensor; download or copy it again")
    return found


def _stored(file: Path, name: str, entry: Any, start: int) -> Stored:
    """One entry of a header whose data begin at byte `start`."""
    try:
        shape, (first, stop) = tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
        sound = stop - first == math.prod(shape) * ELEMENT_BYTES[entry["dtype"]] and first >= 0
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{file}: the header entry of {name} is not valid; download or copy the file again")
    return Stored(file, entry["dtype"], shape, start + first, start + stop)
