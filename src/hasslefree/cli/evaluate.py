"""The commands `evaluate` and `reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import DEVICE, TRUST, app, check_output_file, console, say, write_file, write_json
from hasslefree.errors import RecipeError


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A hub name or a local folder, dense or compressed.")],
    perplexity: Annotated[
        list[str] | None, typer.Option(help="Texts: wikitext2, ptb, c4, or .txt and .jsonl files.")
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="piqa, hellaswag, arc_easy, arc_challenge, winogrande, rte, openbookqa, boolq."),
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option(help="Tokens a window (default: 2048 or the model's most).", min=2)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Use only the first tokens of each text.", min=2)] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first rows of each task.", min=1)] = None,
    task_data: Annotated[
        Path | None, typer.Option(help="Take the tasks' rows from here, TASK.jsonl each, and not from the hub.")
    ] = None,
    batch_size: Annotated[
        str, typer.Option(help="Windows or task sequences at a time; auto: 1, and for tasks what fits on the GPU.")
    ] = "auto",
    cache: Annotated[
        Path | None, typer.Option(help="Keep the answers to tasks here (default: ~/.cache/hasslefree).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, DEVICE] = None,
    trust_remote_code: Annotated[bool, TRUST] = False,
    output: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """Perplexity of MODEL on texts, and its zero-shot accuracy on tasks, as docs/guide/evaluate.md defines them."""
    from hasslefree.evaluation import run
    from hasslefree.evaluation.harness import default_cache
    from hasslefree.evaluation.tables import result_tables

    if not perplexity and not tasks:
        raise RecipeError("name at least one text or task, such as --perplexity wikitext2 or --tasks piqa")
    batch = parse_batch_size(batch_size)
    check_output_file(output)
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
            keep=lambda results: write_file(results, output),
            progress=progress,
        )
    for table in result_tables(results):
        console.print(table)
    write_json(results, output)


def parse_batch_size(given: str) -> int | None:
    """The number, or None for auto."""
    if given == "auto":
        return None
    if not given.isdecimal() or int(given) < 1:
        raise RecipeError(f"--batch-size is auto or a number of at least 1, got {given!r}")
    return int(given)


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help="table1, table2, table3, table4 or figure1 of arXiv 2502.00899.")],
    model: Annotated[str | None, typer.Option(help="Instead of the paper's models (figure1: Llama-3.2-1B).")] = None,
    like: Annotated[str | None, typer.Option(help="The paper's model whose figures stand beside.")] = None,
    methods: Annotated[list[str] | None, typer.Option(help="Only these (default: all that are built).")] = None,
    output: Annotated[Path, typer.Option(help="The folder for results; what it holds is not done again.")] = Path(
        "reproduction"
    ),
    plan_only: Annotated[bool, typer.Option("--plan", help="Show what it takes, and stop.")] = False,
    keep: Annotated[bool, typer.Option(help="Keep the compressed models.")] = False,
    rank: Annotated[int | None, typer.Option(help="In the place of rank 64.", min=0)] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration segments (paper: 128).", min=1)] = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens a segment and a window (paper: 2048).", min=2)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of every method that has them (paper: 80).", min=1)] = None,
    calibration: Annotated[str | None, typer.Option(help="A text in the place of c4.")] = None,
    texts: Annotated[list[str] | None, typer.Option(help="NAME=FILE: texts in the place of the paper's.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Use only the first tokens of each text.", min=2)] = None,
    tasks: Annotated[list[str] | None, typer.Option(help="Only these tasks; none for none.")] = None,
    task_data: Annotated[Path | None, typer.Option(help="Take the tasks' rows from here.")] = None,
    limit: Annotated[int | None, typer.Option(help="Use only the first rows of each task.", min=1)] = None,
    block: Annotated[int, typer.Option(help="figure1: the block, from 0.", min=0)] = 0,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, DEVICE] = None,
) -> None:
    """A table or a figure of the paper: measured, the paper's figures beside it. See docs/measured/reproduction.md."""
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
    if what == "figure1":
        with phase_bars() as progress:
            reproduce_figure(model, chosen, scale, desk, block, progress)
        return
    table = table_number(what)
    with phase_bars() as progress:
        reproduce_table(table, model, like, chosen, scale, desk, plan_only=plan_only, keep=keep, progress=progress)
