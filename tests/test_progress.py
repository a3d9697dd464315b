"""Phases: their timers, their counts, and the log lines."""

import logging

import pytest

from hasslefree.progress import Phases, PhaseTime


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def passes(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    return clock


def test_one_timer_runs_at_a_time(clock):
    """Oracle: the seconds that pass within each phase, by hand."""
    phases = Phases()
    clock.passes(1)  # in no phase
    with (
        phases.phase("inputs", 2, "layers") as outer,
        phases.phase("solving", 2, "layers", running=False) as solving,
        phases.phase("nothing", 0, running=False) as nothing,
    ):
        for _ in range(2):
            clock.passes(3)
            with nothing.running():
                pass
            with solving.running():
                clock.passes(10)
            outer.advance()
    clock.passes(5)
    for seconds in (2, 4):
        with phases.phase("writing"):
            clock.passes(seconds)
    assert phases.times() == (PhaseTime("inputs", 6.0), PhaseTime("solving", 20.0), PhaseTime("writing", 6.0))


def test_a_listener_gets_the_count_and_the_time_left_of_the_phase(clock):
    """Oracle: the rule of three, by hand."""
    steps = []
    phases = Phases(steps.append)
    clock.passes(10)
    with phases.phase("solving", 8, "layers") as phase:
        clock.passes(1)
        phase.skip(4)
        clock.passes(1)
        phase.advance(1, "the layer")
        phase.reach(7)
        phase.reach(2)
    assert [(step.done, step.seconds, step.left, step.ended, step.layer) for step in steps] == [
        (0, 10, None, False, None),
        (4, 11, None, False, None),
        (5, 12, 6.0, False, "the layer"),
        (7, 12, pytest.approx(2 / 3), False, None),
        (7, 12, pytest.approx(2 / 3), False, None),
        (8, 12, 0.0, True, None),
    ]


def test_an_error_ends_no_phase(clock):
    steps = []
    phases = Phases(steps.append)
    with pytest.raises(KeyboardInterrupt), phases.phase("outer"), phases.phase("inner", 3):
        raise KeyboardInterrupt
    assert [(step.phase, step.ended) for step in steps] == [("outer", False), ("inner", False)]
    with phases.phase("next"):
        clock.passes(2)
    assert phases.times()[-1] == PhaseTime("next", 2.0)


def test_a_line_comes_every_minute_and_not_for_every_phase(clock, caplog):
    """Oracle: the lines, written out."""
    phases = Phases()
    with caplog.at_level(logging.INFO, "hasslefree"):
        for _ in range(50):
            with phases.phase("quick", 4, "layers"):
                clock.passes(1)
        clock.passes(110)
        for _ in phases.counted("allocation", range(10), 10, "blocks"):
            clock.passes(25)
    assert caplog.messages == [
        "allocation: 0/10 blocks, 3 min so far",
        "allocation: 3/10 blocks, 4 min so far, about 3 min left",
        "allocation: 6/10 blocks, 5 min so far, about 100 s left",
        "allocation: 9/10 blocks, 6 min so far, about 25 s left",
    ]


def test_the_time_left_is_that_of_the_whole_run(clock):
    """Oracle: the end of a run that takes twice the expected time, which the estimate approaches."""
    steps = []
    phases = Phases(steps.append)
    with phases.phase("loading"):
        clock.passes(3)
    phases.expected = {"solving": 100.0, "training": 300.0}
    for name, seconds in (("solving", 200), ("training", 600)):
        for _ in phases.counted(name, range(20), 20, "layers"):
            clock.passes(seconds / 20)
    left = {step.seconds: step.left for step in steps}
    assert left[3] == 400
    assert left[203] == pytest.approx(600, rel=0.2)
    assert left[503] == pytest.approx(300, rel=0.1)
    assert left[803] == 0


def test_phases_that_should_take_no_time_leave_the_time_of_the_run_unknown():
    steps = []
    phases = Phases(steps.append)
    phases.expected = {"solving": 0.0}
    with phases.phase("solving"):
        pass
    assert steps[-1].left is None
