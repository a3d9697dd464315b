"""The `quantization_config` of config.json: the description of each compressed layer."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.factors import check_factor_bits
from hasslefree.errors import CheckpointError, HasslefreeError
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec
from hasslefree.validation import InvalidError, validated

QUANT_METHOD = "hasslefree"
VERSION = 2
LAYOUT = "packed"

GRID_FIELDS = {"bits", "group", "symmetric"}
# What is wrong with an entry, by the field that is missing or not of its type.
WRONG = {
    "pattern": "pattern must be a string, such as 2:4",
    "shape": "shape must be [out, in]",
    "rank": "rank must be a whole number, 0 or more",
    "nonzeros": "nonzeros must be a whole number, 0 or more",
    **dict.fromkeys(
        ("grid", *GRID_FIELDS), "grid must have the fields bits, group (a whole number or null) and symmetric"
    ),
    "factor_bits": "factor_bits must be a whole number",
}


@dataclass(frozen=True)
class Entry:
    """One compressed layer. crc32: of the bytes of the index tensor."""

    spec: LayerSpec
    crc32: int


def entry_of(layer: SparseLowRankLinear) -> dict[str, Any]:
    """The entry of a layer, as config.json holds it."""
    return layer.spec.to_dict() | {"crc32": f"{crc32(layer.index):08x}"}


def crc32(tensor: Tensor, start: int = 0) -> int:
    """zlib's CRC-32 of the bytes of a tensor in C order. start: the CRC-32 of what goes before."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, start)


def check_version(version: Any, layout: Any) -> None:
    """Raise a CheckpointError where this is not the format that this version reads."""
    if (version, layout) == (VERSION, LAYOUT):
        return
    older = isinstance(version, int) and version < VERSION
    remedy = "compress the model again" if older else "update hasslefree"
    raise CheckpointError(
        f"the folder has format version {version}, layout {layout!r} (in config.json), but this version of hasslefree "
        f"reads version {VERSION}, layout {LAYOUT!r}: {remedy}"
    )


def read_entries(modules: Any) -> dict[str, Entry]:
    """The entries of all layers by name.

    Raises:
        CheckpointError: with the name of the first entry that does not follow the format.
    """
    if not isinstance(modules, dict):
        raise CheckpointError(
            "config.json has no valid `modules` in its quantization_config; download or copy it again"
        )
    return {name: _read(name, entry) for name, entry in modules.items()}


def _read(name: str, entry: Any) -> Entry:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"config.json, entry {name}: {what}. Download or copy config.json again")

    if not isinstance(entry, dict):
        raise wrong("the entry must be a JSON object")
    try:
        spec = validated(LayerSpec, entry)
        check_factor_bits(entry.get("factor_bits"), spec.rank)
        spec.tensors()
    except InvalidError as error:
        raise wrong(error.message if error.refused else WRONG.get(error.field, error.message)) from None
    except HasslefreeError as error:
        raise wrong(error.message) from None
    if spec.grid is not None and entry["grid"].keys() != GRID_FIELDS:
        raise wrong(WRONG["grid"])
    if not isinstance(crc := entry.get("crc32"), str) or not re.fullmatch("[0-9a-f]{8}", crc):
        raise wrong("crc32 must be eight hexadecimal digits")
    return Entry(spec, int(crc, 16))
