"""The command line. A user's mistake ends with one message and exit code 2."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hasslefree.errors import HasslefreeError, OutputError, RecipeError

if TYPE_CHECKING:
    from hasslefree.report import LayerReport

app = typer.Typer(
    help="Make a language model smaller without retraining it: every linear layer becomes sparse plus low-rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

# These take several values after one flag, as in: --perplexity wikitext2 ptb my.txt
_LISTS = ("--perplexity", "--leave-dense")


@app.command()
def compress(
    model: Annotated[str, typer.Argument(help="A hub name or a local folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    recipe: Annotated[Path | None, typer.Option(help="A YAML recipe; options given here win over it.")] = None,
    pattern: Annotated[str | None, typer.Option(help="N:M, unstructured, row or structured (default: 2:4).")] = None,
    rank: Annotated[int | None, typer.Option(help="Rank of the low-rank part.")] = None,
    sparsity: Annotated[float | None, typer.Option(help="Share of zeros in S, for patterns other than N:M.")] = None,
    ratio: Annotated[float | None, typer.Option(help="Share of the parameters to save; fixes the rank.")] = None,
    rank_share: Annotated[float | None, typer.Option(help="Share of what is kept that goes to L.")] = None,
    method: Annotated[
        str | None, typer.Option(help="joint (default), 3basil, hassle-free, oats, eora, or a pruner.")
    ] = None,
    pruner: Annotated[str | None, typer.Option(help="Another pruner for hassle-free: sparsegpt, alps, …")] = None,
    low_rank: Annotated[str | None, typer.Option(help="Another solver for hassle-free: adam, exact, …")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds (default: the method's own).")] = None,
    damping: Annotated[float | None, typer.Option(help="λ over mean(diag H) (default: the method's).")] = None,
    calibration: Annotated[str | None, typer.Option(help="c4 (default), wikitext2, ptb, or a file.")] = None,
    samples: Annotated[int | None, typer.Option(help="Calibration segments (default: 128).")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens a segment (default: at most 2048).")] = None,
    sequential: Annotated[str | None, typer.Option(help="layer (a pass a group) or block (a pass a block).")] = None,
    leave_dense: Annotated[list[str] | None, typer.Option(help="Globs of layers that stay as they are.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all that is random (default: 0).")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, … (default: the GPU if there is one).")] = None,
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace OUT if it is not empty.")] = False,
) -> None:
    """Compress MODEL into the folder OUT, which transformers loads after `import hasslefree`."""
    given = {
        "pattern": pattern,
        "rank": rank,
        "sparsity": sparsity,
        "ratio": ratio,
        "rank_share": rank_share,
        "method": method,
        "pruner": pruner,
        "low_rank": low_rank,
        "rounds": rounds,
        "damping": damping,
        "calibration": calibration,
        "samples": samples,
        "seqlen": seqlen,
        "sequential": sequential,
        "leave_dense": tuple(leave_dense) if leave_dense else None,
        "dtype": dtype,
        "seed": seed,
    }
    run_compress(
        model, out, recipe, {k: v for k, v in given.items() if v is not None}, device, max_shard_size, overwrite
    )


def run_compress(
    model: str,
    out: Path,
    recipe: Path | None,
    given: dict[str, Any],
    device: str | None,
    max_shard_size: str,
    overwrite: bool,
) -> None:
    """Compress with a bar over the layers, and a table at the end."""
    from hasslefree.compress import compress as compress_model
    from hasslefree.recipe import Recipe
    from hasslefree.report import summary_table

    with layer_bar() as progress:
        report = compress_model(
            model,
            out,
            Recipe.from_yaml(recipe, **given) if recipe else Recipe(**given),
            device=device,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            progress=progress,
        )
    console.print(summary_table(report))
    say(f"Written to {out} in {report.seconds:.0f} s; every layer is listed in {out / 'compression.json'}.")


@contextmanager
def layer_bar() -> Iterator[Callable[[LayerReport, int, int], None]]:
    """A bar over layers with the current layer's relative error and the time left."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}", markup=False), *columns, console=console, transient=True) as bar:
        task = bar.add_task("loading the model and the text", total=None)

        def progress(report: LayerReport, done: int, total: int) -> None:
            text = f"{report.name} relative error {report.relative_error:.5f}"
            bar.update(task, description=text, completed=done, total=total)

        yield progress


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(help="A hub name or a local folder, dense or compressed.")],
    perplexity: Annotated[
        list[str] | None, typer.Option(help="Texts: wikitext2, ptb, c4, or .txt and .jsonl files.")
    ] = None,
    seqlen: Annotated[
        int | None, typer.Option(help="Tokens a window (default: 2048 or the model's most).", min=2)
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Use only the first tokens of each text.", min=2)] = None,
    batch_size: Annotated[int, typer.Option(help="Windows at a time.", min=1)] = 1,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, … (default: the GPU if there is one).")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
) -> None:
    """Perplexity of MODEL, at full stride, as the Hugging Face guide defines it."""
    from rich.table import Table
    from rich.text import Text

    from hasslefree.evaluation.run import evaluate_perplexity

    if not perplexity:
        raise RecipeError("name at least one text, such as --perplexity wikitext2")
    check_output_file(output)
    with console.status("evaluating"):
        results = evaluate_perplexity(model, perplexity, seqlen, max_tokens, batch_size, dtype, device)
    table = Table(title=Text(model))
    for heading in ("text", "perplexity", "tokens", "window"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    for text, result in results["perplexity"].items():
        table.add_row(Text(text), f"{result['perplexity']:.3f}", f"{result['tokens']:,}", str(result["window"]))
    console.print(table)
    write_json(results, output)


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder that `hasslefree compress` wrote.")],
    output: Annotated[Path | None, typer.Option(help="Write the sizes as JSON.")] = None,
) -> None:
    """What FOLDER holds and weighs, layer by layer, from config.json and the headers; no weight is read."""
    from hasslefree.checkpoints.inspect import inspect_folder, size_table

    check_output_file(output)
    found = inspect_folder(folder)
    console.print(size_table(found))
    write_json(found.to_dict(), output)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that compress wrote.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write.")],
    to: Annotated[str, typer.Option(help="dense (plain weights) or peft (sparse weights and a LoRA adapter).")],
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace DEST if it is not empty.")] = False,
) -> None:
    """Write a compressed model for programs that do not know hasslefree."""
    from hasslefree.checkpoints.export import export as export_model

    with console.status("exporting"):
        export_model(folder, destination, to, overwrite=overwrite, max_shard_size=max_shard_size)
    say(f"Written to {destination}.")


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the compressed models here (default: nowhere).")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of hassle-free; the paper takes 80.", min=1)] = 20,
) -> None:
    """Compress the small model that ships with the package in four ways, and compare."""
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
    """Write results to the file of --output, if it was given."""
    if output is not None:
        output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        say(f"Written to {output}.")


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
    """Run the command line; a HasslefreeError becomes a message and exit code 2."""
    quiet_libraries()
    try:
        app(args=spread_lists(sys.argv[1:]), prog_name="hasslefree")
    except HasslefreeError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


def quiet_libraries() -> None:
    """One bar is enough: transformers' own bars and notices are off. Its errors are not."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
