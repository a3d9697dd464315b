"""Write the tables of README.md and docs/ from the results, between the marks <!-- NAME --> and <!-- /NAME -->.

    python benchmarks/readme.py [--check]

`benchmarks/tables` specifies every table. With --check nothing is written: it fails where a page differs from what the
results give, or where a method of the package is not measured or not in the documentation, and says what to run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from tables import choices, layers, models, paper, real, running
from tables.engine import PageError, Table, filled, pages, shown

PARTS = (choices, layers, models, real, running, paper)
TABLES: dict[str, tuple[Table, ...]] = {name: table for part in PARTS for name, table in part.TABLES.items()}


def written() -> dict[Path, tuple[str, str]]:
    """Every page as it is, and with its tables made anew from the results."""
    before = pages()
    make = {name: lambda parts=parts: "\n\n".join(part.text() for part in parts) for name, parts in TABLES.items()}
    after = filled(before, make)
    return {page: (before[page], after[page]) for page in before}


def problems() -> Iterator[str]:
    """What is wrong with the pages and the results, and what to do about it."""
    from tables import coverage  # imports hasslefree

    try:
        for page, (before, after) in written().items():
            if before != after:
                yield f"{shown(page)} is not what the results give: run `python benchmarks/readme.py`"
    except PageError as error:
        yield str(error)
    yield from coverage.problems(pages())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where something is missing")
    if parser.parse_args().check:
        raise SystemExit("\n".join(problems()) or 0)
    try:
        for page, (before, after) in written().items():
            if before != after:
                page.write_text(after, encoding="utf-8")
                print(f"{shown(page)} written")
    except PageError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
