"""The command `demo`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import app, console, say


@app.command()
def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the compressed models here (default: nowhere).")] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of hassle-free; the paper takes 80.", min=1)] = 20,
) -> None:
    """Compress the small model that ships with the package in several ways, compare, and let the last one write."""
    from hasslefree.demo.run import demo_table, run_demo, sample_table

    start = time.perf_counter()
    with phase_bars() as progress:
        found = run_demo(out, rounds, progress)
    console.print(demo_table(found.rows))
    console.print(sample_table(found.samples))
    say(f"{time.perf_counter() - start:.0f} seconds.")
