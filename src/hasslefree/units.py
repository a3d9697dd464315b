"""Sizes, durations, rounded figures and tables, the same wherever they are shown.

Tables lose nothing at 80 columns or in a pipe: long words are folded, and never cut.
"""

import re
from collections.abc import Sequence

from rich import box
from rich.filesize import decimal as size
from rich.table import Table
from rich.text import Text

from hasslefree.errors import BudgetError, option

__all__ = ["duration", "parse_size", "significant", "size", "span", "table"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B?", re.IGNORECASE)
_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_size(text: str) -> int:
    """The bytes of a size such as 150MB, 1.5 GB or 2000000, or a BudgetError; a kB is a thousand bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BudgetError(
            f"{text!r} is not a size; give a number of bytes or a number with a unit, such as "
            f"{option('advise', '150MB')}, 1.5GB or 2000000"
        )
    return int(float(match[1]) * _PREFIXES[match[2].lower()])


def duration(seconds: float) -> str:
    """Such as 42 s, 3 min or 1.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def significant(value: float, digits: int = 4) -> float:
    """A number rounded to so many significant digits."""
    return float(f"{value:.{digits}g}")


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
