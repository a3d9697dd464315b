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
        return nibbles_of(packed[rows])
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


def nibbles_of(octets: Tensor) -> Tensor:
    """The nibbles of whole blocks or of the last rows: uint8 (rows, n/2) → (rows, n)."""
    count, width = octets.shape
    block = rows_of_block()
    is_whole = count % block == 0
    half = block // 2 if is_whole else count // 2
    parts = octets.reshape(-1, 2 * width, half)
    nibbles = torch.stack([parts & 15, parts >> 4], 1)  # (blocks, 2, n, half)
    # A byte holds nibbles of both halves of a block, or of neighbours among the last rows.
    rows_first = (0, 1, 3, 2) if is_whole else (0, 3, 1, 2)
    return nibbles.permute(rows_first).flatten(0, 2)
