"""The phases of a run: each has a name, a count of what is done, and the seconds that it took.

    with heard(listener) as phases:
        with phases.phase(ALLOCATION, len(blocks), "blocks") as phase:
            for block in blocks:
                ...
                phase.advance()

One phase runs at a time. Within a phase another one may run: the clock of the outer phase stands still meanwhile, so
that the seconds of all phases sum to no more than those of the run. A phase whose work is spread over another one, such
as the solving of layers between the forward passes, is opened with `running=False`; its clock runs within `running()`.

No clock waits for a GPU: what a phase has queued there counts in the phase that waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from hasslefree.units import duration
from hasslefree.validation import Figure

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOADING = "loading the model"
TEXT = "reading the text"
LOOK = "checking the model"
BLOCK_ROTATION, STREAM_ROTATION = "rotation within blocks", "rotation of the stream"
REFERENCE_TEXT, REFERENCE = "reading the text to match on", "dense predictions"
PROBES = "probes"
ALLOCATION = "allocation"
IMPORTANCE = "channel importance"
ADVICE = "patterns and ranks"
RESUMED = "finished blocks"
GRAMS = "Grams"
SOLVING = "solving"
MATCHING = "block matching"
READ_BACK, PREDICTIONS = "reading blocks back", "prediction matching"
WRITING = "writing"
TASK_DATA, SCORING, ANSWERS = "reading the tasks", "scoring", "answers to tasks"

# Seconds between two log lines of a phase.
EVERY = 30.0


@dataclass(frozen=True)
class Step:
    """What a listener is called with: when a phase begins, goes on after another one, counts, and ends.

    Args:
        phase: its name. done, total, unit: the count, which never falls and ends at the total, and what is counted.
        seconds: that the phase has taken so far. left: estimated seconds until it ends; None where nothing is known.
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
    """How long a phase took, in seconds, and how long it was estimated to take; None where no estimate is made."""

    name: str
    seconds: Figure
    estimated: Figure | None = None


