"""The command `demo`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import OUTPUT, TRY, Quiet, app, console, say


@app.command(rich_help_panel=TRY)
def demo(
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the compressed models (default: they are not kept).", rich_help_panel=OUTPUT),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of hassle-free; the paper takes 80.", min=1)] = 20,
    quiet: Quiet = False,
) -> None:
    """Compress a small model that ships with the package, in minutes.

    Several methods are compared by perplexity; then the dense and the last compressed model continue a prompt.
    """
    from hasslefree.demo.run import demo_table, run_demo, sample_table

    start = time.perf_counter()
    with phase_bars() as progress:
        found = run_demo(out, rounds, progress)
    console.print(demo_table(found.rows))
    console.print(sample_table(found.samples))
    say(f"Finished in {time.perf_counter() - start:.0f} seconds.")
