"""The layers of a compressed folder and their sizes: from config.json, compression.json and the file headers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasslefree.errors import CheckpointError
from hasslefree.folder.entries import QUANT_METHOD, Entry, check_version, read_entries
from hasslefree.folder.headers import ELEMENT_BYTES, Stored, read_headers, read_json, weight_files
from hasslefree.folder.record import read_record
from hasslefree.folder.verify import check_layers
from hasslefree.packed.spec import LayerSpec


@dataclass(frozen=True)
class LayerSize:
    """One compressed layer.

    Args:
        dtype: of the values, or of the grid's scales. bytes: of all its tensors. dense_bytes: of the dense layer in the
            same dtype. relative_error: from compression.json; None where the folder has no such file.
    """

    name: str
    spec: LayerSpec
    dtype: str
    bytes: int
    dense_bytes: int
    relative_error: float | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the fields of the spec are among the others, its grid in words."""
        grid = str(self.spec.grid) if self.spec.grid else None
        rest = {name: value for name, value in vars(self).items() if name not in ("name", "spec")}
        return {"name": self.name, **vars(self.spec), **rest, "grid": grid}


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
        return {
            "folder": self.folder,
            "version": self.version,
            "layers": [layer.to_dict() for layer in self.layers],
            "other_bytes": self.other_bytes,
            "layer_bytes": self.layer_bytes,
            "layer_dense_bytes": self.layer_dense_bytes,
            "bytes": self.bytes,
            "dense_bytes": self.dense_bytes,
        }


def inspect_folder(folder: Path) -> FolderSize:
    """Read config.json and the headers, and check that they match; no weights are read.

    Raises:
        CheckpointError: no local folder, a model that is not compressed, files that do not match config.json, or a
            damaged compression.json.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"the folder {folder} does not exist; a model on the hub must be downloaded first (hf download)"
        )
    config = read_json(folder / "config.json").get("quantization_config")
    if not isinstance(config, dict) or config.get("quant_method") != QUANT_METHOD:
        raise CheckpointError(f"{folder} is not a compressed model; give a folder that `hasslefree compress` wrote")
    check_version(config.get("version"), config.get("layout"))
    entries, stored = read_entries(config.get("modules")), read_headers(weight_files(folder))
    check_layers(entries, {name for name in entries if f"{name}.bias" in stored}, stored)
    errors = relative_errors(folder)
    layers = tuple(
        _layer_size(name, entries[name], stored, errors.get(name)) for name in sorted(entries, key=_by_number)
    )
    other = sum(tensor.size for tensor in stored.values()) - sum(layer.bytes for layer in layers)
    return FolderSize(str(folder), config["version"], layers, other)


def relative_errors(folder: Path) -> dict[str, float]:
    """The relative error of each layer that compression.json lists; empty where there is no such file."""
    if not (folder / "compression.json").is_file():
        return {}
    return {layer.name: layer.relative_error for layer in read_record(folder).layers}


def _layer_size(name: str, entry: Entry, stored: Mapping[str, Stored], relative_error: float | None) -> LayerSize:
    spec, (out, width), bias = entry.spec, entry.spec.shape, f"{name}.bias" in stored
    leaves = [*spec.tensors(), *(["bias"] if bias else [])]
    dtype = stored[f"{name}.{'weight_scale' if spec.grid else 'values'}"].dtype
    dense = out * (width + bias) * ELEMENT_BYTES[dtype]
    size = sum(stored[f"{name}.{leaf}"].size for leaf in leaves)
    return LayerSize(name, spec, dtype, size, dense, relative_error)


def _by_number(name: str) -> list[tuple[int, str]]:
    """A key that puts layers.2 before layers.10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
