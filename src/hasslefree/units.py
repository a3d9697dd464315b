"""Sizes, durations and rounded figures, the same wherever they are shown."""

import re

from rich.filesize import decimal as size

from hasslefree.errors import BudgetError, option

__all__ = ["duration", "parse_size", "significant", "size"]

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
