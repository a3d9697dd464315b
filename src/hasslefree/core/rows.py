"""The rows of one weight, which several processes can share: given L and H, the rows of S do not
depend on each other.

A process that shares a weight (out, in) holds consecutive rows of W, S and u, and all of v and of
what is made of H. A solver then computes with its rows as if there were no others, and calls
`Rows.sum` where rows meet: in uᵀu, in Bᵀ(W − S), in an objective, in a count. These are (r, r), (r,
in) and numbers: no array of (out, in) is exchanged before the end.
"""

import torch
from torch import Tensor

from hasslefree.distributed import ALONE, World


class Rows:
    """The consecutive rows of a weight, of `out` in all, that this process holds; all hold equally
    many, to within one.

    Every process must make the same calls in the same order; the results are equal, bit for bit, in
    every process.
    """

    def __init__(self, world: World = ALONE, out: int = 0):
        self.world, self.out, self.rank, self.size = world, out, world.rank, world.size
        self.bounds = [out * rank // world.size for rank in range(world.size + 1)]
        self.start, self.stop = self.bounds[self.rank], self.bounds[self.rank + 1]

    def shape(self, matrix: Tensor) -> tuple[int, int]:
        """(out, in) of a whole matrix of which this process holds rows."""
        return (self.out if self.size > 1 else matrix.shape[0]), matrix.shape[1]

    def local(self, whole: Tensor) -> Tensor:
        """The rows of this process: a view of a whole tensor (out, …)."""
        return whole[self.start : self.stop] if self.size > 1 else whole

    def gather(self, local: Tensor) -> Tensor:
        """The whole tensor (out, …), in every process, of the rows (…, …) that each has."""
        if self.size == 1:
            return local
        whole = local.new_empty(self.out, *local.shape[1:])
        self.local(whole).copy_(local)
        for owner in range(self.size):
            self.world.broadcast_(whole[self.bounds[owner] : self.bounds[owner + 1]], owner)
        return whole

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over the processes, which may overwrite the tensor."""
        tensor = tensor.contiguous() if self.size > 1 else tensor
        self.world.add(tensor)
        return tensor

    def broadcast(self, tensor: Tensor, owner: int) -> Tensor:
        """The tensor of the process with rank `owner`, which may overwrite the tensor given; both
        have one shape.
        """
        tensor = tensor.contiguous() if self.size > 1 else tensor
        self.world.broadcast_(tensor, owner)
        return tensor


WHOLE = Rows()


def largest_of_rows(score: Tensor, count: int, rows: Rows) -> Tensor:
    """The `count` largest of all entries, as the bool mask of this process; equal scores are kept
    from the first row.

    Floating-point numbers are read as whole numbers of the same order, among which bisection finds
    the threshold.
    """
    if not count:
        return torch.zeros_like(score, dtype=torch.bool)
    whole = torch.int32 if score.dtype == torch.float32 else torch.int64
    info, keys = torch.iinfo(whole), (score + 0.0).view(whole)  # −0.0 becomes 0.0
    keys = torch.where(keys < 0, keys ^ info.max, keys)
    threshold, above = (
        info.min,
        info.max,
    )  # at least `count` are at or over the one, fewer over the other
    while threshold < above:
        middle = (threshold + above + 1) // 2
        reached = int(rows.sum(torch.count_nonzero(keys >= middle))) >= count
        threshold, above = (middle, above) if reached else (threshold, middle - 1)
    ties = torch.zeros(rows.size, dtype=torch.int64, device=score.device)
    ties[rows.rank] = tied = int(torch.count_nonzero(keys == threshold))
    room = count - int(rows.sum(torch.count_nonzero(keys > threshold)))
    room -= int(rows.sum(ties)[: rows.rank].sum())
    mask = keys >= threshold
    if room < tied:
        equal = keys == threshold
        mask &= ~equal | (equal.flatten().cumsum(0) <= max(room, 0)).view_as(equal)
    return mask
