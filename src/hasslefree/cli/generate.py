"""The commands `generate` and `chat`: the compressed and the dense model write text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from hasslefree.cli.common import RUN, TRY, Device, Dtype, Folder, Trust, app, console, flag, say
from hasslefree.errors import ModelError, PromptError, with_flags
from hasslefree.units import size, table

if TYPE_CHECKING:
    from hasslefree.evaluation.continuation import Continuation, Sampling, Writer

TEXT = "Text"
BACKEND = "How S is multiplied: dense, unpacked, numba or int4 (default: chosen for each layer)."
MOST_THREADS = 4 * (
    os.cpu_count() or 1
)  # more only slow a machine down, and systems refuse thousands
LONGEST = 1 << 22  # characters of a prompt
Dense = Annotated[
    str | None, flag(None, "Dense model to compare with, or none (default: the original of OUT).")
]
NewTokens = Annotated[int, flag(TEXT, "Maximum number of tokens to generate.", min=1)]
Temperature = Annotated[
    float, flag(TEXT, "0 takes the most probable token each time, more draws tokens.", min=0)
]
Seed = Annotated[int, flag(TEXT, "Seed of the draws.")]
Threads = Annotated[
    int | None, flag(RUN, "Threads of the CPU (default: torch's).", min=1, max=MOST_THREADS)
]
Backend = Annotated[str | None, flag(RUN, BACKEND)]

say_piece = partial(say, end="")


@app.command(rich_help_panel=TRY)
def generate(
    folder: Folder,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="The text to continue (default: standard input)."),
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
    if prompt is None:
        if sys.stdin.isatty():
            raise PromptError(
                "there is no prompt; give it after the model's folder, or through a pipe"
            )
        prompt = bounded(sys.stdin.read).removesuffix("\n")
    if not prompt:
        raise PromptError("the prompt is empty; give some text to continue")
    from hasslefree.evaluation.continuation import Sampling

    sampling = Sampling(max_new_tokens, temperature, seed)
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    writers = load_writers(folder, dense, backend, threads, options)
    texts = []
    for role, writer in writers.items():
        say(f"[{role}]", style="cyan")
        say(prompt, end="", style="bold")
        texts.append(writer.write(prompt, sampling, say_piece))
        console.print()
    console.print(writer_table(writers, texts))


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
                say(with_flags(error.message), style="red")
                continue
            console.print()
            rate = (
                "" if text.tokens_per_second is None else f", {text.tokens_per_second:.1f} tokens/s"
            )
            plural = "s" if len(text.tokens) > 1 else ""
            console.print(f"{len(text.tokens)} token{plural}{rate}", style="dim", highlight=False)


def answer(
    writer: Writer, history: list[dict[str, str]], message: str, sampling: Sampling
) -> Continuation:
    """The model's answer to a message; both join the history in the form of chat templates, if
    there is a template.
    """
    if writer.tokenizer.chat_template is None:
        return writer.write(message, sampling, say_piece)
    from hasslefree.models.tokenizer import rendered

    question = {"role": "user", "content": message}
    prompt = rendered(writer.tokenizer, [*history, question], add_generation_prompt=True)
    try:
        text = writer.write(prompt, sampling, say_piece, special_tokens=False)
    except PromptError as error:
        if not history:
            raise
        raise PromptError(
            "the conversation has become too long; start `hasslefree chat` again for a new one:"
            f" {error.message}"
        ) from None
    history += [question, {"role": "assistant", "content": text.text}]
    return text


def load_writers(
    folder: Path,
    dense: str | None,
    backend: str | None,
    threads: int | None,
    options: dict[str, Any],
) -> dict[str, Writer]:
    """The dense model, if it is wanted and on this machine, and the compressed one; a line says why
    one is missing.
    """
    import torch

    from hasslefree.evaluation.continuation import Sampling, Writer, dense_original
    from hasslefree.packed.linear import compressed_layers, use_backend

    if threads is not None:
        torch.set_num_threads(threads)
    remark = None
    with console.status("loading"):
        if dense is None:
            dense, remark = dense_original(folder)
        compressed = Writer.load(str(folder), **options)
        if not compressed_layers(compressed.model):
            raise ModelError(
                f"{folder} has no compressed layers; give a folder that `hasslefree compress` wrote"
            )
        use_backend(compressed.model, backend)
        # Kernels are compiled, or read from their cache, when they are first called.
        compressed.write(torch.zeros(1, 2, dtype=torch.long), Sampling(max_new_tokens=2))
        writers = {} if dense in (None, "none") else {"dense": Writer.load(str(dense), **options)}
    if remark is not None:
        say(remark)
    return writers | {"compressed": compressed}


def messages() -> Iterator[str]:
    """The lines of standard input that are not blank; those of a pipe are printed too."""
    typed = sys.stdin.isatty()
    if typed:
        with suppress(
            ImportError
        ):  # it gives input() a history and keys to edit with; Windows has none
            import readline  # noqa: F401
    while True:
        try:
            line = input("> ") if typed else bounded(sys.stdin.readline)
        except EOFError:
            console.print()
            return
        if not typed and not line:
            return
        line = line.removesuffix("\n")
        if line.strip():
            if not typed:
                say(f"> {line}")
            yield line


def bounded(read: Callable[[int], str]) -> str:
    """What `read` of standard input gives: it may have no end."""
    if len(text := read(LONGEST + 1)) > LONGEST:
        raise PromptError(f"the prompt is longer than {LONGEST:,} characters; give a shorter one")
    return text


def writer_table(writers: dict[str, Writer], texts: Sequence[Continuation] = ()) -> Table:
    """The models and the memory of their weights; with texts, the number of tokens and the speed
    after the first.
    """
    comparison = table(["", "model"], ["weights", *(["tokens", "tokens/s"] if texts else [])])
    for index, (role, writer) in enumerate(writers.items()):
        cells = [role, writer.name, size(writer.bytes)]
        if texts:
            rate = texts[index].tokens_per_second
            cells += [str(len(texts[index].tokens)), "" if rate is None else f"{rate:.1f}"]
        comparison.add_row(*cells)
    return comparison
