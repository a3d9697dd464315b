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

# The picture that README begins with: rows of four_bits.json, by curve, and the label of each.
NEXT_TO_OTHERS = {
    "hasslefree --size": {
        "4.3 bits, dealt, best": "4.3bits, best",
        "4.6 bits, dealt, best": "4.6bits, best",
        "5.2 bits, dealt, balanced": "default",
    },
    "hasslefree --bits 4 --rank 16": {"4 bits + rank 16, balanced": ""},
    "llama.cpp": {f"llama.cpp {kind}": kind for kind in ("Q3_K_M", "Q4_0", "Q4_K_M", "Q5_0")},
    "AutoRound": {"AutoRound, 50 iterations, 4 bits": "50 iterations"},
    "GPTQ (llm-compressor)": {"llm-compressor GPTQ, 4 bits": "4 bits"},
}


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


def draw_next_to_others(plot: Path, four_bits: Path = RESULTS / "four_bits.json") -> None:
    """Draw a few quantised rows next to those of other programs."""
    rows = results(four_bits)
    curves: Curves = {}
    for name, points in NEXT_TO_OTHERS.items():
        found = ((rows[row], label) for row, label in points.items())
        curves[name] = [(row["bytes_a_weight"], 100 * math.expm1(row["gap"]), label) for row, label in found]
    programs = {name for name in curves if not name.startswith("hasslefree")}
    plots.next_to_others(curves, programs, "SmolLM2-135M-Instruct: lower left is better", plot)


def draw_by_seconds(plot: Path, two_four: Path = RESULTS / "two_four.json") -> None:
    """Draw the gap of every row at 2:4, the mean over its draws, against its CPU seconds over those of `fast`."""
    from tables import real

    rows = list(real.two_four(json.loads(two_four.read_text(encoding="utf-8"))))
    places = {row["name"]: (row["over_fast"], row["gap"]) for row in rows if row["name"] != "dense"}
    plots.by_seconds(places, {"fast", "balanced", "best", "an hour"}, plot)
