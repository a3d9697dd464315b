"""What the command line prints for people and for programs: help, lists, tables at 80 columns, JSON, and nothing."""

import dataclasses
import importlib
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from hasslefree import Recipe
from hasslefree.checkpoint.entries import LayerSpec
from hasslefree.checkpoint.inspect import FolderSize, LayerSize, kind_table, layer_table
from hasslefree.cli import app
from hasslefree.cli.evaluate import result_tables
from hasslefree.core.grids import Grid
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.recipe import listing
from hasslefree.recipe.fields import GROUPS, Fields
from hasslefree.recipe.resolve import EFFORTS
from hasslefree.solve import low_rank, methods

DOCS = Path(__file__).parents[2] / "docs" / "explanation"
COMMANDS = typer.main.get_command(app).commands
PLAN = ["plan", str(MODEL), "--rank", "4", "--calibration", str(CALIBRATION)]


def invoke(*arguments):
    """The exit code, standard output and standard error, in 80 columns."""
    found = CliRunner().invoke(app, list(map(str, arguments)), prog_name="hasslefree", env={"COLUMNS": "80"})
    return found.exit_code, found.stdout, found.stderr


def shown(table):
    """The lines of a table in 80 columns."""
    file = io.StringIO()
    Console(file=file, width=80).print(table)
    return file.getvalue().splitlines()


