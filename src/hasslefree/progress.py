"""The progress of a run, by phases: each has a name, a count of what is done, and its seconds.

    phases = Phases(listener)
    with phases.phase(ALLOCATION, len(blocks), "blocks") as phase:
        for block in blocks:
            ...
            phase.advance()

One clock runs at a time: within an inner phase, the clock of the outer one stands still, so the
seconds of all phases sum to no more than those of the run. A phase whose work is spread over
another phase, such as solving layers between forward passes, is opened with `running=False`; its
clock runs within `running()`.

Clocks do not wait for a GPU: queued work counts in the phase that waits for it.

The time left is that of the whole run, once `Phases.expect` has said how long the phases should
take. A phase that is under way corrects its own estimate, and all of them so far correct those of
the phases to come.
"""

import logging
import math
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
REFERENCE_TEXT, REFERENCE = "reading the training text", "running the dense model"
PROBES, ALLOCATION = "probing the dense model", "choosing bits and ranks"
RESUMED = "loading finished blocks"
INPUTS = "collecting layer inputs"
SOLVING = "compressing layers"
READ_BACK, PREDICTIONS = "loading compressed blocks", "fine-tuning"
HELD_OUT_TEXT, CHECK = "reading held-out text", "measuring perplexity"
WRITING = "writing files"
TASK_DATA, SCORING = "reading the tasks", "answering the tasks"

# Seconds between two log lines, at least.
INTERVAL = 60.0
# What an expectation weighs against what was measured, as a share of a phase, or of the whole run.
TRUST = 0.1


@dataclass(frozen=True)
class Step:
    """The argument of a listener, which is called when a phase begins, advances and ends.

    Args:
        phase: its name. done, total, unit: the count, which never falls and ends at the total, and
            what is counted.
        seconds: that the phase has taken so far. left: estimated seconds until it ends, from the
            rate so far; None before the first count.
        ended: it is the last step of its phase.
        layer: the `LayerRecord` of the layer that was just compressed; None in every other step.
        run_seconds: that the run has taken so far. run_left: estimated seconds until the run ends,
            smoothed; None as long as it is not known how long the phases should take.
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
        """What is done, of how much."""
        return f"{self.done:,}/{self.total:,} {self.unit}" if self.unit else ""

    def about(self, passed: float = 0.0) -> str:
        """The time left of the run, or else of the phase, after a comma. passed: seconds since this
        step.
        """
        left = self.left if self.run_left is None else self.run_left
        return (
            "" if left is None or left - passed < 1 else f", about {duration(left - passed)} left"
        )


Listener = Callable[[Step], None]


def ignore(step: Step) -> None:
    """The listener of a run that shows nothing."""


@dataclass(frozen=True)
class PhaseTime:
    """How long a phase took, in seconds."""

    name: str
    seconds: Figure


class Phase:
    """One phase of a run, made by `Phases.phase`. seconds: while its clock ran."""

    def __init__(self, phases: "Phases", name: str, total: int, unit: str):
        self.phases, self.name, self.total, self.unit = phases, name, total, unit
        self.done, self.skipped, self.seconds = 0, 0, 0.0

    @property
    def measured(self) -> float:
        """The share of the phase that took its seconds, without what was skipped."""
        return (self.done - self.skipped) / max(self.total, 1)

    def time_left(self, expected: float = 0.0, trust: float = 0.0) -> float:
        """Estimated seconds until it ends. expected: of the whole, which counts as if this share
        were measured.
        """
        return (
            (self.seconds + trust * expected)
            / (self.measured + trust)
            * (1 - self.done / max(self.total, 1))
        )

    def advance(self, count: int = 1, layer: Any = None) -> None:
        """Count what was done. layer: as for `Step`."""
        self.done = min(self.done + count, self.total)
        self.phases.notify(self, layer=layer)

    def reach(self, done: int) -> None:
        """Advance to this count; a smaller one than before is ignored, as when a trainer starts
        again.
        """
        self.advance(max(done - self.done, 0))

    def skip(self, count: int, layer: Any = None) -> None:
        """Count what an interrupted run has done, from which the time left is not estimated."""
        self.skipped += count
        self.advance(count, layer)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, the clock of this phase runs, and that of the phase around it stands still."""
        self.phases.charge()
        self.phases.stack.append(self)
        try:
            yield
        finally:
            self.phases.charge()
            self.phases.stack.remove(self)


