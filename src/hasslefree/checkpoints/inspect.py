"""What a compressed folder holds and what it weighs, from config.json and the headers of the weight files alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hasslefree.checkpoints.entries import QUANT_METHOD, Entry, check_version, read_entries
from hasslefree.checkpoints.headers import ELEMENT_BYTES, Stored, read_headers, read_json, weight_files
from hasslefree.checkpoints.verify import check_layers
from hasslefree.core.storage import kind_of
from hasslefree.errors import CheckpointError


@dataclass(frozen=True)
class LayerSize:
    """One compressed layer.

    Args:
        shape: (out, in). nonzeros: the values or codes stored for S. dtype: of the values, or of the grid's scales.
        bytes: of all its tensors. dense_bytes: of the layer as it was, in the same dtype.
        grid: on which S lies, in words. factor_bits: 8 where the factors are codes.
    """

    name: str
    pattern: str
    shape: tuple[int, int]
    rank: int
    nonzeros: int
    dtype: str
    bytes: int
    dense_bytes: int
    grid: str | None = None
    factor_bits: int | None = None

    @property
    def kind(self) -> str:
        """The pattern, the grid if there is one, and how the factors are stored if not as all else."""
        return kind_of(self.pattern, self.grid, self.factor_bits)


@dataclass(frozen=True)
class FolderSize:
    """A compressed folder. other_bytes: of the tensors that are part of no compressed layer."""

    folder: str
    version: int
    layers: tuple[LayerSize, ...]
    other_bytes: int

    @property
    def layer_bytes(self) -> int:
        return sum(layer.bytes for layer in self.layers)

    @property
    def layer_dense_bytes(self) -> int:
        return sum(layer.dense_bytes for layer in self.layers)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "layer_bytes": self.layer_bytes,
            "layer_dense_bytes": self.layer_dense_bytes,
            "bytes": self.layer_bytes + self.other_bytes,
            "dense_bytes": self.layer_dense_bytes + self.other_bytes,
        }


def inspect_folder(folder: Path) -> FolderSize:
    """Read config.json and the headers, and check one against the other; no weight is read.

    Raises:
        CheckpointError: no local folder, a model that is not compressed, or files that are not as config.json says.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; a model of the hub has to be downloaded first (hf download)"
        )
    config = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(f"{folder} holds no compressed model; give a folder that `hasslefree compress` wrote")
    check_version(config.get("version"), config.get("layout"))
    entries, stored = read_entries(config.get("modules")), read_headers(weight_files(folder))
    check_layers(entries, {name for name in entries if f"{name}.bias" in stored}, stored)
    layers = tuple(_layer_size(name, entries[name], stored) for name in sorted(entries, key=_by_number))
    other = sum(tensor.size for tensor in stored.values()) - sum(layer.bytes for layer in layers)
    return FolderSize(str(folder), config["version"], layers, other)


def _layer_size(name: str, entry: Entry, stored: Mapping[str, Stored]) -> LayerSize:
    (out, width), bias = entry.shape, f"{name}.bias" in stored
    tensors = [stored[f"{name}.{leaf}"] for leaf in entry.shapes(bias)]
    dtype = stored[f"{name}.{'weight_scale' if entry.grid else 'values'}"].dtype
    dense = out * (width + bias) * ELEMENT_BYTES[dtype]
    size = sum(tensor.size for tensor in tensors)
    grid = str(entry.grid) if entry.grid else None
    about = (entry.pattern, entry.shape, entry.rank, entry.nonzeros)
    return LayerSize(name, *about, dtype, size, dense, grid, entry.factor_bits)


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def size_table(found: FolderSize) -> Table:
    """A line for each layer, and the totals."""
    table = Table(title=Text(f"{found.folder}: {len(found.layers)} compressed layers"))
    table.add_column("layer", overflow="fold")
    for heading in ("pattern", "rank", "non-zeros", "bytes", "dense", "share"):
        table.add_column(heading, justify="right")

    def line(name: str, size: int, dense: int, pattern: str = "", rank: str = "", nonzeros: str = "") -> None:
        share = f"{size / dense:.1%}" if dense else ""
        table.add_row(Text(name), pattern, rank, nonzeros, f"{size:,}", f"{dense:,}", share)

    for layer in found.layers:
        line(layer.name, layer.bytes, layer.dense_bytes, layer.kind, str(layer.rank), f"{layer.nonzeros:,}")
    table.add_section()
    nonzeros = f"{sum(layer.nonzeros for layer in found.layers):,}"
    line("compressed layers", found.layer_bytes, found.layer_dense_bytes, nonzeros=nonzeros)
    line("the rest of the model", found.other_bytes, found.other_bytes)
    line("all", found.layer_bytes + found.other_bytes, found.layer_dense_bytes + found.other_bytes)
    return table
