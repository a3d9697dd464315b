"""The commands `compress` and `plan`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import (
    COMPRESS,
    DEVICE,
    OUTPUT,
    QUIET_PROCESS,
    RUN,
    TRUST,
    Json,
    Output,
    Quiet,
    app,
    before_writing,
    console,
    say,
    show,
)
from hasslefree.errors import with_flags
from hasslefree.recipe.options import with_recipe

ADVISE = (
    "Instead of a plan, list the patterns and ranks that lose least within BYTES of weights, such as 150MB or 1.5GB; "
    "this reads the model and the calibration text."
)
ACTIVATIONS = typer.Option(
    help="Where hidden states are kept between blocks: device, cpu (in RAM) or disk.", rich_help_panel=RUN
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help="The model: a hub name or a local folder.")]
Trust = Annotated[bool, TRUST]


@app.command(rich_help_panel=COMPRESS, epilog="Example: hasslefree compress MODEL OUT --pattern 2:4 --rank 64")
@with_recipe
def compress(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    recipe: Any,
    device: Annotated[str | None, DEVICE] = None,
    activations: Annotated[str, ACTIVATIONS] = "device",
    trust_remote_code: Trust = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Resume an interrupted run from its last finished block (default: off).",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace OUT if it is not empty, and start from the first block (default: off).",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Compress MODEL into the folder OUT, which transformers loads."""
    with before_writing():
        from hasslefree.folder.journal import kept
        from hasslefree.folder.record import summary_table
        from hasslefree.report.content import write_seconds
        from hasslefree.run.compress import compress as compress_model
        from hasslefree.run.tables import phase_table

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
        raise KeyboardInterrupt(f"Interrupted; {with_flags(kept(out))}.") from None
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
    device: Annotated[str | None, DEVICE] = None,
    activations: Annotated[str, ACTIVATIONS] = "device",
    processes: Annotated[
        int,
        typer.Option(help="Number of processes under torchrun; figures are for each.", min=1, rich_help_panel=RUN),
    ] = 1,
    trust_remote_code: Trust = False,
    advise: Annotated[str | None, typer.Option(help=ADVISE, metavar="BYTES", rich_help_panel=OUTPUT)] = None,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Show the memory, disk and time that `compress` would take.

    The options are those of `compress`. Only the configuration of MODEL is read, and no weights.
    """
    from hasslefree.models.load import resolve_device

    if advise is not None:
        show_advice(model, advise, recipe, device, activations, trust_remote_code, output, as_json)
        return
    from hasslefree.run.estimate import estimate_model, to_dict
    from hasslefree.run.memory import as_run
    from hasslefree.run.tables import estimate_table

    target = resolve_device(device)
    found = as_run(estimate_model(model, recipe, target, activations, processes, trust_remote_code), target)
    show(to_dict(found), output, as_json, estimate_table(found, target))


def show_advice(
    model: str,
    budget: str,
    recipe: Any,
    device: str | None,
    activations: str,
    trust: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Patterns and ranks within a budget of bytes, as a table, the best one first; and the command for that."""
    from hasslefree.folder.repeat import compress_command
    from hasslefree.run.advise import advise as advise_on
    from hasslefree.run.tables import advice_table
    from hasslefree.units import bytes_of

    with phase_bars() as progress:
        found = advise_on(
            model,
            bytes_of(budget),
            recipe,
            device=device,
            activations=activations,
            trust_remote_code=trust,
            progress=progress,
        )
    show({"advice": [dataclasses.asdict(each) for each in found]}, output, as_json, advice_table(found))
    chosen = dataclasses.replace(recipe, pattern=found[0].pattern, rank=found[0].rank)
    say(shlex.join(compress_command(model, "OUT", chosen)))
