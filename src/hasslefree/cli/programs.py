"""The command `run`."""

from __future__ import annotations

from typing import Annotated

import typer

from hasslefree.cli.common import app

# What follows PROGRAM is the program's own, whatever it looks like.
UNTOUCHED = {"allow_interspersed_args": False}


@app.command(context_settings=UNTOUCHED)
def run(
    program: Annotated[str, typer.Argument(help="A console script, a module that `python -m` runs, or a .py file.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The program's own.")] = None,
) -> None:
    """Run PROGRAM so that it, and the Python processes that it starts, load compressed folders through transformers.

    For example: hasslefree run lm_eval --model hf --model_args pretrained=OUT --tasks piqa
    """
    from hasslefree.launch.program import run_program

    run_program(program, arguments or [])
