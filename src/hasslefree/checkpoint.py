"""The files of a model folder: its index, its tensors, and threads that read or write them beside the computation."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hasslefree.errors import CheckpointError

INDEX = "model.safetensors.index.json"

T = TypeVar("T")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, mapped into memory."""

    file: Path
    tensor: Tensor


def read_json(file: Path, remedy: str = "download or copy it again") -> dict[str, Any]:
    """The JSON object in a file; a CheckpointError that ends with `remedy` if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; {remedy}") from None
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


def map_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """All tensors in safetensors files of one folder, by name."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as handle:
                stored |= {name: StoredTensor(file, handle.get_tensor(name)) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is truncated, or not a safetensors file ({error}); download or copy it again"
            ) from None
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
