"""What every command shares: the application, the console, and the file of `--output`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from hasslefree.errors import OutputError

app = typer.Typer(
    help="Make a language model smaller without retraining it: every linear layer becomes sparse plus low-rank.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Under torchrun the first process alone speaks, but for errors.
console = Console(quiet=os.environ.get("RANK", "0") != "0")

DEVICE = typer.Option(help="cpu, cuda, cuda:1, … (default: the GPU if there is one).")
TRUST = typer.Option(help="Run code that comes with the model.")


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
