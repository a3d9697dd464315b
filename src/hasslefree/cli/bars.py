"""The progress of a run: a bar for each phase on a terminal, and a line per minute in a pipe or a
file.
"""

import copy
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from hasslefree.cli.common import console, say
from hasslefree.errors import HasslefreeError, with_flags
from hasslefree.escaping import escaped
from hasslefree.progress import SOLVING, Listener, Step, ignore
from hasslefree.progress import logger as phase_logger
from hasslefree.units import duration


@contextmanager
def phase_bars() -> Iterator[Listener]:
    """Print log lines, and on a terminal progress bars below them; yield the listener."""
    logger = logging.getLogger("hasslefree")
    level = logger.level
    lines = Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        if console.is_interactive:
            lines.addFilter(lambda record: record.name != phase_logger.name)  # phases have bars
            with Bars(console) as bars:
                yield bars.show
        else:
            lines.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
            yield ignore
    finally:
        logger.removeHandler(lines)
        logger.setLevel(level)


class Lines(logging.Handler):
    """A log handler that prints records as plain text. Errors name flags, not Python arguments."""

    def emit(self, record: logging.LogRecord) -> None:
        shown = copy.copy(record)
        if isinstance(record.args, tuple):
            shown.args = tuple(map(as_on_command_line, record.args))
        say(escaped(self.format(shown)))


def as_on_command_line(value: object) -> object:
    """The message of an error, with flags; any other value unchanged."""
    return with_flags(value.message) if isinstance(value, HasslefreeError) else value


class Bars(Progress):
    """Bars of the running phases, the time so far and the error of the last layer, uncut."""

    def __init__(self, console: Console) -> None:
        self.phases: dict[str, TaskID] = {}
        self.began = time.monotonic()
        self.left = ""
        self.layer = ""
        super().__init__(
            TextColumn("{task.description}", markup=False, table_column=Column()),
            BarColumn(None),
            TextColumn("{task.fields[count]}", markup=False, table_column=Column()),
            console=console,
            transient=True,
        )

    def show(self, step: Step) -> None:
        """Show a step of a phase."""
        self.left = step.about
        if step.layer is not None:
            error = f"relative error {step.layer.relative_error:.5f}"
            self.layer = escaped(f"{step.layer.name}: {error}")
        if step.phase not in self.phases:
            self.phases[step.phase] = self.add_task(step.phase, total=step.total, count="")
        self.update(self.phases[step.phase], completed=step.done, count=step.count)
        if step.ended:
            self.remove_task(self.phases.pop(step.phase))

    def get_renderables(self) -> Iterator[RenderableType]:
        """The bars, and below them the text."""
        yield from super().get_renderables()
        passed = duration(time.monotonic() - self.began)
        yield Text(f"{passed} so far{self.left}", style="cyan")
        if SOLVING in self.phases:
            yield Text(self.layer, style="dim", overflow="fold")
