"""The charts of a report: for single folders, and for the comparison of models."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from hasslefree.checkpoint.output import write_whole
from hasslefree.report.content import OUTSIDE, Content, Run, model_name, place, places
from hasslefree.report.drawing import CONFIG, Drawing, Row, png, vega_lite
from hasslefree.report.maps import MAPS, cells, figures, layer_map
from hasslefree.units import significant

# Charts by name.
Charts = dict[str, Drawing]
# The maximum number of values in all curves of a report. Each takes about seven bytes on the page.
POINTS = 12_000
# The dash pattern of each line, in order. It changes whenever all colours have been used.
_PATTERNS = ([9999, 0], [6, 3], [2, 2], [8, 3, 2, 3])
DASHES = [dash for dash in _PATTERNS for _ in CONFIG["range"]["category"]]
# The width of a legend: that of a phone without margins.
LEGEND_PIXELS = 300
ROUNDS_NOTE = (
    "The error that the method minimises, as a share of the layer's output, each time it was"
    " measured or estimated."
)
FRONTIER_NOTE = "Lower left is better: fewer bytes and a lower perplexity."
# The least range of the axis of perplexities, as a factor: a small loss must look small.
LEAST_RISE = 1.2
HELD_OUT = "held-out text"


def write_figures(content: Content, folder: Path) -> list[Path]:
    """Write every chart of a report as SVG and PNG into a folder, which is created if missing."""
    drawings = comparisons(content)
    for run in content.runs:
        drawings.update(run_charts(run, content, run.name))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, drawing in drawings.items():
        stem = re.sub(r"[^\w.-]+", "-", name)
        if folder / f"{stem}.svg" in files:  # for example, of the folders a/b and a-b
            stem = f"{stem}-{len(files)}"
        svg = drawing.svg()
        for file, image in ((f"{stem}.png", png(svg)), (f"{stem}.svg", svg)):
            write_whole(folder / file, image)
            files.append(folder / file)
    return files


def run_charts(
    run: Run,
    content: Content,
    label: str,
    selected: str = "",
) -> Charts:
    """Draw the charts of one folder, by name.

    Args:
        content: all folders of the report. Their maps have the same scales.
        label: the end of the charts' names.
        selected: the layer that is marked, and whose curves are drawn; "" for the curves of all
            layers.
    """
    shared = map_values(content.runs)
    charts: Charts = {}
    for name, values in figures(run.record).items():
        if values:
            charts[f"{name}-{label}"] = layer_map(name, values, selected, shared[name])
    most = max(12, POINTS // (2 * len(shared["relative-error"])))
    histories = {layer.name: layer.history for layer in run.record.layers}
    if max(map(len, histories.values())) > 1:
        charts[f"rounds-{label}"] = lines(
            "Error during the run",
            curves(histories, most),
            "progress of the solver",
            "relative error, damped",
            selected,
            note=ROUNDS_NOTE,
        )
    if run.spectra:
        spectra = {layer.name: run.spectra.get(layer.name, ()) for layer in run.record.layers}
        charts[f"spectra-{label}"] = lines(
            "Singular values of L",
            curves(spectra, most),
            "singular value, largest first",
            "share of the largest",
            selected,
            is_share=True,
        )
    return charts


def map_values(runs: Iterable[Run]) -> dict[str, list[float]]:
    """The values in the cells of each map, over all folders."""
    shared: dict[str, list[float]] = {name: [] for name in MAPS}
    for run in runs:
        for name, values in figures(run.record).items():
            shared[name].extend(row["value"] for row in cells(values, MAPS[name]))
    return shared


def comparisons(content: Content) -> Charts:
    """Draw the charts that compare models, by name."""
    charts: Charts = {}
    for text, points in sized_perplexities(content).items():
        if len(points) > 1:
            charts[f"perplexity-{text}"] = frontier(text, points)
    if len(content.runs) > 1:
        rows = [mean_errors(run) for run in content.runs]
        charts["comparison"] = lines(
            "Mean relative error of each block", rows, "block", "mean relative error"
        )
    return charts


def mean_errors(run: Run) -> Row:
    """The row of `lines` for a folder's mean relative error by block."""
    blocks: dict[int, list[float]] = {}
    for layer in run.record.layers:
        block, _ = place(layer.name)
        if block != OUTSIDE:
            blocks.setdefault(block, []).append(layer.relative_error)
    means = [significant(statistics.fmean(errors)) for errors in blocks.values()]
    return {"layer": run.name, "kind": run.name, "step": [*blocks], "value": means}