class Phase:
    """One phase of a run; `Phases.phase` makes it. seconds: while its clock ran."""

    def __init__(self, phases: Phases, name: str, total: int, unit: str):
        self.phases, self.name, self.total, self.unit = phases, name, total, unit
        self.done, self.skipped, self.seconds = 0, 0, 0.0

    def advance(self, count: int = 1, layer: Any = None) -> None:
        """Count what was done. layer: as `Step` has it."""
        self.done = min(self.done + count, self.total)
        self.phases.say(self, layer=layer)

    def reach(self, done: int) -> None:
        """Count up to so many; a smaller number than before is passed over, as when work is done once more."""
        self.advance(max(done - self.done, 0))

    def skip(self, count: int, layer: Any = None) -> None:
        """Count what an earlier run has done; the time left is not estimated from it."""
        self.skipped += count
        self.advance(count, layer)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within it, the clock of this phase runs, and that of the phase around it stands still."""
        self.phases.enter(self)
        try:
            yield
        finally:
            self.phases.leave(self)
        self.phases.resume()

    def step(self, ended: bool = False, layer: Any = None) -> Step:
        """The phase as it is now."""
        left = self.phases.left(self)
        return Step(self.name, self.done, self.total, self.unit, self.seconds, left, ended, layer)


class Phases:
    """The phases of one run.

    Args:
        listeners: are called with every step, in the thread that works.
        clock: gives seconds.
    """

    def __init__(self, *listeners: Listener, clock: Callable[[], float] = time.perf_counter):
        self.listeners, self.clock = listeners, clock
        self.estimates: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._stack: list[Phase] = []
        self._since = 0.0

    @contextmanager
    def phase(self, name: str, total: int = 1, unit: str = "", running: bool = True) -> Iterator[Phase]:
        """A phase from its beginning to its end, at which everything is counted as done, but for an error.

        Args:
            total: what there is to do; a phase of nothing at all is not heard of. unit: of the total, in the plural.
            running: whether its clock runs all the time, but for what runs within it.
        """
        phase = Phase(self, name, total, unit)
        if running:
            self.enter(phase)
        else:
            self.say(phase)
        try:
            yield phase
        finally:
            if running:
                self.leave(phase)
        phase.done = total
        self.say(phase, ended=True)
        self.resume()

    def counted(self, name: str, items: Iterable[T], total: int, unit: str) -> Iterator[T]:
        """The items of a loop whose body, with the making of the items, is a phase; each is counted after the body."""
        with self.phase(name, total, unit) as phase:
            for item in items:
                yield item
                phase.advance()

    def times(self) -> tuple[PhaseTime, ...]:
        """The seconds of all phases so far, in the order in which they began; those of one name together."""
        self._charge()
        return tuple(PhaseTime(name, seconds, self.estimates.get(name)) for name, seconds in self._seconds.items())

    def left(self, phase: Phase) -> float | None:
        """Seconds until a phase ends at the rate so far; before its first count, what is left of the estimate."""
        if phase.name == WRITING and phase.done < phase.total:
            return None  # files are written beside the work, and wait for it
        counted = phase.done - phase.skipped
        if counted:
            return phase.seconds / counted * (phase.total - phase.done)
        estimate = self.estimates.get(phase.name)
        return None if estimate is None else max(estimate - phase.seconds, 0.0)

    def say(self, phase: Phase, ended: bool = False, layer: Any = None) -> None:
        """Call the listeners."""
        self._charge()
        if phase.total and self.listeners:
            step = phase.step(ended, layer)
            for listener in self.listeners:
                listener(step)

    def enter(self, phase: Phase) -> None:
        """Let the clock of a phase run."""
        self._charge()
        self._stack.append(phase)
        self.say(phase)

    def leave(self, phase: Phase) -> None:
        """Stop the clock of a phase; that of the phase around it goes on."""
        self._charge()
        self._stack.remove(phase)

    def resume(self) -> None:
        """Call the listeners with the phase that goes on, if there is one."""
        if self._stack:
            self.say(self._stack[-1])

    def _charge(self) -> None:
        """Add the time since the last call to the phase that runs."""
        now = self.clock()
        if self._stack and self._stack[-1].total:
            running = self._stack[-1]
            running.seconds += now - self._since
            self._seconds[running.name] = self._seconds.get(running.name, 0.0) + now - self._since
        self._since = now


class LogLines:
    """A listener that logs a phase's beginning, its end, and every `every` seconds how far the running phase is.

    Args:
        log: takes the line. clock: gives seconds.
    """

    def __init__(
        self,
        every: float = EVERY,
        clock: Callable[[], float] = time.perf_counter,
        log: Callable[[str], None] = logger.info,
    ):
        self.every, self.clock, self.log = every, clock, log
        self.begun: set[str] = set()
        self._lock = threading.Lock()
        self._last: Step | None = None
        self._heard = self._logged = clock()

    def __call__(self, step: Step) -> None:
        with self._lock:
            self._last, self._heard = None if step.ended else step, self.clock()
            if step.phase not in self.begun and not step.ended:
                self.begun.add(step.phase)
                self._write(f"{step.phase}: started" + (f", {step.total:,} {step.unit}" if step.unit else ""))
            elif step.ended:
                self.begun.discard(step.phase)
                count = f", {step.total:,} {step.unit}" if step.unit else ""
                self._write(f"{step.phase}: finished{count} in {duration(step.seconds)}")
        self.beat()

    def beat(self) -> None:
        """Log where the running phase is, if the last line is old enough."""
        with self._lock:
            step, now = self._last, self.clock()
            if step is None or now - self._logged < self.every:
                return
            waited = now - self._heard
            count = f"{step.done:,} of {step.total:,} {step.unit} in " if step.unit else ""
            left = (
                ""
                if step.left is None or step.done == step.total
                else f", about {duration(max(step.left - waited, 0.0))} left"
            )
            self._write(f"{step.phase}: {count}{duration(step.seconds + waited)}{left}")

    def _write(self, line: str) -> None:
        self._logged = self.clock()
        self.log(line)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Within it, a thread calls `beat`: lines come while a single step takes minutes, too."""
        over = threading.Event()

        def beats() -> None:
            while not over.wait(self.every / 4):
                self.beat()

        thread = threading.Thread(target=beats, name="phases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def heard(listener: Listener | None = None, speaks: bool = True) -> Iterator[Phases]:
    """The phases of a run. Their steps go to the listener, and as lines to the log where it takes lines of level INFO.

    Args:
        speaks: whether this process logs them: of several processes, the first one does.
    """
    listeners = () if listener is None else (listener,)
    if not (speaks and logger.isEnabledFor(logging.INFO)):
        yield Phases(*listeners)
        return
    lines = LogLines()
    with lines.beating():
        yield Phases(*listeners, lines)
