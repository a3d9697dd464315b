"""The commands that read a compressed folder: `inspect`, `report` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import DEVICE, TRUST, app, check_output_file, console, say, write_json
from hasslefree.errors import OutputError, PromptError


@app.command()
def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder that `hasslefree compress` wrote.")],
    output: Annotated[Path | None, typer.Option(help="Write the sizes as JSON.")] = None,
) -> None:
    """What FOLDER holds and weighs, layer by layer, from config.json and the headers; no weight is read."""
    from hasslefree.folder.inspect import inspect_folder, size_table

    check_output_file(output)
    found = inspect_folder(folder)
    console.print(size_table(found))
    write_json(found.to_dict(), output)


@app.command(name="report")
def report_page(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER...", help="Folders that compress wrote; and JSON results of evaluate."),
    ],
    output: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option(help="Write the figures here too, as PNG and SVG.")] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Show how the compressed and the dense model continue this text; repeatable."),
    ] = None,
    dense: Annotated[
        str | None,
        typer.Option(help="With --prompt: the dense model, or none (default: the one from which FOLDER was made)."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="With --prompt: length of the text at most.", min=1)] = 64,
    device: Annotated[str | None, DEVICE] = None,
    trust_remote_code: Annotated[bool, TRUST] = False,
) -> None:
    """One HTML page about compressed folders, side by side where there are several, that needs no network.

    Perplexities and tasks are taken from the files evaluation*.json in FOLDER, and from results named beside it, which
    may be those of the dense model.
    """
    from hasslefree.report.content import read_content
    from hasslefree.report.figures import write_figures
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


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A folder that compress wrote.")],
    destination: Annotated[Path, typer.Argument(metavar="DEST", help="The folder to write.")],
    to: Annotated[
        str,
        typer.Option(
            help="dense (plain weights), peft (sparse weights, a LoRA adapter) or narrow (no idle heads, neurons)."
        ),
    ],
    max_shard_size: Annotated[str, typer.Option(help="Largest safetensors file.")] = "5GB",
    overwrite: Annotated[bool, typer.Option(help="Replace DEST if it is not empty.")] = False,
) -> None:
    """Write a compressed model for programs that do not know hasslefree."""
    from hasslefree.exports.export import export as export_model

    with phase_bars() as progress:
        export_model(folder, destination, to, overwrite=overwrite, max_shard_size=max_shard_size, progress=progress)
    say(f"Written to {destination}.")
