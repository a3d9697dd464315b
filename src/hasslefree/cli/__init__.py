"""The command line."""

import sys
from io import BytesIO, TextIOWrapper
from typing import Any

import typer.main
from wrapt import register_post_import_hook

# Each module adds its commands to the application; within a heading, the help lists them in this
# order.
from hasslefree.cli import bench, compress, evaluate, export, generate, inspect  # noqa: F401
from hasslefree.cli.common import app
from hasslefree.cli.exits import report


def run_app() -> None:
    """Run the command line; report an exception in one sentence, and exit with its code."""
    register_post_import_hook(_quiet_transformers, "transformers.utils.logging")
    # If the hub cannot be reached, only the final error is shown, not every retry.
    register_post_import_hook(
        lambda logging: logging.set_verbosity_error(), "huggingface_hub.utils.logging"
    )
    register_post_import_hook(lambda datasets: datasets.disable_progress_bars(), "datasets")
    _accept_any_text()
    root: Any = typer.main.get_command(app)
    try:
        code = root(args=sys.argv[1:], prog_name="hasslefree", standalone_mode=False)
        print(end="", flush=True)
    except Exception as error:
        code = report(error, verbose="--verbose" in sys.argv)
    sys.exit(code)


def _accept_any_text() -> None:
    """Print any text, in any locale, and read names that are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.stdin is None:  # it was closed
        sys.stdin = TextIOWrapper(BytesIO())
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")


def _quiet_transformers(logging: Any) -> None:
    """Show only errors: the package has progress bars of its own."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
