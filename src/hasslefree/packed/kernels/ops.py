"""y = x Sᵀ as torch operators, so that torch.compile sees one node and no graph break.

On a CPU, few tokens are multiplied with the packed rows directly. Many tokens in bfloat16 with 2:4
use tables of the inputs, unless the processor multiplies tiles (AMX). Otherwise, from `DIRECT`
tokens on, some rows of S at a time are unpacked into a buffer, and torch multiplies them: a large S
is never in memory as a whole.

There is no gradient: a call that needs one raises torch's error that no autograd formula was
registered. `backends.choose` uses the dense backend for such calls.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.products import is_traced, linear, multiplies_tiles
from hasslefree.packed.kernels.arrays import (
    LayerArrays,
    bits_of,
    masks_of,
    numba_kernels,
    row_starts,
    workspace,
)
from hasslefree.packed.layouts import Bitmask, Layout, PackedGroups

# The number of tokens from which unpacking some rows once is cheaper than reading packed rows for
# every token. With AVX-512, 2:4 halves the products as well, and float32 is never unpacked.
DIRECT_2_4 = {torch.float32: math.inf, torch.bfloat16: 33}
DIRECT_2_4_AMX = {torch.float32: math.inf, torch.bfloat16: 13}
# Other patterns, and 2:4 with AVX2; and without both.
DIRECT = {torch.float32: 13, torch.bfloat16: 13}
DIRECT_SCALAR = {torch.float32: 6, torch.bfloat16: 6}
# Tokens that run through the packed rows of 2:4 together: their inputs stay in the second level of
# the cache.
TOGETHER = 32
# The unpacked rows stay in the cache, and a product needs this many rows to be fast.
TILE_BYTES = 4 << 20
MIN_TILE_ROWS = 256
# Inputs that a table holds.
TABLE_INPUTS = 64
# Rows that run through the tables together: their sums stay in the second level of the cache.
MAX_TABLE_ROWS = 1024


def product(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    layout: Layout,
) -> Tensor:
    """x Sᵀ.

    Args:
        x: (..., in), float32, bfloat16 or float16. Kernels do not check how long a row of it is.
        values: of S, of x's dtype.
        index: of S, uint8.
        layout: how S is stored.

    Returns:
        (..., out), of x's dtype; sums are float32.
    """
    flat = x.reshape(-1, x.shape[-1])
    groups = groups_product
    masked = mask_product
    if is_traced(x):
        groups = linear_groups
        masked = linear_mask
    if isinstance(layout, PackedGroups):
        y = groups(flat, values, index, layout.n, layout.m)
    else:
        y = masked(flat, values, index)
    return y.reshape(*x.shape[:-1], y.shape[-1])


def groups_product(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    n: int,
    m: int,
) -> Tensor:
    """`product` for the pattern N:M.

    x: (tokens, in). values: (out, in/M·N). positions: (out, bytes), uint8, the codes of the groups.
    """
    layout = PackedGroups(n, m)
    is_many = len(x) >= direct_tokens(layout).get(x.dtype, 0)
    if is_many and takes_tables(layout, x):
        return _by_tables(x, values.contiguous(), positions.contiguous())
    return _by_layout(x, values, positions.contiguous(), layout)


def mask_product(
    x: Tensor,
    values: Tensor,
    mask: Tensor,
) -> Tensor:
    """`product` for any pattern that is stored as a mask.

    x: (tokens, in). values: (nonzeros,), row by row. mask: (out, ⌈in/8⌉), uint8.
    """
    return _by_layout(x, values, mask.contiguous(), Bitmask())


def takes_tables(layout: PackedGroups, x: Tensor) -> bool:
    """Tell whether tables of these inputs (tokens, in) are the fastest for many tokens."""
    if layout != PackedGroups(2, 4) or x.dtype != torch.bfloat16 or x.shape[1] % TABLE_INPUTS:
        return False
    kernels = numba_kernels()
    return kernels.STEP == kernels.WITH_AVX512 and not multiplies_tiles()


def direct_tokens(layout: PackedGroups | Bitmask) -> Mapping[torch.dtype, float]:
    """The tokens, by dtype, from which rows are not read packed."""
    kernels = numba_kernels()
    if not kernels.STEP:
        return DIRECT_SCALAR
    if layout != PackedGroups(2, 4) or kernels.STEP == kernels.WITH_AVX2:
        return DIRECT
    if multiplies_tiles():
        return DIRECT_2_4_AMX
    return DIRECT_2_4


as_operator: Any = functools.partial(torch.library.custom_op, mutates_args=(), device_types="cpu")
linear_groups = as_operator("hasslefree::linear_groups", groups_product)
linear_mask = as_operator("hasslefree::linear_mask", mask_product)
for operator in (linear_groups, linear_mask):
    operator.register_fake(lambda x, values, index, *_: x.new_empty(x.shape[0], index.shape[0]))


def _by_layout(
    x: Tensor,
    values: Tensor,
    index: Tensor,
    layout: PackedGroups | Bitmask,
) -> Tensor:
    """x Sᵀ from the packed rows for few tokens, and from unpacked ones otherwise. index:
    contiguous.
    """
    values = values.contiguous()
    if len(x) < direct_tokens(layout).get(x.dtype, 0):
        return _direct(x, values, index, layout)
    kernels = numba_kernels()
    masks = masks_of(layout, index, x.shape[1])
    starts = row_starts(masks, values.numel()).numpy()
    stored = bits_of(values.view(-1))
    rows_of_masks = masks.numpy()

    def unpack(
        start: int,
        stop: int,
        rows: Any,
    ) -> None:
        some = (starts[start:stop], rows_of_masks[start:stop])
        kernels.unpack_by_masks(stored, *some, rows, kernels.STEP)

    return _by_tiles(x, len(index), unpack)


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
    """x Sᵀ of 2:4 in bfloat16, 64 tokens at a time; a short remainder goes directly."""
    from hasslefree.packed.kernels import llvm_pairs, tables

    numba_kernels()  # sets the number of threads
    out = len(values)
    tokens = len(x)
    threads = torch.get_num_threads()
    y = x.new_empty(tokens, out)
    remainder = tokens % llvm_pairs.TOKENS
    if 0 < remainder < DIRECT_2_4[x.dtype]:
        tokens -= remainder
        y[tokens:] = _direct(x[tokens:], values, positions, PackedGroups(2, 4))
    missing = -tokens % llvm_pairs.TOKENS
    inputs = F.pad(x[:tokens], (0, 0, 0, missing)) if missing else x[:tokens].contiguous()
    rows_per_thread = -(-out * len(inputs) // (threads * llvm_pairs.TOKENS))
    height = min(out, MAX_TABLE_ROWS, max(llvm_pairs.TOKENS, rows_per_thread))
    shape = (threads, llvm_pairs.TABLE_ROWS + height, llvm_pairs.TOKENS)
    memory = workspace(4 * math.prod(shape)).view(torch.float32).view(shape).numpy()
    outputs = bits_of(y[:tokens])
    tables.dot_tables_2_4(bits_of(values), positions.numpy(), bits_of(inputs), outputs, memory)
    return y


def _by_tiles(
    x: Tensor,
    out: int,
    unpack: Callable[[int, int, Any], None],
) -> Tensor:
    """x Sᵀ by torch, from some rows of S at a time.

    Args:
        x: (tokens, in).
        out: the rows of S.
        unpack: unpack(start, stop, rows) writes the bits of these rows of S into an array (stop −
            start, in).
    """
    width = x.shape[1]
    row_bytes = max(1, width * x.itemsize)
    height = min(out, max(MIN_TILE_ROWS, TILE_BYTES // row_bytes))
    tile = workspace(height * width * x.itemsize).view(x.dtype).view(height, width)
    array = bits_of(tile)
    if height == out:
        unpack(0, out, array)
        return linear(x, tile)
    y = x.new_empty(len(x), out)
    for start in range(0, out, height):
        count = min(height, out - start)
        unpack(start, start + count, array[:count])
        y[:, start : start + count] = linear(x, tile[:count])
    return y
