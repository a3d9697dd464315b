"""The order of codes that torch's int4 operators read on a CPU: block by block of rows, input by
input, two rows per byte.

The rows in the first half of a block take the lower four bits. Of the remaining rows after the last
whole block, neighbours share a byte instead. Source: torch's int4mm_kernel.cpp for CPUs.
"""

import torch
from torch import Tensor

# Rows per block, by the instructions that torch uses.
BLOCKS = {"AVX512": 64, "AVX2": 32}
# Looked up once: torch.compile cannot trace the call.
CAPABILITY = torch.backends.cpu.get_cpu_capability()


def rows_of_block() -> int:
    """The number of rows per block on this processor."""
    return BLOCKS[CAPABILITY]


def interleaved(nibbles: Tensor) -> Tensor:
    """Put nibbles into this order, by torch's operator: uint8 (out, n) → (out, n/2)."""
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles.int(), 1)
    return packed


def rows_of(packed: Tensor, rows: Tensor | slice) -> Tensor:
    """The nibbles of some rows, uint8 (rows, n).

    Args:
        packed: uint8 (out, n/2), in this order.
        rows: indices (rows,), or a slice of whole blocks or of the last rows.
    """
    if isinstance(rows, slice):
        columns = torch.empty(2 * packed.shape[1], rows.stop - rows.start, dtype=torch.uint8)
        write_columns(packed[rows], columns)
        return columns.T.contiguous()
    out, octets = packed.shape
    block = rows_of_block()
    whole = out - out % block
    in_block = rows < whole
    # The rows from `whole` on are one block, in which neighbouring rows share a byte.
    first = torch.where(in_block, rows - rows % block, whole)
    half = torch.where(in_block, block // 2, (out - whole) // 2)
    row = rows - first
    column = torch.where(in_block, row % (block // 2), row // 2)
    is_high = torch.where(in_block, row // (block // 2), row % 2)
    start = first * octets + column
    inputs = torch.arange(2 * octets, device=packed.device)
    codes = packed.flatten()[start.unsqueeze(1) + half.unsqueeze(1) * inputs]
    return codes >> (4 * is_high).to(torch.uint8).unsqueeze(1) & 15


def write_columns(octets: Tensor, columns: Tensor) -> None:
    """Write the nibbles of whole blocks, or of the last rows, into columns.

    octets: uint8 (rows, n/2), in this order; columns: (n, rows) of any dtype.
    """
    width, count = columns.shape
    block = rows_of_block()
    if count % block:  # neighbouring rows share a byte
        halves = columns.view(width, 1, -1, 2).permute(1, 3, 0, 2)
    else:  # the rows of the first and the second half of a block
        halves = columns.view(width, -1, 2, block // 2).permute(1, 2, 0, 3)
    octets = octets.reshape(len(halves), width, -1)
    halves[:, 0] = octets & 15
    halves[:, 1] = octets >> 4
