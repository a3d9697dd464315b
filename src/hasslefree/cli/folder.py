"""The commands that measure and use a model: `evaluate`, `inspect`, `report`, `export` and
`run`.
"""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hasslefree.cli import common
from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import (
    OUTPUT,
    RUN,
    Device,
    Dtype,
    Folder,
    Json,
    Output,
    Quiet,
    Trust,
    app,
    flag,
)
from hasslefree.errors import OutputError, PromptError, RecipeError
from hasslefree.units import table

# Headings of the help of `evaluate` and `report`.
TEXTS, TASKS, SAMPLES = "Perplexity", "Zero-shot tasks", "Samples of text"

TASK_NAMES = "Tasks: piqa, hellaswag, arc_easy, arc_challenge, winogrande, rte, openbookqa, boolq."
BATCH = "Windows or task sequences in a batch; auto is 1, and for tasks on a GPU what fits."
BESIDE = (
    "Dense model to measure too, or none (default: the one from which MODEL was made, if it is on"
    " this machine)."
)
PROMPT = (
    "Text that the compressed and the dense model continue on the page; repeatable (default: none)."
)
DENSE = (
    "Dense model that continues the prompts, or none (default: the one from which OUT was made)."
)
EXAMPLE = "Example: hasslefree evaluate OUT --perplexity wikitext2 --tasks piqa winogrande"
FORMATS = (
    "dense (plain weights), peft (sparse weights and a LoRA adapter), narrow (without the heads and"
    " neurons that are zero), or with the codes of a quantised S and a LoRA adapter: gguf"
    " (llama.cpp), mlx or compressed-tensors (vLLM)."
)
TEMPLATE = (
    "For gguf: the dense model in bf16, f16 or f32, as llama.cpp's converter writes it (no"
    " default)."
)


