"""A compressed folder as a table for the terminal: by kind of layer, or layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rich.table import Table

from hasslefree.folder.inspect import FolderSize, LayerSize
from hasslefree.tables import span, table
from hasslefree.units import size


def kind_table(found: FolderSize) -> Table:
    """A line for each kind of layer (q_proj, down_proj, …), with ranges over its layers, and the totals."""
    kinds: dict[tuple[str, str], list[LayerSize]] = {}
    for layer in found.layers:
        kinds.setdefault((layer.name.rpartition(".")[2], layer.spec.kind), []).append(layer)
    made = _table(found, "kind", "layers")
    for (kind, _), layers in kinds.items():
        made.add_row(kind, *_pattern(found, layers), str(len(layers)), *_figures(layers))
    made.add_section()
    gap = [""] * len(_pattern(found, found.layers))
    made.add_row("compressed", *gap, str(len(found.layers)), *_figures(found.layers))
    other, whole = found.other_bytes, found.layer_bytes + found.other_bytes
    made.add_row("the rest", *gap, "", "", "", size(other), "100.0%" if other else "")
    made.add_row("all", *gap, "", "", "", size(whole), f"{whole / (found.layer_dense_bytes + other):.1%}")
    return made


def layer_table(found: FolderSize) -> Table:
    """A line for each layer. What all names begin with stands above them."""
    names = [layer.name.split(".") for layer in found.layers]
    heads = zip(*(name[:-1] for name in names), strict=False)
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, heads)]
    made = _table(found, f"layer of {'.'.join(shared)}" if shared else "layer")
    for name, layer in zip(names, found.layers, strict=True):
        made.add_row(".".join(name[len(shared) :]), *_pattern(found, [layer]), *_figures([layer]))
    return made


def _table(found: FolderSize, text: str, *numbers: str) -> Table:
    """The pattern has a column only where layers differ in it."""
    kinds = {layer.spec.kind for layer in found.layers}
    title = f"{found.folder}: {len(found.layers)} compressed layers" + (f", {kinds.pop()}" if len(kinds) == 1 else "")
    pattern = ["pattern"] if _pattern(found, found.layers) else []
    return table([text, *pattern], [*numbers, "rank", "relative error", "bytes", "of dense"], title)


def _pattern(found: FolderSize, layers: Sequence[LayerSize]) -> list[str]:
    return [layers[0].spec.kind] if len({layer.spec.kind for layer in found.layers}) > 1 else []


def _figures(layers: Sequence[LayerSize]) -> list[str]:
    errors = [layer.relative_error for layer in layers if layer.relative_error is not None]
    stored, dense = sum(layer.bytes for layer in layers), sum(layer.dense_bytes for layer in layers)
    error = span(errors, "{:.2g}") if errors else ""
    return [span([layer.spec.rank for layer in layers]), error, size(stored), f"{stored / dense:.1%}"]
