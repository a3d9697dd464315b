"""The largest entries of a matrix whose rows several processes share: exact, and by count."""

from __future__ import annotations

import torch
from torch import Tensor

from hasslefree.core.rows import Rows

# The threshold is found by this number of bits at a time, from the highest on.
DIGIT = 16


def largest_of_rows(score: Tensor, count: int, rows: Rows) -> Tensor:
    """The `count` largest of all entries, as the bool mask of this process; equal scores are kept from the first row.

    A radix select: the floating-point numbers are read as whole numbers of the same order. In each pass all processes
    add up how often every value of the next 16 bits occurs among the entries that agree with the threshold so far.

    Args:
        score: the rows of this process, (…, in), float32 or float64, finite. count: from 0 to all entries.
    """
    keys = ordered(score)
    bits = 8 * keys.itemsize
    tied, wanted, threshold = keys.flatten(), count, 0
    for shift in range(bits - DIGIT, -1, -DIGIT) if count else ():
        digits = (tied >> shift) & ((1 << DIGIT) - 1)
        if shift == bits - DIGIT:  # the highest bit is the sign: negative numbers come first
            digits ^= 1 << (DIGIT - 1)
        occurring = rows.sum(torch.bincount(digits, minlength=1 << DIGIT))
        reached = occurring.flip(0).cumsum(0)
        place = int(torch.count_nonzero(reached < wanted))
        wanted -= int(reached[place - 1]) if place else 0
        digit = (1 << DIGIT) - 1 - place
        tied = tied[digits == digit]
        threshold = (threshold << DIGIT) | digit
    if not count:
        return torch.zeros_like(score, dtype=torch.bool)
    threshold -= 1 << (bits - 1)
    room = wanted - int(rows.before(torch.tensor(len(tied), device=score.device)))
    mask = keys >= threshold
    if room < len(tied):
        equal = keys == threshold
        mask &= ~equal | (equal.flatten().cumsum(0) <= max(room, 0)).view_as(equal)
    return mask


def ordered(score: Tensor) -> Tensor:
    """Whole numbers of the width of a floating-point tensor that are in the same order; equal where it is equal."""
    whole = torch.int32 if score.dtype == torch.float32 else torch.int64
    keys = (score + 0.0).view(whole)  # −0.0 becomes 0.0
    return torch.where(keys < 0, keys ^ torch.iinfo(whole).max, keys)
