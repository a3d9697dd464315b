"""A reproduction as tables for the terminal: its cost, and the paper's figures next to the measured ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from hasslefree.reproduction.jobs import Job
from hasslefree.run.estimate import Footprint
from hasslefree.units import duration, size


def cost_table(jobs: Sequence[tuple[Job, Footprint | None]], done: Iterable[str], rate: float, keep: bool) -> Table:
    """A line for each row with the parameters kept, time and disk of its compression; and what all take together.

    Args:
        done: keys of what is measured already. rate: of the device, in FLOPs a second.
        keep: all compressed models stay on the disk.
    """
    done = set(done)
    table = Table(title=f"{len(jobs)} rows, {sum(job.key in done for job, _ in jobs)} of them measured already")
    for heading in ("model", "setting", "method", "kept", "disk", "time"):
        table.add_column(heading, justify="left" if heading in ("model", "setting", "method") else "right")
    for job, takes in jobs:
        cells = ["", "", ""]
        if takes is not None:
            time = "done" if job.key in done else duration(takes.flops / rate)
            cells = [f"{takes.kept / takes.dense:.1%}", size(takes.disk), time]
        table.add_row(Text(job.model), job.setting, job.row.method, *cells)
    left = [takes for job, takes in jobs if takes is not None and job.key not in done]
    disk = [takes.disk for takes in left]
    needed = sum(disk) if keep else max(disk, default=0)
    table.add_section()
    table.add_row("all that is left", "", "", "", size(needed), duration(sum(takes.flops for takes in left) / rate))
    table.caption = "Compressions alone; evaluations come on top."
    return table


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
    """Three lines a row: measured, the paper's, and the difference."""
    names = list(dict.fromkeys(name for row in rows for name in row["measured"]))
    table = Table(title=Text(title))
    for heading in ("setting", "method", "", *names, "relative error"):
        table.add_column(heading, justify="left" if heading in ("setting", "method", "") else "right")
    for row in rows:
        lines = {"measured": row["measured"], "paper": row["paper"], "difference": row["difference"]}
        for label, figures in lines.items():
            if label != "measured" and not figures:
                continue
            first = [row["setting"] or "dense", row["method"]] if label == "measured" else ["", ""]
            form = "{:+.2f}" if label == "difference" else "{:.2f}"
            error = f"{row['relative_error']:.4f}" if label == "measured" and "relative_error" in row else ""
            cells = [form.format(figures[name]) if name in figures else "" for name in names]
            table.add_row(*first, label, *cells, error)
        table.add_section()
    return table
