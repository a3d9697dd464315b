"""The command line."""

import codecs
import sys
from io import TextIOWrapper
from typing import Any

from wrapt import register_post_import_hook

# Each module adds its commands to the application; within a heading, the help lists them in this
# order.
from hasslefree.cli import compress, folder, generate  # noqa: F401
from hasslefree.cli.common import app
from hasslefree.cli.ending import report

# These take several values after one flag, as in: --perplexity wikitext2 ptb my.txt
_LISTS = ("--perplexity", "--tasks", "--leave-dense")
_PLAIN = str.maketrans("×–−·", "x--*") | str.maketrans({"…": "...", "→": "->", "≈": "~", "ᵀ": "'"})


def spread_lists(arguments: list[str]) -> list[str]:
    """Repeat a list flag before each of its values, but not for `run`, whose arguments are another
    program's.
    """
    if arguments[:1] == ["run"]:
        return arguments
    spread: list[str] = []
    flag = None
    for argument in arguments:
        if argument.startswith("-"):
            flag = argument if argument in _LISTS else None
        elif flag and spread[-1] != flag:
            spread.append(flag)
        spread.append(argument)
    return spread


def in_ascii(error: Any) -> tuple[str, int]:
    """A handler of UnicodeEncodeError: plain characters for those of our own texts, and backslashes
    for others.
    """
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", "backslashreplace").decode(), error.end


def run_app() -> None:
    """Run the command line; whatever ends it becomes a sentence and an exit code."""
    codecs.register_error("hasslefree", in_ascii)
    register_post_import_hook(_quiet, "transformers.utils.logging")
    # Of a hub that is out of reach, the error at the end, and not every retry.
    register_post_import_hook(
        lambda logging: logging.set_verbosity_error(), "huggingface_hub.utils.logging"
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(
                errors="hasslefree"
            )  # in a locale without UTF-8, and for names that are not UTF-8
    if isinstance(sys.stdin, TextIOWrapper):  # bytes that are not UTF-8 are read as U+FFFD
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    arguments = sys.argv[1:]
    try:
        code = app(args=spread_lists(arguments), prog_name="hasslefree", standalone_mode=False)
        print(end="", flush=True)
    except Exception as error:
        code = report(error, arguments)
    sys.exit(code)


def _quiet(logging: Any) -> None:
    """Leave progress to the package's own bars: of transformers, only errors are shown."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
