"""Sizes, durations, rounded figures and tables, the same wherever they are shown.

Tables lose nothing at 80 columns or in a pipe: long words are folded, and never cut.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from hasslefree.errors import BudgetError, option
from hasslefree.escaping import escaped

# A number of bytes in words, such as 1.5 GB.
size = decimal
# Bytes of a float32 number.
FLOAT = 4

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kMGT]?)B?|(bits?))", re.IGNORECASE)
# A kB is a thousand bytes.
_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Size:
    """The size of a compressed model: bytes of all stored weights, or bits per weight of the
    compressed layers.
    """

    amount: float
    in_bits: bool = False

    @classmethod
    def parse(cls, text: str) -> "Size":
        """Read a size such as 150MB, 1.5 GB, 2000000 or 4.8bits. Raises a BudgetError."""
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise BudgetError(
                f"{text!r} is not a size; give bytes of all weights, such as"
                f" {option('size', '150MB')}, 1.5GB or 2000000, or bits for each weight of the"
                f" compressed layers, such as {option('size', '4.8bits')}",
                ("size",),
            )
        if match[3]:
            return cls(float(match[1]), True)
        if "." in match[1] and text.strip()[-1].isdigit():
            raise BudgetError(
                f"{text!r} has no unit; give {option('size', f'{match[1]}bits')} for bits for each"
                f" weight of the compressed layers, or bytes such as {option('size', '150MB')}",
                ("size",),
            )
        factors = {prefix.lower(): factor for prefix, factor in _PREFIXES.items()}
        # In binary, 1.001 · 1000 is below 1001.
        return cls(int(Decimal(match[1]) * factors[match[2].lower()]))

    def __str__(self) -> str:
        if self.in_bits:
            return f"{self.amount:.4g} bits per weight"
        return size(int(self.amount))

    def bytes_for(self, weights: int) -> int:
        """Bytes of compressed layers with this number of weights, for a size in bits."""
        return int(Decimal(repr(self.amount)) * weights / 8)

    @property
    def rounded_up(self) -> str:
        """The size in the form that `parse` reads, rounded up to three or four digits."""
        if self.in_bits:
            return f"{math.ceil(100 * self.amount) / 100:g}bits"
        prefix, factor = next(
            item for item in reversed(_PREFIXES.items()) if self.amount >= item[1]
        )
        return f"{math.ceil(10 * self.amount / factor) / 10:g}{prefix}B"


def duration(seconds: float) -> str:
    """A time in words, such as 42 s, 3 min, 2 h 5 min, 13 h or 52 days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 10 and rest:
        return f"{hours} h {rest} min"
    if minutes < 48 * 60:
        return f"{minutes / 60:.0f} h"
    return f"{minutes / 1440:.0f} days"


def significant(value: float, digits: int = 4) -> float:
    """A number rounded to `digits` significant digits."""
    return float(f"{value:.{digits}g}")


class _Rows(Table):
    """A table whose cells are plain text, not markup of `rich`."""

    def add_row(self, *cells: Any, **settings: Any) -> None:
        super().add_row(*(Text(escaped(cell, "\n")) for cell in cells), **settings)


def table(
    text: Sequence[str],
    numbers: Sequence[str] = (),
    title: str = "",
) -> Table:
    """A table without rows. text, numbers: headings of the columns aligned left, and of those
    aligned right.
    """
    # As wide as the title, which is wrapped to the width of the table.
    rows = _Rows(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, min_width=len(title) or None
    )
    rows.caption_justify = "left"
    if title:
        rows.title = Text(escaped(title))
        rows.title_justify = "left"
    for heading in text:
        rows.add_column(Text(escaped(heading)), overflow="fold")
    for heading in numbers:
        rows.add_column(heading, overflow="fold", justify="right")
    return rows


def span(values: Sequence[float], form: str = "{}") -> str:
    """The smallest and the largest value, such as 8–16, or the only one."""
    least = form.format(min(values))
    most = form.format(max(values))
    if least == most:
        return least
    return f"{least}–{most}"
