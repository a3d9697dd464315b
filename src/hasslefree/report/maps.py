"""Maps of a folder's layers: blocks down, kinds of layer across, and a figure in each cell."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hasslefree.checkpoint.record import Record
from hasslefree.report.content import OUTSIDE, places
from hasslefree.report.drawing import Drawing, Row, vega_lite
from hasslefree.units import significant


@dataclass(frozen=True)
class Map:
    """The format of a map of one figure.

    Args:
        title: of the chart.
        figure: the title of the legend and of the column.
        percent: show values in per cent.
        digits: the number of significant digits of a value.
        logarithmic: use a logarithmic scale of colours from the smallest figure above 0. A linear
            scale begins at 0.
        joined: combines the figures of the experts of a block, which share a cell.
    """

    title: str
    figure: str
    percent: bool = False
    digits: int = 2
    logarithmic: bool = False
    joined: Callable[[Iterable[float]], float] = statistics.fmean

    def text(self, value: float) -> str:
        """A value as text: in a cell, in the table and in the list of the selected layer."""
        if self.percent:
            return f"{significant(100 * value, self.digits):g} %"
        return f"{significant(value, self.digits):.15g}"


MAPS = {
    "relative-error": Map("Relative error", "relative error", percent=True, logarithmic=True),
    "bits": Map("Bits of S", "bits of S"),
    "bytes": Map("Stored bytes: S, scales and L", "kB", digits=3, logarithmic=True, joined=sum),
    "kept": Map("Parameters kept", "kept", percent=True),
    "rank": Map("Rank of L", "rank of L", digits=3),
    "sensitivity": Map("Sensitivity", "nats per token", logarithmic=True, joined=sum),
}


def figures(record: Record) -> dict[str, dict[str, float]]:
    """The figures of each map and layer.

    "bits" leaves out layers without a grid, and "kept" those without pruning. "rank" is empty if
    all ranks are 0.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in MAPS}
    found["sensitivity"].update(record.sensitivities or {})
    for layer in record.layers:
        spec = layer.spec
        found["relative-error"][layer.name] = layer.relative_error
        if layer.bytes:
            found["bytes"][layer.name] = layer.bytes / 1000
        if spec.grid is not None:
            found["bits"][layer.name] = spec.grid.stored_bits
        if spec.pattern != "dense":
            found["kept"][layer.name] = spec.parameters / spec.dense_parameters
        found["rank"][layer.name] = spec.rank
    if not any(found["rank"].values()):
        found["rank"].clear()
    return found


def cells(values: Mapping[str, float], form: Map) -> list[Row]:
    """A row for each block and kind of layer. Its "layer" is the one with the largest value."""
    layers: dict[tuple[int, str], list[str]] = {}
    for name, cell in places(values).items():
        layers.setdefault(cell, []).append(name)
    rows = []
    for (block, kind), names in layers.items():
        value = significant(form.joined(values[name] for name in names))
        largest = max(names, key=values.__getitem__)
        text = form.text(value)
        rows.append({"layer": largest, "block": block, "kind": kind, "value": value, "text": text})
    return rows


def layer_map(
    name: str,
    values: Mapping[str, float],
    selected: str = "",
    others: Iterable[float] = (),
) -> Drawing:
    """Draw one of `MAPS`.

    Args:
        values: the figure of each layer.
        selected: the marked layer.
        others: figures of other folders, whose maps have the same scale.
    """
    form = MAPS[name]
    rows = cells(values, form)
    shown = [row["value"] for row in rows]
    positive = [value for value in [*others, *shown] if value > 0] or [1.0]
    least = min(positive)
    most = max(positive)
    if form.logarithmic:
        most = max(most, 1.01 * least)  # a scale needs a range
    blocks = {row["block"] for row in rows}
    chart = vega_lite(
        "map.json",
        height=22 * len(blocks),
        form=form,
        least=least,
        most=most,
        outside=OUTSIDE,
        selected=selected,
    )
    return Drawing(form.title, chart, rows)
