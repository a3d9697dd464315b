"""Phases: their clocks, their counts, and the lines that a log has of them."""

import logging
import threading

import pytest

from hasslefree.phases import LogLines, Phases, PhaseTime, heard


class Clock:
    """Seconds that pass when they are told to."""

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
    clock.passes(1)  # of no phase
    with (
        phases.phase("Grams", 2, "layers") as outer,
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
    with phases.phase("writing"):
        clock.passes(2)
    phases.estimates = {"solving": 15.0}
    assert phases.times() == (PhaseTime("Grams", 6.0), PhaseTime("solving", 20.0, 15.0), PhaseTime("writing", 2.0))


def test_a_listener_hears_the_count_and_the_time_left():
    """Oracle: the rule of three, by hand; before the first count, the estimate."""
    clock, steps = Clock(), []
    phases = Phases(steps.append, clock=clock)
    phases.estimates = {"solving": 50.0}
    with phases.phase("solving", 8, "layers") as phase:
        clock.passes(1)
        phase.skip(4)
        clock.passes(1)
        phase.advance(1, "the layer")
        phase.reach(7)
        phase.reach(2)
    said = [(step.done, step.seconds, step.left, step.ended, step.layer) for step in steps]
    assert said == [
        (0, 0.0, 50.0, False, None),
        (4, 1.0, 49.0, False, None),
        (5, 2.0, 6.0, False, "the layer"),
        (7, 2.0, 2 / 3, False, None),
        (7, 2.0, 2 / 3, False, None),
        (8, 2.0, 0.0, True, None),
    ]


def test_no_time_is_told_for_files_that_wait_for_the_work():
    clock, steps = Clock(), []
    with Phases(steps.append, clock=clock).phase("writing", 2, "files") as phase:
        clock.passes(1)
        phase.advance()
    assert [step.left for step in steps] == [None, None, 0.0]


def test_an_error_ends_no_phase():
    clock, steps = Clock(), []
    phases = Phases(steps.append, clock=clock)
    with pytest.raises(KeyboardInterrupt), phases.phase("outer"), phases.phase("inner", 3):
        raise KeyboardInterrupt
    assert [(step.phase, step.ended) for step in steps] == [("outer", False), ("inner", False)]
    with phases.phase("next"):
        clock.passes(2)
    assert phases.times()[-1] == PhaseTime("next", 2.0)


def test_lines_come_at_both_ends_and_every_half_minute():
    """Oracle: the lines, written out."""
    clock, lines = Clock(), []
    log = LogLines(30.0, clock, lines.append)
    phases = Phases(log, clock=clock)
    with phases.phase("loading the model"):
        for _ in range(9):
            clock.passes(10)
            log.beat()
    with phases.phase("allocation", 10, "blocks") as phase:
        for _ in range(10):
            clock.passes(14)
            phase.advance()
    assert lines == [
        "loading the model: started",
        "loading the model: 30 s",
        "loading the model: 60 s",
        "loading the model: 90 s",
        "loading the model: finished in 90 s",
        "allocation: started, 10 blocks",
        "allocation: 3 of 10 blocks in 42 s, about 98 s left",
        "allocation: 6 of 10 blocks in 84 s, about 56 s left",
        "allocation: 9 of 10 blocks in 2 min, about 14 s left",
        "allocation: finished, 10 blocks in 2 min",
    ]


@pytest.mark.parametrize(("level", "speaks", "expected"), [
    (logging.WARNING, True, []), (logging.INFO, False, []),
    (logging.INFO, True, ["allocation: started, 2 blocks", "allocation: finished, 2 blocks in 0 s"]),
])  # fmt: skip
def test_the_log_has_lines_only_where_it_is_listened_to(level, speaks, expected, caplog):
    with caplog.at_level(level, "hasslefree"), heard(speaks=speaks) as phases:
        assert list(phases.counted("allocation", "ab", 2, "blocks")) == ["a", "b"]
    assert caplog.messages == expected


def test_a_step_of_minutes_is_not_silent():
    lines, said = [], threading.Event()
    log = LogLines(0.02, log=lambda line: (lines.append(line), len(lines) == 3 and said.set()))
    with log.beating(), Phases(log).phase("allocation", 3, "blocks") as phase:
        phase.advance()
        assert said.wait(10)
    assert lines[1].startswith("allocation: 1 of 3 blocks in 0 s, about 0 s left")
