"""How far a run is: a bar for each phase on a terminal; elsewhere, such as in a pipe or a log file, lines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from hasslefree.cli.common import console, say
from hasslefree.phases import Listener, Step
from hasslefree.phases import logger as phase_logger
from hasslefree.units import duration


@contextmanager
def phase_bars() -> Iterator[Listener]:
    """A listener to the phases of a run. What is logged meanwhile is printed, on a terminal above the bars."""
    if not console.is_terminal:
        with logged(Lines()):
            yield lambda step: None  # the log has every phase
        return
    with Progress(*COLUMNS, console=console, transient=True) as progress:
        handler = RichHandler(console=progress.console, show_path=False, show_level=False, markup=False)
        handler.addFilter(lambda record: record.name != phase_logger.name)  # the bars show them
        with logged(handler):
            yield Bars(progress)


@contextmanager
def logged(handler: logging.Handler) -> Iterator[None]:
    """Within it, the handler takes what hasslefree logs from level INFO on."""
    logger = logging.getLogger("hasslefree")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class Lines(logging.Handler):
    """Prints each log record as one line, with the time."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{time.strftime('%H:%M:%S')} {self.format(record)}")


class Taken(ProgressColumn):
    """The seconds that a phase has taken; while its clock runs, they grow."""

    def render(self, task: Task) -> Text:
        since = task.fields["since"]
        seconds = task.fields["seconds"] + (0.0 if since is None else time.perf_counter() - since)
        return Text(duration(seconds), justify="right")


COLUMNS = (
    TextColumn("{task.description}", markup=False),
    BarColumn(bar_width=20),
    TextColumn("{task.fields[count]}", justify="right"),
    Taken(),
    TextColumn("{task.fields[left]}"),
    TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
)


class Bars:
    """A listener that draws a bar for each phase. When a phase that has ended begins anew, the ended bars go."""

    def __init__(self, progress: Progress):
        self.progress = progress
        self.tasks: dict[str, TaskID] = {}
        self.ended: set[str] = set()
        self.running: Step | None = None
        self.since = 0.0

    def __call__(self, step: Step) -> None:
        now = time.perf_counter()
        if self.running is not None and self.running.phase in self.tasks:
            seconds = self.running.seconds + now - self.since
            self.progress.update(self.tasks[self.running.phase], seconds=seconds, since=None)
        if step.phase in self.ended:
            for phase in self.ended:
                self.progress.remove_task(self.tasks.pop(phase))
            self.ended.clear()
        if step.phase not in self.tasks:
            fields: dict[str, Any] = {"count": "", "seconds": 0.0, "since": None, "left": "", "note": ""}
            self.tasks[step.phase] = self.progress.add_task(step.phase, total=None, **fields)
        self.show(step, now)
        self.running, self.since = None if step.ended else step, now
        if step.ended:
            self.ended.add(step.phase)

    def show(self, step: Step, now: float) -> None:
        """Draw the bar of a phase. now: the time, as `Taken` has it."""
        note: dict[str, Any] = {"note": ""} if step.ended else {}
        if step.layer is not None:
            note = {"note": f"{step.layer.name} error {step.layer.relative_error:.5f}"}
        self.progress.update(
            self.tasks[step.phase],
            total=step.total if step.unit or step.ended else None,  # a bar of no count moves to and fro
            completed=step.done,
            count=f"{step.done:,}/{step.total:,} {step.unit}" if step.unit else "",
            seconds=step.seconds,
            since=None if step.ended else now,
            left="" if step.ended or step.left is None else f"{duration(step.left)} left",
            **note,
        )
