"""Error messages of the command line: one sentence with the cause and the remedy, and an exit
code.
"""

import difflib
import os
import sys
import traceback
from contextlib import suppress
from typing import Any

from hasslefree.cli.common import errors
from hasslefree.errors import WENT_WRONG, HasslefreeError, lacks_memory, with_flags
from hasslefree.escaping import escaped

# Minimum similarity of a suggested option, from 0 to 1.
CLOSE = 0.75
# Messages for errors of Python and torch that a user can cause.
MEANINGS = {
    MemoryError: "not enough memory{cause}; use smaller inputs, or a machine with more memory",
    UnicodeError: "a text or a name is not UTF-8{cause}; convert or rename it",
    RecursionError: "a file is nested too deeply to be read; download or write it again",
    OverflowError: "a number is too large{cause}; give a smaller one",
}


def report(error: Exception, verbose: bool) -> int:
    """Print the sentence for an error, with its traceback if it is a defect or `verbose` is true;
    return the exit code.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return 2  # it printed the help
    try:
        print(end="", flush=True)
    except OSError:  # drop the rest of the output, which Python would try to write at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sentence, code = sentence_for(error)
    with suppress(OSError):
        if verbose or sentence is None:
            trace = "".join(traceback.format_exception(error)).rstrip()
            errors.print(trace, markup=False, highlight=False)
        if sentence is None:
            sentence = "this is a defect of hasslefree; please report it with the lines above"
        errors.print(f"error: {sentence}", style="red", markup=False, highlight=False)
    return code


def usage_sentence(error: Any) -> str:
    """Describe a UsageError of typer, and the usage of the command."""
    cause = error.format_message()
    if getattr(error, "possibilities", None):  # any option that shares a letter or two
        close = difflib.get_close_matches(error.option_name, error.possibilities, 1, CLOSE)
        cause = error.message.rstrip(".")
        if close:
            cause += f". Did you mean {close[0]}?"
    cause = escaped(cause).rstrip(".")
    context = error.ctx
    end = "" if cause.endswith("?") else "."
    if context is None or context.parent is None:
        return f"{cause}{end} `hasslefree --help` lists the commands"
    path = context.command_path
    words = [path]
    for parameter in context.command.params:
        if parameter.param_type_name == "argument":
            name = parameter.metavar
            words.append(name if parameter.required else f"[{name}]")
        elif parameter.required:
            words += [parameter.opts[0], parameter.metavar]
    called = " ".join(words)
    return f"{cause}{end} The command is `{called}`; `{path} --help` lists its options"


def sentence_for(error: Exception) -> tuple[str | None, int]:
    """Describe an exception in a sentence.

    Returns:
        The sentence, or None for a defect of this package; and the exit code: 2 for a mistake in
        the command line, 1 for other failures.
    """
    if isinstance(error, HasslefreeError):
        return with_flags(error.message), 1 if isinstance(error, WENT_WRONG) else 2
    if hasattr(error, "format_message"):  # the command line could not be parsed
        return usage_sentence(error), 2
    if isinstance(error, OSError):
        file = error.filename or "a file, or standard output"
        cause = error.strerror or str(error)
        return f"{file} cannot be used: {cause}; correct this, or give another path", 1
    text = str(error).strip().partition("\n")[0]
    kind = type(error)
    if lacks_memory(error):
        kind = MemoryError
    for known, meaning in MEANINGS.items():
        if issubclass(kind, known):
            return meaning.format(cause=f" ({text})" if text else ""), 1
    return None, 1
