"""Memory for unpacked rows of S in bfloat16, and products with them. It is kept between calls: new
pages cost more than unpacking.
"""

import ctypes
import threading
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows per block in oneDNN's order.
BLOCK = 64
# oneDNN pads the inputs to a multiple of this.
INPUTS = 32
# The number of tokens, by which oneDNN may choose the order.
TOKENS = 512
_kept = threading.local()


class BlockedRoom:
    """Rows of S in the order of oneDNN's products of bfloat16, which then reorder nothing.

    values: (blocks, pairs of inputs, 64 rows, 2), padded with zeros.
    """

    def __init__(self, rows: int, inputs: int):
        self.packed = reordered(torch.zeros(rows, inputs, dtype=torch.bfloat16))
        blocks = -(-rows // BLOCK)
        self.values = values_of(self.packed).view(blocks, -1, BLOCK, 2)

    def product(self, x: Tensor) -> Tensor:
        """x (tokens, in) → (tokens, rows)."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, None, "none", [], "")
        return product


def room_for(rows: int, inputs: int) -> BlockedRoom | None:
    """This thread's room for a shape; None if oneDNN's order is unknown."""
    if not is_known_order(rows, inputs):
        return None
    rooms: dict[tuple[int, int], BlockedRoom] = vars(_kept).setdefault("rooms", {})
    key = (rows, inputs)
    if key not in rooms:
        rooms[key] = BlockedRoom(rows, inputs)
    return rooms[key]


@cache
def is_known_order(rows: int, inputs: int) -> bool:
    """Test whether oneDNN orders a matrix in blocks of 64 rows, then by pairs of inputs."""
    operators = ("_reorder_linear_weight", "_linear_pointwise", "data_ptr", "_nbytes")
    if not torch.backends.mkldnn.is_available():
        return False
    if not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    # Bits of finite numbers, nearly all different.
    matrix = (torch.arange(rows * inputs) % 32611).to(torch.int16).view(rows, inputs)
    packed = reordered(matrix.view(torch.bfloat16))
    found = values_of(packed).view(torch.int16)
    padded = F.pad(matrix, (0, -inputs % INPUTS, 0, -rows % BLOCK))
    blocks = padded.view(-1, BLOCK, padded.shape[1] // 2, 2)
    return torch.equal(found, blocks.transpose(1, 2).flatten())


def reordered(matrix: Tensor) -> Tensor:
    """A matrix (rows, in) in bfloat16 in oneDNN's order, as a tensor that only oneDNN reads."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix, TOKENS)
    return packed


def values_of(packed: Tensor) -> Tensor:
    """The flat bfloat16 memory of a tensor in oneDNN's order; valid while `packed` exists."""
    if not packed.is_mkldnn:
        return packed.flatten()
    size = torch.ops.mkldnn._nbytes(packed)
    memory: Any = (ctypes.c_uint8 * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(memory, dtype=torch.bfloat16)
