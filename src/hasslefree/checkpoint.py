"""The files of a model folder: its index, its tensors, and threads that read or write them beside the computation."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hasslefree.errors import CheckpointError

INDEX = "model.safetensors.index.json"

T = TypeVar("T")

# Bytes of a file of settings: those of the largest models have half of this, and the JSON takes 2 GB of memory.
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, of which only the header was read. meta: its shape and dtype, without values."""

    file: Path
    name: str
    meta: Tensor

    def read(self) -> Tensor:
        """The tensor with its values, on the CPU."""
        with opened(self.file) as handle:
            values: Tensor = handle.get_tensor(self.name)
        return values


def read_small(file: Path, most: int = MOST_BYTES) -> str:
    """The text of a file of settings. Raises an OSError or a ValueError: no regular file, too large, or not UTF-8."""
    if file.exists() and not file.is_file():  # a pipe would be waited for, and a device has no end
        raise ValueError("it is not a regular file")
    with file.open("rb") as handle:
        return read_limited(handle, most)


def read_limited(handle: BinaryIO, most: int) -> str:
    """The text of an open file in UTF-8; a ValueError if it has more bytes, or is not UTF-8."""
    if len(content := handle.read(most + 1)) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    return content.decode("utf-8")


def read_json(file: Path, remedy: str = "download or copy it again") -> dict[str, Any]:
    """The JSON object in a file; a CheckpointError that ends with `remedy` if there is none."""
    try:
        content = json.loads(read_small(file))
    except (OSError, ValueError, RecursionError) as error:
        cause = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise CheckpointError(f"{file} cannot be read: {cause}; {remedy}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not contain a JSON object; {remedy}")
    return content


def weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name → its file, from the index of a model folder; empty without an index."""
    index = folder / INDEX
    if not index.is_file():
        return {}
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{index} has no valid weight_map; download or copy it again")
    for name in set(map(str, names.values())):
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} lists {name!r}, which is not the name of a file in the same folder; download or copy it again"
            )
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} lists {name}, but {folder / name} is missing; download or copy it")
    return {tensor: folder / str(name) for tensor, name in names.items()}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises a CheckpointError if one is missing."""
    files = sorted(set(weight_map(folder).values())) or [folder / "model.safetensors"]
    if not files[0].is_file():
        raise CheckpointError(f"{files[0]} is missing; download or copy it")
    return files


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file whose tensors are read and not mapped: if it is cut off meanwhile, that is a CheckpointError.

    The system would end the process when it used a page of a mapped file that is no longer there.
    """
    try:
        with torch.device("cpu"), safe_open(file, "pt", backend="pread") as handle:  # also while a model is on "meta"
            yield handle
    except (SafetensorError, OSError) as error:
        problem = "cannot be read" if isinstance(error, OSError) else "is truncated, or not a safetensors file"
        raise CheckpointError(f"{file} {problem} ({error}); download or copy it again") from None


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """All tensors in safetensors files of one folder, by name, from the headers."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118
                shape = (part := handle.get_slice(name)).get_shape()
                values = part[:0] if shape and shape[0] else handle.get_tensor(name)  # for its dtype; the rest is empty
                stored[name] = StoredTensor(file, name, torch.empty(shape, dtype=values.dtype, device="meta"))
    for name, file in weight_map(files[0].parent).items():
        if file in files and (name not in stored or stored[name].file != file):
            raise CheckpointError(f"{file} does not contain {name}, which {INDEX} lists; download or copy it again")
    return stored


def run_in_background(name: str, *calls: Callable[[], T]) -> list[Future[T]]:
    """Run calls one after the other in one new thread, which ends after the last one; a future for each.

    Reads, writes and checksums of large arrays release Python's lock for other threads. name: of the thread.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures
