"""A table of the documentation as a specification, and the marks between which it stands in a page.

A page holds a table between the lines <!-- NAME --> and <!-- /NAME -->. README.md and every page under docs/ is
searched, so that a table may move from page to page with its marks.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

Content = dict[str, Any]
Row = dict[str, Any]


class PageError(Exception):
    """A mark is missing, doubled or unknown, or a result file is missing."""


@dataclass(frozen=True)
class Table:
    """What a table shows of a result file. Heads, cells, lead and note are format strings.

    A cell takes its fields from its row, and is empty where one of them is None. `[*]` in a cell makes a column of each
    key of that field, and `*` in its head is the key. Heads, lead and note take their fields from the results, from
    `facts`, from `where` (the machine), and heads from the first row of their table too.

    Args:
        results: stem of the file in benchmarks/results. command: what measures it.
        columns: pairs of a head and a cell; none for a sentence. rows: made from the results.
        split: the field of the rows whose values get a table each, in the order of the rows.
        lead, note: what stands before and after. facts: what they need beside the results' own fields.
    """

    results: str
    command: str
    columns: tuple[tuple[str, str], ...] = ()
    rows: Callable[[Content], Iterable[Row]] = lambda content: content["rows"]
    split: str | None = None
    lead: str = ""
    note: str = ""
    facts: Callable[[Content], Row] = lambda content: {}

    def text(self) -> str:
        """The table in Markdown, made from the results."""
        content = self.load()
        facts = {**content, "where": where(content), **self.facts(content)}
        parts = [self.lead.format_map(facts)] if self.lead else []
        if self.columns:
            groups = itertools.groupby(self.rows(content), key=lambda row: row[self.split] if self.split else None)
            parts += [self._grid(list(group), facts) for _, group in groups]
        parts += [self.note.format_map(facts)] if self.note else []
        return "\n\n".join(parts)

    def load(self) -> Content:
        path = RESULTS / f"{self.results}.json"
        if not path.exists():
            raise PageError(f"{path.relative_to(ROOT)} is missing: run `{self.command}`")
        return load(self.results)

    def _grid(self, rows: list[Row], facts: Row) -> str:
        columns = [*expanded(self.columns, rows[0])]
        heads = [head.format_map({**facts, **rows[0]}) for head, _ in columns]
        return markdown(heads, [[cell(form, row) for _, form in columns] for row in rows])


def load(stem: str) -> Content:
    """A result file."""
    found: Content = json.loads((RESULTS / f"{stem}.json").read_text(encoding="utf-8"))
    return found


def expanded(columns: Iterable[tuple[str, str]], first: Row) -> Iterator[tuple[str, str]]:
    """The columns, those with `[*]` once for each key of the field in the first row."""
    for head, form in columns:
        starred = re.search(r"(\w+)\[\*\]", form)
        if starred is None:
            yield head, form
            continue
        for key in first[starred[1]]:
            yield head.replace("*", str(key)), form.replace("[*]", f"[{key}]")


def cell(form: str, row: Row) -> str:
    """One cell: empty where a field is None."""
    fields = [name for _, name, _, _ in Formatter().parse(form) if name]
    values = [Formatter().get_field(name, (), row)[0] for name in fields]
    return "" if any(value is None for value in values) else form.format_map(row)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """A table whose columns are numbers, but for the first one and those without a head, which are text."""
    lines = [heads, ["---", *("---:" if head else "---" for head in heads[1:])], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(content: Content) -> str:
    """The machine and the versions of a measurement."""
    if "machine" not in content:
        return "no machine: by arithmetic"
    machine = content["machine"]
    threads = f"{machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")
    return f"{machine['processor']}, {threads}, torch {machine['torch']}, transformers {machine['transformers']}"


def pages() -> dict[Path, str]:
    """README.md and every page of docs/."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def filled(texts: Mapping[Path, str], tables: Mapping[str, Callable[[], str]]) -> dict[Path, str]:
    """The pages with every table made anew.

    Raises:
        PageError: a table has no marks, or they are doubled or torn apart; or a page marks a table that is not known.
    """
    for path, text in texts.items():
        if unknown := set(re.findall(r"^<!-- /(\w+) -->$", text, re.MULTILINE)) - tables.keys():
            names = ", ".join(sorted(unknown))
            raise PageError(f"{shown(path)} has the marks of {names}, which benchmarks/tables does not specify")
    done = dict(texts)
    for name, make in tables.items():
        page = page_of(name, texts)
        before, _, rest = done[page].partition(f"<!-- {name} -->\n")
        done[page] = f"{before}<!-- {name} -->\n{make()}\n<!-- /{name} -->{rest.partition(f'<!-- /{name} -->')[2]}"
    return done


def page_of(name: str, texts: Mapping[Path, str]) -> Path:
    """The one page that holds the marks of a table, the first before the last."""
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    found = {mark: [path for path, text in texts.items() for _ in range(text.count(mark))] for mark in (start, end)}
    for mark, paths in found.items():
        if not paths:
            raise PageError(
                f"no page holds the mark {mark.strip()}: put the lines {start.strip()} and {end} where the table "
                "belongs, or remove its specification from benchmarks/tables"
            )
        if len(paths) > 1:
            raise PageError(f"the mark {mark.strip()} is doubled: it is in {', '.join(map(shown, paths))}")
    (page,), (last,) = found[start], found[end]
    if page != last or texts[page].index(start) > texts[page].index(end):
        raise PageError(f"{start.strip()} in {shown(page)} is not closed by {end}, which is in {shown(last)}")
    return page


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
