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
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
        seconds: the time that the phase has taken so far.
        left: estimated seconds until the phase ends, from the rate so far; None before the first
            count.
        ended: it is the last step of its phase.
        layer: the `LayerRecord` of the layer that was just compressed; None in all other steps.
        run_seconds: the time that the run has taken so far.
        run_left: estimated seconds until the run ends; None as long as it is not known how long
            the phases should take.
    """

    phase: str
    done: int
    total: int
    unit: str
    seconds: float
    left: float | None
    ended: bool = False
    layer: Any = None
    run_seconds: float = 0.0
    run_left: float | None = None

    @property
    def count(self) -> str:
        """The count in words, such as "3/14 layers"; empty without a unit."""
        if self.unit:
            return f"{self.done:,}/{self.total:,} {self.unit}"
        return ""

    def about(self) -> str:
        """The time left of the run, or else of the phase, after a comma."""
        left = self.left if self.run_left is None else self.run_left
        if left is None or left < 1:
            return ""
        return f", about {duration(left)} left"


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

    @property
    def left(self) -> float | None:
        """Estimated seconds until the phase ends, from the rate so far; None before any count."""
        measured = self.done - self.skipped
        if not measured:
            return None
        return self.seconds / measured * (self.total - self.done)

    def advance(self, count: int = 1, layer: Any = None) -> None:
        """Count what was done. layer: as for `Step`."""
        self.done = min(self.done + count, self.total)
        self.phases.notify(self, layer=layer)

    def reach(self, done: int) -> None:
        """Advance to this count; ignore one that was reached before, as when a trainer restarts."""
        self.advance(max(done - self.done, 0))

    def skip(self, count: int, layer: Any = None) -> None:
        """Count what an interrupted run has done, without an effect on the time left."""
        self.skipped += count
        self.advance(count, layer)

    def running(self) -> AbstractContextManager[None]:
        """Run the timer of this phase within the context, in place of the one that runs now."""
        return self.phases.timing(self)


class Phases:
    """The phases of one run, for a listener and the log.

    Args:
        listener: called with every step, in the thread that works.
        log: write a line of level INFO every `INTERVAL`.
        clock: gives seconds.
    """

    def __init__(
        self,
        listener: Listener | None = None,
        log: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.listener = listener
        self.log = log
        self.clock = clock
        self.by_name: dict[str, Phase] = {}
        self.timed: Phase | None = None
        self.expected: Mapping[str, float] = {}
        self.began = self.charged = self.logged = clock()

    def __getitem__(self, name: str) -> Phase:
        """The phase of this name, which has begun."""
        return self.by_name[name]

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Estimate the time left of the whole run, given how long its phases should take."""
        self.expected = seconds

    @contextmanager
    def phase(
        self, name: str, total: int = 1, unit: str = "", running: bool = True
    ) -> Iterator[Phase]:
        """Count a phase from beginning to end; at the end everything counts as done.

        Args:
            name: if an earlier phase has the same one, their seconds are added.
            total: what there is to do; phases with total 0 are not reported.
            unit: of the total, in the plural.
            running: whether its timer runs all the time, except within inner phases.
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

    @contextmanager
    def timing(self, phase: Phase) -> Iterator[None]:
        """Run the timer of a phase within the context, in place of the one that runs now."""
        outer = self.timed
        self.switch(phase)
        try:
            yield
        finally:
            self.switch(outer)

    def switch(self, phase: Phase | None) -> None:
        """Add the time since the last call to the phase that is timed, and time this one."""
        now = self.clock()
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
        step = Step(
            phase.name,
            phase.done,
            phase.total,
            phase.unit,
            phase.seconds,
            phase.left,
            ended,
            layer,
            run_seconds=self.charged - self.began,
            run_left=self.time_left(),
        )
        if self.listener:
            self.listener(step)
        if self.log and self.charged - self.logged >= INTERVAL:
            self.logged = self.charged
            count = f"{step.count}, " if step.unit else ""
            so_far = duration(step.run_seconds)
            logger.info("%s: %s%s so far%s", step.phase, count, so_far, step.about())

    def time_left(self) -> float | None:
        """Estimated seconds until the run ends: those expected, at the pace of the run so far."""
        prior = TRUST * sum(self.expected.values())
        if not prior:
            return None
        measured = expected = prior
        left = 0.0
        for name, seconds in self.expected.items():
            phase = self.by_name.get(name)
            if phase is None or not phase.total:
                left += seconds
                continue
            measured += phase.seconds
            expected += seconds * (phase.done - phase.skipped) / phase.total
            left += seconds * (phase.total - phase.done) / phase.total
        return left * measured / expected
