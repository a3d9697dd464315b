"""The charts of a report: those of one folder, and those that compare models."""

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hasslefree.checkpoint.output import write_whole
from hasslefree.report.content import OUTSIDE, Content, Run, model_name, place, places
from hasslefree.report.drawing import CONFIG, Drawing, png, vega_lite
from hasslefree.report.maps import MAPS, cells, figures, layer_map
from hasslefree.units import significant

# The most numbers in the curves of all layers of a report, about seven bytes each on the page.
POINTS = 12_000
# A dash for each line, in the order of lines: another one whenever all colours are used.
_PATTERNS = ([9999, 0], [6, 3], [2, 2], [8, 3, 2, 3])
DASHES = [dash for dash in _PATTERNS for _ in CONFIG["range"]["category"]]
# The width of a phone, without margins, in which a legend must fit.
LEGEND_PIXELS = 300
ROUNDS_NOTE = (
    "What the method minimises, as a share of the layer's output, each time that it was measured or"
    " estimated."
)
FRONTIER_NOTE = "Fewer bytes to the left, lower perplexity below: both are better."
# The axis of a perplexity is as long as this increase or longer: a small loss must look small.
LEAST_RISE = 1.2
HELD_OUT = "held-out text"


def write_figures(content: Content, folder: Path) -> list[Path]:
    """Write every chart of a report as SVG and PNG, in a folder that is made if need be."""
    drawings = comparisons(content)
    for run in content.runs:
        drawings.update(run_charts(run, content, run.name))
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for name, drawing in drawings.items():
        stem = re.sub(r"[^\w.-]+", "-", name)
        if folder / f"{stem}.svg" in files:  # of the folders a/b and a-b
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
) -> dict[str, Drawing]:
    """Draw the charts of one folder, by name.

    Args:
        content: all folders of the report, whose maps have the same scales.
        label: the end of the names.
        selected: the marked layer; "" for the curves of all layers.
    """
    shared: dict[str, list[float]] = {name: [] for name in MAPS}
    for other in content.runs:
        for name, values in figures(other.record).items():
            shared[name].extend(row["value"] for row in cells(values, MAPS[name]))
    charts: dict[str, Drawing] = {}
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


def comparisons(content: Content) -> dict[str, Drawing]:
    """Draw the charts that compare models, by name."""
    charts: dict[str, Drawing] = {}
    for text, points in sized_perplexities(content).items():
        if len(points) > 1:
            charts[f"perplexity-{text}"] = frontier(text, points)
    if len(content.runs) > 1:
        rows: list[dict[str, Any]] = []
        for run in content.runs:
            blocks: dict[int, list[float]] = {}
            for layer in run.record.layers:
                block, _ = place(layer.name)
                if block != OUTSIDE:
                    blocks.setdefault(block, []).append(layer.relative_error)
            means = [significant(statistics.fmean(errors)) for errors in blocks.values()]
            rows.append({"layer": run.name, "kind": run.name, "step": [*blocks], "value": means})
        charts["comparison"] = lines(
            "Mean relative error of each block", rows, "block", "mean relative error"
        )
    return charts


def curves(values: Mapping[str, Sequence[float]], most: int) -> list[dict[str, Any]]:
    """The rows of `lines`, thinned to `most` points each, from a curve for each layer."""
    rows = []
    for name, (_, kind) in places(values).items():
        rows.append({"layer": name, "kind": kind, **thinned(values[name], most)})
    return rows


def thinned(values: Sequence[float], most: int) -> dict[str, list[float]]:
    """At most this many of the values, evenly spread, with the first and the last; and their steps,
    from 1.
    """
    count = len(values)
    kept = torch.linspace(0, count - 1, min(count, most)).round().int().tolist()
    return {
        "step": [index + 1 for index in kept],
        "value": [significant(values[index], 5) for index in kept],
    }


def lines(
    title: str,
    rows: list[dict[str, Any]],
    x: str,
    y: str,
    selected: str = "",
    is_share: bool = False,
    note: str = "",
) -> Drawing:
    """Draw a line for each row.

    Args:
        rows: the layer, or what a line stands for; the kind, which has a colour; the steps, and the
            values above 0.
        x, y: the titles of the axis of steps and of the upward one.
        selected: the only layer that is drawn; "" for all.
        is_share: the upward axis goes from 0 to 1; otherwise it is logarithmic.
    """
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    # Given, because a layer without values has none from which Vega could find it.
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
    """A legend with as many names in a row as fit on a phone."""
    longest = max(map(len, names))
    return {"columns": max(1, LEGEND_PIXELS // (30 + 6 * longest))}


def sized_perplexities(content: Content) -> dict[str, list[dict[str, Any]]]:
    """The models of known size by the texts on which they were measured: name, bytes, perplexity.

    The text that `compress` held out is among them if it was the same for all folders, which the
    dense model's perplexity shows.
    """
    checks = [(run, run.record.held_out) for run in content.runs if run.record.held_out]
    texts: dict[str, list[dict[str, Any]]] = {}

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


def frontier(text: str, points: list[dict[str, Any]]) -> Drawing:
    """Draw the perplexity on a text against the bytes of the weights."""
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
