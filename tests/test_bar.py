"""How a terminal shows the phases of a run, what a pipe gets, and the bar of a call from Python."""

import io
import logging
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from rich.console import Console

from hasslefree.bar import show, with_bar
from hasslefree.cli import bars
from hasslefree.errors import CalibrationError, option
from hasslefree.progress import INPUTS, LOADING, SOLVING, Phases, Step


class Screen(io.StringIO):
    """A file that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


def run(listener):
    layer = SimpleNamespace(name="model.layers.0.mlp.up_proj", relative_error=0.0123456)
    phases = Phases(listener)
    with phases.phase(LOADING):
        pass
    phases.expected = {INPUTS: 20.0, SOLVING: 4000.0}
    with (
        phases.phase(INPUTS, 1234, "layers") as inputs,
        phases.phase(SOLVING, 1234, "layers", running=False) as solving,
    ):
        inputs.advance(1000)
        with solving.running():
            solving.advance(1, layer)
        yield


@pytest.mark.parametrize("width", [80, 40])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_shows_what_is_under_way_and_cuts_nothing(width, encoding):
    """Oracle: the words by hand; a console that cuts would end them with an ellipsis."""
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    console = Console(file=file, width=width, force_terminal=True, color_system=None)
    board = bars.Bars(console)
    for _ in run(board.show):
        console.print(board.get_renderable())
    assert not board.tasks
    file.seek(0)
    text = file.read()
    assert max(map(len, text.splitlines())) <= width
    shown = "collecting layer inputs 1,000/1,234 layers compressing layers 1/1,234 layers 0 s so far, about left"
    assert Counter(shown.split()) <= Counter(text.split())
    assert "…" not in text
    assert "model.layers.0.mlp.up_proj:relativeerror0.01235" in "".join(text.split())
    assert ("━" in text) == (encoding == "utf-8")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_note_stands_above_the_bars_and_a_phase_is_no_note(terminal, monkeypatch):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(bars, "console", console)
    monkeypatch.setattr(bars, "say", lambda line: console.print(line, markup=False, highlight=False))
    with bars.phase_bars() as listener:
        for _ in run(listener):
            logging.getLogger("hasslefree.pipeline").info("no \x1b[31mred[/] name")
    text = file.getvalue()
    assert r"no \x1b[31mred[/] name" in text
    assert ("collecting layer inputs" in text) == terminal


def test_an_error_in_a_note_names_the_flag(monkeypatch):
    lines = []
    monkeypatch.setattr(bars, "say", lines.append)
    with bars.phase_bars():
        error = CalibrationError(f"no connection; give {option('calibration', 'self')}")
        logging.getLogger("hasslefree.pipeline").warning("no text of %r: %s", "c4", error)
    assert lines[0].endswith(" no text of 'c4': no connection; give --calibration self")


@with_bar
def call(*, progress=None):
    list(run(progress))


@pytest.mark.parametrize(
    ("environment", "disabled", "wanted"),
    [
        ({}, False, "  0 % compressing layers 0/1,234 layers, about 67 min left"),
        ({"TQDM_DISABLE": "1"}, False, None),
        ({"RANK": "1"}, False, None),
        ({}, True, None),
    ],
)
def test_the_switches_of_tqdm_turn_the_bar_of_a_call_off(monkeypatch, environment, disabled, wanted):
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    enable_progress_bars()
    with disable_progress_bars() if disabled else nullcontext():
        call()
    enable_progress_bars()
    shown = [line.partition(" |")[0] for line in screen.getvalue().split("\r")]
    assert wanted in shown if wanted else shown == [""]


def test_a_step_before_any_time_has_passed_is_shown():
    bar = MagicMock(n=0)
    show(bar, Step(LOADING, 0, 1, "", seconds=0.0, left=0.0))
    bar.update.assert_called_once_with(0)
    bar.refresh.assert_called_once_with()


def test_a_listener_replaces_the_bar(monkeypatch):
    screen, steps = Screen(), []
    monkeypatch.setattr("sys.stderr", screen)
    call(progress=steps.append)
    assert len(steps) == 8
    assert screen.getvalue() == ""
