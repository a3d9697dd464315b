"""The commands `compress` and `plan`."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import DEVICE, TRUST, app, check_output_file, console, say, write_json
from hasslefree.errors import with_flags
from hasslefree.recipe.options import with_recipe

ADVISE = (
    "Say instead which pattern and rank lose least in so many bytes (150MB, 1.5GB) of weights; the model and the text "
    "are read for it."
)
ACTIVATIONS = typer.Option(help="Where hidden states are between blocks: device, cpu (RAM) or disk.")


@app.command()
@with_recipe
def compress(
    model: Annotated[str, typer.Argument(help="A hub name or a local folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    recipe: Any,
    device: Annotated[str | None, DEVICE] = None,
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
        say(f"Interrupted; {with_flags(kept(out))}.")
        raise
    if not console.quiet:
        write_seconds(out, report)
    console.print(summary_table(report))
    console.print(phase_table(report))
    say(f"Written to {out} in {report.seconds:.0f} s; every layer is listed in {out / 'compression.json'}.")


@app.command()
@with_recipe
def plan(
    model: Annotated[str, typer.Argument(help="A hub name or a local folder.")],
    recipe: Any,
    device: Annotated[str | None, DEVICE] = None,
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
    console.print(advice_table(found))
    chosen = dataclasses.replace(recipe, pattern=found[0].pattern, rank=found[0].rank)
    say(shlex.join(compress_command(model, "OUT", chosen)))
    write_json({"advice": [dataclasses.asdict(each) for each in found]}, output)
