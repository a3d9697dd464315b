"""The files of a model folder: its index, its tensors, and threads that read or write them beside
the computation.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from weakref import finalize

import torch
from torch import Tensor

from hasslefree.errors import CheckpointError

INDEX = "model.safetensors.index.json"

T = TypeVar("T")

# Bytes of a file of settings: those of the largest models have half of this, and the JSON takes 2
# GB of memory.
MOST_BYTES = 64 << 20
# Bytes of the header of a safetensors file, as safetensors limits them.
MOST_HEADER = 100_000_000
# The dtypes of safetensors by their names in torch, of which older versions lack the last ones.
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "U16": "uint16", "U32": "uint32", "U64": "uint64",
    "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2",
}  # fmt: skip


def read_small(file: Path, most: int = MOST_BYTES) -> str:
    """The text of a file of settings. Raises an OSError or a ValueError: no regular file, too
    large, or not UTF-8.
    """
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
                f"{index} lists {name!r}, which is not the name of a file in the same folder;"
                " download or copy it again"
            )
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{index} lists {name}, but {folder / name} is missing; download or copy it"
            )
        if not is_inside(folder / name, folder):
            raise CheckpointError(
                f"{index} lists {name}, a link out of the folder; put the file itself in its place"
            )
    return {tensor: folder / str(name) for tensor, name in names.items()}


def is_inside(file: Path, folder: Path) -> bool:
    """Whether a file is in a folder, and no link out of it, except to the blobs of which the hub's
    cache consists.
    """
    folder, target = Path(os.path.realpath(folder)), Path(os.path.realpath(file))
    blobs = folder.parent.with_name("blobs") if folder.parent.name == "snapshots" else folder
    return target.is_relative_to(folder) or target.parent == blobs


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises a CheckpointError if one is missing."""
    files = sorted(set(weight_map(folder).values())) or [folder / "model.safetensors"]
    if not files[0].is_file():
        raise CheckpointError(f"{files[0]} is missing; download or copy it")
    return files


class TensorFile:
    """A safetensors file that is read and never mapped, by the interface of
    `safetensors.safe_open`.

    The system ends a process that uses a page of a mapped file which was cut off meanwhile, and
    `safe_open` maps at least the header. Here it is a CheckpointError. The file is closed with the
    last tensor that refers to it.
    """

    def __init__(self, file: str | os.PathLike[str], **_: Any):
        self.path, self.metas = Path(file), dict[str, Tensor]()
        with self._damage_named():
            self._handle = os.open(self.path, os.O_RDONLY)
            finalize(self, os.close, self._handle)
            size = os.fstat(self._handle).st_size
            self._start = 8 + int.from_bytes(self._read(0, 8).numpy().tobytes(), "little")
            if self._start > min(size, MOST_HEADER):
                raise ValueError(f"a header of {self._start - 8:,} bytes in a file of {size:,}")
            self._header = json.loads(self._read(8, self._start - 8).numpy().tobytes())
            self._header.pop("__metadata__", None)
            end = 0
            for name, entry in sorted(
                self._header.items(), key=lambda item: item[1]["data_offsets"]
            ):
                self.metas[name] = meta = meta_of(entry)
                if entry["data_offsets"] != [end, end := end + meta.nbytes]:
                    raise ValueError(
                        f"the offsets of {name!r:.60} do not match its shape, or leave a gap"
                    )
            if self._start + end != size:
                raise ValueError(
                    f"{self._start + end:,} bytes according to its header, but {size:,} in all"
                )

    @contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (
            OSError,
            EOFError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            problem = (
                "cannot be read"
                if isinstance(error, OSError)
                else "is truncated, or not a safetensors file"
            )
            raise CheckpointError(
                f"{self.path} {problem} ({error}); download or copy it again"
            ) from None

    def _read(self, start: int, count: int) -> Tensor:
        """So many bytes: (count,) uint8."""
        values = torch.empty(
            count, dtype=torch.uint8, device="cpu"
        )  # also while a model is on "meta"
        rest = values.numpy().data
        while rest:
            if not (got := os.preadv(self._handle, [rest], start)):
                raise EOFError(f"its bytes from {start:,} on are missing")
            rest, start = rest[got:], start + got
        return values

    def get_tensor(self, name: str) -> Tensor:
        """The tensor of this name with its values, on the CPU."""
        with self._damage_named():
            meta, (start, _) = self.metas[name], self._header[name]["data_offsets"]
            return self._read(self._start + start, meta.nbytes).view(meta.dtype).view(meta.shape)

    def get_slice(self, name: str) -> "StoredTensor":
        return StoredTensor(self, name)

    def keys(self) -> list[str]:
        return list(self.metas)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, of which only the header was read: also what `safe_open`
    calls a slice.
    """

    file: TensorFile
    name: str

    @property
    def meta(self) -> Tensor:
        """Its shape and dtype, without values."""
        return self.file.metas[self.name]

    def read(self) -> Tensor:
        """The tensor with its values, on the CPU."""
        return self.file.get_tensor(self.name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    def get_shape(self) -> list[int]:
        return list(self.meta.shape)

    def get_dtype(self) -> str:
        return next(
            code for code, name in DTYPES.items() if getattr(torch, name, None) == self.meta.dtype
        )


def meta_of(entry: Any) -> Tensor:
    """The shape and dtype in an entry of a header, as a tensor without values."""
    shape = entry["shape"]
    if entry["dtype"] == "F4":  # two numbers in a byte, which torch counts as one
        shape = [*shape[:-1], shape[-1] // 2]
    try:
        return torch.empty(shape, dtype=getattr(torch, DTYPES[entry["dtype"]]), device="meta")
    except RuntimeError as error:  # numbers that no memory has
        raise ValueError(error) from None


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """All tensors in safetensors files of one folder, by name, from the headers."""
    stored = {
        name: StoredTensor(file, name)
        for file in map(TensorFile, files)
        for name in sorted(file.metas)
    }
    for name, file in weight_map(files[0].parent).items():
        if file in files and (name not in stored or stored[name].file.path != file):
            raise CheckpointError(
                f"{file} does not contain {name}, which {INDEX} lists; download or copy it again"
            )
    return stored


def run_in_background(name: str, *calls: Callable[[], T]) -> list[Future[T]]:
    """Run calls one after the other in one new thread, which ends after the last one; a future for
    each.

    Reads, writes and checksums of large arrays release Python's lock for other threads. name: of
    the thread.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name)
    futures = [pool.submit(call) for call in calls]
    pool.shutdown(wait=False)
    return futures
