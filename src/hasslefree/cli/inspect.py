"""The commands about compressed folders: `inspect` and `report`."""

from pathlib import Path
from typing import Annotated

import typer

from hasslefree.cli import common
from hasslefree.cli.common import OUTPUT, Device, Folder, Json, Output, Quiet, Trust, command, flag
from hasslefree.errors import OutputError, PromptError

SAMPLES = "Samples of text"
PAGE = "The page to write; an earlier one is replaced."
PROMPT = (
    "Text that the compressed and the dense model continue on the page; repeatable (default: none)."
)
DENSE = (
    "Dense model that continues the prompts, original or none (default: original, the one from"
    " which OUT was made)."
)


@command(rich_help_panel=common.MEASURE)
def inspect(
    folder: Folder,
    layers: Annotated[
        bool, flag(OUTPUT, "List every layer, not only every kind (default: off).", "--layers")
    ] = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """List what a compressed folder holds, and its bytes.

    Only config.json, compression.json and the headers of the weight files are read, and no weights.
    """
    from hasslefree.checkpoint.inspect import inspect_folder, kind_table, layer_table

    sizes = inspect_folder(folder)
    draw = layer_table if layers else kind_table
    common.show(sizes.to_dict(), output, as_json, draw(sizes))


@command("report", rich_help_panel=common.MEASURE)
def write_report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="OUT", help="Compressed folders and evaluate's JSON files."),
    ],
    output: Annotated[Path, flag(OUTPUT, PAGE, metavar="FILE")] = Path("report.html"),
    figures: Annotated[
        Path | None, flag(OUTPUT, "Folder for the figures as PNG and SVG (default: none).")
    ] = None,
    prompt: Annotated[list[str] | None, flag(SAMPLES, PROMPT)] = None,
    dense: Annotated[str | None, flag(SAMPLES, DENSE)] = None,
    max_new_tokens: Annotated[
        int, flag(SAMPLES, "Maximum number of tokens that continue a prompt.", min=1)
    ] = 64,
    device: Device = None,
    trust_remote_code: Trust = False,
    quiet: Quiet = False,
) -> None:
    """Write an HTML page about compressed folders, side by side.

    The page needs no network. Perplexities and tasks are taken from the files evaluation*.json in
    each folder, and from the JSON files among the arguments, which may be of the dense model.
    """
    from hasslefree.checkpoint.output import PAGE as BEGINNING
    from hasslefree.checkpoint.output import check_file, write_whole
    from hasslefree.report.charts import write_figures
    from hasslefree.report.content import read_content
    from hasslefree.report.page import render

    check_file(output, BEGINNING)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise OutputError(f"--figures {figures} is a file; give a folder")
    prompts = prompt or []
    if dense is not None and not prompts:
        raise PromptError("--dense continues the prompts; give some with --prompt, or leave it out")
    if "" in prompts:
        raise PromptError("--prompt is empty; give some text to continue")
    content = read_content(sources)
    # Written before the prompts are continued: that may take long, or fail.
    write_whole(output, render(content))
    if figures is not None:
        drawn = write_figures(content, figures)
        common.say(f"{len(drawn)} figures written to {figures}.")
    if prompts:
        from hasslefree.report.samples import sample_folders

        folders = [Path(run.sizes.folder) for run in content.runs]
        with common.console.status("continuing the prompts"):
            samples = sample_folders(
                folders,
                prompts,
                dense,
                max_new_tokens,
                device=device,
                trust_remote_code=trust_remote_code,
            )
        write_whole(output, render(content, samples))
    common.say(f"Written to {output}.")
