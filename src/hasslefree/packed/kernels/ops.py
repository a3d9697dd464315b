"""y = x Sᵀ as torch operators, so that torch.compile sees one node and no graph break.

A few tokens are multiplied by the packed rows directly. Many tokens in bfloat16 with 2:4 use tables
of the inputs, unless the processor multiplies tiles (AMX). Otherwise, from `DIRECT` tokens on, a
few rows of S at a time are unpacked into a buffer and multiplied by torch: a large S is never in
memory as a whole.

There is no gradient: a call that needs one raises torch's error that no autograd formula was
registered. `backends.choose` uses the dense backend for such calls.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.products import is_traced, linear, multiplies_tiles, tiles
from hasslefree.packed.kernels.arrays import (
    LayerArrays,
    bits_of,
    masks_of,
    numba_kernels,
    workspace,
)
from hasslefree.packed.layouts import Bitmask, Columns, PackedGroups, layout_of

Product = Callable[..., Tensor]
# The number of tokens from which unpacking some rows once is cheaper than reading packed rows for
# every token. With AVX-512, 2:4 halves the products as well.
DIRECT_2_4 = 33
# The same for other patterns, and for 2:4 with AVX2 or AMX.
DIRECT = 13
# The same for every pattern without AVX2.
DIRECT_SCALAR = 6
# Tokens that are multiplied by packed rows of 2:4 together: their inputs stay in the L2 cache.
TOGETHER = 32
# The unpacked rows stay in the cache, and a product needs this many rows to be fast.
TILE_BYTES = 4 << 20
MIN_TILE_ROWS = 256
# Inputs per table.
TABLE_INPUTS = 64
# Rows that are multiplied by the tables together: their sums stay in the L2 cache.
MAX_TABLE_ROWS = 1024


def operator(rows: int) -> Callable[[Product], Product]:
    """Make a product with S, (tokens, in) → (tokens, out), a torch operator when it is traced.

    Args:
        rows: the index, among the operands after x, of one that has a row per output.
    """

    def decorate(function: Product) -> Product:
        name = f"hasslefree::{function.__name__}"
        traced = torch.library.custom_op(name, function, mutates_args=(), device_types="cpu")

        @traced.register_fake
        def fake(x: Tensor, *operands: Any) -> Tensor:
            return x.new_empty(x.shape[0], operands[rows].shape[0])

        @functools.wraps(function)
        def multiply(x: Tensor, *operands: Any) -> Tensor:
            if is_traced(x):
                return traced(x, *operands)
            return function(x, *operands)

        return multiply

    return decorate


@operator(rows=1)
def packed_product(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    pattern: str,
) -> Tensor:
    """x Sᵀ.

    Args:
        x: (tokens, in), float32, bfloat16 or float16. Kernels do not check the number of inputs.
        values: of S, of x's dtype.
        index: of S, uint8.
        pattern: the name of the pattern of S, any but structured.

    Returns:
        (tokens, out), of x's dtype; sums are float32.
    """
    layout = layout_of(pattern)
    assert not isinstance(layout, Columns)
    values = values.contiguous()
    index = index.contiguous()
    if len(x) < direct_tokens(layout, x.dtype):
        return _direct(x, values, index, layout)
    if takes_tables(layout, x):
        return _by_tables(x, values, index)
    return _by_tiles(x, values, index, layout)


def takes_tables(layout: PackedGroups | Bitmask, x: Tensor) -> bool:
    """True if tables of these inputs (tokens, in) are fastest for many tokens."""
    if layout != PackedGroups(2, 4) or x.dtype != torch.bfloat16 or x.shape[1] % TABLE_INPUTS:
        return False
    kernels = numba_kernels()
    return kernels.STEP == kernels.WITH_AVX512 and not multiplies_tiles()


def direct_tokens(layout: PackedGroups | Bitmask, dtype: torch.dtype) -> float:
    """The number of tokens from which packed rows are not multiplied directly."""
    if dtype not in (torch.float32, torch.bfloat16):
        return 0
    kernels = numba_kernels()
    if not kernels.STEP:
        return DIRECT_SCALAR
    if layout != PackedGroups(2, 4) or kernels.STEP == kernels.WITH_AVX2:
        return DIRECT
    if dtype == torch.float32:  # never unpacked
        return math.inf
    return DIRECT if multiplies_tiles() else DIRECT_2_4


def _direct(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    layout: PackedGroups | Bitmask,
) -> Tensor:
    """x Sᵀ from the packed rows. values, index: contiguous."""
    layer = LayerArrays(layout, x.shape[1], values, index)
    if len(x) <= TOGETHER:
        return layer.product(x)
    return torch.cat([layer.product(part) for part in x.split(TOGETHER)])


def _by_tables(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
) -> Tensor:
    """x Sᵀ of 2:4 in bfloat16, 64 tokens at a time; a short remainder takes `_direct`."""
    from hasslefree.packed.kernels import llvm_pairs, tables

    numba_kernels()  # sets the number of threads
    out = len(values)
    tokens = len(x)
    threads = torch.get_num_threads()
    y = x.new_empty(tokens, out)
    remainder = tokens % llvm_pairs.TOKENS
    if 0 < remainder < DIRECT_2_4:
        tokens -= remainder
        y[tokens:] = _direct(x[tokens:], values, positions, PackedGroups(2, 4))
    missing = -tokens % llvm_pairs.TOKENS
    inputs = x[:tokens].contiguous()
    if missing:
        inputs = F.pad(inputs, (0, 0, 0, missing))
    rows_per_thread = -(-out * len(inputs) // (threads * llvm_pairs.TOKENS))
    height = min(out, MAX_TABLE_ROWS, max(llvm_pairs.TOKENS, rows_per_thread))
    shape = (threads, llvm_pairs.TABLE_ROWS + height, llvm_pairs.TOKENS)
    memory = workspace(shape, torch.float32).numpy()
    outputs = bits_of(y[:tokens])
    tables.dot_tables_2_4(bits_of(values), positions.numpy(), bits_of(inputs), outputs, memory)
    return y


def _by_tiles(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    layout: PackedGroups | Bitmask,
) -> Tensor:
    """x Sᵀ by torch, unpacking a few rows of S at a time. values, index: contiguous."""
    kernels = numba_kernels()
    out = len(index)
    width = x.shape[1]
    masks, starts = masks_of(layout, index, width, values.numel())
    stored = bits_of(values.view(-1))
    first_values = starts.numpy()
    rows_of_masks = masks.numpy()
    row_bytes = max(1, width * x.itemsize)
    height = min(out, max(MIN_TILE_ROWS, TILE_BYTES // row_bytes))
    tile = workspace((height, width), x.dtype)

    y = x.new_empty(len(x), out)
    for rows in tiles(out, height):
        unpacked = tile[: rows.stop - rows.start]
        some = (first_values[rows], rows_of_masks[rows])
        kernels.unpack_by_masks(stored, *some, bits_of(unpacked), kernels.STEP)
        y[:, rows] = linear(x, unpacked)
    return y
