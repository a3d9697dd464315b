"""The commands that let a result write: `generate` and `chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hasslefree.cli.common import DEVICE, TRUST, app, console, say
from hasslefree.errors import PromptError

if TYPE_CHECKING:
    from hasslefree.generation.compared import ComparedModel

Folder = Annotated[str, typer.Argument(metavar="OUT", help="A folder that compress wrote, or any model.")]
Dense = Annotated[
    str | None,
    typer.Option(help="The dense model to compare with; none for none (default: the one that OUT was made of)."),
]
NewTokens = Annotated[int, typer.Option(help="Length of the text at most.", min=1)]
Temperature = Annotated[float, typer.Option(help="0: the most probable token each time; above 0: draw.", min=0)]
Seed = Annotated[int, typer.Option(help="Of the draws.")]
Threads = Annotated[int | None, typer.Option(help="Threads of a CPU (default: torch's).", min=1)]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, DEVICE]
Backend = Annotated[
    str | None,
    typer.Option(help="dense, unpacked, numba, triton or semi-structured (default: chosen for each layer)."),
]
Trust = Annotated[bool, TRUST]


@app.command()
def generate(
    folder: Folder,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue (default: standard input).")] = None,
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
    """Continue PROMPT by the model in OUT and by the dense one, with bytes and tokens a second."""
    if prompt is None and sys.stdin.isatty():
        raise PromptError("there is no prompt; give it after OUT, or through a pipe")
    from hasslefree.generation.sample import Sampling
    from hasslefree.generation.terminal import read_prompt, show_generation

    text = read_prompt() if prompt is None else prompt
    if not text:
        raise PromptError("the prompt is empty; give some text to continue")
    compared = loaded(folder, dense, backend, threads, dtype, device, trust_remote_code)
    show_generation(console, compared, text, Sampling(max_new_tokens, temperature, seed))


@app.command()
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
    """Talk to the model in OUT and to the dense one, a line at a time, until Ctrl-D or Ctrl-C."""
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
