"""The commands `evaluate` and `reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import (
    DEVICE,
    MEASURE,
    OUTPUT,
    RUN,
    TRUST,
    Json,
    Output,
    Quiet,
    app,
    console,
    say,
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


METHODS = (
    "Methods of the table, and those that can be added to its settings with a low-rank part: joint, 3basil, "
    "joint-balanced and joint-best (default: the table's methods and joint)."
)


@app.command(rich_help_panel=MEASURE)
def reproduce(
    what: Annotated[
        str, typer.Argument(metavar="WHAT", help="table1, table2, table3, table4 or figure1 of arXiv 2502.00899.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Model (default: those of the paper; figure1: Llama-3.2-1B).")
    ] = None,
    like: Annotated[
        str | None, typer.Option(help="Model of the paper whose figures are printed beside (default: by the name).")
    ] = None,
    methods: Annotated[list[str] | None, typer.Option(help=METHODS)] = None,
    settings: Annotated[
        list[str] | None, typer.Option(help="Settings of the table, such as '2:4 + rank 64' (default: all).")
    ] = None,
    block: Annotated[int, typer.Option(help="Number of the block for figure1, from 0.", min=0)] = 0,
    rank: Annotated[
        int | None, typer.Option(help="Rank (default: the paper's, 64).", min=0, rich_help_panel=SCALE)
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Number of calibration segments (default: the paper's, 128).", min=1, rich_help_panel=SCALE),
    ] = None,
    seqlen: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a segment and a window (default: the paper's, 2048).", min=2, rich_help_panel=SCALE
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="Rounds of every method that has them (default: the method's own).",
            min=1,
            rich_help_panel=SCALE,
        ),
    ] = None,
    calibration: Annotated[
        str | None, typer.Option(help="Calibration text (default: the paper's, c4).", rich_help_panel=SCALE)
    ] = None,
    texts: Annotated[
        list[str] | None,
        typer.Option(help="Local texts, each as NAME=FILE (default: the paper's).", rich_help_panel=SCALE),
    ] = None,
    max_tokens: Annotated[int | None, max_tokens_option(SCALE)] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Zero-shot tasks; none for none (default: the table's).", rich_help_panel=SCALE),
    ] = None,
    task_data: Annotated[Path | None, task_data_option(SCALE)] = None,
    limit: Annotated[int | None, limit_option(SCALE)] = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP.format("the recipe's"), rich_help_panel=RUN)] = None,
    device: Annotated[str | None, DEVICE] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Show time and disk space, and stop (default: off).", rich_help_panel=OUTPUT)
    ] = False,
    output: Annotated[
        Path,
        typer.Option(
            help="Folder for results; those that it holds are not measured again.",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("reproduction"),
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the compressed models (default: off).", rich_help_panel=OUTPUT)
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Measure a table or figure of the HASSLE-free paper again."""
    from hasslefree.reproduction.jobs import Scale
    from hasslefree.reproduction.reproduce import (
        Desk,
        chosen_tasks,
        local_texts,
        reproduce_figure,
        reproduce_table,
        table_number,
    )

    scale = Scale(rank, samples, seqlen, rounds, calibration, dtype, local_texts(texts or []), max_tokens,
                  chosen_tasks(tasks), limit, task_data)  # fmt: skip
    chosen, desk = tuple(methods) if methods else None, Desk(output, device, console, say)
    table = None if what == "figure1" else table_number(what)
    with phase_bars() as progress:
        if table is None:
            reproduce_figure(model, chosen, scale, desk, block, progress)
            return
        reproduce_table(
            table, model, like, chosen, scale, desk,
            settings=tuple(settings) if settings else None, plan_only=plan_only, keep=keep, progress=progress,
        )  # fmt: skip
