"""The progress of a run: a bar for each phase on a terminal, and log lines in a pipe or a file."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column

from hasslefree.cli.common import console, say
from hasslefree.escaping import escaped
from hasslefree.phases import Listener, Step
from hasslefree.phases import logger as phase_logger
from hasslefree.units import duration

# The spinner shows that a phase is running while its bar stands still.
COLUMNS = (
    SpinnerColumn(finished_text=" "),
    TextColumn("{task.description}", markup=False),
    BarColumn(bar_width=20),
    TextColumn("{task.fields[count]}", justify="right"),
    TextColumn("{task.fields[seconds]}", justify="right"),
    TextColumn("{task.fields[left]}"),
    TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
)


@contextmanager
def phase_bars() -> Iterator[Listener]:
    """A listener to the phases of a run. Log lines are printed, on a terminal above the bars."""
    if not console.is_terminal:
        lines = Lines()
        lines.setFormatter(OneLine("%(asctime)s %(message)s", "%H:%M:%S"))
        with logging_to(lines):
            yield lambda step: None  # every phase is logged
        return
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        handler = RichHandler(console=progress.console, show_path=False, show_level=False, markup=False)
        handler.setFormatter(OneLine())
        handler.addFilter(lambda record: record.name != phase_logger.name)  # phases have bars
        with logging_to(handler):
            yield lambda step: update_bars(progress, step)


@contextmanager
def logging_to(handler: logging.Handler) -> Iterator[None]:
    """Within it, the handler gets the log records of hasslefree from level INFO on."""
    logger = logging.getLogger("hasslefree")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class OneLine(logging.Formatter):
    """Each record as one line of plain text, whatever the names in it hold."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class Lines(logging.Handler):
    """Prints each log record as one line."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def update_bars(progress: Progress, step: Step) -> None:
    """Draw the bar of the step's phase. When a phase that has ended begins again, the bars of ended phases go."""
    bars = {task.description: task for task in progress.tasks}
    if step.done == 0 and step.phase in bars and bars[step.phase].finished:
        for name in [name for name, task in bars.items() if task.finished]:
            progress.remove_task(bars.pop(name).id)
    fields: dict[str, Any] = {
        "total": step.total if step.unit or step.ended else None,  # None: an indeterminate bar
        "completed": step.done,
        "count": f"{step.done:,}/{step.total:,} {step.unit}" if step.unit else "",
        "seconds": duration(step.seconds),
        "left": "" if step.ended or step.left is None else f"{duration(step.left)} left",
    }
    if step.layer is not None:
        fields["note"] = f"{step.layer.name} error {step.layer.relative_error:.5f}"
    elif step.ended or step.phase not in bars:
        fields["note"] = ""
    if step.phase in bars:
        progress.update(bars[step.phase].id, **fields)
    else:
        progress.add_task(step.phase, **fields)