class Phases:
    """The phases of one run, which a listener and the log follow.

    listener: called with every step, in the thread that works. log: write a line of level INFO
        every `INTERVAL`.
    clock: gives seconds.
    """

    def __init__(
        self,
        listener: Listener | None = None,
        log: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.listener, self.log, self.clock = listener, log, clock
        self.phases: list[Phase] = []
        self.stack: list[Phase] = []
        self.expected: Mapping[str, float] = {}
        self.end = math.nan  # when the run should end, by the clock
        self.began = self.charged = self.logged = self.estimated = clock()

    def expect(self, seconds: Mapping[str, float]) -> None:
        """Estimate the time left of the whole run from now on. seconds: that phases should take, by
        their names.
        """
        self.expected = seconds

    @contextmanager
    def phase(
        self, name: str, total: int = 1, unit: str = "", running: bool = True
    ) -> Iterator[Phase]:
        """A phase from beginning to end, at which everything is counted as done, unless an error
        ends it.

        total: what there is to do; phases with total 0 are not reported. unit: of the total, in the
            plural.
        running: whether its clock runs all the time, except within inner phases.
        """
        phase = Phase(self, name, total, unit)
        self.phases.append(phase)
        self.notify(phase)
        with phase.running() if running else nullcontext():
            yield phase
        phase.done = total
        self.notify(phase, ended=True)

    def counted(self, name: str, items: Iterable[T], total: int, unit: str) -> Iterator[T]:
        """The items of a loop; making an item and running the body are the phase, and each item
        counts after it.
        """
        with self.phase(name, total, unit) as phase:
            for item in items:
                yield item
                phase.advance()

    def times(self) -> tuple[PhaseTime, ...]:
        """The seconds of all phases so far in the order in which they began, summed over those with
        the same name.
        """
        self.charge()
        seconds: dict[str, float] = {}
        for phase in self.phases:
            if phase.total:
                seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        return tuple(PhaseTime(*item) for item in seconds.items())

    def notify(self, phase: Phase, ended: bool = False, layer: Any = None) -> None:
        """Tell the listener about a phase, and the log if it is time."""
        self.charge()
        if not phase.total:
            return
        left = phase.time_left() if phase.measured else None
        counted = phase.name, phase.done, phase.total, phase.unit, phase.seconds, left
        step = Step(*counted, ended, layer, self.charged - self.began, self.time_left())
        if self.listener:
            self.listener(step)
        if self.log and self.charged - self.logged >= INTERVAL:
            self.logged = self.charged
            count = f"{step.count}, " if step.unit else ""
            logger.info(
                "%s: %s%s so far%s", step.phase, count, duration(step.run_seconds), step.about()
            )

    def time_left(self) -> float | None:
        """Estimated seconds until the run ends; an estimate that jumps is approached slowly."""
        if not self.expected:
            return None
        begun = {phase.name: phase for phase in self.phases if phase.total}
        phases = [
            (begun.get(name) or Phase(self, name, 1, ""), seconds)
            for name, seconds in self.expected.items()
        ]
        trusted = TRUST * sum(self.expected.values())
        pace = trusted + sum(phase.seconds for phase, _ in phases)
        pace /= trusted + sum(phase.measured * seconds for phase, seconds in phases)
        left = sum(phase.time_left(pace * seconds, TRUST) for phase, seconds in phases)
        end, weight = (
            self.charged + left,
            math.exp((self.estimated - self.charged) / (10 + left / 50)),
        )
        self.end = end if math.isnan(self.end) else weight * self.end + (1 - weight) * end
        self.estimated = self.charged
        return max(self.end - self.charged, left / 2)

    def charge(self) -> None:
        """Add the time since the last call to the phase whose clock runs."""
        now = self.clock()
        if self.stack:
            self.stack[-1].seconds += now - self.charged
        self.charged = now
