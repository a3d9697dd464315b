"""The command `run`."""

from __future__ import annotations

from typing import Annotated

import typer

from hasslefree.cli.common import ELSEWHERE, app

# What follows PROGRAM is the program's own, whatever it looks like.
UNTOUCHED = {"allow_interspersed_args": False}


@app.command(context_settings=UNTOUCHED, rich_help_panel=ELSEWHERE)
def run(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="A console script, a module that `python -m` runs, or a .py file.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the program.")] = None,
) -> None:
    """Run a Python program that can load compressed folders.

    The program, and the Python processes that it starts, load them through transformers as any other model.

    For example: hasslefree run lm_eval --model hf --model_args pretrained=OUT --tasks piqa
    """
    from hasslefree.launch.program import run_program

    run_program(program, arguments or [])
