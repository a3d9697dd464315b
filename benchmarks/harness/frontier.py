"""Pictures of the gap: against bytes, with patterns, ranks, bits and other programs; and against seconds."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from harness import plots
from harness.record import RESULTS

# Of every curve: the bytes of a weight, the gap and the label of each point.
Curves = dict[str, list[tuple[float, float, str]]]

# The picture that README begins with: rows of whole_files_MODEL.json, by curve, and the label of each.
WHOLE_FILES = {
    "hasslefree": {
        "4.3bits, best": "--size 4.3bits, best",
        "5.2bits, balanced": "default",
        "105MB, balanced": "--size 105MB",
    },
    "llama.cpp, importance matrix": {
        f"llama.cpp {kind}, matrix": kind for kind in ("IQ3_M", "IQ4_XS", "Q3_K_M", "Q4_K_M", "Q5_K_M")
    },
}
MODEL = "SmolLM2-135M-Instruct"


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


def draw_whole_files(plot: Path, whole_files: Path = RESULTS / f"whole_files_{MODEL}.json") -> None:
    """Draw a few rows next to those of llama.cpp: the mean over texts of other kinds than was calibrated on."""
    rows = results(whole_files)
    curves: Curves = {}
    for name, points in WHOLE_FILES.items():
        found = ((rows[row], label) for row, label in points.items() if row in rows)
        curves[name] = [(row["file_bytes"] / 1e6, 100 * math.expm1(row["unseen"]), label) for row, label in found]
    programs = {name for name in curves if name != "hasslefree"}
    plots.whole_files(curves, programs, f"{MODEL} at equal file sizes", plot)


def draw_by_seconds(plot: Path, two_four: Path = RESULTS / "two_four.json") -> None:
    """Draw the gap of every row at 2:4, the mean over its draws, against its CPU seconds over those of `fast`."""
    from tables import real

    rows = list(real.two_four(json.loads(two_four.read_text(encoding="utf-8"))))
    places = {row["name"]: (row["over_fast"], row["gap"]) for row in rows if row["name"] != "dense"}
    plots.by_seconds(places, {"fast", "balanced", "best", "an hour"}, plot)
