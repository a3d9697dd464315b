"""The charts of a report. Each is defined once, as Vega-Lite, for the page as well as for PNG and
SVG files.

Colours are variables of page.css, so that charts on the page follow the reader's colour scheme.
Files have the colours of the light scheme.
"""

import functools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import altair as alt
import vl_convert

from hasslefree.checkpoint.output import write_whole
from hasslefree.checkpoint.record import LayerRecord
from hasslefree.errors import MemoryShortError
from hasslefree.escaping import escaped, escaped_within
from hasslefree.report.content import Content, Run, error_range, place, places
from hasslefree.units import significant

ASSETS = Path(__file__).parent / "assets"

# The most numbers in the curves of all layers of a report, about seven bytes each on the page.
POINTS = 12_000

# Up to this share of the scale, white text on viridis has a contrast of 4.5 or more; from there on
# black text has.
WHITE_UP_TO = 0.435

ROWS = alt.NamedData("rows")
WHOLE = alt.Axis(
    grid=False, tickMinStep=1, labelExpr="datum.value % 1 ? '' : datum.label", format="d"
)
INK, SOFT, LINE, CARD = (f"var(--{name})" for name in ("ink", "soft", "line", "card"))
HUES = [
    f"var(--{name})"
    for name in ("accent", "second", "third", "fourth", "fifth", "sixth", "seventh")
]
DASHES = [dash for dash in ([9999, 0], [6, 3], [2, 2], [8, 3, 2, 3]) for _ in HUES]

_TEXT = {
    "labelColor": SOFT,
    "titleColor": SOFT,
    "titleFontWeight": "normal",
    "labelFontSize": 11,
    "titleFontSize": 11,
}
CONFIG: dict[str, Any] = {
    "background": CARD,
    "font": "sans-serif",
    "axis": {**_TEXT, "gridColor": LINE, "domainColor": LINE, "tickColor": LINE},
    "legend": {**_TEXT, "labelColor": INK, "orient": "bottom", "labelLimit": 300},
    "title": {"color": INK, "anchor": "start"},
    "view": {"stroke": None},
    "range": {"category": HUES},
}


@dataclass(frozen=True)
class Drawing:
    """A chart and its data, which it calls "rows". note: how to read it; empty where the title is
    enough.
    """

    title: str
    chart: alt.Chart | alt.LayerChart | alt.FacetChart
    rows: list[dict[str, Any]]
    note: str = ""

    def on_page(self) -> dict[str, Any]:
        """Vega-Lite as wide as its place on the page, without `CONFIG`, which the charts of a page
        share.
        """
        return {
            **self._definition(),
            "width": "container",
            "datasets": {"rows": escaped_within(self.rows)},
        }

    def svg(self) -> str:
        """The chart as a file of its own; the same data give the same text."""
        light = dict(
            re.findall(
                r"--(\w+): (#\w+)", (ASSETS / "page.css").read_text("utf-8").partition("@media")[0]
            )
        )
        definition = json.dumps(
            {**self._definition(), "config": CONFIG, "title": escaped(self.title)}
        )
        coloured = json.loads(
            re.sub(r"var\(--(\w+)\)", lambda match: light.get(match[1], match[0]), definition)
        )
        svg = _vega_svg(json.dumps({**coloured, "datasets": {"rows": escaped_within(self.rows)}}))
        ids: dict[str, int] = {}  # Vega numbers clips and gradients from the start of the process
        return re.sub(
            r'(id="|url\(#)((?:clip|gradient_)\d+)',
            lambda match: f"{match[1]}part{ids.setdefault(match[2], len(ids))}",
            svg,
        )

    def _definition(self) -> dict[str, Any]:
        return escaped_within({**self.chart.to_dict(), "config": {}, "description": self.title})


@functools.cache
def _engine_process() -> int:
    """The process in which vl-convert runs JavaScript, in a thread. A forked child has no such
    thread.
    """
    return os.getpid()


def png(svg: str) -> bytes:
    return vl_convert.svg_to_png(svg, scale=2)


