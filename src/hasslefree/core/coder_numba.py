"""`hasslefree.core.coder` compiled by Numba, with the same words as constriction's coder."""

from functools import cache

import constriction
import numpy as np

from hasslefree.core.coder import CLASSES, model
from hasslefree.core.compiled import compiled

u32 = np.uint32
u64 = np.uint64
# constriction counts probabilities in units of 2^-24.
UNIT = u64(24)
MASK = u64((1 << 24) - 1)
# While words remain below the state, the state is at least this large.
LEAST = u64(1 << 32)
WORD = u64(32)
# The search for a symbol starts at the first symbol of an interval of this probability, 2^-12.
INTERVAL = u64(12)


class CompiledStack:
    """See `coder.Stack`.

    Args:
        words: uint32 (n,); the last word is not 0.
    """

    def __init__(self, words: np.ndarray):
        if len(words) == 0 or words[-1] == 0:
            raise ValueError("the last word is 0, or there is none")
        self.below = words[:-2].astype(u32)
        self.state = int(words[-1])
        if len(words) > 1:
            self.state = self.state << 32 | int(words[-2])

    def push(self, symbols: np.ndarray, classes: np.ndarray) -> None:
        assert len(symbols) == len(classes)
        shed = np.empty(len(symbols), u32)  # at most one word per symbol
        order = sorted_positions(classes)
        counted, state = push_symbols(symbols, classes, order, cumulative(), u64(self.state), shed)
        self.below = np.concatenate((self.below, shed[:counted]))
        self.state = int(state)

    def pop(self, classes: np.ndarray) -> np.ndarray:
        symbols = np.empty(len(classes), np.uint8)
        order = sorted_positions(classes)
        below = cumulative()
        first = first_symbols()
        left, state = pop_symbols(
            self.below, u64(self.state), classes, order, below, first, symbols
        )
        self.below = self.below[:left]
        self.state = int(state)
        return symbols

    def words(self) -> np.ndarray:
        top = [self.state & 0xFFFFFFFF]
        if self.state >> 32:
            top.append(self.state >> 32)
        return np.concatenate((self.below, np.array(top, u32)))


@cache
def cumulative() -> np.ndarray:
    """Return the probability of all smaller symbols, in constriction's units, uint32
    (classes, 257): the state after the symbol is pushed onto an empty stack.
    """
    table = np.zeros((CLASSES, 257), u32)
    for index in range(CLASSES):
        for symbol in range(256):
            coder = constriction.stream.stack.AnsCoder()
            coder.encode_reverse(np.array([symbol], np.int32), model(index))
            table[index, symbol] = sum(coder.get_compressed())  # no words if it is 0
    table[:, 256] = 1 << 24
    return table


@cache
def first_symbols() -> np.ndarray:
    """Return the first symbol of each interval, uint8 (classes, 4096)."""
    starts = np.arange(1 << 12, dtype=u32) << u32(INTERVAL)
    rows = [np.searchsorted(row, starts, side="right") - 1 for row in cumulative()]
    return np.stack(rows).astype(np.uint8)


@compiled()
def sorted_positions(classes):
    """Return the positions of all symbols, int64 (n,), stably sorted by class."""
    starts = np.zeros(CLASSES + 1, np.int64)
    for index in classes:
        starts[np.int64(index) + 1] += 1
    for index in range(CLASSES):
        starts[index + 1] += starts[index]
    positions = np.empty(len(classes), np.int64)
    for position in range(len(classes)):
        index = classes[position]
        positions[starts[index]] = position
        starts[index] += 1
    return positions


@compiled()
def push_symbols(
    symbols,
    classes,
    order,
    below,
    state,
    shed,
):
    """Push symbols onto a state, the last symbol first.

    Returns the number of words written to `shed`, and the new state.
    """
    count = 0
    for position in order[::-1]:
        index = classes[position]
        symbol = symbols[position]
        start = u64(below[index, symbol])
        share = u64(below[index, symbol + 1]) - start
        if state >> (u64(64) - UNIT) >= share:
            shed[count] = u32(state & (LEAST - u64(1)))
            count += 1
            state >>= WORD
        state = (state // share) << UNIT | (start + state % share)
    return count, state


@compiled()
def pop_symbols(
    words,
    state,
    classes,
    order,
    below,
    first,
    symbols,
):
    """Pop symbols from a state into `symbols`.

    Returns the number of words that are left, and the new state.
    """
    left = len(words)
    for position in order:
        index = classes[position]
        part = state & MASK
        symbol = np.int64(first[index, part >> INTERVAL])
        while u64(below[index, symbol + 1]) <= part:
            symbol += 1
        start = u64(below[index, symbol])
        symbols[position] = symbol
        state = (state >> UNIT) * (u64(below[index, symbol + 1]) - start) + (part - start)
        if state < LEAST and left > 0:
            left -= 1
            state = state << WORD | u64(words[left])
    return left, state
