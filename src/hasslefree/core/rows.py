"""The rows of one weight, which several processes can share: given L and H, the rows of S do not depend on each other.

A process that shares a weight (out, in) holds consecutive rows of W, S and u, and all of v and of what is made of H. A
solver then computes with its rows as if there were no others, and calls `Rows.sum` where rows meet: in uᵀu, in
Bᵀ(W − S), in an objective, in a count. These are (r, r), (r, in) and numbers: no array of (out, in) is exchanged before
the end.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rows:
    """All rows of a weight, in a single process: each sum is the value in this process.

    `distributed.SharedRows` derives from it. Every process must make the same calls in the same order; the
    result of a call is the same, bit for bit, in every process.

    Attributes: rank, size: of this process, and the number of processes. start: the first row of this process.
    """

    rank: int = 0
    size: int = 1
    start: int = 0

    def shape(self, matrix: Tensor) -> tuple[int, int]:
        """(out, in) of a whole matrix of which this process holds rows."""
        return matrix.shape[0], matrix.shape[1]

    def local(self, whole: Tensor) -> Tensor:
        """The rows of this process: a view of a whole tensor (out, …)."""
        return whole

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor (out, …), in every process, of the rows (…, …) that each has."""
        return local

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes. The tensor given may be overwritten by it."""
        return tensor

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """The tensor of the process with rank `owner`. The tensor given has its shape, and may be overwritten."""
        return tensor

    def before(self, count: Tensor) -> Tensor:
        """The sum of a number, (), over the processes that hold the rows above those of this one."""
        return torch.zeros_like(count)


WHOLE = Rows()