@app.command("evaluate", rich_help_panel=common.MEASURE, epilog=EXAMPLE)
def call_evaluate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A hub name or a local folder, dense or compressed."),
    ],
    perplexity: Annotated[
        list[str] | None, flag(TEXTS, "Texts: wikitext2, ptb, c4, or .txt and .jsonl files.")
    ] = None,
    seqlen: Annotated[
        int | None, flag(TEXTS, "Tokens per window (default: 2048, or the limit).", min=2)
    ] = None,
    max_tokens: Annotated[
        int | None, flag(TEXTS, "First tokens of each text to use (default: all).", min=2)
    ] = None,
    tasks: Annotated[list[str] | None, flag(TASKS, TASK_NAMES)] = None,
    limit: Annotated[
        int | None, flag(TASKS, "Use only the first rows of each task (default: all).", min=1)
    ] = None,
    task_data: Annotated[
        Path | None, flag(TASKS, "Folder with TASK.jsonl for each task (default: the hub).")
    ] = None,
    cache: Annotated[
        Path | None, flag(TASKS, "Folder that keeps answers (default: ~/.cache/hasslefree).")
    ] = None,
    dense: Annotated[str | None, flag(RUN, BESIDE)] = None,
    batch_size: Annotated[str, flag(RUN, BATCH)] = "auto",
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity on texts and accuracy on zero-shot tasks.

    If MODEL is a compressed folder, its dense model is measured too.
    """
    from hasslefree.evaluation.continuation import dense_original
    from hasslefree.evaluation.harness import default_cache
    from hasslefree.evaluation.run import evaluate

    if not perplexity and not tasks:
        raise RecipeError(
            "name at least one text or task, such as --perplexity wikitext2 or --tasks piqa"
        )
    if not re.fullmatch("auto|[1-9][0-9]{0,8}", batch_size):
        raise RecipeError(
            f"--batch-size must be auto or a whole number of at least 1, got {batch_size!r}"
        )
    if dense is None and (Path(model) / "compression.json").is_file():
        dense, remark = dense_original(Path(model))
        if remark is not None:
            common.say(remark)
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "trust_remote_code": trust_remote_code,
    }
    options |= {"seqlen": seqlen, "max_tokens": max_tokens, "limit": limit, "task_data": task_data}
    options |= {
        "batch": None if batch_size == "auto" else int(batch_size),
        "cache": cache or default_cache(),
    }
    results: dict[str, Any] = {}

    def keep(found: dict[str, Any], part: str | None = None) -> None:
        results.update(found if part is None else {part: found})
        if output is not None:
            common.write_file(results, output)

    with phase_bars() as progress:
        options["progress"] = progress
        evaluate(model, perplexity or [], tasks or [], keep=keep, **options)
        if dense not in (None, "none"):
            evaluate(
                dense, perplexity or [], tasks or [], keep=partial(keep, part="dense"), **options
            )
    common.show(results, output, as_json, *result_tables(results))


def result_tables(results: dict[str, Any]) -> list[Table]:
    """A table for the texts and one for the tasks, with accuracies in per cent, if the results have
    them.
    """
    tables, dense = [], results.get("dense", {})
    if "perplexity" in results:
        beside = ["dense", "increase"] if dense else []
        texts = table(["text"], ["perplexity", *beside, "tokens", "window"], results["model"])
        for text, row in results["perplexity"].items():
            before = dense["perplexity"][text]["perplexity"] if dense else None
            cells = (
                [f"{before:.3f}", f"{100 * (row['perplexity'] / before - 1):+.1f} %"]
                if before
                else []
            )
            texts.add_row(
                text, f"{row['perplexity']:.3f}", *cells, f"{row['tokens']:,}", str(row["window"])
            )
        tables.append(texts)
    if "tasks" in results:
        tasks = table(
            ["task", "metric"],
            ["accuracy", *(["dense"] if dense else []), "±", "rows"],
            results["model"],
        )
        tasks.caption, tasks.caption_justify = "zero-shot, per cent", "left"
        if results["limit"] is not None:
            tasks.caption += f"; only the first {results['limit']} rows of each task"
        if truncated := sum(row["truncated"] for row in results["tasks"].values()):
            tasks.caption += (
                f"; longer than the model's window, and cut at their beginning: {truncated}"
            )
        for task, row in results["tasks"].items():
            error = row[f"{row['metric']}_stderr"]
            spread = "" if error is None else f"{100 * error:.2f}"
            cells = [f"{100 * dense['tasks'][task]['value']:.2f}"] if dense else []
            tasks.add_row(
                task, row["metric"], f"{100 * row['value']:.2f}", *cells, spread, f"{row['rows']:,}"
            )
        tasks.add_section()
        cells = [f"{100 * dense['average']:.2f}"] if dense else []
        tasks.add_row("average", "", f"{100 * results['average']:.2f}", *cells, "", "")
        tables.append(tasks)
    return tables


@app.command(rich_help_panel=common.MEASURE)
def inspect(
    folder: Folder,
    layers: Annotated[
        bool, flag(OUTPUT, "List every layer, not only every kind (default: off).", "--layers")
    ] = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """List what a compressed folder holds, and its bytes.

    Only config.json, compression.json and the headers of the weight files are read, and no weights.
    """
    from hasslefree.checkpoint.inspect import inspect_folder, kind_table, layer_table

    sizes = inspect_folder(folder)
    common.show(
        sizes.to_dict(), output, as_json, layer_table(sizes) if layers else kind_table(sizes)
    )


@app.command("report", rich_help_panel=common.MEASURE)
def write_report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="OUT", help="Compressed folders and evaluate's JSON files."),
    ],
    output: Annotated[Path, flag(OUTPUT, "The page to write.", metavar="FILE")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None, flag(OUTPUT, "Folder for the figures as PNG and SVG (default: none).")
    ] = None,
    prompt: Annotated[list[str] | None, flag(SAMPLES, PROMPT)] = None,
    dense: Annotated[str | None, flag(SAMPLES, DENSE)] = None,
    max_new_tokens: Annotated[
        int, flag(SAMPLES, "Maximum number of tokens that continue a prompt.", min=1)
    ] = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Write an HTML page about compressed folders, side by side.

    The page needs no network. Perplexities and tasks are taken from the files evaluation*.json in
    each folder, and from the JSON files that are named beside the folders, which may be those of
    the dense model.
    """
    from hasslefree.checkpoint.output import PAGE, check_file, write_whole
    from hasslefree.report.charts import write_figures
    from hasslefree.report.content import read_content
    from hasslefree.report.page import render

    check_file(output, PAGE)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise OutputError(f"--figures {figures} is a file; give a folder")
    if "" in (prompts := prompt or []):
        raise PromptError("--prompt is empty; give some text to continue")
    content = read_content(sources)
    samples = []
    if prompts:
        from hasslefree.report.samples import sample_folders

        folders = [Path(run.sizes.folder) for run in content.runs]
        how = {"device": device, "trust_remote_code": trust_remote_code}
        with common.console.status("continuing the prompts"):
            samples = sample_folders(folders, prompts, dense, max_new_tokens, **how)
    write_whole(output, render(content, samples))
    common.say(f"Written to {output}.")
    if figures is not None:
        common.say(f"{len(write_figures(content, figures))} figures written to {figures}.")


@app.command("export", rich_help_panel=common.ELSEWHERE)
def call_export(
    folder: Folder,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write.")],
    to: Annotated[str, flag(OUTPUT, FORMATS)],
    template: Annotated[Path | None, flag(OUTPUT, TEMPLATE, metavar="FILE")] = None,
    max_shard_size: Annotated[str, flag(OUTPUT, "Maximum size of a weight file.")] = "5GB",
    overwrite: Annotated[
        bool, flag(OUTPUT, "Replace DEST if it is not empty (default: off).", "--overwrite")
    ] = False,
    push_to: common.PushTo = None,
    private: common.Private = False,
    quiet: Quiet = False,
) -> None:
    """Write a compressed model for programs without hasslefree."""
    from hasslefree.exports.export import export

    common.prepare_push(push_to, private)
    with phase_bars() as progress:
        options: dict[str, Any] = {
            "overwrite": overwrite,
            "max_shard_size": max_shard_size,
            "progress": progress,
        }
        export(folder, destination, to, template=template, **options)
    common.say(f"Written to {destination}.")
    common.push(destination, push_to)


# What follows PROGRAM belongs to that program, whatever it looks like.
@app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=common.ELSEWHERE)
def run(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="A console script, a module, or a .py file.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the program.")
    ] = None,
) -> None:
    """Run a Python program that can load compressed folders.

    The program, and the Python processes that it starts, load them through transformers as any
    other model.

    For example: hasslefree run lm_eval --model hf --model_args pretrained=OUT --tasks piqa
    """
    from hasslefree.launch.program import run_program

    run_program(program, arguments or [])
