"""The picture of perplexity against bytes: patterns and ranks, quantised rows, and other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import plots
from harness.record import RESULTS

# Of every curve: the bytes of a weight, the gap and the label of each point.
Curves = dict[str, list[tuple[float, float, str]]]


def results(path: Path) -> dict[str, Any]:
    """By name, the first seed of every row of a result file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    return {name: next(iter(seeds.values())) for name, seeds in content["results"].items()}


def draw(plot: Path, frontier: Path = RESULTS / "frontier.json", four_bits: Path = RESULTS / "four_bits.json") -> None:
    """Draw what both files hold; each file's gaps are those from its own dense model."""
    from tables.real import gap_of  # tables imports harness

    curves: Curves = {}
    sparse = results(frontier)
    dense = sparse.pop("dense")["perplexity"]
    for name, row in sorted(sparse.items()):
        pattern, _, rank = name.partition(" + rank ")
        curves.setdefault(pattern, []).append((row["bytes_a_weight"], gap_of(row["perplexity"], dense), rank))
    quantised = results(four_bits)
    del quantised["dense"]
    for row in quantised.values():
        curve = row["curve"].replace("dealt", "--size")
        curves.setdefault(curve, []).append((row["bytes_a_weight"], row["gap"], row["label"]))
    programs = {row["curve"] for row in quantised.values() if row["program"]}
    title = "SmolLM2-135M-Instruct, lower left is better; labels are ranks, or types of other programs"
    plots.frontier({name: sorted(points) for name, points in curves.items()}, programs, title, plot)
