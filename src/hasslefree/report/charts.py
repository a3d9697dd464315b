"""The charts of a report: those of one folder, and those that compare models."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import altair as alt

from hasslefree.checkpoint.output import write_whole
from hasslefree.checkpoint.record import LayerRecord
from hasslefree.report.content import Content, Parts, Run, error_range, place, places
from hasslefree.report.drawing import HUES, INK, ROWS, Drawing, png
from hasslefree.report.maps import bits_map, cells, heat_map, layer_rows
from hasslefree.units import significant

# The most numbers in the curves of all layers of a report, about seven bytes each on the page.
POINTS = 12_000
# A dash for each line, in the order of lines: the colours come again after `HUES`.
_PATTERNS = ([9999, 0], [6, 3], [2, 2], [8, 3, 2, 3])
DASHES = [dash for dash in _PATTERNS for _ in HUES]
WHOLE = alt.Axis(
    grid=False, tickMinStep=1, labelExpr="datum.value % 1 ? '' : datum.label", format="d"
)
# The width of a phone, without margins, in which a legend must fit.
LEGEND_PIXELS = 300


def write_figures(content: Content, folder: Path) -> list[Path]:
    """Write every chart of a report as SVG and PNG, in a folder that is made if need be."""
    drawings: dict[str, Drawing] = {}
    for name, drawing in comparisons(content).items():
        drawings[file_name(name)] = drawing
    for run in content.runs:
        for name, drawing in run_charts(run, content).items():
            drawings[f"{name}-{file_name(run.name)}"] = drawing
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, drawing in drawings.items():
        svg = drawing.svg()
        files += [folder / f"{name}.png", folder / f"{name}.svg"]
        write_whole(folder / f"{name}.svg", svg)
        write_whole(folder / f"{name}.png", png(svg))
    return files


def file_name(text: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text)


def run_charts(
    run: Run,
    content: Content,
    selected: str = "",
) -> dict[str, Drawing]:
    """Draw the charts of one folder, by name.

    Args:
        content: all folders of the report, whose errors share one scale.
        selected: the marked layer; "" for the curves of all layers.
    """
    record = run.record
    errors: list[float] = []
    for other in content.runs:
        errors.extend(layer.relative_error for layer in other.record.layers)
    most = max(12, POINTS // (2 * len(errors)))
    charts = {"relative-error": heat_map(record.layers, error_range(errors), selected)}
    parts = Parts.of(layer.spec for layer in record.layers)
    if parts.quantised:
        charts["bits"] = bits_map(record.layers, selected)
    if any(len(layer.history) > 1 for layer in record.layers):
        charts["rounds"] = _objectives(record.layers, most, selected)
    if run.spectra:
        charts["spectra"] = _spectra(run, most, selected)
    if record.sensitivities:
        charts["sensitivity"] = _sensitivities(record.sensitivities)
    if parts.sparse or parts.low_rank:
        charts["parameters"] = parameters(record.layers)
    return charts


def comparisons(content: Content) -> dict[str, Drawing]:
    """Draw the charts that compare models, by name."""
    charts: dict[str, Drawing] = {}
    for text, drawing in frontiers(content).items():
        charts[f"perplexity-{text}"] = drawing
    if len(content.runs) > 1:
        errors: list[tuple[str, int, float]] = []
        for run in content.runs:
            for layer in run.record.layers:
                errors.append((run.name, place(layer.name)[0], layer.relative_error))
        title = "Mean relative error of each block"
        charts["comparison"] = _by_block(title, "mean", "mean relative error", errors)
    return charts


def _objectives(
    layers: Sequence[LayerRecord],
    most: int,
    selected: str,
) -> Drawing:
    """Draw the objective of the method during the run, layer by layer."""
    histories = {layer.name: layer.history for layer in layers}
    curves = list(histories.values())
    if not selected:  # All curves share one axis.
        curves = [tuple(itertools.chain.from_iterable(curves))]
    note = (
        "What the method minimises, as a share of the layer's output, each time that it was"
        " measured or estimated."
    )
    y = _value("relative error, damped", curves)
    x = "progress of the solver"
    return _curves("Error during the run", histories, most, selected, x, y, note)


def _spectra(
    run: Run,
    most: int,
    selected: str,
) -> Drawing:
    """Draw the singular values of L, layer by layer."""
    spectra = {layer.name: run.spectra.get(layer.name, ()) for layer in run.record.layers}
    y = alt.Y("share:Q", title="share of the largest", scale=alt.Scale(domain=[0, 1]))
    x = "singular value, largest first"
    return _curves("Singular values of L", spectra, most, selected, x, y)


def _sensitivities(sensitivities: Mapping[str, float]) -> Drawing:
    """Draw the sensitivities by block; those of the experts of a block are summed."""
    lines: list[tuple[str, int, float]] = []
    for name, (block, kind) in places(sensitivities, merge_experts=True).items():
        lines.append((kind, block, sensitivities[name]))
    return _by_block("Sensitivity, by kind of layer", "sum", "nats per token", lines)


def _curves(
    title: str,
    values: Mapping[str, Sequence[float]],
    most: int,
    selected: str,
    x: str,
    y: alt.Y,
    note: str = "",
) -> Drawing:
    """Draw a line for each layer, in the colour of its kind.

    Args:
        values: the curve of each layer.
        most: the most points of a line.
    """
    kinds = places(values, merge_experts=True)
    rows: list[dict[str, Any]] = []
    lines_shown: list[str] = []
    longest = 2
    for name, curve in values.items():
        _, kind = kinds[name]
        lines_shown.append(kind)
        rows.append({"layer": name, "kind": kind, **thinned(curve, most)})
        longest = max(longest, len(curve))
    parameter = alt.param(name="layer", value=selected)
    lines = alt.Chart(ROWS, width=560, height=240)
    lines = lines.transform_filter((parameter == "") | (alt.datum.layer == parameter))
    lines = lines.transform_calculate(largest="datum.value[0]")
    lines = lines.transform_flatten(["step", "value"])
    lines = lines.transform_calculate(share="datum.value / datum.largest")
    lines = lines.transform_filter(alt.datum.value > 0)
    mark: dict[str, Any] = {"strokeWidth": 1, "strokeOpacity": 0.6}
    if selected:
        mark = {"point": {"size": 25}}
    steps = alt.Scale(domain=[1, longest])
    shown_step = alt.Tooltip("step:Q", title=x)
    shown_value = alt.Tooltip("value:Q", format=".4~g")
    chart = lines.mark_line(**mark).encode(
        alt.X("step:Q", title=x, axis=WHOLE, scale=steps),
        y,
        detail="layer:N",
        tooltip=["layer:N", shown_step, shown_value],
        **_series("kind", lines_shown, legend=not selected),
    )
    return Drawing(title, chart.add_params(parameter), rows, note)


def thinned(values: Sequence[float], most: int) -> dict[str, list[float]]:
    """At most this many of the values, evenly spread, with the first and the last; and their steps,
    from 1.
    """
    count = len(values)
    kept: Sequence[int] = range(count)
    if count > most:
        kept = [index * (count - 1) // (most - 1) for index in range(most)]
    steps: list[float] = []
    rounded: list[float] = []
    for index in kept:
        steps.append(index + 1)
        rounded.append(significant(values[index], 5))
    return {"step": steps, "value": rounded}


def parameters(layers: Iterable[LayerRecord]) -> Drawing:
    """Draw what each layer keeps: the non-zeros of S, the factors of L on top, and the rank."""
    rows = layer_rows(layers)
    shares = ["non-zeros of S", "factors of L"]
    largest = max(row["rank"] for row in rows)
    ranks = alt.Scale(domain=[0, max(largest, 1)])
    means = {name: f"mean({name})" for name in (*shares, "rank")}
    axis = alt.Axis(labels=False, ticks=False)
    bases = cells(**means).encode(
        alt.X("layer:N", sort=None, title="layer, in the order of the model", axis=axis),
        tooltip=["layer:N", "non-zeros of S:Q", "factors of L:Q", "rank:Q"],
    )
    bars = bases.transform_fold([*shares], ["part", "share"]).mark_bar(cursor="pointer")
    bars = bars.encode(
        alt.Y("share:Q", title="% of the dense weight"),
        alt.Color("part:N", sort=shares, title=None),
        alt.Order("part:N", sort="descending"),
    )
    points = bases.mark_point(color=INK, filled=True, size=16, cursor="pointer")
    points = points.encode(alt.Y("rank:Q", title="rank of L (points)", axis=WHOLE, scale=ranks))
    chart = alt.layer(bars, points).resolve_scale(y="independent").properties(width=560, height=240)
    return Drawing("Parameters kept, in per cent of the dense weight's", chart, rows)


def _by_block(
    title: str,
    total: str,
    y: str,
    values: Iterable[tuple[str, int, float]],
) -> Drawing:
    """Draw lines over the blocks.

    Args:
        total: how the values of a line in a block are joined: sum or mean.
        values: the line, the block and the value.
    """
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    figures: list[float] = []
    for line, block, value in values:
        figure = significant(value)
        names.append(line)
        figures.append(figure)
        rows.append({"line": line, "block": block, "value": figure})
    lines = alt.Chart(ROWS, width=560, height=240)
    lines = lines.transform_aggregate(value=f"{total}(value)", groupby=["line", "block"])
    chart = lines.transform_filter(alt.datum.value > 0).mark_line(point={"size": 25})
    chart = chart.encode(
        alt.X("block:Q", axis=WHOLE, scale=alt.Scale(nice=False)),
        _value(y, [figures]),
        tooltip=["line:N", "block:Q", alt.Tooltip("value:Q", title=y, format=".4~g")],
        **_series("line", names),
    )
    return Drawing(title, chart, rows)


def _series(
    field: str,
    names: Iterable[str],
    legend: bool = True,
) -> dict[str, Any]:
    """A colour for each line, and dashes where the colours come again."""
    domain = list(dict.fromkeys(names))
    shared: dict[str, Any] = {"title": None, "legend": None}
    if legend:
        shared["legend"] = _legend(domain)
    dashes = alt.Scale(domain=domain, range=DASHES)
    return {
        "color": alt.Color(f"{field}:N", scale=alt.Scale(domain=domain), **shared),
        "strokeDash": alt.StrokeDash(f"{field}:N", scale=dashes, **shared),
    }


def _legend(names: Sequence[str]) -> alt.Legend:
    """A legend with as many names in a row as fit on a phone."""
    longest = max(map(len, names), default=0)
    return alt.Legend(columns=max(1, LEGEND_PIXELS // (30 + 6 * longest)))


def _value(
    title: str, curves: Iterable[Sequence[float]], field: str = "value", padding: int = 0
) -> alt.Y:
    """The upward axis: logarithmic if a curve spans more than a decade. A linear one need not
    begin at 0.
    """
    scale = alt.Scale(zero=False, padding=padding)
    axis = alt.Axis()
    for curve in curves:
        positive = [value for value in curve if value > 0]
        if positive and max(positive) > 10 * min(positive):
            scale = alt.Scale(type="log", nice=False, padding=padding)
            axis = alt.Axis(tickCount=4)
    return alt.Y(f"{field}:Q", title=title, scale=scale, axis=axis)


def frontiers(content: Content) -> dict[str, Drawing]:
    """Draw a chart for each text on which at least two models of known size were evaluated."""
    texts: dict[str, list[dict[str, Any]]] = {}

    def add(
        name: str,
        size: int,
        colour: str,
        perplexities: Mapping[str, float],
    ) -> None:
        for text, perplexity in perplexities.items():
            point = {"model": name, "bytes": size, "perplexity": perplexity, "colour": colour}
            texts.setdefault(text, []).append(point)

    for model, evaluation in content.others.items():
        size = dense_bytes(model, content.runs)
        if size is not None:
            add(f"{Path(model).name or model} (dense)", size, INK, evaluation.perplexity)
    for run, hue in zip(content.runs, itertools.cycle(HUES)):
        add(run.name, run.sizes.bytes, hue, run.evaluation.perplexity)
    charts: dict[str, Drawing] = {}
    for text, points in texts.items():
        if len(points) > 1:
            charts[text] = _frontier(text, points)
    return charts


def dense_bytes(model: str, runs: Iterable[Run]) -> int | None:
    """The bytes of the dense model from which one of the folders was made; None for any other
    model.
    """
    resolved = Path(model).resolve()
    for run in runs:
        if Path(run.record.model).resolve() == resolved:
            return run.sizes.dense_bytes
    return None


def _frontier(text: str, points: list[dict[str, Any]]) -> Drawing:
    """Draw the perplexity on a text against the bytes of the weights."""
    names: list[str] = []
    colours: list[str] = []
    perplexities: list[float] = []
    for point in points:
        names.append(point["model"])
        colours.append(point["colour"])
        perplexities.append(point["perplexity"])
    shared: dict[str, Any] = {"title": None, "legend": _legend(names)}
    wide = alt.Scale(zero=False, padding=15)
    chart = alt.Chart(ROWS, width=560, height=280).mark_point(size=120, filled=True, opacity=1)
    chart = chart.encode(
        alt.X("bytes:Q", title="bytes of the weights", axis=alt.Axis(format="~s"), scale=wide),
        _value("perplexity", [perplexities], "perplexity", padding=15),
        alt.Color("model:N", scale=alt.Scale(domain=names, range=colours), **shared),
        alt.Shape("model:N", scale=alt.Scale(domain=names), **shared),
        tooltip=["model:N", alt.Tooltip("bytes:Q", format=","), "perplexity:Q"],
    )
    note = "Fewer bytes to the left, lower perplexity below: both are better."
    return Drawing(f"Perplexity on {text} against size", chart, points, note)
