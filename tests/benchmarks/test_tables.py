"""What writes the tables of README.md and docs/, on invented results and pages: `make docs` checks the real ones."""

import importlib
from pathlib import Path

import pytest
import torch

from hasslefree.solve.methods import METHODS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE, OTHER = Path("page.md"), Path("other.md")
MARKED = "Before\n<!-- t -->\nold\n<!-- /t -->\nafter\n"


@pytest.fixture
def tables(monkeypatch):
    """A module of benchmarks/tables by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"tables.{name}")


def test_a_specification_becomes_markdown(tables, monkeypatch):
    """Oracle: by hand. A column for each text, a table for each setting, an empty cell for None."""
    engine = tables("engine")
    content = {"unit": "bits", "rows": [
        {"setting": "a", "name": "one", "loss": {"x": 1.25, "y": None}},
        {"setting": "a", "name": "two", "loss": {"x": 2.0, "y": 3.0}},
        {"setting": "b", "name": "one", "loss": {"x": 4.0, "y": 5.0}},
    ]}  # fmt: skip
    table = engine.Table(
        "invented", "", (("{setting}, {unit}", "{name}"), ("on *", "{loss[*]:.1f}")), split="setting",
        lead="{count} rows.", note="In {unit}.", facts=lambda content: {"count": len(content["rows"])},
    )  # fmt: skip
    monkeypatch.setattr(engine.Table, "load", lambda self: content)
    assert table.text() == (
        "3 rows.\n\n"
        "| a, bits | on x | on y |\n| --- | ---: | ---: |\n| one | 1.2 |  |\n| two | 2.0 | 3.0 |\n\n"
        "| b, bits | on x | on y |\n| --- | ---: | ---: |\n| one | 4.0 | 5.0 |\n\n"
        "In bits."
    )


@pytest.mark.parametrize(
    ("row", "name"),
    [({}, "2:4: oats"), ({"rounds": 80}, "2:4: oats"), ({"rounds": 20}, "2:4: oats, 20 rounds")],
)
def test_a_row_of_the_paper_s_tables_says_its_own_rounds(row, name, tables):
    row |= {"setting": "2:4", "method": "oats"}
    assert tables("paper").name_of(row, 80) == name


def test_the_paper_s_models_are_named_once_or_by_table(tables):
    rows = {"table1": [{"beside": "A"}], "table2": [{"beside": "B"}], "table4": [{"beside": "B"}]}
    counterparts = tables("paper").counterparts
    assert counterparts(rows) == "A in table 1 and B in table 2 and B in table 4"
    assert counterparts({"table2": [{"beside": "B"}], "table4": [{"beside": "B"}]}) == "B"


def test_a_table_is_written_on_the_page_that_marks_it(tables):
    found = tables("engine").filled({OTHER: "nothing", PAGE: MARKED}, {"t": lambda: "new"})
    assert found == {OTHER: "nothing", PAGE: MARKED.replace("old", "new")}


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({PAGE: "nothing"}, "no page holds the mark <!-- t -->"),
        ({PAGE: "<!-- t -->\nold\n"}, "no page holds the mark <!-- /t -->"),
        ({PAGE: MARKED, OTHER: MARKED}, "<!-- t --> is doubled: it is in page.md, other.md"),
        ({PAGE: "<!-- t -->\n", OTHER: "<!-- /t -->\n"}, "is not closed"),
        ({PAGE: "<!-- /t -->\n<!-- t -->\n"}, "is not closed"),
        ({PAGE: MARKED + "<!-- u -->\n<!-- /u -->\n"}, "page.md has the marks of u"),
    ],
)
def test_a_mark_that_is_missing_or_doubled_is_an_error(tables, pages, message):
    engine = tables("engine")
    with pytest.raises(engine.PageError) as error:
        engine.filled(pages, {"t": lambda: "new"})
    assert message in str(error.value)


def test_a_missing_result_file_is_an_error_with_its_command(tables):
    engine = tables("engine")
    with pytest.raises(engine.PageError) as error:
        engine.Table("never_measured", "python benchmarks/never.py").text()
    assert "never_measured.json is missing: run `python benchmarks/never.py`" in str(error.value)


def test_a_method_without_a_row_is_named_with_what_to_run(tables):
    coverage = tables("coverage")
    names = [*METHODS.keys() - {"dsnot"}, *coverage.ROOMS.keys() - {"dsnot"}, *coverage.CURVES]
    problem = {"rows": {key: {} for key in names}, "rooms": {}}
    (line,) = coverage.of_layers({"clock": "cpu", "problems": {"a": problem}})
    assert "no rows of dsnot" in line
    assert "benchmarks/layers.py curves --clock cpu --methods dsnot`" in line
    problem["rows"] |= {"dsnot": {}, "gone, refit": {}}
    (line,) = coverage.of_layers({"clock": "cpu", "problems": {"a": problem}})
    assert 'rows of "gone, refit", which hasslefree does not have' in line
    (line,) = coverage.of_pages({PAGE: "".join(f"| `{name}` | x |\n" for name in METHODS if name != "joint")})
    assert "page.md has no row of joint" in line


def test_the_types_that_hold_the_weights_by_hand(tables):
    """The largest share first, and none that rounds to nothing."""
    row = {"kinds": {"Q6_K": 250, "Q5_0": 748, "F32": 2}}
    assert tables("choices").stored(row) == "Q5_0 75 %, Q6_K 25 %"


def test_rows_at_two_four_stand_by_their_loss(tables):
    """Oracle: by hand. Rows by their tokens of training have a table of their own."""
    perplexity = {"dense": 10, "sparsegpt": 30, "25 thousand tokens": 15, "fast": 20, "oats": 25}
    results = {
        name: {"0": {"perplexity": {"a": value}, "bytes_a_weight": 1.0, "cpu_seconds": 90.0}}
        for name, value in perplexity.items()
    }
    rows = tables("real").at_two_four({"results": results})
    assert [(row["flags"], round(row["increase"]), row["minutes"]) for row in rows] == [
        ("`--effort fast`", 100, 1.5),
        ("`--method oats`", 150, 1.5),
        ("`--method sparsegpt --rank 0`", 200, 1.5),
    ]


def test_whole_files_stand_by_their_sizes(tables):
    """Oracle: by hand."""
    choices = tables("choices")
    ours = {"file_bytes": 100e6, "cpu_seconds": 90.0, "increase": {"wikitext2": 0.1}, "unseen": 0.1, "worst": 0.2}
    results = {
        "dense": {"0": {"file_bytes": 270e6, "perplexity": {"wikitext2": 5.0}}},
        "5.2bits, fast": {"0": ours | {"perplexity": {"wikitext2": 6.0}}},
        "5.3bits, fast, entropy-coded, mixture": {"0": ours | {"file_bytes": 101e6, "perplexity": {"wikitext2": 6.0}}},
    }
    found = list(choices.whole_files({"results": results}))
    words = ["`--size 5.2bits --coding fixed`, fast", "`--size 5.3bits`, fast, mixture", "dense"]
    assert [row["words"] for row in found] == words
    assert [row["cpu_minutes"] for row in found] == [1.5, 1.5, None]
    assert found[0]["percent"] == pytest.approx({"wikitext2": 10.52, "mean": 10.52, "worst": 22.14}, abs=0.01)


def test_the_order_of_the_paper_by_hand(tables):
    """In both settings of the paper hassle-free is ahead; here in the second one."""
    fields = {"model": "m", "beside": "p"}
    rows = [
        fields | {"config": config, "method": method, "paper": {"c4": paper}, "measured": {"c4": here, "piqa": 99.0}}
        for config, method, paper, here in [
            ("2:4", "oats", 15.0, 15.0), ("2:4", "hassle-free", 12.0, 16.0),
            ("3:8", "oats", 15.0, 15.0), ("3:8", "hassle-free", 12.0, 14.0),
        ]
    ]  # fmt: skip
    assert tables("paper").paper_order(rows) == {("hassle-free", "oats"): (2, 1, 2)}


def test_a_block_is_cut_as_the_public_code_of_sparsegpt_cuts_it(monkeypatch):
    """Oracle: by hand. Of four scores at sparsity 0.5 the third smallest is the threshold, and is not kept."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pattern = importlib.import_module("recorded").BlockThreshold(2, sparsity=0.5)
    assert pattern.restricted(slice(0, 4), 8).mask(torch.tensor([[3.0, 1.0], [4.0, 2.0]])).tolist() == [
        [False, False],
        [True, False],
    ]
