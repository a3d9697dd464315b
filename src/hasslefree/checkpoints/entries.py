"""The `quantization_config` of config.json: what a folder says of each compressed layer."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.factors import check_factor_bits, factor_tensors
from hasslefree.core.grids import Grid
from hasslefree.core.storage import Storage
from hasslefree.errors import CheckpointError, HasslefreeError
from hasslefree.models.linear import SparseLowRankLinear

QUANT_METHOD = "hasslefree"
VERSION = 2
LAYOUT = "packed"


@dataclass(frozen=True)
class Entry:
    """One compressed layer.

    Args:
        pattern: its name. shape: (out, in). rank: of the low-rank part. nonzeros: the number of stored values
            or codes.
        crc32: of the bytes of the index tensor.
        grid: on which S lies; None where its values are stored.
        factor_bits: 8 where the factors are codes; None where they are in the model's dtype.
    """

    pattern: str
    shape: tuple[int, int]
    rank: int
    nonzeros: int
    crc32: int
    grid: Grid | None = None
    factor_bits: int | None = None

    @property
    def storage(self) -> Storage:
        return Storage.of(self.pattern, self.grid)

    def shapes(self, bias: bool) -> dict[str, tuple[int, ...]]:
        """The tensors of the layer, by their names in it, with their shapes."""
        out, width = self.shape
        shapes = self.storage.shapes(out, width, self.nonzeros)
        factors = factor_tensors(out, width, self.rank, self.factor_bits)
        shapes |= {name: shape for name, (shape, _) in factors.items()}
        return shapes | ({"bias": (out,)} if bias else {})


def entry_of(layer: SparseLowRankLinear) -> dict[str, Any]:
    """The entry of a layer, as config.json holds it."""
    grid = layer.grid
    in_bits = {"factor_bits": layer.factor_bits} if layer.factor_bits else {}
    on_grid = {"grid": {"bits": grid.bits, "group": grid.group, "symmetric": grid.symmetric}} if grid else {}
    return {
        "pattern": layer.pattern,
        "shape": [layer.out_features, layer.in_features],
        "rank": layer.rank,
        "nonzeros": layer.nonzeros,
        **on_grid,
        **in_bits,
        "crc32": f"{crc32(layer.index):08x}",
    }


def crc32(tensor: Tensor, start: int = 0) -> int:
    """zlib's CRC-32 of the bytes of a tensor in C order. start: the CRC-32 of what goes before."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, start)


def check_version(version: Any, layout: Any) -> None:
    """Raise a CheckpointError where this is not the format that is read here."""
    if (version, layout) == (VERSION, LAYOUT):
        return
    older = isinstance(version, int) and version < VERSION
    remedy = "compress the model again" if older else "update hasslefree"
    raise CheckpointError(
        f"config.json says format version {version}, layout {layout!r}; this hasslefree reads version {VERSION}, "
        f"layout {LAYOUT!r}: {remedy}"
    )


def read_entries(modules: Any) -> dict[str, Entry]:
    """The entries of all layers by name.

    Raises:
        CheckpointError: the first that is not as the format says, with its name.
    """
    if not isinstance(modules, dict):
        raise CheckpointError("config.json has no `modules` in its quantization_config; get it anew")
    return {name: _read(name, entry) for name, entry in modules.items()}


def _read(name: str, entry: Any) -> Entry:
    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"config.json, entry {name}: {what}; get it anew")

    if not isinstance(entry, dict):
        raise wrong("it is no object")
    pattern, shape, crc = entry.get("pattern"), entry.get("shape"), entry.get("crc32")
    if not isinstance(pattern, str):
        raise wrong("it has no pattern")
    if not isinstance(shape, list) or len(shape) != 2 or not all(_is_count(side, 1) for side in shape):
        raise wrong("its shape is not [out, in]")
    if not _is_count(entry.get("rank")) or not _is_count(entry.get("nonzeros")):
        raise wrong("rank and nonzeros are whole numbers, 0 or more")
    if not isinstance(crc, str) or not re.fullmatch("[0-9a-f]{8}", crc):
        raise wrong("its crc32 is not of eight hexadecimal digits")
    grid = entry.get("grid")
    if grid is not None and not _is_grid(grid):
        raise wrong("its grid is not of bits, group (a whole number or null) and symmetric")
    bits = entry.get("factor_bits")
    if bits is not None and not _is_count(bits):
        raise wrong("its factor_bits is no whole number")
    try:
        check_factor_bits(bits, entry["rank"])
        on = None if grid is None else Grid(grid["bits"], grid["group"], grid["symmetric"])
        found = Entry(pattern, (shape[0], shape[1]), entry["rank"], entry["nonzeros"], int(crc, 16), on, bits)
        found.shapes(bias=False)
    except HasslefreeError as error:
        raise wrong(str(error)) from None
    return found


def _is_grid(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"bits", "group", "symmetric"}:
        return False
    group = value["group"]
    return _is_count(value["bits"]) and isinstance(value["symmetric"], bool) and (group is None or _is_count(group))


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
