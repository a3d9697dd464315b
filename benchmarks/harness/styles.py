"""How every picture looks: one colour and marker for a program or method, names of axes, labels at the points."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from numpy import linspace

LOSS = "perplexity increase over the dense model, %"
BYTES = "bytes per weight of the compressed layers: values, indices, scales and L"


@dataclass(frozen=True)
class Style:
    """The colour and the marker of one program or method, in every picture."""

    colour: str
    marker: str


# Colours of Okabe and Ito, which colour-blind readers tell apart. Blue circles are hasslefree alone.
HASSLEFREE = Style("#0072B2", "o")
STYLES = {
    "llama.cpp": Style("#000000", "v"),
    "llm-compressor": Style("#D55E00", "s"),
    "AutoRound": Style("#009E73", "D"),
    "3basil": Style("#D55E00", "^"),
    "hassle-free": Style("#E69F00", "P"),
    "hassle-free, ALPS": Style("#000000", "<"),
    "hassle-free, exact step": Style("#CC79A7", "p"),
    "hassle-free, unscaled": Style("#56B4E9", "d"),
    "hassle-free, gaussian start": Style("#767676", "v"),
    "oats": Style("#009E73", "X"),
    "eora": Style("#56B4E9", "*"),
}
OTHER = Style("#767676", "h")


def style_of(name: str) -> Style:
    """The style of a row of results, by the program or method with which its name begins."""
    first = name.partition(",")[0]
    if first in ("hasslefree", "joint", "joint-grid"):
        return HASSLEFREE
    return STYLES.get(name, STYLES.get(first, OTHER))


@dataclass(frozen=True)
class Point:
    """A point and its label. filled: whether the marker is."""

    x: float
    y: float
    label: str
    style: Style = HASSLEFREE
    filled: bool = True


# Where a label may stand: so many points away from its own, in these directions. The first free place is taken, and a
# line leads to a label that is far away.
DISTANCES = (5, 9, 16, 26, 38)
DIRECTIONS = ((1, 1), (1, -1), (-1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))
ACROSS = {1: "left", 0: "center", -1: "right"}
UP = {1: "bottom", 0: "center", -1: "top"}
Groups = dict[str, list[Point]]


def canvas(width: float = 7, height: float = 4.5, panels: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and the axes of its panels, which share the vertical axis."""
    size = (width, height)
    return pyplot.subplots(1, panels, figsize=size, dpi=200, layout="constrained", sharey=True)


def plot(axes: Any, points: list[Point], line: str = "", name: str | None = None) -> None:
    """Draw points, and the line through them from left to right. name: in the legend."""
    points = sorted(points, key=lambda point: point.x)
    for number, point in enumerate(points):
        face = point.style.colour if point.filled else "white"
        shown = name if number == 0 else None
        axes.plot(point.x, point.y, point.style.marker, color=point.style.colour, markerfacecolor=face, label=shown)
    if line:
        xs, ys = [point.x for point in points], [point.y for point in points]
        axes.plot(xs, ys, line, color=points[0].style.colour, linewidth=1, zorder=1)


def label(axes: Any, points: list[Point], size: float) -> None:
    """Write the label of each point beside it, within the axes, where it covers no point, line or other label."""
    figure = axes.figure
    figure.canvas.draw()  # the layout
    renderer = figure.canvas.get_renderer()
    radius = 3 * figure.dpi / 72
    taken = []
    for x, y in axes.transData.transform([(point.x, point.y) for point in points]):
        taken.append(Bbox.from_extents(x - radius, y - radius, x + radius, y + radius))
    if axes.get_legend():
        taken.append(axes.get_legend().get_window_extent(renderer))
    for line in axes.get_lines():
        if line.get_linestyle() != "None":
            ends = line.get_transform().transform(line.get_xydata())
            taken += [Bbox([spot, spot + 1]) for one, other in pairwise(ends) for spot in linspace(one, other, 40)]
    frame = axes.get_window_extent(renderer)
    for point in filter(lambda point: point.label, points):
        for distance, (across, up) in product(DISTANCES, DIRECTIONS):
            note = axes.annotate(
                point.label, (point.x, point.y), (distance * across, distance * up * 0.8), textcoords="offset points",
                fontsize=size, color=point.style.colour, ha=ACROSS[across], va=UP[up],
                arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "grey"} if distance > 9 else None,
            )  # fmt: skip
            note.update_positions(renderer)
            box = Text.get_window_extent(note, renderer)  # without its line
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
            note.remove()
        else:
            raise ValueError(f"no room for the label {point.label!r}: make the picture larger")
        taken.append(box)


def chart(
    axes: Any,
    groups: Groups,
    names: tuple[str, str, str, str],
    joined: Collection[str] = (),
    letters: float = 7.5,
    legend: str | None = None,
    **settings: Any,
) -> None:
    """Draw groups of points with their labels.

    Args:
        names: as `finish` has them. joined: groups with a line through their points. letters: the size of labels.
        legend: its place; None for none. settings: of the axes.
    """
    for name, points in groups.items():
        plot(axes, points, "-" if name in joined else "", name)
    axes.set(**settings)
    finish(axes, *names)
    if legend:
        axes.legend(loc=legend, fontsize=8 if letters < 9 else 10)
    label(axes, [point for points in groups.values() for point in points], letters)


def finish(axes: Any, title: str, note: str, x: str, y: str) -> None:
    """Set the title, which is the message, the model and settings below it, and the names of the axes."""
    shown = f"{title}\n({note})" if note else title
    axes.set_title(shown, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)
