"""Maps of a folder's layers: blocks down, kinds of layer across."""

from collections.abc import Iterable
from typing import Any

import altair as alt

from hasslefree.checkpoint.record import LayerRecord
from hasslefree.report.content import error_range, places
from hasslefree.report.drawing import HUES, ROWS, Drawing
from hasslefree.units import significant

# Up to this share of the scale, white text on viridis has a contrast of 4.5 or more; from there on
# black text has.
WHITE_UP_TO = 0.435


def layer_rows(layers: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """The figures of each layer that the charts show.

    Parts of the weight are in per cent of out × in. bits: of the codes of S, if it has a grid;
    "bits per weight": of all that is stored for the layer, per entry of the dense weight.
    """
    records = {layer.name: layer for layer in layers}
    rows = []
    for name, (block, kind) in places(records, merge_experts=True).items():
        spec = records[name].spec
        size = spec.dense_parameters
        row = {
            "layer": name,
            "block": block,
            "kind": kind,
            "error": records[name].relative_error,
            "non-zeros of S": significant(100 * spec.nonzeros / size),
            "factors of L": significant(100 * (spec.parameters - spec.nonzeros) / size),
            "rank": spec.rank,
        }
        if spec.grid is not None:
            row["bits"] = spec.grid.bits
        if records[name].bytes:
            row["bits per weight"] = significant(8 * records[name].bytes / size)
        rows.append(row)
    return rows


def cells(**means: str) -> alt.Chart:
    """A row for each block and kind; the experts of a block share one, which leads to the worst."""
    worst = alt.AggregatedFieldDef(op="argmax", field="error", **{"as": "worst"})
    chart = alt.Chart(ROWS).transform_aggregate([worst], groupby=["block", "kind"], **means)
    return chart.transform_calculate(layer="datum.worst.layer")


def heat_map(
    layers: Iterable[LayerRecord], errors: tuple[float, float] | None = None, selected: str = ""
) -> Drawing:
    """Draw the relative error of every layer.

    Args:
        errors: the ends of the scale; None for the least and the largest error of these layers.
        selected: the layer that is marked.
    """
    rows = layer_rows(layers)
    least, most = errors or error_range([row["error"] for row in rows])
    most = max(most, 1.01 * least)  # a scale needs a range
    legend = alt.Legend(title="relative error", format=".2~p", gradientLength=200, tickCount=4)
    scale = alt.Scale(type="log", scheme="viridis", domain=[least, most], clamp=True)
    dark = alt.datum.error < least * (most / least) ** WHITE_UP_TO
    chart = _map(
        rows,
        cells(error="mean(error)").transform_calculate(shown=f"max(datum.error, {least})"),
        alt.Color("shown:Q", scale=scale, legend=legend),
        alt.Text("error:Q", format=".2~p"),
        dark,
        alt.Tooltip("error:Q", title="relative error", format=".4~g"),
        selected,
    )
    return Drawing("Relative error", chart, rows)


def bits_map(layers: Iterable[LayerRecord], selected: str = "") -> Drawing:
    """Draw the bits of the codes of S in every layer that has a grid."""
    rows: list[dict[str, Any]] = []
    bits: set[int] = set()
    for row in layer_rows(layers):
        if "bits" in row:
            rows.append(row)
            bits.add(row["bits"])
    least = min(bits)
    most = max(*bits, least + 1)  # A scale needs a range.
    legend = alt.Legend(title="bits", format="d", values=list(range(least, most + 1)))
    scale = alt.Scale(scheme="viridis", domain=[least, most])
    dark = alt.datum.bits < least + (most - least) * WHITE_UP_TO
    chart = _map(
        rows,
        cells(error="mean(error)", bits="mean(bits)", stored="mean(bits per weight)"),
        alt.Color("bits:Q", scale=scale, legend=legend),
        alt.Text("bits:Q", format=".2~f"),
        dark,
        alt.Tooltip("stored:Q", title="bits per weight, with scales and L", format=".3~g"),
        selected,
    )
    note = "More bits went to the layers whose rounding changes the predictions most."
    if len(bits) == 1:
        note = ""
    return Drawing("Bits of S", chart, rows, note)


def _map(
    rows: list[dict[str, Any]],
    data: alt.Chart,
    colour: alt.Color,
    text: alt.Text,
    dark: Any,
    figure: alt.Tooltip,
    selected: str,
) -> alt.LayerChart | alt.FacetChart:
    """Draw a coloured cell with a number for each block and kind, and mark one of them.

    Args:
        data: the rows after `cells`.
        dark: the condition on which a cell is so dark that its text is white.
        figure: the value that the tooltip shows below the layer's name.
    """
    parameter = alt.param(name="layer", value=selected)
    axis = alt.Axis(orient="top", labelAngle=-35, labelLimit=110)
    data = data.encode(
        alt.X("kind:N", sort=None, title=None, axis=axis),
        alt.Y("block:O"),
        tooltip=["layer:N", figure],
    )
    text_colour = alt.condition(dark, alt.value("#fff"), alt.value("#000"))
    shown = data.mark_rect(cursor="pointer").encode(color=colour)
    numbers = data.mark_text(fontSize=10, cursor="pointer").encode(text=text, color=text_colour)
    frame = data.mark_rect(fill=None, stroke=HUES[1], strokeWidth=3).transform_filter(
        alt.datum.layer == parameter
    )
    blocks = {row["block"] for row in rows}
    chart = alt.layer(shown, numbers, frame).properties(width=alt.Step(44), height=22 * len(blocks))
    return chart.add_params(parameter)
