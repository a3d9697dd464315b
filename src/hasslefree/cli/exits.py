"""How a command ends: with its result, or with one sentence that names the thing and the remedy,
and an exit code.
"""

import math
import os
import platform
import sys
import tempfile
import traceback
from contextlib import suppress

import hasslefree
from hasslefree.cli.common import errors
from hasslefree.errors import WENT_WRONG, HasslefreeError, with_flags
from hasslefree.escaping import escaped

# The room of a message, with its "error: ".
COLUMNS = 80
LINES = 3
# Stands for the words that a long message loses.
MARK = " … (--verbose shows all) … "


def report(error: Exception, arguments: list[str]) -> int:
    """Print the sentence for an error, with --verbose after its traceback, and return the exit
    code.
    """
    verbose = "--verbose" in arguments
    if type(error).__name__ == "NoArgsIsHelpError":
        return 2  # it printed the help
    try:
        print(end="", flush=True)
    except OSError:  # discards the rest of the output, which Python would try again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sentence, code = sentence_for(error, arguments)
    with suppress(OSError):
        message = f"error: {sentence}"
        if verbose:
            trace = "".join(traceback.format_exception(error)).rstrip()
            errors.print(trace, markup=False, highlight=False)
        else:
            message = shortened(message)
        errors.print(message, style="red", markup=False, highlight=False)
    return code


def sentence_for(error: Exception, arguments: list[str]) -> tuple[str, int]:
    """Say in a sentence what an exception means.

    Returns:
        The sentence, and the exit code: 2 for what was typed wrong, 1 for what went wrong.
    """
    text = escaped(str(error).strip().partition("\n")[0])
    if isinstance(error, HasslefreeError):
        return with_flags(error.message), 1 if isinstance(error, WENT_WRONG) else 2
    usage = getattr(error, "format_message", None)
    if usage is not None:  # the command line could not be parsed
        path = getattr(getattr(error, "ctx", None), "command_path", "hasslefree")
        cause = escaped(usage()).rstrip(".").replace("'?", "'")
        return f"{cause}; `{path} --help` lists what can be given", 2
    if isinstance(error, OSError) or text.startswith("Symlink loop"):
        return sentence_for_file(error, text), 1
    if is_out_of_memory(error, text):
        cause = text or "MemoryError"
        remedy = "use smaller inputs, or a machine with more memory"
        return f"not enough memory ({cause}); {remedy}", 1
    if isinstance(error, UnicodeError):
        return f"a text or a name is not UTF-8 ({text}); convert or rename it", 1
    if isinstance(error, RecursionError):
        return "a file is nested too deeply to be read; download or write it again", 1
    if isinstance(error, OverflowError):
        return f"a number is too large ({text}); give a smaller one", 1
    defect = f"this is a defect of hasslefree ({type(error).__name__}: {text:.60})"
    return f"{defect}; {keep(error, arguments)}", 1


def sentence_for_file(error: Exception, text: str) -> str:
    """The sentence for a file that the system does not let us use."""
    if not isinstance(error, OSError):  # a RuntimeError of pathlib, before Python 3.13
        return f"{text}; give another path"
    file = escaped(str(error.filename or "a file, or standard output"))
    return f"{file} cannot be used: {error.strerror or text}; correct this, or give another path"


def is_out_of_memory(error: Exception, text: str) -> bool:
    """Recognise Python's and torch's errors about memory, on the CPU and on a GPU."""
    return (
        isinstance(error, MemoryError)
        or "OutOfMemory" in type(error).__name__
        or "can't allocate" in text
    )


def keep(error: Exception, arguments: list[str]) -> str:
    """Write a traceback to a file, and say what to send."""
    lines = [
        f"hasslefree {hasslefree.__version__}, Python {platform.python_version()},"
        f" {platform.platform()}"
    ]
    lines += [f"hasslefree {' '.join(arguments)}", *traceback.format_exception(error)]
    try:
        descriptor, name = tempfile.mkstemp(".txt", "hasslefree-")
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(escaped("\n".join(lines), "\n\t"))
    except OSError:
        return "please report it with the output of the same command and --verbose"
    return f"please report it with {name}, which holds the command and the traceback"


def shortened(message: str) -> str:
    """A message in three lines of 80 columns: a longer one loses words in its middle.

    The thing is named at the beginning of a message, and the remedy at its end.
    """
    lines = message.split("\n")
    taken = sum(math.ceil(len(line) / COLUMNS) for line in lines)
    if taken <= LINES:
        return message
    text = " ".join(lines)
    room = (LINES * COLUMNS - len(MARK)) // 2
    # With a word that is longer than its half, such as a path, the half ends within it.
    head = text[: room + 1].rpartition(" ")[0] or text[:room]
    tail = text[-room - 1 :].partition(" ")[2] or text[-room:]
    return f"{head}{MARK}{tail}"
