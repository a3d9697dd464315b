"""Phases: their clocks, their counts, and the log lines."""

import logging

import pytest

from hasslefree.phases import Phases, PhaseTime


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def test_one_clock_runs_at_a_time():
    """Oracle: the seconds that pass within each phase, by hand."""
    clock = Clock()
    phases = Phases(clock=clock)
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


def test_a_listener_gets_the_count_and_the_time_left():
    """Oracle: the rule of three, by hand."""
    clock, steps = Clock(), []
    with Phases(steps.append, clock=clock).phase("solving", 8, "layers") as phase:
        clock.passes(1)
        phase.skip(4)
        clock.passes(1)
        phase.advance(1, "the layer")
        phase.reach(7)
        phase.reach(2)
    assert [(step.done, step.seconds, step.left, step.ended, step.layer) for step in steps] == [
        (0, 0.0, None, False, None),
        (4, 1.0, None, False, None),
        (5, 2.0, 6.0, False, "the layer"),
        (7, 2.0, 2 / 3, False, None),
        (7, 2.0, 2 / 3, False, None),
        (8, 2.0, 0.0, True, None),
    ]


def test_an_error_ends_no_phase():
    clock, steps = Clock(), []
    phases = Phases(steps.append, clock=clock)
    with pytest.raises(KeyboardInterrupt), phases.phase("outer"), phases.phase("inner", 3):
        raise KeyboardInterrupt
    assert [(step.phase, step.ended) for step in steps] == [("outer", False), ("inner", False)]
    with phases.phase("next"):
        clock.passes(2)
    assert phases.times()[-1] == PhaseTime("next", 2.0)


def test_lines_come_at_both_ends_and_every_half_minute(caplog):
    """Oracle: the lines, written out."""
    clock = Clock()
    phases = Phases(clock=clock)
    with caplog.at_level(logging.INFO, "hasslefree"):
        with phases.phase("loading the model"):
            clock.passes(90)
        with Phases(log=False, clock=clock).phase("another process"):
            clock.passes(5)
        for _ in phases.counted("allocation", range(10), 10, "blocks"):
            clock.passes(14)
    assert caplog.messages == [
        "loading the model: started",
        "loading the model: finished in 90 s",
        "allocation: started, 10 blocks",
        "allocation: 3 of 10 blocks in 42 s, about 98 s left",
        "allocation: 6 of 10 blocks in 84 s, about 56 s left",
        "allocation: 9 of 10 blocks in 2 min, about 14 s left",
        "allocation: finished, 10 blocks in 2 min",
    ]
