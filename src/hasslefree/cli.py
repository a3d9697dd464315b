"""The command line. A user's mistake ends with one message and exit code 2."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from wrapt import register_post_import_hook

from hasslefree.errors import HasslefreeError, OutputError, RecipeError, with_flags
from hasslefree.recipe.options import with_recipe

if TYPE_CHECKING:
    from hasslefree.folder.record import LayerRecord

app = typer.Typer(
    help="Make a language model smaller without retraining it: every linear layer becomes sparse plus low-rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Under torchrun the first process alone speaks, but for errors.
console = Console(quiet=os.environ.get("RANK", "0") != "0")

# These take several values after one flag, as in: --perplexity wikitext2 ptb my.txt
_LISTS = ("--perplexity", "--tasks", "--leave-dense", "--methods", "--texts")

COLUMNS = (
    TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    TextColumn("left"), TimeRemainingColumn(),
)  # fmt: skip

ADVISE = (
    "Say instead which pattern and rank lose least in so many bytes (150MB, 1.5GB) of weights; the model and the text "
    "are read for it."
)
ACTIVATIONS = typer.Option(help="Where hidden states are between blocks: device, cpu (RAM) or disk.")
TRUST = typer.Option(help="Run code that comes with the model.")


@app.command()
@with_recipe
def compress(
    model: Annotated[str, typer.Argument(help="A hub name or a local folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    recipe: Any,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … (default: the GPU if there is one).")] = None,
    activations: Annotated[str, ACTIVATIONS] = "device",
    resume: Annotated[bool, typer.Option(help="Resume an interrupted run from its last finished block.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it is not empty; begin anew.")] = False,
    trust_remote_code: Annotated[bool, TRUST] = False,
) -> None:
    """Compress MODEL into the folder OUT, which transformers loads after `import hasslefree`."""
    from hasslefree.folder.journal import kept
    from hasslefree.folder.record import summary_table
    from hasslefree.report.content import write_seconds
    from hasslefree.run.compress import compress as compress_model

    try:
        with layer_bar() as progress:
            report = compress_model(
                model,
                out,
                recipe,
                device=device,
                activations=activations,
                resume=resume,
                overwrite=overwrite,
                trust_remote_code=trust_remote_code,
                progress=progress,
            )
    except KeyboardInterrupt:
        say(f"Interrupted; {with_flags(kept(out))}.")
        raise
    if not console.quiet:
        write_seconds(out, report)
    console.print(summary_table(report))
    say(f"Written to {out} in {report.seconds:.0f} s; every layer is listed in {out / 'compression.json'}.")


@app.command()
@with_recipe
def plan(
    model: Annotated[str, typer.Argument(help="A hub name or a local folder.")],
    recipe: Any,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … (default: the GPU if there is one).")] = None,
    activations: Annotated[str, ACTIVATIONS] = "device",
    processes: Annotated[int, typer.Option(help="Processes under torchrun; figures are for each.", min=1)] = 1,
    trust_remote_code: Annotated[bool, TRUST] = False,
    advise: Annotated[str | None, typer.Option(help=ADVISE, metavar="BYTES")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the plan as JSON.")] = None,
) -> None:
    """What `compress` would do to MODEL, and the memory, disk and time that it takes. No weight is read for that."""
    from hasslefree.models.load import resolve_device

    check_output_file(output)
    if advise is not None:
        say_advice(model, advise, recipe, device, activations, trust_remote_code, output)
        return
    from hasslefree.run.estimate import estimate_model, to_dict
    from hasslefree.run.memory import as_run
    from hasslefree.run.tables import estimate_table

    target = resolve_device(device)
    found = as_run(estimate_model(model, recipe, target, activations, processes, trust_remote_code), target)
    console.print(estimate_table(found, target))
    write_json(to_dict(found), output)


def say_advice(
    model: str, budget: str, recipe: Any, device: str | None, activations: str, trust: bool, output: Path | None
) -> None:
    """Patterns and ranks within a budget of bytes, as a table, the best one first; and the command for that."""
    from hasslefree.folder.repeat import compress_command
    from hasslefree.run.advise import advise as advise_on
    from hasslefree.run.tables import advice_table
    from hasslefree.units import bytes_of

    with Progress(*COLUMNS, console=console, transient=True) as bar:
        task = bar.add_task("loading the model and the text", total=None)
        found = advise_on(
            model,
            bytes_of(budget),
            recipe,
            device=device,
            activations=activations,
            trust_remote_code=trust,
            progress=lambda done, total: bar.update(task, description="blocks", completed=done, total=total),
        )
    console.print(advice_table(found))
    chosen = dataclasses.replace(recipe, pattern=found[0].pattern, rank=found[0].rank)
    say(shlex.join(compress_command(model, "OUT", chosen)))
    write_json({"advice": [dataclasses.asdict(each) for each in found]}, output)


@contextmanager
def layer_bar() -> Iterator[Callable[[LayerRecord, int, int], None]]:
    """A bar over layers with the current layer's relative error and the time left; above it what is logged."""
    with Progress(*COLUMNS, console=console, transient=True) as bar:
        task = bar.add_task("loading the model and the text", total=None)
        handler = RichHandler(console=bar.console, show_path=False, show_level=False, markup=False)
        logger = logging.getLogger("hasslefree")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

        def progress(report: LayerRecord, done: int, total: int) -> None:
            text = f"{report.name} relative error {report.relative_error:.5f}"
            bar.update(task, description=text, completed=done, total=total)

        try:
            yield progress
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


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
    device: Annotated[str | None, typer.Option(help="cpu, cuda, … (default: the GPU if there is one).")] = None,
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
    # The tasks have bars of their own.
    with nullcontext() if tasks else console.status("evaluating"):
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
    device: Annotated[str | None, typer.Option(help="cpu, cuda, … (default: the GPU if there is one).")] = None,
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
        reproduce_figure(model, chosen, scale, desk, block)
        return
    table = table_number(what)
    with layer_bar() as progress:
        reproduce_table(table, model, like, chosen, scale, desk, plan_only=plan_only, keep=keep, progress=progress)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder that `hasslefree compress` wrote.")],
    output: Annotated[Path | None, typer.Option(help="Write the sizes as JSON.")] = None,
) -> None:
    """What FOLDER holds and weighs, layer by layer, from config.json and the headers; no weight is read."""
    from hasslefree.folder.inspect import inspect_folder, size_table

    check_output_file(output)
    found = inspect_folder(folder)
    console.print(size_table(found))
    write_json(found.to_dict(), output)


