"""Sizes and durations in words, the same wherever they are printed."""

from rich.filesize import decimal as size

__all__ = ["duration", "size"]


def duration(seconds: float) -> str:
    """Such as 42 s, 3 min or 1.5 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
