"""The layers of a compressed folder and their sizes: from config.json, compression.json and the
file headers.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hasslefree.checkpoint.entries import (
    FLOATS,
    QUANT_METHOD,
    check_format_version,
    check_stored,
    read_entries,
)
from hasslefree.checkpoint.record import read_record
from hasslefree.errors import ModelError
from hasslefree.escaping import escaped
from hasslefree.files import read_json, stored_tensors, weight_files
from hasslefree.packed.spec import LayerSpec
from hasslefree.units import size, span, table


@dataclass(frozen=True)
class LayerSize:
    """The size of a compressed layer.

    Args:
        dtype: of the values or scales.
        relative_error: None without a record.
    """

    name: str
    spec: LayerSpec
    dtype: str
    bytes: int
    dense_bytes: int
    relative_error: float | None

    def to_dict(self) -> dict[str, Any]:
        """All fields for JSON. The fields of the spec are inlined, its grid in words."""
        content = {"name": self.name, **vars(self.spec), **vars(self)}
        content["grid"] = self.spec.grid and str(self.spec.grid)
        del content["spec"]
        return content


@dataclass(frozen=True)
class FolderSize:
    """The size of a compressed folder.

    Args:
        other_bytes: the size of all tensors outside the compressed layers.
    """

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

    @property
    def bytes(self) -> int:
        return self.layer_bytes + self.other_bytes

    @property
    def dense_bytes(self) -> int:
        return self.layer_dense_bytes + self.other_bytes

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "layers": [layer.to_dict() for layer in self.layers],
            "layer_bytes": self.layer_bytes,
            "layer_dense_bytes": self.layer_dense_bytes,
            "bytes": self.bytes,
            "dense_bytes": self.dense_bytes,
        }


def inspect_folder(folder: Path) -> FolderSize:
    """Read config.json and the headers, and check that they match; no weights are read."""
    config = read_quantization(folder)
    entries = read_entries(config.get("modules"))
    stored = stored_tensors(weight_files(folder))
    biased = {name for name in entries if f"{name}.bias" in stored}
    check_stored(entries, stored, biased, indices=False)
    records = read_record(folder).layers if (folder / "compression.json").is_file() else ()
    errors = {record.name: record.relative_error for record in records}
    bytes_of: Counter[str] = Counter()
    for full_name, tensor in stored.items():
        bytes_of[full_name.rpartition(".")[0]] += tensor.meta.nbytes
    layers = []
    for name in in_order(entries, list(errors)):
        spec = entries[name].spec
        out, width = spec.shape
        leaf = "weight_scale" if spec.grid else "values"
        dtype = stored[f"{name}.{leaf}"].meta.dtype
        dense_bytes = out * (width + (name in biased)) * dtype.itemsize
        packed = bytes_of.pop(name)
        error = errors.get(name)
        layers.append(LayerSize(name, spec, FLOATS[dtype], packed, dense_bytes, error))
    return FolderSize(str(folder), config["version"], tuple(layers), bytes_of.total())


def read_quantization(folder: Path) -> dict[str, Any]:
    """The quantization_config of a compressed folder. Raises a ModelError for other folders."""
    if not folder.is_dir():
        raise ModelError(
            f"the folder {folder} does not exist; a model on the hub must be downloaded first (hf"
            " download)"
        )
    config = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != QUANT_METHOD:
        raise ModelError(
            f"{folder} is not a compressed model; give a folder that `hasslefree compress` wrote"
        )
    check_format_version(config.get("version"), config.get("layout"))
    return config


def in_order(names: Iterable[str], recorded: list[str]) -> list[str]:
    """Sort layers in the order of the record; the others so that layers.2 precedes layers.10."""
    order = {name: index for index, name in enumerate(recorded)}

    def position(name: str) -> tuple[int, list[tuple[int, str]]]:
        # Compare numbers by length, then by digits: Python refuses to convert very long ones.
        parts = [(len(part) * part.isdecimal(), part) for part in name.split(".")]
        return order.get(name, len(order)), parts

    return sorted(names, key=position)


def kind_table(folder: FolderSize) -> Table:
    """A row for each kind of layer (q_proj, down_proj, …) with ranges over the layers, and the
    totals.
    """
    kinds: dict[tuple[str, str], list[LayerSize]] = {}
    for layer in folder.layers:
        kind = escaped(layer.name.rpartition(".")[2])
        kinds.setdefault((kind, layer.spec.pattern), []).append(layer)
    pattern = pattern_column(folder)
    figures = columns_of(folder)
    columns = [*pattern, "layers", *figures]
    lines = table(["kind", *pattern], ["layers", *figures], title_of(folder))
    for (kind, _), layers in kinds.items():
        lines.add_row(kind, *cells(layers, columns))
    lines.add_section()
    lines.add_row("compressed", *cells(folder.layers, columns))
    gap = [""] * (len(columns) - 2)
    other = folder.other_bytes
    lines.add_row("the rest", *gap, size(other), "100.0%" if other else "")
    lines.add_row("all", *gap, size(folder.bytes), f"{folder.bytes / folder.dense_bytes:.1%}")
    return lines


def layer_table(folder: FolderSize) -> Table:
    """A row for each layer. The common prefix of all names is in the heading."""
    names = [layer.name.split(".") for layer in folder.layers]
    shared: list[str] = []
    for parts in zip(*(name[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    heading = f"layer of {'.'.join(shared)}" if shared else "layer"
    pattern = pattern_column(folder)
    figures = columns_of(folder)
    lines = table([heading, *pattern], figures, title_of(folder))
    for name, layer in zip(names, folder.layers, strict=True):
        rest = escaped(".".join(name[len(shared) :]))
        lines.add_row(rest, *cells([layer], pattern + figures))
    return lines


def title_of(folder: FolderSize) -> str:
    """The title: the folder, and the pattern and grid if all layers have the same, perhaps except
    for the bits.
    """
    title = f"{folder.folder}: {len(folder.layers)} compressed layers"
    kinds = {layer.spec.kind for layer in folder.layers}
    if len(kinds) > 1:
        kinds = {re.sub(r"int\d in", "in", kind) for kind in kinds}
    if len(kinds) > 1:
        return title
    return f"{title}, {kinds.pop()}"


def pattern_column(folder: FolderSize) -> list[str]:
    """The heading of the column of patterns; empty if all layers have the same pattern."""
    if len({layer.spec.pattern for layer in folder.layers}) > 1:
        return ["pattern"]
    return []


def columns_of(folder: FolderSize) -> list[str]:
    """The headings of the columns of figures: bits if they differ, ranks if any is above 0."""
    columns = ["relative error", "bytes", "of dense"]
    if any(layer.spec.rank for layer in folder.layers):
        columns = ["rank", *columns]
    if len({layer.spec.grid.stored_bits for layer in folder.layers if layer.spec.grid}) > 1:
        columns = ["bits", *columns]
    return columns


def cells(layers: Sequence[LayerSize], columns: Sequence[str]) -> list[str]:
    """The cells of a row that summarises some layers, in the order of the columns."""
    patterns = {layer.spec.pattern for layer in layers}
    bits = [layer.spec.grid.stored_bits for layer in layers if layer.spec.grid]
    errors = [layer.relative_error for layer in layers if layer.relative_error is not None]
    stored = sum(layer.bytes for layer in layers)
    figures = {
        "pattern": patterns.pop() if len(patterns) == 1 else "",
        "layers": str(len(layers)),
        "bits": span(bits, "{:g}") if bits else "",
        "rank": span([layer.spec.rank for layer in layers]),
        "relative error": span(errors, "{:.2g}") if errors else "",
        "bytes": size(stored),
        "of dense": f"{stored / sum(layer.dense_bytes for layer in layers):.1%}",
    }
    return [figures[column] for column in columns]
