"""Whether every method of the package is measured and stands in the documentation, and what to run where one is not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.layers import CURVES, METHODS, ROOMS, UNMEASURED
from tables.engine import Content, load, shown


def listed(names: Iterable[str]) -> str:
    return " ".join(f'"{name}"' if " " in name else name for name in sorted(names))


def problems(pages: Mapping[Path, str]) -> Iterator[str]:
    """Everything that is missing, each with its remedy."""
    yield from of_layers(load("layers"))
    yield from of_workspace(load("workspace"))
    yield from of_pages(pages)


def of_layers(content: Content) -> Iterator[str]:
    """layers.json: every method on every problem, every variant on one at least."""
    missing: set[str] = set()
    seen: set[str] = set()
    for problem in content["problems"].values():
        names = {key.partition(" @ ")[0] for key in [*problem["rows"], *problem["rooms"]]}
        missing |= METHODS.keys() - {name.partition(",")[0] for name in names}
        seen |= names
    missing |= {*CURVES, *ROOMS} - seen
    if missing:
        command = f"OMP_NUM_THREADS=1 python benchmarks/layers.py curves --clock {content['clock']}"
        yield (
            f"layers.json has no rows of {listed(missing)}: run `{command} --methods {listed(missing)}`, or `{command} "
            "--anew` on another machine than its rows were measured on; then `python benchmarks/readme.py`"
        )
    if unknown := {name for name in seen if name.partition(",")[0] not in METHODS}:
        yield f"layers.json has rows of {listed(unknown)}, which hasslefree does not have: remove them from the file"


def of_workspace(content: Content) -> Iterator[str]:
    """workspace.json: every method. streaming.json: the planned peak is at least the measured one, and near it."""
    rows = content["rows"].values()
    measured = {row["method"] for row in rows}
    if missing := METHODS.keys() - measured - set(UNMEASURED):
        command = f"python benchmarks/memory.py layer --methods {listed(missing)}"
        yield f"workspace.json has no rows of {listed(missing)}: run `{command}`, then `python benchmarks/readme.py`"
    if unknown := measured - METHODS.keys():
        yield f"workspace.json has rows of {listed(unknown)}, which hasslefree does not have: remove them from the file"
    for row in load("streaming")["rows"]:
        if not row["peak_mb"] <= row["planned_mb"] <= 1.5 * row["peak_mb"]:
            yield (
                f"{row['blocks']} blocks took {row['peak_mb']:,} MB, and {row['planned_mb']:,} were planned: it must "
                "be between 1 and 1.5 times as much; correct the estimate, or measure again with python "
                "benchmarks/memory.py compression"
            )


def of_pages(pages: Mapping[Path, str]) -> Iterator[str]:
    """The table of methods: the one in the documentation whose first column names most of them."""
    page, names = max(first_columns(pages), key=lambda found: len(found[1] & METHODS.keys()))
    if missing := METHODS.keys() - names:
        rows = ", ".join(f"| `{name}` | … |" for name in sorted(missing))
        yield f"the table of methods in {shown(page)} has no row of {listed(missing)}: add {rows}"
    if unknown := names - METHODS.keys():
        yield f"the table of methods in {shown(page)} has {listed(unknown)}, which hasslefree does not have: remove it"


def first_columns(pages: Mapping[Path, str]) -> Iterator[tuple[Path, set[str]]]:
    """Of every table of the pages, the names in backticks of its first column."""
    for page, text in pages.items():
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            yield page, set(re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE))