def test_nothing_is_cut_in_40_columns(monkeypatch):
    """Oracle: the letters of the same text in 80 columns."""

    def letters(columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        return sorted("".join(CliRunner().invoke(app, ["methods"], prog_name="hasslefree").stdout.split()))

    assert letters(40) == letters(80)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_sentence_with_its_default(name):
    for parameter in COMMANDS[name].params:
        if parameter.name == "help":
            continue
        text = parameter.help or ""
        assert text[:1].isupper() or text.split()[0].rstrip(",") in {"8", "0", "cpu", "dense", "table1"}, parameter.name
        assert text.endswith("."), (parameter.name, text)
        given = parameter.param_type_name == "argument" or parameter.required
        assert given or "default" in text or parameter.default is not None or parameter.name in NO_DEFAULT, text


def test_a_folder_with_the_name_of_a_command_does_not_hide_it(monkeypatch, tmp_path):
    (tmp_path / "methods").mkdir()
    expected = invoke("methods")
    assert expected[0] == 0
    monkeypatch.chdir(tmp_path)
    assert invoke("methods") == expected


# Without them nothing is measured or written; `dtype` and others have a default that typer prints.
NO_DEFAULT = {"perplexity", "tasks", "output"}


def test_every_field_of_a_recipe_stands_under_a_heading():
    groups = [field.metadata["group"] for field in dataclasses.fields(Fields)]
    assert set(groups) == set(GROUPS)
    for name in ("compress", "plan"):
        headings = {getattr(option, "rich_help_panel", None) for option in COMMANDS[name].params}
        assert headings >= {*GROUPS, "Where to run", "Output"}


def test_the_root_lists_every_command_in_one_line_under_a_heading():
    code, text, _ = invoke("--help")
    assert code == 0
    assert invoke("-h") == (0, text, "")
    assert all(command.rich_help_panel for command in COMMANDS.values())
    lines = [line for line in text.splitlines() if line.split()[1:2] and line.split()[1] in COMMANDS]
    assert {line.split()[1] for line in lines} == set(COMMANDS)
    assert all(line.rstrip("│ ").endswith(".") for line in lines), "a line goes on below"


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_the_help_of_a_switch_has_no_type(name):
    _, text, _ = invoke(*([name] if name else []), "--help")
    assert "<bool>" not in text
    assert not [line for line in text.splitlines() if len(line) > 80 or "…" in line.replace("cuda:1, …", "")]


def test_the_first_screen_of_compress_has_the_common_options():
    """Oracle: what README and the how-to pages use most."""
    screen = "\n".join(invoke("compress", "-h")[1].splitlines()[:24])
    common = "size bits rank pattern engine effort calibration samples seqlen device resume overwrite"
    assert [name for name in common.split() if f"│ --{name} " not in screen] == []


@pytest.mark.parametrize("name", ["compress", "plan"])
def test_a_brief_help_fits_two_screens_and_names_every_option(name):
    """Two screens of 24 lines. Oracle: the options of the command."""
    brief = invoke(name, "-h")[1]
    assert len(brief.splitlines()) <= 48
    assert [option.opts[0] for option in COMMANDS[name].params if option.opts[0].upper() not in brief.upper()] == []
    assert "Ridge on the diagonal" not in brief
    assert "Ridge on the diagonal" in invoke(name, "--help")[1]


def test_every_effort_has_a_line():
    """Oracle: the efforts that a recipe resolves."""
    assert listing.TABLES["efforts"].keys() == EFFORTS.keys()


def test_references_are_those_of_the_documentation():
    """Oracle: the table of methods in docs/explanation/maths.md."""
    for heading, entries in listing.TABLES.items():
        for name, about in entries.items():
            kind, _, page = about.reference.partition(": ")
            assert re.search(r"arXiv \d{4}\.\d{4,5}$|\b(19|20)\d\d$", kind) or (DOCS / f"{page}.md").is_file(), name
            assert len(about.line) <= 45, "the line takes two"
            row = re.search(rf"^\| `{name}` .*\[(arXiv [\d.]+)\]", (DOCS / "maths.md").read_text(), re.MULTILINE)
            if row and heading == "methods":
                assert about.reference == row[1]


def test_methods_lists_each_name_once_and_as_json():
    code, text, errors = invoke("methods")
    assert (code, errors) == (0, "")
    for name in [*methods.METHODS, *low_rank.LOW_RANK_SOLVERS, "unstructured", "balanced"]:
        assert len(re.findall(rf"^{re.escape(name)} ", text, re.MULTILINE)) == 1, name
    code, text, _ = invoke("methods", "--json")
    assert set(json.loads(text)["methods"]) == set(methods.METHODS)


def test_methods_of_a_name_are_its_settings():
    """Oracle: the signature of its class; the rounds are those that the command line uses."""
    _, text, _ = invoke("methods", "joint", "--json")
    found = json.loads(text)["settings"]
    assert list(found) == list(inspect.signature(type(methods.METHODS["joint"])).parameters)
    assert found["rounds"] == {"default": Recipe(rank=1).resolve(with_text=False).solver.rounds, "option": "--rounds"}
    assert found["penalty"]["option"] is None
    _, text, _ = invoke("methods", "caldera")
    assert re.search(r"pruner\.grid\.group +64 +--group-size", text)
    code, _, _ = invoke("methods", "exact")
    assert code == 0
    assert "Did you mean 'joint'" in str(CliRunner().invoke(app, ["methods", "jiont"]).exception)


def layer(name, pattern="2:4"):
    spec = LayerSpec(pattern, (1 << 14, 1 << 12), 128, 1 << 25, None, None)
    return LayerSize(name, spec, "BF16", 75_497_472, 134_217_728, 1.2e-5 if "0" in name else 0.125)


def test_a_large_model_is_a_line_for_each_kind_and_a_line_for_each_layer():
    names = [f"model.language_model.layers.{i}.mlp.shared_experts.gate_proj" for i in range(40)]
    found = FolderSize("/a/folder/with/a/long/name/" + "x" * 60, 1, tuple(map(layer, names)), 10**9)
    text = "\n".join(shown(kind_table(found)))
    assert re.search(r"gate_proj +40 +128 +1.2e-05–0.12 +3.0 GB +56.2%", text), text
    assert "x" * 60 in text.replace("\n", "")
    lines = [line for line in shown(layer_table(found)) if "gate_proj" in line]
    assert [line.split()[0] for line in lines] == [name.removeprefix("model.language_model.layers.") for name in names]
    assert all(line.split()[-1] == "56.2%" for line in lines)
    mixed = FolderSize("m", 1, (layer("a.0.q_proj"), layer("a.1.q_proj", "unstructured")), 0)
    assert [line.split()[1] for line in shown(kind_table(mixed)) if "q_proj" in line] == ["2:4", "unstructured"]


def test_layers_of_different_bits_are_a_line_of_their_kind_with_ranges():
    grids = {"a.0.q": 2, "a.0.down": 4, "a.1.q": 5, "a.1.down": 4}
    layers = []
    for name, bits in grids.items():
        spec = LayerSpec("dense", (64, 64), 0, 4096, Grid(bits, 32, scale_bits=5))
        layers.append(LayerSize(name, spec, "BF16", 1000, 8192, 0.1))
    folder = FolderSize("m", 1, tuple(layers), 0)
    lines = [line.split() for line in shown(kind_table(folder))]
    assert " ".join(lines[0]) == "m: 4 compressed layers, dense, in groups of 32, scales of 5 bits"
    assert lines[2] == ["kind", "layers", "bits", "relative", "error", "bytes", "of", "dense"]
    assert lines[4:6] == [
        ["q", "2", "2–5", "0.1", "2.0", "kB", "12.2%"],
        ["down", "2", "4", "0.1", "2.0", "kB", "12.2%"],
    ]
    assert [line.split()[:2] for line in shown(layer_table(folder))[4:8]] == [
        [name.removeprefix("a."), str(bits)] for name, bits in grids.items()
    ]


def test_a_long_path_is_folded_and_not_cut():
    path = "/data/" + "/".join(f"folder-{i}" for i in range(20)) + "/held_out.txt"
    row = {"perplexity": 12.5, "tokens": 123456, "window": 2048}
    lines = shown(result_tables({"model": path, "perplexity": {path: row}})[0])
    assert "…" not in "".join(lines)
    assert path in "".join(
        line.split()[0] for line in lines[lines.index(next(x for x in lines if "───" in x)) + 1 :] if line.strip()
    )


def test_json_is_alone_on_standard_output(tmp_path):
    file = tmp_path / "plan.json"
    code, text, errors = invoke(*PLAN, "--json", "--output", file)
    assert code == 0
    assert json.loads(text) == json.loads(file.read_text())
    assert errors == f"Written to {file}.\n"
    code, text, errors = invoke(*PLAN, "--json", "--quiet")
    assert (code, errors) == (0, "")
    assert json.loads(text) == json.loads(file.read_text())


def test_quiet_prints_nothing_and_ends_with_its_command():
    assert invoke(*PLAN, "--quiet") == (0, "", "")
    assert "parameters kept" in invoke(*PLAN)[1]


def test_completion_knows_commands_and_options():
    for line, wanted in [("hasslefree in", "inspect"), ("hasslefree compress --sam", "--samples")]:
        words = {"_HASSLEFREE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        found = subprocess.run(
            [sys.executable, "-m", "hasslefree"], env=os.environ | words, capture_output=True, text=True, check=False
        )
        assert found.stdout.split() == [wanted]


class Interrupting:
    """A finder of modules at which Ctrl-C is pressed."""

    def __init__(self, name):
        self.name = name

    def find_spec(self, name, path, target=None):
        if name == self.name:
            raise KeyboardInterrupt


def interrupt_at(monkeypatch, name):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(name), *sys.meta_path])


def test_an_interruption_while_libraries_are_imported_says_so(monkeypatch, capsys, tmp_path):
    interrupt_at(monkeypatch, "hasslefree.pipeline.compress")
    message = "Interrupted before anything was written.\n"
    assert invoke("compress", *PLAN[1:2], tmp_path / "out", *PLAN[2:]) == (130, "", message)
    assert not list(tmp_path.iterdir())
    interrupt_at(monkeypatch, "hasslefree.cli")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as caught:
        importlib.import_module("hasslefree.__main__").main()
    assert (caught.value.code, capsys.readouterr().err) == (130, message)


def test_any_command_that_is_interrupted_says_so(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("hasslefree.checkpoint.inspect"), "inspect_folder", interrupted)
    assert invoke("inspect", "out") == (130, "", "Interrupted.\n")
