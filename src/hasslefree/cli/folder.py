"""The commands that use a compressed folder: `inspect`, `report`, `export` and `run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import (
    ELSEWHERE,
    MEASURE,
    OUTPUT,
    Device,
    Json,
    Output,
    Quiet,
    Trust,
    app,
    check_output_file,
    console,
    option,
    say,
    show,
)
from hasslefree.errors import OutputError, PromptError

SAMPLES = "Samples of text"


LAYERS = "List every layer, not only every kind of layer (default: off)."
FORMATS = (
    "dense (plain weights), peft (sparse weights and a LoRA adapter) or narrow (without the heads and neurons that are "
    "zero)."
)
OVERWRITE = "Replace DEST if it is not empty (default: off)."
Folder = Annotated[Path, typer.Argument(metavar="OUT", help="A folder that `hasslefree compress` wrote.")]


@app.command(rich_help_panel=MEASURE)
def inspect(
    folder: Folder,
    layers: Annotated[bool, option(OUTPUT, LAYERS, "--layers")] = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """List what a compressed folder holds, and its bytes.

    Only config.json, compression.json and the headers of the weight files are read, and no weights.
    """
    from hasslefree.folder.inspect import inspect_folder, kind_table, layer_table

    sizes = inspect_folder(folder)
    show(sizes.to_dict(), output, as_json, layer_table(sizes) if layers else kind_table(sizes))


@app.command(name="report", rich_help_panel=MEASURE)
def report_page(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="OUT...", help="Folders that compress wrote, and JSON files that evaluate wrote."),
    ],
    output: Annotated[Path, typer.Option(help="The page to write.", metavar="FILE", rich_help_panel=OUTPUT)] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the figures as PNG and SVG (default: they are on the page alone).", rich_help_panel=OUTPUT
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that the compressed and the dense model continue on the page; repeatable (default: none).",
            rich_help_panel=SAMPLES,
        ),
    ] = None,
    dense: Annotated[
        str | None,
        typer.Option(
            help="Dense model that continues the prompts, or none (default: the one from which OUT was made).",
            rich_help_panel=SAMPLES,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(help="Most tokens that continue a prompt.", min=1, rich_help_panel=SAMPLES)
    ] = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Write an HTML page about compressed folders, side by side.

    The page needs no network. Perplexities and tasks are taken from the files evaluation*.json in each folder, and from
    the JSON files that are named beside the folders, which may be those of the dense model.
    """
    from hasslefree.report.charts import write_figures
    from hasslefree.report.content import read_content
    from hasslefree.report.page import render

    check_output_file(output)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise OutputError(f"--figures {figures} is a file; give a folder")
    if "" in (prompts := prompt or []):
        raise PromptError("--prompt is empty; give some text to continue")
    content = read_content(sources)
    samples = []
    if prompts:
        from hasslefree.report.samples import sample_folders

        folders = [Path(run.sizes.folder) for run in content.runs]
        how = {"device": device, "trust_remote_code": trust_remote_code}
        with console.status("continuing the prompts"):
            samples = sample_folders(folders, prompts, dense, max_new_tokens, **how)
    output.write_text(render(content, samples), encoding="utf-8")
    say(f"Written to {output}.")
    if figures is not None:
        say(f"{len(write_figures(content, figures))} figures written to {figures}.")


@app.command(rich_help_panel=ELSEWHERE)
def export(
    folder: Folder,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write.")],
    to: Annotated[str, option(OUTPUT, FORMATS)],
    max_shard_size: Annotated[str, option(OUTPUT, "Size of the largest weight file.")] = "5GB",
    overwrite: Annotated[bool, option(OUTPUT, OVERWRITE, "--overwrite")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a compressed model for programs without hasslefree."""
    from hasslefree.exports.export import export as export_model

    with phase_bars() as progress:
        export_model(folder, destination, to, overwrite=overwrite, max_shard_size=max_shard_size, progress=progress)
    say(f"Written to {destination}.")


# What follows PROGRAM belongs to that program, whatever it looks like.
@app.command(context_settings={"allow_interspersed_args": False}, rich_help_panel=ELSEWHERE)
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
