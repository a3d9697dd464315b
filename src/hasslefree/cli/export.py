"""The commands for other programs: `export` and `run`."""

from pathlib import Path
from typing import Annotated

import typer

from hasslefree.cli import common
from hasslefree.cli.bars import phase_bars
from hasslefree.cli.common import OUTPUT, Folder, Quiet, command, flag
from hasslefree.errors import OutputError, option

FORMATS = (
    "dense (plain weights), peft (sparse weights and a LoRA adapter), narrow (without the heads and"
    " neurons that are zero), or with the codes of a quantised S and a LoRA adapter: gguf"
    " (llama.cpp), mlx or compressed-tensors (vLLM)."
)
TEMPLATE = (
    "For gguf: the dense model in bf16, f16 or f32, as llama.cpp's converter writes it (default:"
    " the converter is run on the model that was compressed)."
)
CONVERTER = (
    "For gguf: llama.cpp's convert_hf_to_gguf.py, or the folder that holds it (default: the one on"
    " the PATH)."
)
DESTINATION = "The folder to write; for gguf, a file if its name ends with .gguf."


@command("export", rich_help_panel=common.ELSEWHERE)
def call_export(
    folder: Folder,
    destination: Annotated[Path, typer.Argument(metavar="DEST", help=DESTINATION)],
    to: Annotated[str, flag(OUTPUT, FORMATS, metavar="FORMAT")],
    template: Annotated[Path | None, flag(OUTPUT, TEMPLATE, metavar="FILE")] = None,
    converter: Annotated[Path | None, flag(OUTPUT, CONVERTER, metavar="PATH")] = None,
    max_shard_size: Annotated[str, flag(OUTPUT, "Maximum size of a weight file.")] = "5GB",
    overwrite: Annotated[
        bool, flag(OUTPUT, "Replace DEST if it is not empty (default: off).", "--overwrite")
    ] = False,
    trust_remote_code: common.Trust = False,
    push_to: common.PushTo = None,
    private: common.Private = False,
    quiet: Quiet = False,
) -> None:
    """Write a compressed model for programs without hasslefree."""
    from hasslefree.exports.export import export
    from hasslefree.exports.gguf import SUFFIX, Files
    from hasslefree.exports.quantised import kernels_in_vllm

    if push_to is not None and destination.suffix == SUFFIX:
        raise OutputError(f"{option('push_to')} uploads a folder, and {destination} is a file")
    common.prepare_push(push_to, private)
    with phase_bars() as progress:
        export(
            folder,
            destination,
            to,
            template=template,
            converter=converter,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    common.say(f"Written to {destination}.")
    if to == "gguf":
        common.say(
            f"\nRun it in llama.cpp, or give it to Ollama:\n\n{Files.of(destination).commands}"
        )
    if to == "compressed-tensors":
        common.say(f"\nvLLM multiplies its layers by\n\n{kernels_in_vllm(destination / 'base')}")
    common.push(destination, push_to)


# Words after PROGRAM are arguments of that program, even if they look like options.
@command(context_settings={"allow_interspersed_args": False}, rich_help_panel=common.ELSEWHERE)
def run(
    program: Annotated[
        str, typer.Argument(metavar="PROGRAM", help="A console script, a module, or a .py file.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the program.")
    ] = None,
) -> None:
    """Run a Python program that can load compressed folders.

    The program, and the Python processes that it starts, load them through transformers as any
    other model.

    For example: hasslefree run lm_eval --model hf --model_args pretrained=OUT --tasks piqa
    """
    from hasslefree.launch.program import run_program

    run_program(program, arguments or [])