@app.command(name="report")
def report_page(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders that compress wrote; and JSON results of evaluate."),
    ],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Write the figures here too, as PNG and SVG.")] = None,
) -> None:
    """One HTML page about compressed folders, side by side where there are several, that needs no network.

    Perplexities and tasks are taken from the files evaluation*.json in FOLDER, and from results named beside it, which
    may be those of the dense model.
    """
    from hasslefree.report.content import read_content
    from hasslefree.report.figures import write_figures
    from hasslefree.report.page import render

    check_output_file(output)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise OutputError(f"--figures {figures} is a file; give a folder")
    content = read_content(sources)
    output.write_text(render(content), encoding="utf-8")
    say(f"Written to {output}.")
    if figures is not None:
        say(f"{len(write_figures(content, figures))} figures written to {figures}.")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that compress wrote.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write.")],
    to: Annotated[
        str,
        typer.Option(
            help="dense (plain weights), peft (sparse weights, a LoRA adapter) or narrow (no idle heads, neurons)."
        ),
    ],
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace DEST if it is not empty.")] = False,
) -> None:
    """Write a compressed model for programs that do not know hasslefree."""
    from hasslefree.exports.export import export as export_model

    with console.status("exporting"):
        export_model(folder, destination, to, overwrite=overwrite, max_shard_size=max_shard_size)
    say(f"Written to {destination}.")


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the compressed models here (default: nowhere).")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of hassle-free; the paper takes 80.", min=1)] = 20,
) -> None:
    """Compress the small model that ships with the package in several ways, and compare."""
    from hasslefree.demo.run import demo_table, run_demo

    start = time.perf_counter()
    with layer_bar() as progress:
        rows = run_demo(out, rounds, progress)
    console.print(demo_table(rows))
    say(f"{time.perf_counter() - start:.0f} seconds.")


def check_output_file(output: Path | None) -> None:
    """Raise an OutputError where --output cannot be a file."""
    if output is not None and (output.is_dir() or not output.resolve().parent.is_dir()):
        raise OutputError(f"--output {output} is a folder, or in a folder that does not exist; give a file")


def write_json(results: dict[str, Any], output: Path | None) -> None:
    """Write results to the file of --output, if it was given, and say so."""
    write_file(results, output)
    if output is not None:
        say(f"Written to {output}.")


def write_file(results: dict[str, Any], output: Path | None) -> None:
    """Write results to the file of --output, if it was given."""
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def say(message: str) -> None:
    """Print a line as it is: paths may hold what rich would take for markup."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def spread_lists(arguments: list[str]) -> list[str]:
    """Repeat a list flag before each of its values: --perplexity a b → --perplexity a --perplexity b."""
    spread: list[str] = []
    flag = None
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in _LISTS else None
        elif flag and spread[-1] != flag:
            spread.append(flag)
        spread.append(argument)
    return spread


def main() -> None:
    """Run the command line; a HasslefreeError becomes a message and exit code 2, an interruption exit code 130."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what schedulers send is what Ctrl-C sends
    quiet_libraries()
    try:
        app(args=spread_lists(sys.argv[1:]), prog_name="hasslefree")
    except HasslefreeError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"error: {with_flags(error.message)}", style="red", markup=False, highlight=False
        )
        sys.exit(2)


def quiet_libraries() -> None:
    """One bar is enough: transformers' own bars and notices are off once it is imported. Its errors are not."""

    def quiet(logging: Any) -> None:
        logging.disable_progress_bar()
        logging.set_verbosity_error()

    register_post_import_hook(quiet, "transformers.utils.logging")
