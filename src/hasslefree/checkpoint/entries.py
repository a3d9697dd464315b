"""The `quantization_config` of config.json, which describes each compressed layer, and the tensors
it describes.
"""

import re
import zlib
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.factors import check_factor_bits
from hasslefree.errors import CheckpointError, HasslefreeError, PatternError
from hasslefree.files import StoredTensor
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec, TensorSpecs
from hasslefree.validation import InvalidError, validated

QUANT_METHOD = "hasslefree"
VERSION = 2
LAYOUT = "packed"

# The dtypes that values may have, by the names that safetensors gives them.
FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Entry:
    """A compressed layer in config.json. crc32: of the bytes of its index tensor."""

    spec: LayerSpec
    crc32: int


def entry_of(layer: SparseLowRankLinear) -> dict[str, Any]:
    """The entry of a layer, as config.json holds it."""
    return layer.spec.to_dict() | {"crc32": f"{crc32(layer.index):08x}"}


def crc32(tensor: Tensor, start: int = 0) -> int:
    """zlib's CRC-32 of the bytes of a tensor in C order. start: the CRC-32 of the bytes before
    them.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, start)


def check_format_version(version: Any, layout: Any) -> None:
    """Raise a CheckpointError if this version of hasslefree does not read this version of the
    format.
    """
    if (version, layout) == (VERSION, LAYOUT):
        return
    raise CheckpointError(
        f"the folder has format version {version}, layout {layout!r} (in config.json), but this"
        f" version of hasslefree reads version {VERSION}, layout {LAYOUT!r}: update"
        " hasslefree, or compress the model again"
    )


def read_entries(modules: Any) -> dict[str, Entry]:
    """The entries of all layers by name."""
    if not isinstance(modules, dict):
        raise CheckpointError(
            "config.json has no valid `modules` in quantization_config; download or copy it again"
        )
    return {name: _read_entry(name, content) for name, content in modules.items()}


def _read_entry(name: str, content: Any) -> Entry:
    try:
        spec = validated(LayerSpec, content)
        check_factor_bits(content.get("factor_bits"), spec.rank)
        spec.tensors()
        if spec.grid is not None and content["grid"].keys() != spec.to_dict()["grid"].keys():
            raise InvalidError(
                "grid", "grid must have the fields bits, group and symmetric, and offset if true"
            )
        if not isinstance(crc := content.get("crc32"), str) or not re.fullmatch("[0-9a-f]{8}", crc):
            raise InvalidError("crc32", "crc32 must be eight hexadecimal digits")
    except (HasslefreeError, InvalidError) as error:
        raise CheckpointError(
            f"config.json, entry {name}: {error.message}. Download or copy config.json again"
        ) from None
    return Entry(spec, int(crc, 16))


def check_stored(
    entries: Mapping[str, Entry],
    stored: Mapping[str, StoredTensor],
    biased: Container[str],
    indices: bool,
) -> None:
    """Compare the tensors of every compressed layer with its entry. indices: read the index
    tensors, and check them.
    """
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = tensor
    for name, entry in entries.items():
        expected = entry.spec.tensors() | (
            {"bias": ((entry.spec.shape[0],), None)} if name in biased else {}
        )
        tensors = layers.get(name, {})
        try:
            check_tensors(name, expected, {leaf: tensor.meta for leaf, tensor in tensors.items()})
            if indices:
                check_index(name, entry, tensors[entry.spec.layout.index].read())
        except CheckpointError as error:
            files = sorted({str(tensor.file) for tensor in (tensors or stored).values()})
            raise CheckpointError(f"{', '.join(files)}: {error.message}") from None


def check_tensors(
    name: str,
    expected: TensorSpecs,
    tensors: Mapping[str, Tensor],
) -> None:
    """Compare the tensors of a layer, by their names in it, with what config.json says; any
    floating-point dtype may be the model's. name: of the layer.
    """
    again = "download or copy the folder again"
    if missing := [f"{name}.{leaf}" for leaf in expected if leaf not in tensors]:
        raise CheckpointError(f"{', '.join(missing)} not found; {again}")
    for leaf, tensor in tensors.items():
        if leaf not in expected:
            raise CheckpointError(
                f"{name}.{leaf} does not belong to the layer that config.json describes; {again}"
            )
        (shape, dtype), found = expected[leaf], tuple(tensor.shape)
        if found != shape:
            raise CheckpointError(
                f"{name}.{leaf} has the shape {list(found)}, but {list(shape)} according to"
                f" config.json; {again}"
            )
        if tensor.dtype != dtype if dtype else tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{name}.{leaf} has the dtype {tensor.dtype}, expected"
                f" {dtype or 'a floating-point one'}; {again}"
            )


def check_index(
    name: str,
    entry: Entry,
    index: Tensor,
) -> None:
    """Compare the index tensor of a layer with its CRC-32, and its codes with the pattern. name: of
    the layer.
    """
    spec = entry.spec
    layout = entry.spec.layout
    index = index.cpu()
    if (crc := crc32(index)) != entry.crc32:
        raise CheckpointError(
            f"{name}.{layout.index} is damaged: its CRC-32 is {crc:08x}, but {entry.crc32:08x}"
            " according to config.json; download or copy the folder again"
        )
    try:
        layout.validate(index, spec.shape[1], spec.nonzeros)
    except PatternError as error:
        raise CheckpointError(
            f"{name}.{layout.index} was written wrongly: its CRC-32 is right, but {error}. Update"
            " hasslefree and compress the model again"
        ) from None
