"""The files of a model folder: its index, its tensors, and threads that read or write them in the
background.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hasslefree.errors import CheckpointError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

T = TypeVar("T")

# Maximum bytes of a file of settings. The files of the largest models have half of this; parsed, a
# file of this size takes 2 GB of memory.
MOST_BYTES = 64 << 20


def read_small(file: Path, most: int = MOST_BYTES) -> str:
    """Read the text of a file of settings.

    Raises:
        OSError, ValueError: it is missing, not a regular file, larger than `most` bytes, or not
            UTF-8.
    """
    if file.exists() and not file.is_file():  # a pipe would block, and a device never ends
        raise ValueError("it is not a regular file")
    with file.open("rb") as handle:
        return read_limited(handle, most)


def read_limited(handle: BinaryIO, most: int) -> str:
    """Read the rest of an open file as UTF-8. Raises a ValueError if it has more than `most` bytes,
    or is not UTF-8.
    """
    content = handle.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it is larger than {most:,} bytes")
    return content.decode("utf-8")


def read_json(
    file: Path, remedy: str = "download or copy it again", most: int = MOST_BYTES
) -> dict[str, Any]:
    """Read the JSON object in a file of at most `most` bytes. Raises a CheckpointError that ends
    with `remedy` if there is none.
    """
    try:
        content = json.loads(read_small(file, most))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}; {remedy}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} does not contain a JSON object; {remedy}")
    return content


def write_json(file: Path, content: Mapping[str, Any], **form: Any) -> None:
    """Write a JSON object. form: options of `json.dumps`; indent is 1 by default."""
    text = json.dumps(content, **{"indent": 1} | form)
    file.write_text(text + "\n", encoding="utf-8")


@contextmanager
def edited_json(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object in a file; write it back with its changes, as transformers would."""
    content = read_json(file)
    yield content
    write_json(file, content, indent=2, sort_keys=True)


def weight_map(folder: Path) -> dict[str, Path]:
    """Map each tensor to its file, by the index of a model folder.

    Returns:
        The map; empty without an index, or beside a model.safetensors, which transformers prefers.

    Raises:
        CheckpointError: the index is damaged, or lists a path or a missing file.
    """
    index = folder / INDEX
    if (folder / WHOLE).is_file() or not index.is_file():
        return {}
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict):
        raise CheckpointError(f"{index} has no valid weight_map; download or copy it again")
    for name in sorted({str(name) for name in names.values()}):
        file = folder / name
        if Path(name).name != name:
            raise CheckpointError(
                f"{index} lists {name!r}, which is not the name of a file in the same folder;"
                " download or copy it again"
            )
        if not file.is_file():
            raise CheckpointError(
                f"{index} lists {name}, but {file} is missing; download or copy it"
            )
    return {tensor: folder / str(name) for tensor, name in names.items()}


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model folder. Raises a CheckpointError if one is missing."""
    files = sorted(set(weight_map(folder).values())) or [folder / WHOLE]
    if not files[0].is_file():
        raise CheckpointError(f"{files[0]} is missing; download or copy it")
    return files


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, of which only the header was read.

    Args:
        file: the path. name: of the tensor in the file.
        meta: its shape and dtype, as a tensor on the meta device.
    """

    file: Path
    name: str
    meta: Tensor

    def read(self) -> Tensor:
        """Read the values, as `read_tensor` does."""
        return read_tensor(self.file, self.name)


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises a CheckpointError that names it if it is damaged."""
    try:
        tensors = safe_open(file, framework="pt", device="cpu")
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); download or copy it again"
        ) from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{file} is truncated, or not a safetensors file ({error}); download or copy it again"
        ) from None
    with tensors:
        yield tensors


def read_tensor(file: Path, name: str) -> Tensor:
    """Read a tensor of a safetensors file: a copy on the CPU, which no longer depends on the file.

    The file is opened for this tensor alone: safe_open maps it, and the mapped pages that were read
    count as memory of the process until it is closed.
    """
    with open_tensors(file) as tensors:
        try:
            value: Tensor = tensors.get_tensor(name)
        except SafetensorError:
            raise CheckpointError(
                f"{file} no longer contains {name}: it was replaced meanwhile; start again"
            ) from None
        return value.clone()


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Describe the tensors in a safetensors file by name; no values are read."""
    with open_tensors(file) as tensors:
        # safe_open maps the file, so a tensor that is not used is not read.
        return {
            name: StoredTensor(file, name, tensors.get_tensor(name).to("meta"))
            for name in sorted(tensors.keys())
        }


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Describe all tensors in the safetensors files of one folder by name; no values are read.

    Raises:
        CheckpointError: a file is damaged, or lacks a tensor that the index of the folder lists.
    """
    stored: dict[str, StoredTensor] = {}
    for file in files:
        stored.update(read_header(file))
    for name, file in weight_map(files[0].parent).items():
        if file in files and (name not in stored or stored[name].file != file):
            raise CheckpointError(
                f"{file} does not contain {name}, which {INDEX} lists; download or copy it again"
            )
    return stored


def run_in_background(name: str, *calls: Callable[[], T]) -> list[Future[T]]:
    """Run calls one after the other in one new thread, which ends after the last one, and return a
    future for each. name: of the thread.

    Reads, writes and checksums of large arrays release Python's global lock.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures
