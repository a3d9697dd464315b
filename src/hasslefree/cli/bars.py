"""The progress of a run: a bar for each phase on a terminal, and a line per minute in a pipe or a
file.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.console import ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hasslefree.cli.common import console, say
from hasslefree.escaping import escaped
from hasslefree.progress import SOLVING, Listener, Step
from hasslefree.progress import logger as phase_logger
from hasslefree.units import duration

# Columns of a terminal from which there is room for bars.
WIDE = 72


@contextmanager
def phase_bars() -> Iterator[Listener]:
    """A listener to the phases of a run. Within it, log lines are printed, on a terminal above the
    bars.
    """
    board, drawn = Board(), console.is_interactive
    lines = Lines()
    lines.setFormatter(
        logging.Formatter("%(message)s" if drawn else "%(asctime)s %(message)s", "%H:%M:%S")
    )
    lines.addFilter(
        lambda record: not drawn or record.name != phase_logger.name
    )  # phases have bars
    logger = logging.getLogger("hasslefree")
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        with Live(board, console=console, transient=True) if drawn else nullcontext():
            yield board.take
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


class Lines(logging.Handler):
    """Prints each log record as one line of plain text, whatever the names in it hold."""

    def emit(self, record: logging.LogRecord) -> None:
        say(escaped(self.format(record)))


class Board:
    """What a terminal shows: phases under way, the time of the run, the last layer's error. No line
    is ever cut.
    """

    def __init__(self) -> None:
        self.steps: dict[str, Step] = {}
        self.run: Step | None = None
        self.layer, self.at = "", 0.0

    def take(self, step: Step) -> None:
        self.steps.pop(step.phase, None) if step.ended else self.steps.update({step.phase: step})
        self.run, self.at = step, time.monotonic()
        if step.layer is not None:
            self.layer = f"{step.layer.name}: relative error {step.layer.relative_error:.5f}"

    def __rich_console__(self, console: object, options: ConsoleOptions) -> RenderResult:
        if self.run is None:
            return
        passed, wide = time.monotonic() - self.at, options.max_width >= WIDE
        lines = Table.grid(padding=(0, 2, 0, 0))
        for step in list(self.steps.values()):  # steps come from another thread
            bar = ProgressBar(step.total if step.unit else None, step.done, width=20)
            lines.add_row(Text(step.phase), *([bar] if wide else []), Text(step.count))
        yield lines
        yield Text(
            f"{duration(self.run.run_seconds + passed)} so far{self.run.about(passed)}",
            style="cyan",
        )
        if SOLVING in self.steps:
            yield Text(escaped(self.layer), style="dim", overflow="fold")
