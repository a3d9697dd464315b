"""The commands that lead to a compression: `compress`, `plan`, `methods` and `demo`."""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import (
    COMPRESS,
    OUTPUT,
    QUIET_PROCESS,
    RUN,
    TRY,
    Device,
    Json,
    Output,
    Quiet,
    Trust,
    app,
    console,
    option,
    say,
    show,
)
from hasslefree.errors import with_flags
from hasslefree.recipe.options import with_recipe

RESUME = "Resume an interrupted run from its last finished block (default: off)."
OVERWRITE = "Replace OUT if it is not empty, and start from the first block (default: off)."
ADVISE = (
    "Instead of a plan, list the patterns and ranks that lose least within BYTES of weights, such as 150MB or 1.5GB; "
    "this reads the model and the calibration text."
)
PROCESSES = "Number of processes under torchrun; figures are for each."
Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model: a hub name or a local folder.")]
Activations = Annotated[str, option(RUN, "Where hidden states are kept between blocks: device, cpu (in RAM) or disk.")]


@app.command(rich_help_panel=COMPRESS, epilog="Example: hasslefree compress MODEL OUT --pattern 2:4 --rank 64")
@with_recipe
def compress(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    recipe: Any,
    device: Device = None,
    activations: Activations = "device",
    trust_remote_code: Trust = False,
    resume: Annotated[bool, option(OUTPUT, RESUME, "--resume")] = False,
    overwrite: Annotated[bool, option(OUTPUT, OVERWRITE, "--overwrite")] = False,
    quiet: Quiet = False,
) -> None:
    """Compress MODEL into the folder OUT, which transformers loads."""
    try:
        from hasslefree.folder.journal import describe_progress
        from hasslefree.folder.record import summary_table
        from hasslefree.report.content import write_seconds
        from hasslefree.run.compress import compress as compress_model
        from hasslefree.run.tables import phase_table
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted before anything was written.") from None

    try:
        with phase_bars() as progress:
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
        raise KeyboardInterrupt(f"Interrupted; {with_flags(describe_progress(out))}.") from None
    if not QUIET_PROCESS:
        write_seconds(out, report)
    console.print(summary_table(report))
    console.print(phase_table(report))
    say(f"Written to {out} in {report.seconds:.0f} s; every layer is listed in {out / 'compression.json'}.")


@app.command(rich_help_panel=COMPRESS)
@with_recipe
def plan(
    model: Model,
    recipe: Any,
    device: Device = None,
    activations: Activations = "device",
    processes: Annotated[int, option(RUN, PROCESSES, min=1)] = 1,
    trust_remote_code: Trust = False,
    advise: Annotated[str | None, option(OUTPUT, ADVISE, metavar="BYTES")] = None,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Show the memory, disk and time that `compress` would take.

    The options are those of `compress`. Only the configuration of MODEL is read, and no weights.
    """
    from hasslefree.models.load import resolve_device

    if advise is None:
        from hasslefree.run.estimate import setup_of, without_prefetch_if_tight
        from hasslefree.run.tables import plan_summary, plan_table

        setup = setup_of(model, recipe, resolve_device(device), activations, processes, trust_remote_code)
        setup = without_prefetch_if_tight(setup)
        show(plan_summary(setup), output, as_json, plan_table(setup))
        return

    from hasslefree.folder.record import compress_command
    from hasslefree.run.advise import advise as advise_on
    from hasslefree.run.tables import advice_table
    from hasslefree.units import bytes_of

    options: dict[str, Any] = {"device": device, "activations": activations, "trust_remote_code": trust_remote_code}
    with phase_bars() as progress:
        advice = advise_on(model, bytes_of(advise), recipe, progress=progress, **options)
    show({"advice": [dataclasses.asdict(row) for row in advice]}, output, as_json, advice_table(advice))
    best = dataclasses.replace(recipe, pattern=advice[0].pattern, rank=advice[0].rank)
    say(shlex.join(compress_command(model, "OUT", best)))


@app.command(rich_help_panel=COMPRESS)
def methods(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="List the settings of this method, pruner or low-rank solver instead."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List methods, pruners, low-rank solvers, patterns and efforts."""
    from hasslefree.recipe import listing

    results, text = listing.overview() if name is None else listing.settings_of(name)
    show(results, None, as_json, text)


@app.command(rich_help_panel=TRY)
def demo(
    out: Annotated[
        Path | None, option(OUTPUT, "Folder for the compressed models (default: they are not kept).")
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
        rows, samples = run_demo(out, rounds, progress)
    console.print(demo_table(rows))
    console.print(sample_table(samples))
    say(f"Finished in {time.perf_counter() - start:.0f} seconds.")
