"""The command `evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import MEASURE, RUN, Device, Dtype, Json, Output, Quiet, Trust, app, option, show, write_file
from hasslefree.errors import RecipeError
from hasslefree.tables import table

TEXTS, TASKS = "Perplexity", "Zero-shot tasks"
TEXT_NAMES = "Texts: wikitext2, ptb, c4, or .txt and .jsonl files."
SEQLEN = "Tokens in a window (default: 2048, or the model's limit if that is less)."
MAX_TOKENS = "Use only the first tokens of each text (default: all)."
TASK_NAMES = "Tasks: piqa, hellaswag, arc_easy, arc_challenge, winogrande, rte, openbookqa, boolq."
LIMIT = "Use only the first rows of each task (default: all)."
TASK_DATA = "Folder with a file TASK.jsonl for each task (default: rows come from the hub)."
CACHE = "Folder in which answers to tasks are kept (default: ~/.cache/hasslefree)."
BATCH = "Windows or task sequences in a batch; auto is 1, and for tasks on a GPU what fits."
EXAMPLE = "Example: hasslefree evaluate OUT --perplexity wikitext2 --tasks piqa winogrande"


@app.command(rich_help_panel=MEASURE, epilog=EXAMPLE)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub name or a local folder, dense or compressed.")],
    perplexity: Annotated[list[str] | None, option(TEXTS, TEXT_NAMES)] = None,
    seqlen: Annotated[int | None, option(TEXTS, SEQLEN, min=2)] = None,
    max_tokens: Annotated[int | None, option(TEXTS, MAX_TOKENS, min=2)] = None,
    tasks: Annotated[list[str] | None, option(TASKS, TASK_NAMES)] = None,
    limit: Annotated[int | None, option(TASKS, LIMIT, min=1)] = None,
    task_data: Annotated[Path | None, option(TASKS, TASK_DATA)] = None,
    cache: Annotated[Path | None, option(TASKS, CACHE)] = None,
    batch_size: Annotated[str, option(RUN, BATCH)] = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity on texts and accuracy on zero-shot tasks."""
    from hasslefree.evaluation import run
    from hasslefree.evaluation.harness import default_cache

    if not perplexity and not tasks:
        raise RecipeError("name at least one text or task, such as --perplexity wikitext2 or --tasks piqa")
    if batch_size != "auto" and (not batch_size.isdecimal() or int(batch_size) < 1):
        raise RecipeError(f"--batch-size must be auto or a whole number of at least 1, got {batch_size!r}")
    with phase_bars() as progress:
        results = run.evaluate(
            model,
            perplexity or [],
            tasks or [],
            seqlen=seqlen,
            max_tokens=max_tokens,
            batch=None if batch_size == "auto" else int(batch_size),
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            limit=limit,
            task_data=task_data,
            cache=cache or default_cache(),
            keep=lambda results: None if output is None else write_file(results, output),
            progress=progress,
        )
    show(results, output, as_json, *result_tables(results))


def result_tables(results: dict[str, Any]) -> list[Table]:
    """A table for the texts and one for the tasks, with accuracies in per cent, if the results have them."""
    tables = []
    if "perplexity" in results:
        texts = table(["text"], ["perplexity", "tokens", "window"], results["model"])
        for text, row in results["perplexity"].items():
            texts.add_row(Text(text), f"{row['perplexity']:.3f}", f"{row['tokens']:,}", str(row["window"]))
        tables.append(texts)
    if "tasks" in results:
        tasks = table(["task", "metric"], ["accuracy", "±", "rows"], results["model"])
        tasks.caption, tasks.caption_justify = "zero-shot, per cent", "left"
        if results["limit"] is not None:
            tasks.caption += f"; only the first {results['limit']} rows of each task"
        if truncated := sum(row["truncated"] for row in results["tasks"].values()):
            tasks.caption += f"; longer than the model's window, and cut at their beginning: {truncated}"
        for task, row in results["tasks"].items():
            error = row[f"{row['metric']}_stderr"]
            spread = "" if error is None else f"{100 * error:.2f}"
            tasks.add_row(task, row["metric"], f"{100 * row['value']:.2f}", spread, f"{row['rows']:,}")
        tasks.add_section()
        tasks.add_row("average", "", f"{100 * results['average']:.2f}", "", "")
        tables.append(tasks)
    return tables
