"""The tables of README and docs are those of the committed results."""

import importlib.util
import json
import re
from pathlib import Path

from hasslefree.methods import METHODS

ROOT = Path(__file__).parents[1]


def test_the_tables_are_those_that_the_results_give(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("readme", ROOT / "benchmarks" / "readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for page, tables in module.PAGES.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count("<!-- /") == len(tables)
        assert module.filled(page, text) == text, "run python benchmarks/readme.py"


def test_every_system_is_measured_on_single_layers():
    """Oracle: the table of all methods in docs/reference/maths.md. A system may have variants after a comma."""
    page = (ROOT / "docs" / "reference" / "maths.md").read_text(encoding="utf-8")
    table = page.partition("## All methods in one table\n")[2].partition("\n## ")[0]
    systems = set(re.findall(r"^\| `([a-z0-9-]+)` \|", table, re.MULTILINE))
    assert systems == METHODS.keys()
    results = json.loads((ROOT / "benchmarks" / "results" / "layers.json").read_text())
    for problem in results["problems"].values():
        names = {re.split(" @ |, ", key)[0] for key in [*problem["rows"], *problem["rooms"]]}
        assert names == systems
        assert "wanda, refit" in problem["rooms"]
