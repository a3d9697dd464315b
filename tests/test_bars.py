"""How a terminal shows the phases of a run, and what a pipe gets."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from hasslefree.cli import bars
from hasslefree.phases import Phases, Step


@pytest.fixture
def screen(monkeypatch):
    """Makes the console write to a file: as a terminal, or as a pipe."""

    def made(terminal):
        file = io.StringIO()
        monkeypatch.setattr(bars, "console", Console(file=file, width=120, force_terminal=terminal))
        monkeypatch.setattr(bars, "say", lambda line: file.write(f"{line}\n"))
        return file

    return made


def run(listener):
    layer = SimpleNamespace(name="model.layers.0.mlp.up_proj", relative_error=0.0123456)
    phases = Phases(listener)
    with phases.phase("loading the model"):
        pass
    with (
        phases.phase("collecting layer inputs", 4, "layers") as inputs,
        phases.phase("solving", 4, "layers", running=False) as solving,
    ):
        inputs.advance(2)
        with solving.running():
            solving.advance(1, layer)
        yield


def test_a_terminal_has_a_bar_for_each_phase(screen):
    """Oracle: the counts, by hand."""
    file = screen(terminal=True)
    with Progress(*bars.COLUMNS, console=bars.console) as progress:
        for _ in run(lambda step: bars.update_bars(progress, step)):
            progress.refresh()
        assert [task.description for task in progress.tasks] == [
            "loading the model",
            "collecting layer inputs",
            "solving",
        ]
        assert all(task.finished for task in progress.tasks)
        bars.update_bars(progress, Step("loading the model", 0, 1, "", 0.0, None))  # of a second run
        assert [task.description for task in progress.tasks] == ["loading the model"]
    text = file.getvalue()
    assert "2/4 layers" in text
    assert "1/4 layers" in text
    assert "model.layers.0.mlp.up_proj error 0.01235" in text
    assert "started" not in text


def test_a_terminal_shows_bars_without_the_lines_of_phases(screen):
    file = screen(terminal=True)
    with bars.phase_bars() as listener:
        list(run(listener))
    assert "started" not in file.getvalue()


def test_a_pipe_has_lines(screen):
    file = screen(terminal=False)
    with bars.phase_bars() as listener:
        list(run(listener))
    assert [line.partition(" ")[2] for line in file.getvalue().splitlines()] == [
        "loading the model: started",
        "loading the model: finished in 0 s",
        "collecting layer inputs: started, 4 layers",
        "solving: started, 4 layers",
        "solving: finished, 4 layers in 0 s",
        "collecting layer inputs: finished, 4 layers in 0 s",
    ]
