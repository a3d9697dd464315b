"""The commands that let a result write: `generate` and `chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hasslefree.cli.common import DEVICE, RUN, TRUST, TRY, app, console, say
from hasslefree.errors import PromptError

if TYPE_CHECKING:
    from hasslefree.generation.compared import ComparedModel

TEXT = "Text"
Folder = Annotated[str, typer.Argument(metavar="OUT", help="A folder that `hasslefree compress` wrote.")]
Dense = Annotated[
    str | None,
    typer.Option(help="Dense model to compare with; none for none (default: the one that was compressed to OUT)."),
]
NewTokens = Annotated[int, typer.Option(help="Most tokens of a text.", min=1, rich_help_panel=TEXT)]
Temperature = Annotated[
    float,
    typer.Option(help="0 takes the most probable token each time, more draws tokens.", min=0, rich_help_panel=TEXT),
]
Seed = Annotated[int, typer.Option(help="Seed of the draws.", rich_help_panel=TEXT)]
Threads = Annotated[int | None, typer.Option(help="Threads of the CPU (default: torch's).", min=1, rich_help_panel=RUN)]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of the weights: auto (the checkpoint's), float32, bfloat16 or float16.", rich_help_panel=RUN
    ),
]
Device = Annotated[str | None, DEVICE]
Backend = Annotated[
    str | None,
    typer.Option(
        help="How sparse weights are multiplied: dense, unpacked, numba or triton (default: chosen for each layer).",
        rich_help_panel=RUN,
    ),
]
Trust = Annotated[bool, TRUST]


@app.command(rich_help_panel=TRY)
def generate(
    folder: Folder,
    prompt: Annotated[
        str | None, typer.Argument(metavar="[PROMPT]", help="The text to continue (default: standard input).")
    ] = None,
    dense: Dense = None,
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = None,
    backend: Backend = None,
    trust_remote_code: Trust = False,
) -> None:
    """Let the compressed and the dense model continue a prompt.

    A table compares the memory of their weights, and their speed.
    """
    if prompt is None and sys.stdin.isatty():
        raise PromptError("there is no prompt; give it after the model's folder, or through a pipe")
    from hasslefree.generation.sample import Sampling
    from hasslefree.generation.terminal import read_prompt, show_generation

    text = read_prompt() if prompt is None else prompt
    if not text:
        raise PromptError("the prompt is empty; give some text to continue")
    compared = loaded(folder, dense, backend, threads, dtype, device, trust_remote_code)
    show_generation(console, compared, text, Sampling(max_new_tokens, temperature, seed))


@app.command(rich_help_panel=TRY)
def chat(
    folder: Folder,
    dense: Dense = None,
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = None,
    backend: Backend = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk to the compressed and the dense model, line by line.

    Ctrl-D or Ctrl-C ends the conversation.
    """
    from hasslefree.generation.sample import Sampling
    from hasslefree.generation.terminal import show_chat, size_table

    compared = loaded(folder, dense, backend, threads, dtype, device, trust_remote_code)
    console.print(size_table(compared))
    show_chat(console, compared, Sampling(max_new_tokens, temperature, seed))


def loaded(
    folder: str,
    dense: str | None,
    backend: str | None,
    threads: int | None,
    dtype: str,
    device: str | None,
    trust_remote_code: bool,
) -> list[ComparedModel]:
    """The models; where the dense one is missing, a line says why."""
    from hasslefree.generation.compared import load_compared_models

    with console.status("loading"):
        found, remark = load_compared_models(
            folder, dense, backend, threads, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
    if remark is not None:
        say(remark)
    return found
