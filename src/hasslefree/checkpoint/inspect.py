"""The layers of a compressed folder and their sizes: from config.json, compression.json and the
file headers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
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
    """A compressed layer: the dtype of its values or scales, and its bytes. relative_error: None
    without a record.
    """

    name: str
    spec: LayerSpec
    dtype: str
    bytes: int
    dense_bytes: int
    relative_error: float | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the fields of the spec are among the others, its grid in words."""
        content = {
            "name": self.name,
            **vars(self.spec),
            **vars(self),
            "grid": self.spec.grid and str(self.spec.grid),
        }
        return {name: value for name, value in content.items() if name != "spec"}


@dataclass(frozen=True)
class FolderSize:
    """A compressed folder. other_bytes: of all tensors outside compressed layers."""

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
        totals = {
            name: getattr(self, name)
            for name in ("layer_bytes", "layer_dense_bytes", "bytes", "dense_bytes")
        }
        return {**vars(self), "layers": [layer.to_dict() for layer in self.layers], **totals}


def inspect_folder(folder: Path) -> FolderSize:
    """Read config.json and the headers, and check that they match; no weights are read."""
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
    entries = read_entries(config.get("modules"))
    stored = stored_tensors(weight_files(folder))
    biased = {name for name in entries if f"{name}.bias" in stored}
    check_stored(entries, stored, biased, indices=False)
    records = read_record(folder).layers if (folder / "compression.json").is_file() else ()
    errors = {record.name: record.relative_error for record in records}
    layers = []
    order = {name: index for index, name in enumerate(errors)}  # the model's, if it is recorded
    # Numbers by their length, then by their digits: Python does not convert thousands of them.
    numbered = sorted(
        entries, key=lambda name: [(len(p) * p.isdecimal(), p) for p in name.split(".")]
    )
    for name in sorted(
        numbered, key=lambda name: order.get(name, len(order))
    ):  # else layers.2 before layers.10
        spec = entries[name].spec
        out, width = spec.shape
        dtype = stored[f"{name}.{'weight_scale' if spec.grid else 'values'}"].meta.dtype
        leaves = [*spec.tensors(), *(["bias"] if name in biased else [])]
        stored_bytes = sum(stored[f"{name}.{leaf}"].meta.nbytes for leaf in leaves)
        dense_bytes = out * (width + (name in biased)) * dtype.itemsize
        layers.append(
            LayerSize(name, spec, FLOATS[dtype], stored_bytes, dense_bytes, errors.get(name))
        )
    other = sum(tensor.meta.nbytes for tensor in stored.values()) - sum(
        layer.bytes for layer in layers
    )
    return FolderSize(str(folder), config["version"], tuple(layers), other)


def kind_table(folder: FolderSize) -> Table:
    """A line for each kind of layer (q_proj, down_proj, …), with ranges over its layers, and the
    totals.
    """
    kinds: dict[tuple[str, str], list[LayerSize]] = {}
    for layer in folder.layers:
        kinds.setdefault((layer.name.rpartition(".")[2], layer.spec.kind), []).append(layer)
    lines = _table(folder, "kind", "layers")
    for (kind, _), layers in kinds.items():
        lines.add_row(escaped(kind), *_pattern(folder, layers), str(len(layers)), *_figures(layers))
    lines.add_section()
    gap = [""] * len(_pattern(folder, folder.layers))
    lines.add_row("compressed", *gap, str(len(folder.layers)), *_figures(folder.layers))
    other = folder.other_bytes
    lines.add_row("the rest", *gap, "", "", "", size(other), "100.0%" if other else "")
    lines.add_row(
        "all", *gap, "", "", "", size(folder.bytes), f"{folder.bytes / folder.dense_bytes:.1%}"
    )
    return lines


def layer_table(folder: FolderSize) -> Table:
    """A line for each layer. The part that all names begin with is in the heading."""
    names = [layer.name.split(".") for layer in folder.layers]
    heads = zip(*(name[:-1] for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, heads)]
    lines = _table(folder, f"layer of {'.'.join(shared)}" if shared else "layer")
    for name, layer in zip(names, folder.layers, strict=True):
        lines.add_row(
            escaped(".".join(name[len(shared) :])), *_pattern(folder, [layer]), *_figures([layer])
        )
    return lines


def _table(folder: FolderSize, text: str, *numbers: str) -> Table:
    kinds = {layer.spec.kind for layer in folder.layers}
    title = f"{folder.folder}: {len(folder.layers)} compressed layers" + (
        f", {kinds.pop()}" if len(kinds) == 1 else ""
    )
    pattern = ["pattern"] if _pattern(folder, folder.layers) else []
    return table([text, *pattern], [*numbers, "rank", "relative error", "bytes", "of dense"], title)


def _pattern(folder: FolderSize, layers: Sequence[LayerSize]) -> list[str]:
    """The cell of the pattern; none if all layers of the folder have the same."""
    if len({layer.spec.kind for layer in folder.layers}) > 1:
        return [layers[0].spec.kind]
    return []


def _figures(layers: Sequence[LayerSize]) -> list[str]:
    errors = [layer.relative_error for layer in layers if layer.relative_error is not None]
    stored = sum(layer.bytes for layer in layers)
    dense = sum(layer.dense_bytes for layer in layers)
    error = span(errors, "{:.2g}") if errors else ""
    return [
        span([layer.spec.rank for layer in layers]),
        error,
        size(stored),
        f"{stored / dense:.1%}",
    ]
