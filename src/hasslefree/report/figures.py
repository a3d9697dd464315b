"""The figures of a report as PNG and SVG; the same data give the same bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hasslefree.folder.record import LayerRecord, Record
from hasslefree.report.content import Content, Run
from hasslefree.report.frontier import Point, frontiers
from hasslefree.report.layer_map import by_kind, error_range, layer_map

# One for each model in a picture of perplexity against bytes.
MARKERS = "osD^vP*Xph"

# Without these, an SVG has the time and random names in it.
_REPEATABLE: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}}


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix says whether as PNG or SVG."""
    with matplotlib.rc_context({"svg.hashsalt": "hasslefree"}):
        figure.savefig(path, dpi=144, metadata=_REPEATABLE[path.suffix])


def write_figures(content: Content, folder: Path) -> list[Path]:
    """Every figure of every run, each as PNG and as SVG, in a folder that is made if need be."""
    drawn: dict[str, Figure] = {}
    for run in content.runs:
        name = file_name(run.name)
        drawn[f"relative-error-{name}"] = heat_map(run.record)
        drawn[f"parameters-{name}"] = parameter_bars(run.record)
        if any(len(layer.history) > 1 for layer in run.record.layers):
            drawn[f"rounds-{name}"] = histories(run)
        if run.spectra:
            drawn[f"spectra-{name}"] = spectra(run)
        if run.record.sensitivities:
            drawn[f"sensitivity-{name}"] = sensitivity_lines(run.record.sensitivities)
    if len(content.runs) > 1:
        drawn["comparison"] = errors_by_block(content.runs)
    for text, points in frontiers(content).items():
        drawn[f"perplexity-{file_name(text)}"] = frontier(text, points)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for name in drawn for suffix in ("png", "svg")]
    for path in paths:
        save(drawn[path.stem], path)
    return paths


def file_name(text: str) -> str:
    """A name as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", text)


def heat_map(report: Record) -> Figure:
    """The relative error of every layer: blocks down, kinds across, the colour on a logarithmic scale."""
    grid = layer_map(report.layers)
    least, most = error_range(report.layers)
    figure, axes = _figure(1.8 + 0.75 * len(grid.kinds), 1.4 + 0.28 * len(grid.blocks))
    # A colour bar needs a range.
    norm = LogNorm(least, max(most, 1.01 * least), clip=True)
    rows = [[_error(grid.cells.get((block, kind))) for kind in grid.kinds] for block in grid.blocks]
    image = axes.imshow(rows, norm=norm, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(grid.kinds)), [plain(kind) for kind in grid.kinds], rotation=35, ha="right")
    step = max(1, len(grid.blocks) // 32)
    axes.set_yticks(range(0, len(grid.blocks), step), [str(block) for block in grid.blocks[::step]])
    axes.set(ylabel="block", title="relative error")
    figure.colorbar(image, ax=axes)
    return figure


def _error(layer: LayerRecord | None) -> float:
    return float("nan") if layer is None else layer.relative_error


def histories(run: Run) -> Figure:
    """The method's objective each time that it was measured, a line for each layer."""
    figure, axes = _figure(7, 4)
    _lines_by_kind(axes, run.record.layers, lambda layer: layer.history)
    axes.set(xlabel=run.step, ylabel="objective", yscale="log", title="the method's objective")
    return figure


def spectra(run: Run) -> Figure:
    """The singular values of L over the largest of them, a line for each layer."""
    figure, axes = _figure(7, 4)
    found = {name: [value / values[0] for value in values] if values[0] else [] for name, values in run.spectra.items()}
    _lines_by_kind(axes, run.record.layers, lambda layer: found.get(layer.name, []))
    axes.set(xlabel="singular value of L", ylabel="share of the largest", title="what the low-rank part keeps")
    axes.set_ylim(bottom=0)
    return figure


