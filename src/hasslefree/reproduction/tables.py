"""A reproduction as tables for the terminal: its cost, and the paper's figures next to the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from hasslefree.reproduction.jobs import Job
from hasslefree.run.estimate import Footprint
from hasslefree.tables import table
from hasslefree.units import duration, size


def cost_table(jobs: Sequence[tuple[Job, Footprint | None]], done: Iterable[str], rate: float, keep: bool) -> Table:
    """A line for each row with the parameters kept, time and disk of its compression; and what all take together.

    Args:
        done: keys of what is measured already. rate: of the device, in FLOPs a second.
        keep: all compressed models stay on the disk.
    """
    done = set(done)
    title = f"{len(jobs)} rows, {sum(job.key in done for job, _ in jobs)} of them measured already"
    made = table(["model", "setting", "method"], ["kept", "disk", "time"], title)
    for job, takes in jobs:
        cells = ["", "", ""]
        if takes is not None:
            time = "done" if job.key in done else duration(takes.flops / rate)
            cells = [f"{takes.kept / takes.dense:.1%}", size(takes.disk), time]
        name = job.model.rstrip("/").rpartition("/")[2]
        made.add_row(Text(name), job.setting or "dense", job.row.method, *cells)
    left = [takes for job, takes in jobs if takes is not None and job.key not in done]
    disk = [takes.disk for takes in left]
    needed = sum(disk) if keep else max(disk, default=0)
    made.add_section()
    made.add_row("all that is left", "", "", "", size(needed), duration(sum(takes.flops for takes in left) / rate))
    made.caption, made.caption_justify = "Compressions alone; evaluations come on top.", "left"
    return made


def compare(job: Job, result: dict[str, Any]) -> dict[str, Any]:
    """One row of a reproduced table: what was measured, what the paper prints, and measured − printed."""
    measured, printed = result["figures"], job.row.figures
    return {
        "model": job.model,
        "beside": job.row.model,
        "config": job.row.config,
        "setting": job.setting,
        "method": job.row.method,
        **{name: result[name] for name in ("relative_error", "kept_share", "seconds") if name in result},
        "measured": measured,
        "paper": printed,
        "difference": {name: measured[name] - printed[name] for name in measured if name in printed},
    }


def result_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """A line for each text and task of a row, with the measured figure, the paper's and their difference."""
    made = table(["setting", "method", "figure"], ["measured", "paper", "difference"], title)
    for row in rows:
        first = [row["setting"] or "dense", row["method"]]
        for name, measured in row["measured"].items():
            of_paper = [f"{row['paper'][name]:.2f}", f"{row['difference'][name]:+.2f}"] if name in row["paper"] else []
            made.add_row(*first, name, f"{measured:.2f}", *of_paper)
            first = ["", ""]
        if "relative_error" in row:
            made.add_row(*first, "relative error", f"{row['relative_error']:.4f}")
        made.add_section()
    return made
