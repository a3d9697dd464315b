"""The layers of a model as a grid: blocks down, kinds of layer across."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hasslefree.folder.record import LayerRecord

_BLOCK = re.compile(r"(?:.*?\.)?(\d+)\.(.+)")


@dataclass(frozen=True)
class LayerMap:
    """blocks: their numbers, ascending. kinds: such as q_proj, in order of appearance. cells: (block, kind) → layer."""

    blocks: tuple[int, ...]
    kinds: tuple[str, ...]
    cells: dict[tuple[int, str], LayerRecord]


def place(name: str) -> tuple[int, str]:
    """The block of a layer and its kind: model.layers.3.mlp.up_proj → 3, mlp.up_proj. Without a number, block 0."""
    found = _BLOCK.fullmatch(name)
    return (int(found[1]), found[2]) if found else (0, name)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The last part of each name where that tells them apart, else all of it."""
    leaves: dict[str, set[str]] = {}
    for name in names:
        leaves.setdefault(name.rpartition(".")[2], set()).add(name)
    return {name: leaf if len(alike) == 1 else name for leaf, alike in leaves.items() for name in alike}


def layer_map(layers: Iterable[LayerRecord]) -> LayerMap:
    """The grid of some layers."""
    found = [(*place(layer.name), layer) for layer in layers]
    short = short_names(kind for _, kind, _ in found)
    cells = {(block, short[kind]): layer for block, kind, layer in found}
    blocks = tuple(sorted({block for block, _ in cells}))
    return LayerMap(blocks, tuple(dict.fromkeys(kind for _, kind in cells)), cells)


def by_kind(values: Mapping[str, float]) -> dict[str, dict[int, float]]:
    """Figures of layers as kind → block → figure; those of the experts of a mixture are summed."""
    found = [(*place(name), value) for name, value in values.items()]
    merged = [(block, re.sub(r"\.\d+(?=\.)", "", kind), value) for block, kind, value in found]
    short = short_names(kind for _, kind, _ in merged)
    lines: dict[str, dict[int, float]] = {}
    for block, kind, value in merged:
        line = lines.setdefault(short[kind], {})
        line[block] = line.get(block, 0.0) + value
    return lines


def shade(error: float, least: float, most: float) -> float:
    """Where an error lies between the least and the most, from 0 to 1, on a logarithmic scale."""
    if most <= least or error <= least or least <= 0:
        return 0.0 if error < most else 1.0
    return min(math.log(error / least) / math.log(most / least), 1.0)


def error_range(layers: Iterable[LayerRecord]) -> tuple[float, float]:
    """The least error above 0 and the most; both 1 where all are 0."""
    errors = [layer.relative_error for layer in layers if layer.relative_error > 0] or [1.0]
    return min(errors), max(errors)
