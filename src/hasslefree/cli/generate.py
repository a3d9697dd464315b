"""The commands `generate` and `chat`: the compressed and the dense model write text."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hasslefree.cli.common import (
    RUN,
    TRY,
    Device,
    Dtype,
    Folder,
    Trust,
    command,
    console,
    flag,
    say,
)
from hasslefree.errors import ModelError, PromptError, with_flags
from hasslefree.units import size, table

if TYPE_CHECKING:
    from hasslefree.evaluation.continuation import Continuation, Sampling, Writer

TEXT = "Text"
BACKEND = (
    "How S is multiplied: dense, unpacked, numba, int4 or int8 (default: chosen for each layer)."
)
# More threads only slow a machine down, and systems refuse thousands.
MOST_THREADS = 4 * (os.cpu_count() or 1)
BESIDE = "Dense model to compare with; original: the one from which OUT was made (default: none)."
Dense = Annotated[str, flag(None, BESIDE)]
NewTokens = Annotated[int, flag(TEXT, "Maximum number of tokens to generate.", min=1)]
Temperature = Annotated[
    float, flag(TEXT, "0 takes the most probable token each time, more draws tokens.", min=0)
]
Seed = Annotated[int, flag(TEXT, "Seed of the draws.")]
Threads = Annotated[
    int | None, flag(RUN, "CPU threads (default: torch's).", min=1, max=MOST_THREADS)
]
Backend = Annotated[str | None, flag(RUN, BACKEND)]

say_piece = partial(say, end="")


@command(rich_help_panel=TRY)
def generate(
    folder: Folder,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text to continue (default: standard input)."),
    ] = None,
    dense: Dense = "none",
    max_new_tokens: NewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = None,
    backend: Backend = None,
    trust_remote_code: Trust = False,
) -> None:
    """Let the compressed model continue a prompt.

    A table shows the memory of its weights, and its speed. With --dense, the dense model continues
    the prompt too.
    """
    from hasslefree.evaluation.continuation import Sampling

    if prompt is None:
        if sys.stdin.isatty():
            raise PromptError(
                "there is no prompt; give it after the model's folder, or through a pipe"
            )
        prompt = sys.stdin.read().removesuffix("\n")
    if not prompt:
        raise PromptError("the prompt is empty; give some text to continue")
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    sampling = Sampling(max_new_tokens, temperature, seed)
    writers = load_writers(folder, dense, backend, threads, options)
    texts = []
    for role, writer in writers.items():
        say(f"[{role}]", style="cyan")
        say(prompt, end="", style="bold")
        try:
            texts.append(writer.write(prompt, sampling, say_piece))
        finally:
            console.print()
    console.print(writer_table(writers, texts))


@command(rich_help_panel=TRY)
def chat(
    folder: Folder,
    dense: Dense = "none",
    max_new_tokens: NewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = None,
    backend: Backend = None,
    trust_remote_code: Trust = False,
) -> None:
    """Talk to the compressed model, line by line.

    With --dense, the dense model answers too. Ctrl-D or Ctrl-C ends the conversation.
    """
    from hasslefree.evaluation.continuation import Sampling

    sampling = Sampling(max_new_tokens, temperature, seed)
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    writers = load_writers(folder, dense, backend, threads, options)
    console.print(writer_table(writers))
    if any(writer.tokenizer.chat_template is None for writer in writers.values()):
        say(
            "The tokenizer has no chat template: each line is continued on its own, without the"
            " lines before it."
        )
    histories: dict[str, list[dict[str, str]]] = {role: [] for role in writers}
    for message in messages():
        for role, writer in writers.items():
            if len(writers) > 1:
                say(f"[{role}]", style="cyan")
            try:
                text = answer(writer, histories[role], message, sampling)
            except PromptError as error:
                say(f"{with_flags(error.message)}, or start a new chat", style="red")
                continue
            console.print()
            console.print(speed_of(text), style="dim", highlight=False)


def speed_of(text: Continuation) -> str:
    """The number of generated tokens, and tokens per second."""
    if len(text.tokens) == 1:
        return "1 token"
    return f"{len(text.tokens)} tokens, {text.tokens_per_second:.1f} tokens/s"


def answer(
    writer: Writer, history: list[dict[str, str]], message: str, sampling: Sampling
) -> Continuation:
    """Let the model answer a message; with a chat template, both are added to the history."""
    if writer.tokenizer.chat_template is None:
        return writer.write(message, sampling, say_piece)
    from hasslefree.models.tokenizer import rendered

    question = {"role": "user", "content": message}
    prompt = rendered(writer.tokenizer, [*history, question], add_generation_prompt=True)
    text = writer.write(prompt, sampling, say_piece, special_tokens=False)
    history += [question, {"role": "assistant", "content": text.text}]
    return text


def load_writers(
    folder: Path,
    dense: str,
    backend: str | None,
    threads: int | None,
    options: dict[str, Any],
) -> dict[str, Writer]:
    """Load the compressed model and, unless `dense` is "none", the dense one.

    Raises:
        ModelError: the model has no compressed layers, or the original is not on this machine.
    """
    import torch

    from hasslefree.evaluation.continuation import (
        ORIGINAL,
        Sampling,
        Writer,
        dense_original,
    )
    from hasslefree.packed.linear import compressed_layers, use_backend

    if threads is not None:
        torch.set_num_threads(threads)
    if dense == ORIGINAL:
        dense = str(dense_original(folder))
    with console.status("loading"):
        compressed = Writer.load(str(folder), **options)
        if not compressed_layers(compressed.model):
            raise ModelError(
                f"{folder} has no compressed layers; give a folder that `hasslefree compress` wrote"
            )
        use_backend(compressed.model, backend)
        # The first tokens compile the kernels.
        compressed.write(torch.zeros(1, 2, dtype=torch.long), Sampling(max_new_tokens=2))
        writers = {"compressed": compressed}
        if dense != "none":
            writers["dense"] = Writer.load(dense, **options)
    return writers


def messages() -> Iterator[str]:
    """Yield the lines of standard input that are not blank; print those of a pipe."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  # gives input() a history and keys to edit with
    while True:
        try:
            line = input("> ")
        except EOFError:
            console.print()
            return
        if not typed:
            say(line)
        if line.strip():
            yield line


def writer_table(writers: dict[str, Writer], texts: Sequence[Continuation] = ()) -> Table:
    """Table of the models and the memory of their weights; with texts, also the number of tokens
    and tokens per second.
    """
    speeds = ["tokens", "tokens/s"] if texts else []
    comparison = table(["", "model"], ["weights", *speeds])
    for index, (role, writer) in enumerate(writers.items()):
        cells = [role, writer.name, size(writer.bytes)]
        if texts:
            rate = texts[index].tokens_per_second
            cells += [str(len(texts[index].tokens)), "" if rate is None else f"{rate:.1f}"]
        comparison.add_row(*cells)
    return comparison
