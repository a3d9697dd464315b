"""The command line. A user's mistake ends with one message and exit code 2."""

import sys
from typing import Any

from wrapt import register_post_import_hook

# Each module adds its commands to the application; within a heading, the help lists them in this order.
from hasslefree.cli import compress, folder, generate  # noqa: F401
from hasslefree.cli.common import app, errors
from hasslefree.errors import HasslefreeError, with_flags

# These take several values after one flag, as in: --perplexity wikitext2 ptb my.txt
_LISTS = ("--perplexity", "--tasks", "--leave-dense")


def spread_lists(arguments: list[str]) -> list[str]:
    """Repeat a list flag before each of its values, but not for `run`, whose arguments are another program's."""
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


def run_app() -> None:
    """Run the command line; a HasslefreeError becomes a message and exit code 2, an interruption exit code 130."""
    register_post_import_hook(_quiet, "transformers.utils.logging")
    try:
        app(args=spread_lists(sys.argv[1:]), prog_name="hasslefree")
    except HasslefreeError as error:
        errors.print(f"error: {with_flags(error.message)}", style="red", markup=False, highlight=False)
        sys.exit(2)


def _quiet(logging: Any) -> None:
    """Leave progress to the package's own bars: of transformers, only errors are shown."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
