"""The progress of a run, by phases: each has a name, a count of what is done, and its seconds.

    phases = Phases(listener)
    with phases.phase(ALLOCATION, len(blocks), "blocks") as phase:
        for block in blocks:
            ...
            phase.advance()

One timer runs at a time: within an inner phase, the timer of the outer one is stopped, so the
seconds of all phases sum to no more than those of the run. A phase whose work is spread over
another phase, such as solving layers between forward passes, is opened with `running=False`; its
timer runs within `running()`.

Timers do not wait for a GPU: queued work counts in the phase that waits for it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from hasslefree.units import duration
from hasslefree.validation import Figure

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOADING = "loading the model"
TEXT = "reading the text"
PREFLIGHT = "checking the model"
REFERENCE_TEXT = "reading the training text"
REFERENCE = "running the dense model"
PROBES = "probing the dense model"
ALLOCATION = "choosing bits and ranks"
RESUMED = "loading finished blocks"
INPUTS = "collecting layer inputs"
SOLVING = "compressing layers"
READ_BACK = "loading compressed blocks"
PREDICTIONS = "fine-tuning"
HELD_OUT_TEXT = "reading held-out text"
CHECK = "measuring perplexity"
WRITING = "writing files"
TASK_DATA = "reading the tasks"
SCORING = "answering the tasks"

# Seconds between two log lines, at least.
INTERVAL = 60.0
# The weight of the expected seconds against the measured ones, as a share of the whole run.
TRUST = 0.1


@dataclass(frozen=True)
class Step:
    """The argument of a listener, which is called when a phase begins, advances and ends.

    Args:
        phase: its name.
        done, total, unit: the count, which never falls and ends at the total, and what is counted.
        seconds: the time that the run has taken so far.
        left: estimated seconds until the run ends, or until the phase ends if it is not known how
            long the run should take; None before the first count.
        ended: it is the last step of its phase.
        layer: the `LayerRecord` of the layer that was just compressed; None in all other steps.
    """

    phase: str
    done: int
    total: int
    unit: str
    seconds: float
    left: float | None
    ended: bool = False
    layer: Any = None

    @property
    def count(self) -> str:
        """The count in words, such as "3/14 layers"; empty without a unit."""
        if self.unit:
            return f"{self.done:,}/{self.total:,} {self.unit}"
        return ""

    @property
    def about(self) -> str:
        """The time left, after a comma."""
        if self.left is None or self.left < 1:
            return ""
        return f", about {duration(self.left)} left"


Listener = Callable[[Step], None]


def ignore(step: Step) -> None:
    """The listener of a run that shows nothing."""


@dataclass(frozen=True)
class PhaseTime:
    """The seconds that a phase took."""

    name: str
    seconds: Figure


@dataclass(eq=False)
class Phase:
    """One phase of a run, made by `Phases.phase`.

    seconds: while its timer ran. skipped: the part of `done` that an earlier run had done.
    """

    phases: "Phases"
    name: str
    total: int
    unit: str
    seconds: float = 0.0
    done: int = 0
    skipped: int = 0

    def advance(self, count: int = 1, layer: Any = None) -> None:
        """Count finished work. layer: as for `Step`."""
        self.done = min(self.done + count, self.total)
        self.phases.notify(self, layer=layer)

    def reach(self, done: int) -> None:
        """Advance to this count; ignore one that was reached before, as when a trainer restarts."""
        self.advance(max(done - self.done, 0))

    def skip(self, count: int, layer: Any = None) -> None:
        """Count the work of an interrupted run, without an effect on the time left."""
        self.skipped += count
        self.advance(count, layer)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the timer of this phase within the context, in place of the one that runs now."""
        outer = self.phases.timed
        self.phases.switch(self)
        try:
            yield
        finally:
            self.phases.switch(outer)


class Phases:
    """The phases of one run, for a listener and the log, which gets a line every `INTERVAL`.

    Args:
        listener: called with every step, in the thread that works.

    Attributes:
        expected: seconds that phases should take, by name; if given, the time left is estimated for
            the whole run.
    """

    def __init__(self, listener: Listener | None = None):
        self.listener = listener or ignore
        self.by_name: dict[str, Phase] = {}
        self.timed: Phase | None = None
        self.expected: Mapping[str, float] = {}
        self.began = self.charged = self.logged = time.perf_counter()

    @contextmanager
    def phase(
        self, name: str, total: int = 1, unit: str = "", running: bool = True
    ) -> Iterator[Phase]:
        """Count a phase from beginning to end; at the end everything counts as done.

        Args:
            name: if an earlier phase has the same one, their seconds are added.
            total: the amount of work; phases with total 0 are not reported.
            unit: of the total, in the plural.
            running: run its timer all the time, except within inner phases.
        """
        phase = Phase(self, name, total, unit)
        if name in self.by_name:
            phase.seconds = self.by_name[name].seconds
        self.by_name[name] = phase
        self.notify(phase)
        with phase.running() if running else nullcontext():
            yield phase
        phase.done = total
        self.notify(phase, ended=True)

    def counted(
        self,
        name: str,
        items: Iterable[T],
        total: int,
        unit: str,
    ) -> Iterator[T]:
        """Iterate as a phase, which counts each item after the body of the loop."""
        with self.phase(name, total, unit) as phase:
            for item in items:
                yield item
                phase.advance()

    def times(self) -> tuple[PhaseTime, ...]:
        """The seconds of the phases so far, in the order in which they began."""
        self.switch(self.timed)
        return tuple(
            PhaseTime(name, phase.seconds) for name, phase in self.by_name.items() if phase.total
        )

    def switch(self, phase: Phase | None) -> None:
        """Add the time since the last call to the phase that is timed, and time this one."""
        now = time.perf_counter()
        if self.timed is not None:
            self.timed.seconds += now - self.charged
        self.charged = now
        self.timed = phase

    def notify(
        self,
        phase: Phase,
        ended: bool = False,
        layer: Any = None,
    ) -> None:
        """Report a phase to the listener, and to the log once per `INTERVAL`."""
        self.switch(self.timed)
        if not phase.total:
            return
        seconds = self.charged - self.began
        left = self.time_left(phase)
        step = Step(phase.name, phase.done, phase.total, phase.unit, seconds, left, ended, layer)
        self.listener(step)
        if self.charged - self.logged >= INTERVAL:
            self.logged = self.charged
            count = f"{step.count}, " if step.unit else ""
            logger.info("%s: %s%s so far%s", step.phase, count, duration(seconds), step.about)

    def time_left(self, current: Phase) -> float | None:
        """Estimated seconds until the run ends, from the expected ones and the pace so far.

        If none are expected, until the current phase ends.
        """
        measured = expected = TRUST * sum(self.expected.values())
        left = 0.0
        for name, seconds in (self.expected or {current.name: 1.0}).items():
            phase = self.by_name.get(name)
            if phase is None or not phase.total:
                left += seconds
                continue
            measured += phase.seconds
            expected += seconds * (phase.done - phase.skipped) / phase.total
            left += seconds * (phase.total - phase.done) / phase.total
        if not expected:
            return None
        return left * measured / expected
