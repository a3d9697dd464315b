"""The results of an evaluation as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


def result_tables(results: dict[str, Any]) -> list[Table]:
    """One table for the texts and one for the tasks, if the results have them."""
    tables = []
    if "perplexity" in results:
        tables.append(perplexity_table(results))
    if "tasks" in results:
        tables.append(task_table(results))
    return tables


def perplexity_table(results: dict[str, Any]) -> Table:
    """A line for each text."""
    table = Table(title=Text(results["model"]))
    for heading in ("text", "perplexity", "tokens", "window"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for text, row in results["perplexity"].items():
        table.add_row(Text(text), f"{row['perplexity']:.3f}", f"{row['tokens']:,}", str(row["window"]))
    return table


def task_table(results: dict[str, Any]) -> Table:
    """A line for each task with its accuracy and standard error in per cent, and one for their mean."""
    caption = "zero-shot, per cent"
    if results["limit"] is not None:
        caption += f"; only the first {results['limit']} rows of each task"
    if cut := sum(row["truncated"] for row in results["tasks"].values()):
        caption += f"; longer than the model's window, and cut at their beginning: {cut}"
    table = Table(title=Text(results["model"]), caption=caption)
    for heading in ("task", "metric", "accuracy", "±", "rows"):
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    for task, row in results["tasks"].items():
        error = row[f"{row['metric']}_stderr"]
        spread = "" if error is None else f"{100 * error:.2f}"
        table.add_row(task, row["metric"], f"{100 * row['value']:.2f}", spread, f"{row['rows']:,}")
    table.add_section()
    table.add_row("average", "", f"{100 * results['average']:.2f}", "", "")
    return table
