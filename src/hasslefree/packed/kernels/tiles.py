"""The order of codes that torch's int4 operators read on CUDA: tiles for the m16n8k16 product of
tensor cores.

A word has 8 nibbles of one row. With q = 0…3, they belong to the inputs 2q, 2q + 1, 2q + 8, 2q + 9,
2q + 16, … of 32 inputs, first those of even inputs, the lowest bits first. Codes (out, n) become
int32 (out/8, steps, 32, words): 8 rows, steps of 32·words inputs, and the 32 lanes of a warp, lane
4·row + q. Source: matrix_to_m16n8k16_Bint4_layout in torch's int4mm.cu.
"""

import torch
from torch import Tensor

# Rows per tile, and lanes per row.
ROWS = 8
LANES = 4
# The number of inputs that a row's lanes hold in one word each.
INPUTS = 32


def tiled(nibbles: Tensor) -> Tensor:
    """Put nibbles into this order, by torch's operator.

    Args:
        nibbles: uint8 (out, n), on CUDA. 8 divides out, and 32 divides n.
    """
    pairs = nibbles[:, ::2] << 4 | nibbles[:, 1::2]
    words = next(words for words in (4, 2, 1) if nibbles.shape[1] % (INPUTS * words) == 0)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs, 2 * words)
    return packed


def rows_of(tiles: Tensor, rows: Tensor | slice) -> Tensor:
    """The nibbles of some rows, uint8 (rows, n).

    Args:
        tiles: codes in this order.
        rows: indices (rows,), or a slice of whole tiles.
    """
    count, steps, _, words = tiles.shape
    by_row = tiles.view(count, steps, ROWS, LANES, words).transpose(1, 2)
    if isinstance(rows, slice):
        selected = by_row[rows.start // ROWS : rows.stop // ROWS].flatten(0, 1)
    else:
        selected = by_row[rows // ROWS, rows % ROWS]
    shifts = torch.arange(0, 32, 4, device=tiles.device, dtype=torch.int32).view(2, 4)
    nibbles = (selected.view(-1, steps, LANES, words, 1, 1) >> shifts & 15).to(torch.uint8)
    # (rows, steps, lanes, words, odd, eights) → inputs from the slowest to the fastest
    return nibbles.permute(0, 1, 3, 5, 2, 4).flatten(1)
