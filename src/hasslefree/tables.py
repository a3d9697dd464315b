"""Tables for the terminal that lose nothing at 80 columns or in a pipe: long words are folded, and never cut."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def table(text: Sequence[str], numbers: Sequence[str] = (), title: str = "") -> Table:
    """A table without rows. text, numbers: headings of the columns on the left, and of those on the right."""
    # As wide as the title, which is wrapped to the width of the table.
    rows = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, min_width=len(title) or None)
    if title:
        rows.title, rows.title_justify = Text(title), "left"
    for heading in text:
        rows.add_column(heading, overflow="fold")
    for heading in numbers:
        rows.add_column(heading, overflow="fold", justify="right")
    return rows


def span(values: Sequence[float], form: str = "{}") -> str:
    """The smallest and the largest value, such as 8–16, or the only one."""
    least, most = form.format(min(values)), form.format(max(values))
    return least if least == most else f"{least}–{most}"
