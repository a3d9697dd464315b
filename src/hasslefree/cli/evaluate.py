"""The commands `evaluate` and `reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import (
    DEVICE,
    MEASURE,
    RUN,
    TRUST,
    Json,
    Output,
    Quiet,
    app,
    show,
    write_file,
)
from hasslefree.errors import RecipeError

TEXTS, TASKS, SCALE = "Perplexity", "Zero-shot tasks", "At another scale than the paper's"


def max_tokens_option(panel: str) -> Any:
    return typer.Option(help="Use only the first tokens of each text (default: all).", min=2, rich_help_panel=panel)


def limit_option(panel: str) -> Any:
    return typer.Option(help="Use only the first rows of each task (default: all).", min=1, rich_help_panel=panel)


def task_data_option(panel: str) -> Any:
    words = "Folder with a file TASK.jsonl for each task (default: rows come from the hub)."
    return typer.Option(help=words, rich_help_panel=panel)


DTYPE_HELP = "Dtype of the weights: auto (the checkpoint's), float32, bfloat16 or float16 (default: {})."


@app.command(
    rich_help_panel=MEASURE, epilog="Example: hasslefree evaluate OUT --perplexity wikitext2 --tasks piqa winogrande"
)
def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A hub name or a local folder, dense or compressed.")],
    perplexity: Annotated[
        list[str] | None,
        typer.Option(help="Texts: wikitext2, ptb, c4, or .txt and .jsonl files.", rich_help_panel=TEXTS),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a window (default: 2048, or the model's limit if that is less).",
            min=2,
            rich_help_panel=TEXTS,
        ),
    ] = None,
    max_tokens: Annotated[int | None, max_tokens_option(TEXTS)] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks: piqa, hellaswag, arc_easy, arc_challenge, winogrande, rte, openbookqa, boolq.",
            rich_help_panel=TASKS,
        ),
    ] = None,
    limit: Annotated[int | None, limit_option(TASKS)] = None,
    task_data: Annotated[Path | None, task_data_option(TASKS)] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder in which answers to tasks are kept (default: ~/.cache/hasslefree).", rich_help_panel=TASKS
        ),
    ] = None,
    batch_size: Annotated[
        str,
        typer.Option(
            help="Windows or task sequences in a batch; auto is 1, and for tasks on a GPU what fits.",
            rich_help_panel=RUN,
        ),
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help=DTYPE_HELP.format("auto"), show_default=False, rich_help_panel=RUN)
    ] = "auto",
    device: Annotated[str | None, DEVICE] = None,
    trust_remote_code: Annotated[bool, TRUST] = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity on texts and accuracy on zero-shot tasks."""
    from hasslefree.evaluation import run
    from hasslefree.evaluation.harness import default_cache
    from hasslefree.evaluation.tables import result_tables

    if not perplexity and not tasks:
        raise RecipeError("name at least one text or task, such as --perplexity wikitext2 or --tasks piqa")
    batch = parse_batch_size(batch_size)
    with phase_bars() as progress:
        results = run.evaluate(
            model,
            perplexity or [],
            tasks or [],
            seqlen=seqlen,
            max_tokens=max_tokens,
            batch=batch,
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


def parse_batch_size(given: str) -> int | None:
    """The number, or None for auto."""
    if given == "auto":
        return None
    if not given.isdecimal() or int(given) < 1:
        raise RecipeError(f"--batch-size must be auto or a whole number of at least 1, got {given!r}")
    return int(given)
