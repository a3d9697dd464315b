"""The `quantization_config` of config.json, which describes each compressed layer, and checks of
the tensors against it.
"""

import zlib
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor

from hasslefree.core.factors import TensorSpecs, check_factor_bits
from hasslefree.errors import CheckpointError, HasslefreeError, PatternError
from hasslefree.files import StoredTensor
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec
from hasslefree.validation import InvalidError, validated

QUANT_METHOD = "hasslefree"
VERSION = 2
LAYOUT = "packed"

# The dtypes that values may have, with the names that safetensors gives them.
FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Entry:
    """The entry of a compressed layer in config.json. crc32: `checksum` of the index tensor."""

    spec: LayerSpec
    crc32: Annotated[str, Field(pattern="^[0-9a-f]{8}$")]

    @classmethod
    def of(cls, layer: SparseLowRankLinear) -> Self:
        return cls(layer.spec, checksum([layer.index]))

    def to_dict(self) -> dict[str, Any]:
        """The entry as config.json holds it."""
        return self.spec.to_dict() | {"crc32": self.crc32}


def checksum(tensors: Iterable[Tensor]) -> str:
    """The CRC-32 (zlib) of the concatenated bytes of tensors in C order, in hexadecimal."""
    crc = 0
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        crc = zlib.crc32(flat.view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def check_format_version(version: Any, layout: Any) -> None:
    """Raise a CheckpointError if this version of hasslefree cannot read the format."""
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
                "grid",
                "grid must have the fields bits, group and symmetric, offset if true, and"
                " scale_bits and block if set",
            )
        return validated(Entry, {"spec": content, "crc32": content.get("crc32")})
    except (HasslefreeError, InvalidError) as error:
        raise CheckpointError(
            f"config.json, entry {name}: {error.message}. Download or copy config.json again"
        ) from None


def check_stored(
    entries: Mapping[str, Entry],
    stored: Mapping[str, StoredTensor],
    biased: Container[str],
    indices: bool,
) -> None:
    """Compare the tensors of every compressed layer with its entry.

    Args:
        entries: by the names of layers.
        stored: the tensors of all files, by name.
        biased: the names of the layers with a bias.
        indices: also read and check the index tensors.
    """
    layers: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = tensor
    for name, entry in entries.items():
        expected = entry.spec.tensors()
        if name in biased:
            expected["bias"] = ((entry.spec.shape[0],), None)
        tensors = layers.get(name, {})
        try:
            check_tensors(name, expected, {leaf: tensor.meta for leaf, tensor in tensors.items()})
            if indices:
                check_index(name, entry, read_index(tensors[entry.spec.layout.index]))
        except CheckpointError as error:
            files = sorted({str(tensor.file) for tensor in (tensors or stored).values()})
            raise CheckpointError(f"{', '.join(files)}: {error.message}") from None


def check_tensors(
    name: str,
    expected: TensorSpecs,
    tensors: Mapping[str, Tensor],
) -> None:
    """Compare the tensors of a layer with config.json. The model may have any floating-point dtype.

    Args:
        name: of the layer.
        expected, tensors: by name in the layer.
    """
    again = "download or copy the folder again"
    missing = [f"{name}.{leaf}" for leaf in expected if leaf not in tensors]
    if missing:
        raise CheckpointError(f"{', '.join(missing)} not found; {again}")
    for leaf, tensor in tensors.items():
        if leaf not in expected:
            raise CheckpointError(
                f"{name}.{leaf} does not belong to the layer that config.json describes; {again}"
            )
        shape, dtype = expected[leaf]
        if tensor.shape != shape:
            raise CheckpointError(
                f"{name}.{leaf} has the shape {list(tensor.shape)}, but {list(shape)} according to"
                f" config.json; {again}"
            )
        allowed: Container[torch.dtype] = FLOATS if dtype is None else (dtype,)
        if tensor.dtype not in allowed:
            raise CheckpointError(
                f"{name}.{leaf} has the dtype {tensor.dtype}, expected"
                f" {dtype or 'a floating-point one'}; {again}"
            )


def read_index(stored: StoredTensor) -> Tensor:
    """Read an index, unless it is empty: each reading parses the header of the file, which may list
    thousands of layers.
    """
    if stored.meta.numel():
        return stored.read()
    return torch.empty_like(stored.meta, device="cpu")


def check_index(name: str, entry: Entry, index: Tensor) -> None:
    """Check the CRC-32 of a layer's index tensor, and its content against the pattern."""
    spec = entry.spec
    layout = spec.layout
    full_name = f"{name}.{layout.index}"
    crc = checksum([index])
    if crc != entry.crc32:
        raise CheckpointError(
            f"{full_name} is damaged: its CRC-32 is {crc}, but {entry.crc32} according to"
            " config.json; download or copy the folder again"
        )
    try:
        layout.validate(index.cpu(), spec.shape[1], spec.nonzeros)
    except PatternError as error:
        raise CheckpointError(
            f"{full_name} was written wrongly: its CRC-32 is right, but {error}. Update hasslefree"
            " and compress the model again"
        ) from None
