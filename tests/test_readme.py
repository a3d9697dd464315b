"""The tables of README and docs are those of the committed results."""

import importlib.util
from pathlib import Path

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
