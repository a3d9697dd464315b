"""What `generate` and `chat` show: each model's text as it is written, and its size and speed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import TextIOWrapper

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hasslefree.errors import PromptError, with_flags
from hasslefree.generation.compared import ComparedModel
from hasslefree.generation.conversation import Conversation
from hasslefree.generation.sample import Continuation, Sampling, continue_prompt, prompt_ids
from hasslefree.tables import table
from hasslefree.units import size

PROMPT = "> "


def show_generation(console: Console, compared: Sequence[ComparedModel], prompt: str, sampling: Sampling) -> None:
    """Every model continues the prompt, one after the other; then a table of sizes and speeds.

    Raises:
        PromptError: the prompt is empty or too long for a model.
    """
    write, found = writer(console), []
    for each in compared:
        heading(console, each.role)
        ids = prompt_ids(each.tokenizer, prompt)
        console.print(prompt, end="", style="bold", markup=False, highlight=False, soft_wrap=True)
        found.append(continue_prompt(each.model, each.tokenizer, ids, sampling, write))
        console.print()
    console.print(speed_table(compared, found))


def show_chat(console: Console, compared: Sequence[ComparedModel], sampling: Sampling) -> None:
    """Answer the lines of standard input until its end (Ctrl-D); each model sees its own answers only."""
    write, conversations = writer(console), [Conversation(each, sampling) for each in compared]
    if not all(each.has_template for each in conversations):
        console.print(
            "The tokenizer has no chat template: each line is continued on its own, without the lines before it."
        )
    for message in messages(console):
        for each in conversations:
            if len(conversations) > 1:
                heading(console, each.compared.role)
            try:
                answer = each.answer(message, write)
            except PromptError as error:
                console.print(with_flags(error.message), style="red", markup=False, highlight=False, soft_wrap=True)
                continue
            console.print()
            console.print(speed(answer), style="dim", highlight=False)


def read_prompt() -> str:
    """All of standard input, without the newline at its end."""
    replace_undecodable()
    return sys.stdin.read().removesuffix("\n")


def messages(console: Console) -> Iterator[str]:
    """The lines of standard input that are not blank; those of a pipe are printed too."""
    typed = sys.stdin.isatty()
    replace_undecodable()
    if typed:
        with suppress(ImportError):  # it gives input() a history and keys to edit with; Windows has none
            import readline  # noqa: F401
    while True:
        try:
            line = input(PROMPT if typed else "")
        except EOFError:
            if typed:
                console.print()
            return
        if line.strip():
            if not typed:
                console.print(PROMPT + line, markup=False, highlight=False, soft_wrap=True)
            yield line


def replace_undecodable() -> None:
    """From now on, bytes on standard input that are not UTF-8 are read as U+FFFD."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def writer(console: Console) -> Callable[[str], None]:
    """Prints pieces of a text one after the other, as they are."""
    return lambda text: console.print(text, end="", markup=False, highlight=False, soft_wrap=True)


def heading(console: Console, role: str) -> None:
    console.print(f"[{role}]", style="cyan", markup=False, highlight=False)


def speed(found: Continuation) -> str:
    """Such as "64 tokens, 31.2 tokens/s"."""
    count = f"{len(found.tokens)} token{'s' if len(found.tokens) > 1 else ''}"
    rate = found.tokens_per_second
    return count if rate is None else f"{count}, {rate:.1f} tokens/s"


def size_table(compared: Sequence[ComparedModel]) -> Table:
    """The models and the memory of their weights."""
    made = table(["", "model"], ["weights"])
    for each in compared:
        made.add_row(each.role, Text(each.name), size(each.bytes))
    return made


def speed_table(compared: Sequence[ComparedModel], found: Sequence[Continuation]) -> Table:
    """The models, the memory of their weights, the number of tokens they generated, and their speed after the first."""
    made = table(["", "model"], ["weights", "tokens", "tokens/s"])
    for each, text in zip(compared, found, strict=True):
        rate = text.tokens_per_second
        shown = "" if rate is None else f"{rate:.1f}"
        made.add_row(each.role, Text(each.name), size(each.bytes), str(len(text.tokens)), shown)
    return made
