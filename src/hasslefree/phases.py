"""The progress of a run, by phases: each has a name, a count of what is done, and its seconds.

    phases = Phases(listener)
    with phases.phase(ALLOCATION, len(blocks), "blocks") as phase:
        for block in blocks:
            ...
            phase.advance()

One clock runs at a time: within an inner phase, the clock of the outer one stands still, so the seconds of all phases
sum to no more than those of the run. A phase whose work is spread over another phase, such as solving layers between
forward passes, is opened with `running=False`; its clock runs within `running()`.

Clocks do not wait for a GPU: queued work counts in the phase that waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
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
REFERENCE_TEXT, REFERENCE = "reading the text to match on", "dense predictions"
PROBES = "dense forward pass"
ALLOCATION = "allocation"
RESUMED = "loading finished blocks"
INPUTS = "collecting layer inputs"
SOLVING = "solving"
READ_BACK, PREDICTIONS = "reading blocks back", "prediction matching"
WRITING = "writing"
TASK_DATA, SCORING = "reading the tasks", "answering the tasks"

# Seconds between two log lines within a phase, at least.
INTERVAL = 30.0


@dataclass(frozen=True)
class Step:
    """The argument of a listener, which is called when a phase begins, advances and ends.

    Args:
        phase: its name. done, total, unit: the count, which never falls and ends at the total, and what is counted.
        seconds: that the phase has taken so far. left: estimated seconds until it ends, from the rate so far; None
            before the first count.
        ended: it is the last step of its phase.
        layer: the `LayerRecord` of the layer that was just compressed; None in every other step.
    """

    phase: str
    done: int
    total: int
    unit: str
    seconds: float
    left: float | None
    ended: bool = False
    layer: Any = None


Listener = Callable[[Step], None]


@dataclass(frozen=True)
class PhaseTime:
    """How long a phase took, in seconds."""

    name: str
    seconds: Figure


class Phase:
    """One phase of a run, made by `Phases.phase`. seconds: while its clock ran."""

    def __init__(self, phases: Phases, name: str, total: int, unit: str):
        self.phases, self.name, self.total, self.unit = phases, name, total, unit
        self.done, self.skipped, self.seconds = 0, 0, 0.0

    def advance(self, count: int = 1, layer: Any = None) -> None:
        """Count what was done. layer: as for `Step`."""
        self.done = min(self.done + count, self.total)
        self.phases.notify(self, layer=layer)

    def reach(self, done: int) -> None:
        """Advance to this count; a smaller one than before is ignored, as when a trainer starts again."""
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

    Args:
        listener: is called with every step, in the thread that works.
        log: write lines of level INFO: at the beginning and the end of each phase, and every `INTERVAL` in between.
        clock: gives seconds.
    """

    def __init__(
        self, listener: Listener | None = None, log: bool = True, clock: Callable[[], float] = time.perf_counter
    ):
        self.listener, self.log, self.clock = listener, log, clock
        self.phases: list[Phase] = []
        self.stack: list[Phase] = []
        self.charged = self.logged = clock()

    @contextmanager
    def phase(self, name: str, total: int = 1, unit: str = "", running: bool = True) -> Iterator[Phase]:
        """A phase from beginning to end, at which everything is counted as done, unless an error ends it.

        Args:
            total: what there is to do; phases with total 0 are not reported. unit: of the total, in the plural.
            running: whether its clock runs all the time, except within inner phases.
        """
        phase = Phase(self, name, total, unit)
        self.phases.append(phase)
        self.notify(phase, "started")
        with phase.running() if running else nullcontext():
            yield phase
        phase.done = total
        self.notify(phase, "finished")

    def counted(self, name: str, items: Iterable[T], total: int, unit: str) -> Iterator[T]:
        """The items of a loop; making an item and running the body are the phase, and each item counts after it."""
        with self.phase(name, total, unit) as phase:
            for item in items:
                yield item
                phase.advance()

    def times(self) -> tuple[PhaseTime, ...]:
        """The seconds of all phases so far in the order in which they began, summed over those with the same name."""
        self.charge()
        seconds: dict[str, float] = {}
        for phase in self.phases:
            if phase.total:
                seconds[phase.name] = seconds.get(phase.name, 0.0) + phase.seconds
        return tuple(PhaseTime(*item) for item in seconds.items())

    def notify(self, phase: Phase, event: str = "", layer: Any = None) -> None:
        """Tell the listener and the log about a phase. event: "started", "finished", or empty in between."""
        self.charge()
        if not phase.total:
            return
        counted = phase.done - phase.skipped
        left = phase.seconds / counted * (phase.total - phase.done) if counted else None
        done, total, unit, seconds = phase.done, phase.total, phase.unit, phase.seconds
        if self.listener:
            self.listener(Step(phase.name, done, total, unit, seconds, left, event == "finished", layer))
        if not self.log or not (event or self.charged - self.logged >= INTERVAL):
            return
        self.logged = self.charged
        if event:
            line = event + (f", {total:,} {unit}" if unit else "")
            line += f" in {duration(seconds)}" if event == "finished" else ""
        else:
            line = f"{done:,} of {total:,} {unit} in {duration(seconds)}"
            line += f", about {duration(left)} left" if left else ""
        logger.info("%s: %s", phase.name, line)

    def charge(self) -> None:
        """Add the time since the last call to the phase whose clock runs."""
        now = self.clock()
        if self.stack:
            self.stack[-1].seconds += now - self.charged
        self.charged = now
