"""The plots of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Content = dict[str, Any]


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def curves(means: dict[str, list[float]], rounds: dict[str, list[int | None]], problems: int, path: Path) -> None:
    """Error against time, both over 3basil's; a curve for every method, a point for every number of rounds.

    Args:
        means: row → its error and its seconds over 3basil's. rounds: method → the points of its curve.
    """
    figure, axes = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
    for name, counts in rounds.items():
        points = [(means[key], c) for c in counts if (key := name if c is None else f"{name} @ {c}") in means]
        if points:
            bold = {"linewidth": 2.5, "zorder": 3} if name == "joint" else {}
            axes.plot([p[1] for p, _ in points], [p[0] for p, _ in points], "o-", label=name, **bold)
        for (error, seconds, *_), count in points:
            text = "" if count is None else "to its end" if count == 2000 else f"{count}"
            axes.annotate(text, (seconds, error), textcoords="offset points", xytext=(3, 5), fontsize=7)
    axes.set(xscale="log", yscale="log", xlabel="time / time of 3basil", ylabel="relative error / that of 3basil")
    axes.set_title(f"{problems} layers, geometric means; labels are rounds")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.set_yticks([0.25, 0.5, 1, 2, 4, 8])
    axes.set_xticks([0.05, 0.1, 0.2, 0.5, 1, 2, 5])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    save(figure, path)


def energies(content: Content, path: Path) -> None:
    """The norm of the first token of a segment, and of the others, before each block and after the last."""
    figure, axes = pyplot.subplots(figsize=(7.5, 3.5), layout="constrained")
    rows = content["rows"]
    axes.plot([row["first"] for row in rows], "o-", color="C3", markersize=3, label="first token of a segment")
    axes.plot([row["others"] for row in rows], "o-", color="C0", markersize=3, label="other tokens")
    axes.set(xlabel="block that the hidden states enter", ylabel="median norm", yscale="log")
    axes.set_title(content["model"])
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def by_bytes(content: Content, path: Path) -> None:
    """The gap of every system against its bytes a weight."""
    figure, axes = pyplot.subplots(figsize=(8.5, 5.5), layout="constrained")
    free: dict[float, float] = {}  # by bytes: where the next label may stand
    for name, row in sorted(content["results"].items(), key=lambda item: item[1]["gap"]):
        place, column = (row["bytes_a_weight"], row["gap"]), round(row["bytes_a_weight"], 2)
        height = max(row["gap"], free.get(column, 0.0))
        free[column] = 1.13 * height
        axes.scatter(*place, s=18, color="C3" if name.startswith("joint") else "C0")
        label = name.removesuffix(", 2:4").removesuffix(", int4")
        axes.annotate(label, place, (place[0] + 0.015, height), va="center", fontsize=7)
    axes.set(xlabel="bytes a weight", ylabel="log(perplexity / dense perplexity)", yscale="log", xlim=(0.35, 1.8))
    axes.set_yticks([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2], minor=False)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.grid(alpha=0.3, which="both")
    save(figure, path)


def speeds(content: Content, path: Path) -> None:
    """Speed over that of the dense layer, against the number of tokens; a panel for each dtype."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8), layout="constrained", sharey=True)
    found = [row for row in content["rows"] if row["way"] != "dense layer"]
    for axis, dtype in zip(axes, ["float32", "bfloat16"], strict=True):
        for key in dict.fromkeys((row["way"], row["out"], row["in"]) for row in found):
            points = [row for row in found if (row["way"], row["out"], row["in"]) == key and row["dtype"] == dtype]
            over_dense = [1 / row["over_dense"] for row in points]
            axis.plot([row["tokens"] for row in points], over_dense, "o-", label=f"{key[0]}, {key[1]}×{key[2]}")
        axis.axhline(1, color="black", linewidth=1)
        axis.set(xscale="log", xlabel="tokens", title=dtype)
        axis.set_xticks(content["tokens"], [str(count) for count in content["tokens"]])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("speed / speed of the dense layer")
    axes[0].set_ylim(bottom=0)
    axes[1].legend(fontsize=8)
    save(figure, path)