def _lines_by_kind(axes: Axes, layers: Iterable[LayerRecord], values: Callable[[LayerRecord], Sequence[float]]) -> None:
    """A thin line for each layer, in the colour of its kind."""
    grid, colours = layer_map(layers), matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    for (_, kind), layer in grid.cells.items():
        found = values(layer)
        colour = colours[grid.kinds.index(kind) % len(colours)]
        axes.plot(range(1, len(found) + 1), found, color=colour, alpha=0.6, linewidth=1)
    for index, kind in enumerate(grid.kinds[: len(colours)]):
        axes.plot([], [], color=colours[index], label=plain(kind))
    axes.figure.legend(fontsize=7, loc="outside right upper")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def parameter_bars(report: Record) -> Figure:
    """What each layer keeps, in per cent of its parameters: the non-zeros of S, and the factors of L on top."""
    figure, axes = _figure(max(5.0, min(14.0, 2 + 0.1 * len(report.layers))), 3.5)
    places, sparse, low_rank = range(len(report.layers)), *shares(report.layers)
    axes.bar(places, sparse, label="non-zeros of S")
    axes.bar(places, low_rank, bottom=sparse, label="factors of L")
    axes.set(xlabel="layer, in the order of the model", ylabel="% of out × in", title="parameters kept")
    axes.legend(fontsize=8)
    return figure


def shares(layers: Iterable[LayerRecord]) -> tuple[list[float], list[float]]:
    """The non-zeros of S and the entries of both factors of each layer, in per cent of out × in."""
    found = [
        (spec.nonzeros, spec.parameters - spec.nonzeros, spec.dense_parameters) for spec in (x.spec for x in layers)
    ]
    return [100 * kept / dense for kept, _, dense in found], [100 * rest / dense for _, rest, dense in found]


def block_means(layers: Iterable[LayerRecord]) -> dict[int, float]:
    """The mean relative error of each block."""
    grid = layer_map(layers)
    found: dict[int, list[float]] = {block: [] for block in grid.blocks}
    for (block, _), layer in grid.cells.items():
        found[block].append(layer.relative_error)
    return {block: sum(errors) / len(errors) for block, errors in found.items()}


def errors_by_block(runs: Iterable[Run]) -> Figure:
    """The mean relative error of each block, a line for each run."""
    figure, axes = _figure(7, 4)
    for run in runs:
        means = block_means(run.record.layers)
        axes.plot(list(means), list(means.values()), "o-", label=plain(run.name))
    axes.set(xlabel="block", ylabel="mean relative error", yscale="log")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def sensitivity_lines(sensitivities: Mapping[str, float]) -> Figure:
    """The sensitivity of the layers of each block, a line for each kind of layer."""
    figure, axes = _figure(7, 4)
    for kind, line in by_kind(sensitivities).items():
        axes.plot(list(line), list(line.values()), "o-", markersize=3, linewidth=1, label=plain(kind))
    axes.set(xlabel="block", ylabel="nats per token", yscale="log", title="sensitivity to pruning")
    figure.legend(fontsize=7, loc="outside right upper")
    axes.grid(alpha=0.3)
    return figure


def frontier(text: str, points: Sequence[Point]) -> Figure:
    """Perplexity on a text against the bytes of the weights, a marker for each model."""
    figure, axes = _figure(7, 4)
    for index, point in enumerate(points):
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(point.bytes / 1e6, point.perplexity, marker, linestyle="", markersize=8, label=plain(point.name))
    axes.set(xlabel="weights, MB", ylabel="perplexity", title=plain(f"perplexity on {text}"))
    figure.legend(fontsize=8, loc="outside right upper")
    axes.grid(alpha=0.3)
    return figure


def plain(text: str) -> str:
    """A text in which a dollar is a dollar, and begins no formula; what is too long for a figure is cut."""
    short = text if len(text) <= 40 else f"{text[:39]}…"
    return short.replace("$", r"\$")


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