def curves(values: Mapping[str, Sequence[float]], most: int) -> list[Row]:
    """The rows of `lines` for a curve of each layer, thinned to `most` points."""
    rows = []
    for name, (_, kind) in places(values).items():
        rows.append({"layer": name, "kind": kind, **thinned(values[name], most)})
    return rows


def thinned(values: Sequence[float], most: int) -> dict[str, list[float]]:
    """At most `most` of the values, evenly spaced, including the first and the last, and their
    steps, which start at 1.
    """
    count = len(values)
    kept = torch.linspace(0, count - 1, min(count, most)).round().int().tolist()
    return {
        "step": [index + 1 for index in kept],
        "value": [significant(values[index], 5) for index in kept],
    }


def lines(
    title: str,
    rows: list[Row],
    x: str,
    y: str,
    selected: str = "",
    is_share: bool = False,
    note: str = "",
) -> Drawing:
    """Draw a line for each row.

    Args:
        rows: each with the "layer" (or another name of the line), the "kind", which determines the
            colour, the steps ("step") and the positive values ("value").
        x, y: the titles of the axes.
        selected: the only layer that is drawn; "" for all.
        is_share: the y axis goes from 0 to 1; otherwise it is logarithmic.
    """
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    # The domain of x is given, since Vega cannot derive it for a selected layer without values.
    ends = [step for row in rows for step in row["step"]]
    chart = vega_lite(
        "lines.json",
        x=x,
        y=y,
        kinds=kinds,
        dashes=DASHES,
        legend=None if selected else legend(kinds),
        ends=[min(ends), max(ends)],
        selected=selected,
        is_share=is_share,
    )
    return Drawing(title, chart, rows, note)


def legend(names: Iterable[str]) -> dict[str, int]:
    """A legend with as many columns as fit on a phone."""
    longest = max(map(len, names))
    return {"columns": max(1, LEGEND_PIXELS // (30 + 6 * longest))}


def sized_perplexities(content: Content) -> dict[str, list[Row]]:
    """The name, bytes and perplexity of models of known size, for each text.

    The text that `compress` held out is included if all folders have the same one, which is assumed
    if the dense model has the same perplexity on all of them.
    """
    checks = [(run, run.record.held_out) for run in content.runs if run.record.held_out]
    texts: dict[str, list[Row]] = {}

    def add(model: str, size: int, perplexities: Mapping[str, float | None]) -> None:
        for text, perplexity in perplexities.items():
            if perplexity is not None:
                point = {"model": model, "bytes": size, "perplexity": perplexity}
                texts.setdefault(text, []).append(point)

    if len(checks) > 1 and len({check["dense"] for _, check in checks}) == 1:
        run, check = checks[0]
        add(f"{run.model} (dense)", run.sizes.dense_bytes, {HELD_OUT: check["dense"]})
        for run, check in checks:
            add(run.name, run.sizes.bytes, {HELD_OUT: check["compressed"]})
    for name, evaluation in content.others.items():
        size = content.dense_bytes(name)
        if size is not None:
            add(f"{model_name(name)} (dense)", size, evaluation.perplexity)
    for run in content.runs:
        add(run.name, run.sizes.bytes, run.evaluation.perplexity)
    return texts


def frontier(text: str, points: list[Row]) -> Drawing:
    """Plot the perplexity on a text against the bytes of the weights."""
    models = [point["model"] for point in points]
    perplexities = [point["perplexity"] for point in points]
    least = min(perplexities)
    chart = vega_lite(
        "frontier.json",
        largest=1.1 * max(point["bytes"] for point in points),
        ends=[least, max(*perplexities, LEAST_RISE * least)],
        legend=legend(models),
        models=models,
    )
    return Drawing(f"Perplexity on {text} against size", chart, points, FRONTIER_NOTE)