# The line of a curve, by what follows the comma in its name: bits of S at a pattern, or an effort.
LINES = {"": "o-", "4 bits": "s:", "fast": "s:", "balanced": "s--", "best": "s-"}


def frontier(curves: dict[str, list[tuple[float, float, str]]], programs: set[str], title: str, path: Path) -> None:
    """The gap against the bytes of a weight.

    Args:
        curves: for each kind of S, the bytes, gap and label of its points.
        programs: curves of other programs, whose points are not joined.
    """
    figure, axes = pyplot.subplots(figsize=(11, 6.5), layout="constrained")
    colours: dict[str, str] = {}
    markers = iter("*^vPX")
    for name, points in curves.items():
        kind, _, variant = name.partition(", ")
        if name in programs:
            colour, line = "black", next(markers)
        else:
            colour, line = colours.setdefault(kind, f"C{len(colours) % 10}"), LINES[variant]
        size = 7 if name in programs else 4
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], line, color=colour, markersize=size, label=name)
        for x, y, label in points:
            axes.annotate(label, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7, color=colour)
    axes.set(xlabel="bytes per weight of the compressed layers", ylabel="log(perplexity / dense perplexity)")
    axes.set(xscale="log", yscale="log", title=title)
    axes.set_xticks([0.4, 0.5, 0.6, 0.7, 0.8, 1, 1.25, 1.5, 2])
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    axes.grid(alpha=0.3, which="both")
    figure.legend(loc="outside right upper", fontsize=8)
    save(figure, path)


def whole_files(curves: dict[str, list[tuple[float, float, str]]], programs: set[str], title: str, path: Path) -> None:
    """The increase of the perplexity against the size of the file, in letters that a phone can show.

    Args:
        curves: for each program, the megabytes, the increase in per cent, and the label of its points.
        programs: curves of other programs, whose points are not joined.
    """
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, points in curves.items():
        colour, line = ("black", "v") if name in programs else ("C0", "o-")
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], line, color=colour, markersize=8, label=name)
        for x, y, label in points:
            place = (0, -15) if name in programs else (0, 8)
            axes.annotate(label, (x, y), place, textcoords="offset points", fontsize=8, color=colour, ha="center")
    axes.set_xlabel("whole file, MB", fontsize=12)
    axes.set_ylabel("perplexity increase on unseen kinds of text, %", fontsize=10)
    axes.set_title(title, fontsize=12)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.margins(x=0.19)
    axes.tick_params(labelsize=11)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=11)
    save(figure, path)


def by_seconds(places: dict[str, tuple[float, float]], joined: set[str], path: Path) -> None:
    """The gap against seconds.

    Args:
        places: for each row, its seconds over those of `fast`, and its gap. joined: rows with a line through them.
    """
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    curve = sorted(place for name, place in places.items() if name in joined)
    axes.plot([x for x, _ in curve], [y for _, y in curve], color="C3")
    for name, place in places.items():
        colour = "C3" if name in joined else "black"
        axes.plot(*place, "o" if name in joined else "s", color=colour, markersize=5)
        axes.annotate(name, place, (6, 5), textcoords="offset points", fontsize=9, color=colour)
    axes.set(xscale="log", xlabel="CPU seconds / those of fast", ylabel="log(perplexity / dense perplexity)")
    axes.set_title("SmolLM2-135M-Instruct, 2:4 + rank 16: lower left is better", fontsize=11)
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20])
    axes.margins(x=0.12)
    axes.grid(alpha=0.3, which="both")
    save(figure, path)


def grouped_bars(groups: dict[str, dict[str, float]], label: str, path: Path) -> None:
    """Bars of several methods for each of several layers. groups: method → layer → height. label: of the y-axis."""
    layers = list(next(iter(groups.values())))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 * len(layers)), 3.8), layout="constrained")
    width = 0.8 / len(groups)
    for index, (name, bars) in enumerate(groups.items()):
        offset = (index - (len(groups) - 1) / 2) * width
        axes.bar([place + offset for place in range(len(layers))], [bars[layer] for layer in layers], width, label=name)
    axes.set_xticks(range(len(layers)), layers)
    axes.set(ylabel=label)
    axes.legend(fontsize=8)
    save(figure, path)
