"""The results of an evaluation as tables for the terminal."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from hasslefree.tables import table


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
    made = table(["text"], ["perplexity", "tokens", "window"], results["model"])
    for text, row in results["perplexity"].items():
        made.add_row(Text(text), f"{row['perplexity']:.3f}", f"{row['tokens']:,}", str(row["window"]))
    return made


def task_table(results: dict[str, Any]) -> Table:
    """A line for each task with its accuracy and standard error in per cent, and one for their mean."""
    caption = "zero-shot, per cent"
    if results["limit"] is not None:
        caption += f"; only the first {results['limit']} rows of each task"
    if cut := sum(row["truncated"] for row in results["tasks"].values()):
        caption += f"; longer than the model's window, and cut at their beginning: {cut}"
    made = table(["task", "metric"], ["accuracy", "±", "rows"], results["model"])
    made.caption, made.caption_justify = caption, "left"
    for task, row in results["tasks"].items():
        error = row[f"{row['metric']}_stderr"]
        spread = "" if error is None else f"{100 * error:.2f}"
        made.add_row(task, row["metric"], f"{100 * row['value']:.2f}", spread, f"{row['rows']:,}")
    made.add_section()
    made.add_row("average", "", f"{100 * results['average']:.2f}", "", "")
    return made
