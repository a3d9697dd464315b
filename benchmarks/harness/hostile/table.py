"""The table: kinds of faults, each a function of its rows, and the commands that each row applies to."""

from __future__ import annotations

from harness.hostile.fault import PYTHON, Fault
from harness.hostile.files import destinations, interruptions, neighbours, outputs, replaced, resumed, shortened, writes
from harness.hostile.folders import checkpoints, configurations, depths, not_finite
from harness.hostile.inputs import library, numbers, paths, settings, surroundings, texts, threads
from harness.hostile.printing import printed

SAMPLED = ("plan", "inspect", "export", "methods", PYTHON)  # the commands of the sample in the default test suite

PARTS = (
    destinations,
    replaced,
    neighbours,
    outputs,
    writes,
    resumed,
    shortened,
    threads,
    settings,
    texts,
    printed,
    configurations,
    checkpoints,
    paths,
    depths,
    numbers,
    library,
    surroundings,
    not_finite,
    interruptions,
)


def faults() -> list[Fault]:
    """All rows, kind after kind."""
    return [fault for part in PARTS for fault in part()]


KINDS = tuple(dict.fromkeys(fault.kind for fault in faults()))


def sample() -> list[tuple[Fault, str]]:
    """Two cells of every kind that take a fraction of a second; one if the kind has only slower commands."""
    cells: list[tuple[Fault, str]] = []
    for part in PARTS:
        rows = [row for row in part() if not (row.during or row.environment or row.disk)]
        all_cells = [(row, command) for row in rows for command in row.lines]
        quick = [cell for cell in all_cells if cell[1] in SAMPLED[: 2 if 0 in cell[0].exits else None]]
        slower = [(row, command) for row, command in all_cells if command == "compress" and 0 not in row.exits]
        cells += quick[:: max(1, len(quick) // 2)][:2] or slower[:1]
    return cells
