"""A stack of symbols from 0 to 255 that are coded by their probabilities: an asymmetric numeral
system (arXiv 0902.0271) with a state of 64 bits, which sheds and takes words of 32.

A symbol has one of `CLASSES` models, that of its class: a Gaussian number around 128 with a
standard deviation of 2^(class / STEPS − OCTAVES), rounded. `LibraryStack` is constriction's coder;
`coder_numba` reads and writes the same words, and takes a fraction of the time to read them.
"""

import functools
import importlib.util
from statistics import NormalDist
from typing import Any, Protocol

import constriction
import numpy as np

# Looked up once. Without Numba the library does the work.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
# The symbol of zero.
MIDDLE = 128
STEPS = 8
OCTAVES = 3
CLASSES = 88
# Probabilities are multiples of one over this number, and no symbol has the probability 0.
PRECISION = 1 << 20


class Stack(Protocol):
    """Symbols are put on the stack so that they come off it by class: those of the smallest class
    first, and those of one class in their own order.

    Symbols are uint8 (n,); so are their classes, which are below `CLASSES`.
    """

    def push(self, symbols: np.ndarray, classes: np.ndarray) -> None:
        """Put symbols on the stack."""

    def pop(self, classes: np.ndarray) -> np.ndarray:
        """Take symbols of these classes, uint8 (n,)."""

    def words(self) -> np.ndarray:
        """The stack, uint32, its top at the end."""


def stack_on(words: np.ndarray) -> Stack:
    """The stack of these words, uint32.

    Raises:
        ValueError: no stack has such words.
    """
    if not HAS_NUMBA:
        return LibraryStack(words)
    from hasslefree.core.coder_numba import CompiledStack

    return CompiledStack(words)


class LibraryStack:
    """The stack by constriction."""

    def __init__(self, words: np.ndarray):
        self.coder = constriction.stream.stack.AnsCoder(words)

    def push(self, symbols: np.ndarray, classes: np.ndarray) -> None:
        by_class = places_by_class(classes)
        for index in reversed(range(CLASSES)):
            self.coder.encode_reverse(symbols[by_class[index]].astype(np.int32), model(index))

    def pop(self, classes: np.ndarray) -> np.ndarray:
        symbols = np.empty(classes.size, np.uint8)
        for index, places in enumerate(places_by_class(classes)):
            symbols[places] = self.coder.decode(model(index), len(places))
        return symbols

    def words(self) -> np.ndarray:
        words: np.ndarray = self.coder.get_compressed()
        return words


def places_by_class(classes: np.ndarray) -> list[np.ndarray]:
    """The places of the symbols of each class, in rising order."""
    ends = np.cumsum(np.bincount(classes, minlength=CLASSES))
    return np.split(np.argsort(classes, kind="stable"), ends[:-1])


@functools.cache
def model(index: int) -> Any:
    """The probabilities of a class, as constriction has them.

    They are rounded before they are handed over, so that they are the same on every machine.
    """
    gaussian = NormalDist(MIDDLE, 2 ** (index / STEPS - OCTAVES))
    below = np.array([0.0, *(gaussian.cdf(symbol + 0.5) for symbol in range(255)), 1.0])
    shares = np.maximum(np.round(np.diff(below) * PRECISION), 1) / PRECISION
    return constriction.stream.model.Categorical(shares.astype(np.float32), perfect=False)
