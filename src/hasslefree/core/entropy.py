"""Entropy coding of the codes of a matrix by an asymmetric numeral system (arXiv 0902.0271).

A code c from 0 to 255 is coded as if c − 128 were a rounded Gaussian number, whose standard
deviation is a product of a number for its row and one for its column:

    σ_ij = 2^((row_i + column_j) / 8),    row_i and column_j whole numbers

Weights of trained models roughly follow this distribution. The stream consists of 32-bit words. The
first word holds the mean and the spread of the row numbers and of the column numbers. The last
words are the coder's stack, which contains, from the top: the row numbers and the column numbers,
also coded as Gaussian, and the codes. The words between are zero.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hasslefree.core.coder import CLASSES, MIDDLE, OCTAVES, STEPS, stack_on
from hasslefree.core.products import tiles
from hasslefree.errors import GridError

# The bottom of the stack: a full state, so the zeros below it are never read.
BOTTOM = np.array([0, 1], np.uint32)
# Number of codes that are coded together; each temporarily takes 16 bytes.
CHUNK = 1 << 22


def words_for_rate(count: int, rate: float) -> int:
    """Return the length of the stream for a number of codes at a rate in bits per code."""
    return 4 + math.ceil(count * rate / 32)


@dataclass(frozen=True)
class Numbers:
    """The row numbers or the column numbers, and the parameters of their Gaussian.

    Args:
        values: int64 (n,), from mean − 128 to mean + 127.
        mean: from −128 to 127.
        spread: the class of the standard deviation.
    """

    values: np.ndarray
    mean: int
    spread: int

    @classmethod
    def of(cls, values: np.ndarray) -> "Numbers":
        mean = round(float(values.mean()))
        deviation = math.sqrt(float(np.square(values - mean).mean()))
        spread = class_of(number_of(np.array(deviation)))
        return cls(values.clip(mean - 128, mean + 127), mean, int(spread))

    @property
    def symbols(self) -> np.ndarray:
        """The symbols to code, uint8."""
        return (self.values - self.mean + MIDDLE).astype(np.uint8)

    @property
    def classes(self) -> np.ndarray:
        """The class of each symbol, uint8."""
        return np.full(len(self.values), self.spread, np.uint8)


def number_of(deviation: np.ndarray) -> np.ndarray:
    """Return the row or column numbers for standard deviations, int64."""
    return np.rint(STEPS * np.log2(np.maximum(deviation, 2.0**-OCTAVES))).astype(np.int64)


def class_of(number: np.ndarray) -> np.ndarray:
    """Return the classes of row or column numbers, or of their sums."""
    return np.clip(number + STEPS * OCTAVES, 0, CLASSES - 1)


def measured(codes: np.ndarray) -> tuple[Numbers, Numbers]:
    """Fit the row numbers and the column numbers to codes, uint8 (out, in)."""
    parts = list(coded_together(*codes.shape))
    sums = np.zeros(codes.shape[1], np.int64)
    for part in parts:
        sums += squares(codes[part]).sum(0)
    columns = Numbers.of(number_of(np.sqrt(sums / len(codes))))
    weights = 4.0 ** (-columns.values / STEPS)
    rows = [number_of(np.sqrt((squares(codes[part]) * weights).mean(1))) for part in parts]
    return Numbers.of(np.concatenate(rows)), columns


def squares(codes: np.ndarray) -> np.ndarray:
    """Return the squares of codes − 128: uint8 → int32."""
    return np.square(codes.astype(np.int32) - MIDDLE)


def coded_together(out: int, width: int) -> Iterator[slice]:
    """Yield the slices of rows that are coded together."""
    return tiles(out, CHUNK // max(1, width))


def classes_of(rows: np.ndarray, columns: np.ndarray, part: slice) -> np.ndarray:
    """Return the classes of the codes in some rows, from all row and column numbers: uint8."""
    numbers = rows[part, None].astype(np.int16) + columns.astype(np.int16)
    return class_of(numbers).astype(np.uint8)


def encode(codes: Tensor, words: int | None = None) -> Tensor:
    """Encode a matrix.

    Args:
        codes: uint8 (out, in).
        words: the length of the stream; None for the shortest possible.

    Returns:
        The stream, int32 (words,), on the device of the codes.

    Raises:
        GridError: the codes need a longer stream.
    """
    matrix = codes.cpu().numpy()
    rows, columns = measured(matrix)
    stack = stack_on(BOTTOM)
    for part in reversed(list(coded_together(*matrix.shape))):
        classes = classes_of(rows.values, columns.values, part)
        stack.push(matrix[part].reshape(-1), classes.reshape(-1))
    for numbers in (columns, rows):
        stack.push(numbers.symbols, numbers.classes)
    stacked = stack.words()
    needed = 1 + len(stacked)
    if words is None:
        words = needed
    if words < needed:
        raise GridError(
            f"the codes take {32 * needed} bits, and there is room for {32 * words};"
            " give the grid a higher rate"
        )
    stream = np.zeros(words, np.uint32)
    header = np.array([rows.mean, rows.spread, columns.mean, columns.spread], np.int8)
    stream[:1] = header.view("<u4")
    stream[words - len(stacked) :] = stacked
    return torch.from_numpy(stream.view(np.int32)).to(codes.device)


def decode(stream: Tensor, shape: tuple[int, int]) -> Tensor:
    """Decode a stream of `encode`: int32 (words,) → uint8 (out, in) on the device of the stream.

    Raises:
        GridError: the stream is damaged.
    """
    words = stream.cpu().numpy().view(np.uint32)
    means = words[:1].view(np.int8)[::2]
    spreads = words[:1].view(np.uint8)[1::2]
    try:
        stack = stack_on(words[1:])
    except ValueError as error:
        raise damaged(shape, str(error)) from None
    numbers: list[np.ndarray] = []
    for length, mean, spread in zip(shape, means, spreads, strict=True):
        symbols = stack.pop(np.full(length, min(int(spread), CLASSES - 1), np.uint8))
        numbers.append(symbols.astype(np.int64) - MIDDLE + int(mean))
    rows, columns = numbers
    codes = np.empty(shape, np.uint8)
    for part in coded_together(*shape):
        classes = classes_of(rows, columns, part)
        codes[part] = stack.pop(classes.reshape(-1)).reshape(classes.shape)
    rest = stack.words()
    if not np.array_equal(rest[-2:], BOTTOM) or rest[:-2].any():
        raise damaged(shape, "their stack does not end where it began")
    return torch.from_numpy(codes).to(stream.device)


def damaged(shape: tuple[int, int], reason: str) -> GridError:
    """Return the error for a damaged stream."""
    return GridError(
        f"the entropy-coded codes of a layer of {shape[0]} × {shape[1]} are damaged: {reason}; copy"
        " or download the model's files again"
    )
