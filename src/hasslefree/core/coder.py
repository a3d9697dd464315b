"""Entropy coding of symbols from 0 to 255 on a stack: an asymmetric numeral system (arXiv
0902.0271) with a 64-bit state and 32-bit words.

Each symbol has one of `CLASSES` classes, which gives its probability: that of a Gaussian number
with mean 128 and standard deviation 2^(class / STEPS − OCTAVES), rounded. `LibraryStack` uses the
coder of constriction; `coder_numba` reads and writes the same words, and reads them much faster.
"""

import functools
import importlib.util
from statistics import NormalDist
from typing import Any, Protocol

import constriction
import numpy as np

# Without Numba, constriction is used.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
# The symbol of zero.
MIDDLE = 128
STEPS = 8
OCTAVES = 3
CLASSES = 88
# Probabilities are positive multiples of 1 / PRECISION.
PRECISION = 1 << 20


class Stack(Protocol):
    """Symbols come off the stack sorted by class, the smallest class first; within a class, they
    keep their order.

    Symbols are uint8 (n,), and so are their classes, which are below `CLASSES`.
    """

    def push(self, symbols: np.ndarray, classes: np.ndarray) -> None:
        """Push symbols onto the stack."""

    def pop(self, classes: np.ndarray) -> np.ndarray:
        """Pop symbols of these classes, uint8 (n,)."""

    def words(self) -> np.ndarray:
        """Return the stack, uint32, with its top at the end."""


def stack_on(words: np.ndarray) -> Stack:
    """Return the stack with these words, uint32.

    Raises:
        ValueError: the words are not a stack.
    """
    if not HAS_NUMBA:
        return LibraryStack(words)
    from hasslefree.core.coder_numba import CompiledStack

    return CompiledStack(words)


class LibraryStack:
    """A `Stack` that uses constriction."""

    def __init__(self, words: np.ndarray):
        self.coder = constriction.stream.stack.AnsCoder(words)

    def push(self, symbols: np.ndarray, classes: np.ndarray) -> None:
        by_class = positions_by_class(classes)
        for index in reversed(range(CLASSES)):
            self.coder.encode_reverse(symbols[by_class[index]].astype(np.int32), model(index))

    def pop(self, classes: np.ndarray) -> np.ndarray:
        symbols = np.empty(classes.size, np.uint8)
        for index, positions in enumerate(positions_by_class(classes)):
            symbols[positions] = self.coder.decode(model(index), len(positions))
        return symbols

    def words(self) -> np.ndarray:
        words: np.ndarray = self.coder.get_compressed()
        return words


def positions_by_class(classes: np.ndarray) -> list[np.ndarray]:
    """Return the positions of the symbols of each class, in ascending order."""
    ends = np.cumsum(np.bincount(classes, minlength=CLASSES))
    return np.split(np.argsort(classes, kind="stable"), ends[:-1])


@functools.cache
def model(index: int) -> Any:
    """Return the probability model of a class for constriction.

    Probabilities are rounded first, which makes them the same on every machine.
    """
    gaussian = NormalDist(MIDDLE, 2 ** (index / STEPS - OCTAVES))
    below = np.array([0.0, *(gaussian.cdf(symbol + 0.5) for symbol in range(255)), 1.0])
    shares = np.maximum(np.round(np.diff(below) * PRECISION), 1) / PRECISION
    return constriction.stream.model.Categorical(shares.astype(np.float32), perfect=False)
