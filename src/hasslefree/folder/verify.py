"""Compare a folder's files with its config.json, before any weights are read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

from hasslefree.errors import CheckpointError, PatternError
from hasslefree.folder.entries import Entry
from hasslefree.folder.headers import Stored

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = {torch.uint8: "U8", torch.int8: "I8", torch.int32: "I32"}


def check_layers(entries: Mapping[str, Entry], biased: set[str], stored: Mapping[str, Stored]) -> None:
    """Compare names, shapes and dtypes of the tensors of every compressed layer.

    Args:
        biased: the layers that have a bias. stored: all tensors of the files.

    Raises:
        CheckpointError: with the file and the tensor.
    """
    held: dict[str, set[str]] = {}
    for name in stored:
        layer, _, leaf = name.rpartition(".")
        held.setdefault(layer, set()).add(leaf)
    for name, entry in entries.items():
        spec, found = entry.spec, held.get(name, set())
        wanted = spec.tensors() | ({"bias": ((spec.shape[0],), None)} if name in biased else {})
        if missing := [f"{name}.{leaf}" for leaf in wanted if leaf not in found]:
            files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()}))
            raise CheckpointError(f"{', '.join(missing)} not found in {files}; download or copy the folder again")
        for leaf in sorted(found):
            shape, dtype = wanted.get(leaf, (None, None))
            _check_tensor(f"{name}.{leaf}", stored[f"{name}.{leaf}"], shape, INTEGERS[dtype] if dtype else None)


def _check_tensor(name: str, tensor: Stored, shape: tuple[int, ...] | None, integer: str | None) -> None:
    """shape: what config.json makes it; None for a tensor that the layer does not have. integer: None for a float."""
    if shape is None:
        raise CheckpointError(
            f"{tensor.file} contains {name}, which the layer that config.json describes does not have; download or "
            "copy both files again"
        )
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: {name} has the shape {list(tensor.shape)}, but {list(shape)} according to config.json; "
            "download or copy both files again"
        )
    if tensor.dtype != integer if integer else tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor.file}: {name} has the dtype {tensor.dtype}, expected {integer or 'a floating-point one'}; "
            "download or copy the file again"
        )


def check_indices(entries: Mapping[str, Entry], stored: Mapping[str, Stored]) -> None:
    """Compare the bytes of every index tensor with its CRC-32, and its codes with its pattern.

    Raises:
        CheckpointError: with the file and the tensor.
    """
    for name, entry in entries.items():
        spec, layout, (out, width) = entry.spec, entry.spec.storage.layout, entry.spec.shape
        tensor = stored[f"{name}.{layout.index}"]
        data = tensor.read()
        where = f"{tensor.file}: {name}.{layout.index}"
        if (found := zlib.crc32(data)) != entry.crc32:
            raise CheckpointError(
                f"{where} is damaged: its CRC-32 is {found:08x}, but {entry.crc32:08x} according to config.json; "
                "download or copy the file again"
            )
        shape = layout.shapes(out, width, spec.nonzeros)[layout.index]
        index = torch.empty(shape, dtype=layout.index_dtype, device="cpu")
        if data:
            index = torch.frombuffer(bytearray(data), dtype=layout.index_dtype).view(shape)
        try:
            layout.validate(index, width, spec.nonzeros)
        except PatternError as error:
            raise CheckpointError(
                f"{where} was written wrongly: its CRC-32 is right, but {error}. Update hasslefree and compress the "
                "model again"
            ) from None