def _vega_svg(definition: str) -> str:
    if (
        _engine_process() == os.getpid()
        and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    ):
        return vl_convert.vegalite_to_svg(definition)
    script = (
        "import sys, vl_convert; sys.stdout.write(vl_convert.vegalite_to_svg(sys.stdin.read()))"
    )
    command = [sys.executable, "-X", "utf8", "-c", script]
    done = subprocess.run(
        command, input=definition, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:  # V8 reserves more than 64 GB of addresses, and aborts if it gets none
        raise MemoryShortError(
            "the charts could not be drawn: lift the limit on address space (ulimit -v), and repeat"
        )
    return done.stdout


def write_figures(content: Content, folder: Path) -> list[Path]:
    """Every chart of a report, as PNG and as SVG, in a folder that is made if need be."""
    drawings = {file_name(name): drawing for name, drawing in comparisons(content).items()}
    for run in content.runs:
        drawings |= {
            f"{name}-{file_name(run.name)}": drawing
            for name, drawing in run_charts(run, content).items()
        }
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings.items():
        svg = drawing.svg()
        write_whole(folder / f"{name}.svg", svg)
        write_whole(folder / f"{name}.png", png(svg))
    return [folder / f"{name}.{suffix}" for name in drawings for suffix in ("png", "svg")]


def file_name(text: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text)


def run_charts(run: Run, content: Content, selected: str = "") -> dict[str, Drawing]:
    """The charts of one folder by name, in the colours of `content`. selected: the marked layer; ""
    for all curves.
    """
    layers, record = [layer for other in content.runs for layer in other.record.layers], run.record
    most = max(12, POINTS // (2 * len(layers)))
    errors = error_range([layer.relative_error for layer in layers])
    charts = {"relative-error": heat_map(record.layers, errors, selected)}
    histories = {layer.name: layer.history for layer in record.layers}
    if any(len(history) > 1 for history in histories.values()):
        values = histories.values() if selected else [list(chain.from_iterable(histories.values()))]
        note = (
            "What the method minimises, as a share of the layer's output, each time that it was"
            " measured or estimated."
        )
        x, y = "progress of the solver", _value("relative error, damped", values)
        charts["rounds"] = _curves("Error during the run", histories, most, selected, x, y, note)
    if run.spectra:
        in_order = {layer.name: run.spectra.get(layer.name, ()) for layer in record.layers}
        y = alt.Y("share:Q", title="share of the largest", scale=alt.Scale(domain=[0, 1]))
        x = "singular value, largest first"
        charts["spectra"] = _curves("Singular values of L", in_order, most, selected, x, y)
    if record.sensitivities:  # those of the experts of a block are summed
        kinds = places(record.sensitivities, merge_experts=True).items()
        lines = [(kind, block, record.sensitivities[name]) for name, (block, kind) in kinds]
        charts["sensitivity"] = _by_block(
            "Sensitivity to pruning, by kind of layer", "sum", "nats per token", lines
        )
    return charts | {"parameters": parameters(record.layers)}


def comparisons(content: Content) -> dict[str, Drawing]:
    """The charts that compare models, by name."""
    charts = {f"perplexity-{text}": drawing for text, drawing in frontiers(content).items()}
    if len(content.runs) > 1:
        layers = ((run.name, layer) for run in content.runs for layer in run.record.layers)
        errors = [(name, place(layer.name)[0], layer.relative_error) for name, layer in layers]
        charts["comparison"] = _by_block(
            "Mean relative error of each block", "mean", "mean relative error", errors
        )
    return charts


def heat_map(
    layers: Iterable[LayerRecord], errors: tuple[float, float] | None = None, selected: str = ""
) -> Drawing:
    """The relative error of every layer: blocks down, kinds across. errors: the ends of the scale;
    None: those here.
    """
    rows = layer_rows(layers)
    least, most = errors or error_range([row["error"] for row in rows])
    most = max(most, 1.01 * least)  # a scale needs a range
    parameter = alt.param(name="layer", value=selected)
    cells = _cells(error="mean(error)").encode(
        alt.X(
            "kind:N",
            sort=None,
            title=None,
            axis=alt.Axis(orient="top", labelAngle=-35, labelLimit=110),
        ),
        alt.Y("block:O"),
        tooltip=["layer:N", alt.Tooltip("error:Q", title="relative error", format=".4~g")],
    )
    scale = alt.Scale(type="log", scheme="viridis", domain=[least, most], clamp=True)
    legend = alt.Legend(title="relative error", format=".2~p", gradientLength=200, tickCount=4)
    dark = alt.datum.error < least * (most / least) ** WHITE_UP_TO
    text = alt.Text("error:Q", format=".2~p")
    colour = alt.condition(dark, alt.value("#fff"), alt.value("#000"))
    shown = cells.transform_calculate(shown=f"max(datum.error, {least})").mark_rect(
        cursor="pointer"
    )
    frame = cells.mark_rect(fill=None, stroke=HUES[1], strokeWidth=3).transform_filter(
        alt.datum.layer == parameter
    )
    chart = alt.layer(
        shown.encode(color=alt.Color("shown:Q", scale=scale, legend=legend)),
        cells.mark_text(fontSize=10, cursor="pointer").encode(text=text, color=colour),
        frame,
    ).properties(width=alt.Step(44), height=22 * len({row["block"] for row in rows}))
    return Drawing("Relative error", chart.add_params(parameter), rows)


def layer_rows(layers: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """What the charts show of each layer; the parameters in per cent of out × in."""
    records = {layer.name: layer for layer in layers}
    return [
        {
            "layer": name,
            "block": block,
            "kind": kind,
            "error": records[name].relative_error,
            "non-zeros of S": significant(100 * spec.nonzeros / spec.dense_parameters),
            "factors of L": significant(
                100 * (spec.parameters - spec.nonzeros) / spec.dense_parameters
            ),
            "rank": spec.rank,
        }
        for name, (block, kind) in places(records, merge_experts=True).items()
        if (spec := records[name].spec)
    ]


def _cells(**means: str) -> alt.Chart:
    """A row for each block and kind. The experts of a block share one, which leads to the worst of
    them.
    """
    worst = alt.AggregatedFieldDef(op="argmax", field="error", **{"as": "worst"})
    cells = alt.Chart(ROWS).transform_aggregate([worst], groupby=["block", "kind"], **means)
    return cells.transform_calculate(layer="datum.worst.layer")


def _curves(
    title: str,
    values: Mapping[str, Sequence[float]],
    most: int,
    selected: str,
    x: str,
    y: alt.Y,
    note: str = "",
) -> Drawing:
    """A line for each layer, in the colour of its kind."""
    kinds = places(values, merge_experts=True)
    rows = [
        {"layer": name, "kind": kinds[name][1], **thinned(curve, most)}
        for name, curve in values.items()
    ]
    longest = max([2, *(len(curve) for curve in values.values())])
    parameter = alt.param(name="layer", value=selected)
    lines = alt.Chart(ROWS, width=560, height=240).transform_filter(
        (parameter == "") | (alt.datum.layer == parameter)
    )
    lines = lines.transform_calculate(largest="datum.value[0]").transform_flatten(["step", "value"])
    lines = lines.transform_calculate(share="datum.value / datum.largest").transform_filter(
        alt.datum.value > 0
    )
    mark = {"point": {"size": 25}} if selected else {"strokeWidth": 1, "strokeOpacity": 0.6}
    chart = lines.mark_line(**mark).encode(
        alt.X("step:Q", title=x, axis=WHOLE, scale=alt.Scale(domain=[1, longest])),
        y,
        detail="layer:N",
        tooltip=["layer:N", alt.Tooltip("step:Q", title=x), alt.Tooltip("value:Q", format=".4~g")],
        **_series("kind", (kind for _, kind in kinds.values()), legend=not selected),
    )
    return Drawing(title, chart.add_params(parameter), rows, note)


def thinned(values: Sequence[float], most: int) -> dict[str, list[float]]:
    """At most this many of the values, evenly spread, with the first and the last; and their steps,
    from 1.
    """
    count = len(values)
    kept = (
        [index * (count - 1) // (most - 1) for index in range(most)]
        if count > most
        else range(count)
    )
    return {
        "step": [index + 1 for index in kept],
        "value": [significant(values[index], 5) for index in kept],
    }


def parameters(layers: Iterable[LayerRecord]) -> Drawing:
    """What each layer keeps: the non-zeros of S, the factors of L on top, and the rank."""
    rows, shares = layer_rows(layers), ["non-zeros of S", "factors of L"]
    ranks = alt.Scale(domain=[0, max([1, *(row["rank"] for row in rows)])])
    cells = _cells(**{name: f"mean({name})" for name in (*shares, "rank")}).encode(
        alt.X(
            "layer:N",
            sort=None,
            title="layer, in the order of the model",
            axis=alt.Axis(labels=False, ticks=False),
        ),
        tooltip=["layer:N", *(f"{share}:Q" for share in shares), "rank:Q"],
    )
    bars = cells.transform_fold([*shares], ["part", "share"]).mark_bar(cursor="pointer")
    bars = bars.encode(
        alt.Y("share:Q", title="% of the dense weight"),
        alt.Color("part:N", sort=[*shares], title=None),
        alt.Order("part:N", sort="descending"),
    )
    points = cells.mark_point(color=INK, filled=True, size=16, cursor="pointer")
    points = points.encode(alt.Y("rank:Q", title="rank of L (points)", axis=WHOLE, scale=ranks))
    chart = alt.layer(bars, points).resolve_scale(y="independent").properties(width=560, height=240)
    return Drawing("Parameters kept, in per cent of the dense weight's", chart, rows)


def _by_block(title: str, total: str, y: str, values: Iterable[tuple[str, int, float]]) -> Drawing:
    """Lines over the blocks. total: of the values of a line in a block; values: the line, the block
    and the value.
    """
    rows = [
        dict[str, Any](line=line, block=block, value=significant(value))
        for line, block, value in values
    ]
    lines = alt.Chart(ROWS, width=560, height=240)
    lines = lines.transform_aggregate(value=f"{total}(value)", groupby=["line", "block"])
    chart = lines.transform_filter(alt.datum.value > 0).mark_line(point={"size": 25})
    chart = chart.encode(
        alt.X("block:Q", axis=WHOLE, scale=alt.Scale(nice=False)),
        _value(y, [[row["value"] for row in rows]]),
        tooltip=["line:N", "block:Q", alt.Tooltip("value:Q", title=y, format=".4~g")],
        **_series("line", (row["line"] for row in rows)),
    )
    return Drawing(title, chart, rows)


def _series(field: str, names: Iterable[str], legend: bool = True) -> dict[str, Any]:
    """A colour for each line, and dashes where the colours come again."""
    domain = list(dict.fromkeys(names))
    shared: dict[str, Any] = {"title": None, "legend": _legend(domain) if legend else None}
    return {
        "color": alt.Color(f"{field}:N", scale=alt.Scale(domain=domain), **shared),
        "strokeDash": alt.StrokeDash(
            f"{field}:N", scale=alt.Scale(domain=domain, range=DASHES), **shared
        ),
    }


def _legend(names: Iterable[str]) -> alt.Legend:
    """As many names in a row as fit into 300 pixels, the width of a phone."""
    return alt.Legend(columns=max(1, 300 // (30 + 6 * max(map(len, names), default=0))))


def _value(
    title: str, curves: Iterable[Iterable[float]], field: str = "value", padding: int = 0
) -> alt.Y:
    """The upward axis: logarithmic where a curve spans more than a decade. A linear one need not
    begin at 0.
    """
    spans = [
        (min(values), max(values))
        for curve in curves
        if (values := [value for value in curve if value > 0])
    ]
    if any(most > 10 * least for least, most in spans):
        scale, axis = alt.Scale(type="log", nice=False, padding=padding), alt.Axis(tickCount=4)
    else:
        scale, axis = alt.Scale(zero=False, padding=padding), alt.Axis()
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=axis)


def frontiers(content: Content) -> dict[str, Drawing]:
    """A chart for each text on which at least two models were evaluated whose bytes are known."""
    models = [
        (f"{Path(model).name or model} (dense)", dense_bytes(model, content.runs), INK, evaluation)
        for model, evaluation in content.others.items()
    ]
    models += [
        (run.name, run.sizes.bytes, hue, run.evaluation)
        for run, hue in zip(content.runs, cycle(HUES))
    ]
    texts: dict[str, list[dict[str, Any]]] = {}
    for name, size, colour, evaluation in models:
        if size is not None:
            for text, perplexity in evaluation.perplexity.items():
                point = {"model": name, "bytes": size, "perplexity": perplexity, "colour": colour}
                texts.setdefault(text, []).append(point)
    return {text: _frontier(text, points) for text, points in texts.items() if len(points) > 1}


def dense_bytes(model: str, runs: Iterable[Run]) -> int | None:
    """The bytes of the dense model from which one of the folders was made; None for any other
    model.
    """
    for run in runs:
        if run.record.model == model or Path(run.record.model).resolve() == Path(model).resolve():
            return run.sizes.dense_bytes
    return None


def _frontier(text: str, points: list[dict[str, Any]]) -> Drawing:
    """Perplexity on a text against the bytes of the weights."""
    names, colours = ([point[field] for point in points] for field in ("model", "colour"))
    shared: dict[str, Any] = {"title": None, "legend": _legend(names)}
    wide = alt.Scale(zero=False, padding=15)
    chart = alt.Chart(ROWS, width=560, height=280).mark_point(size=120, filled=True, opacity=1)
    chart = chart.encode(
        alt.X("bytes:Q", title="bytes of the weights", axis=alt.Axis(format="~s"), scale=wide),
        _value("perplexity", [[point["perplexity"] for point in points]], "perplexity", padding=15),
        alt.Color("model:N", scale=alt.Scale(domain=names, range=colours), **shared),
        alt.Shape("model:N", scale=alt.Scale(domain=names), **shared),
        tooltip=["model:N", alt.Tooltip("bytes:Q", format=","), "perplexity:Q"],
    )
    note = "Fewer bytes to the left, lower perplexity below: both are better."
    return Drawing(f"Perplexity on {text} against size", chart, points, note)
