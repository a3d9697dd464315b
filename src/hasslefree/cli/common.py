"""What every command shares: the application, the console, the bar over layers, and the file of `--output`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hasslefree.errors import OutputError

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

COLUMNS = (
    TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    TextColumn("left"), TimeRemainingColumn(),
)  # fmt: skip

DEVICE = typer.Option(help="cpu, cuda, cuda:1, … (default: the GPU if there is one).")
TRUST = typer.Option(help="Run code that comes with the model.")


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
