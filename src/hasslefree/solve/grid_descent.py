"""Coordinate descent on a quantised S: each step is the best change of one code, or of one scale
and its offset.

With R = T − S, the loss tr(R H Rᵀ) falls by 2 d·(R H)_j − H_jj d² if entry j of a row of S rises by
d. So the best value of one entry is S_j + (R H)_j / H_jj, rounded to the grid, and the best scale
and offset of a group solve two linear equations in each row. A sweep such as GPTQ's decides each
entry once, before it knows how later entries are rounded; descent continues from there. For codes
alone this is QuantEase (arXiv 2309.01885).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.grids import Grid, Scaling, stored
from hasslefree.core.protocols import Pruned

# The number of inputs whose codes are decided before R H is updated for the rest of their group, in
# one product.
BLOCK = 128
# The smallest determinant of the two equations, relative to that of independent ones.
SINGULAR = 1e-6


def descend(
    target: Tensor,
    swept: Pruned,
    norm: Tensor,
    support: Tensor | None,
    passes: int,
) -> Pruned:
    """S on its grid and its support, with a loss no larger than that of `swept`, up to rounding.

    Args:
        target: T, (out, in).
        swept: the S to begin with, on a grid.
        norm: H, damped, (in, in).
        support: bool (out, in); None if every entry has a code.
        passes: how often all groups are visited.
    """
    assert swept.scaling is not None
    grid = swept.scaling.grid
    width = len(norm)
    # Columns become rows, (in, out), so that each update runs over contiguous memory.
    sparse = transposed(swept.sparse)
    scale = transposed(swept.scaling.scale)
    zero = transposed(swept.scaling.zero)
    mask = torch.ones_like(sparse) if support is None else support.T.to(sparse.dtype)
    slopes = norm @ (target.T - sparse)  # H Rᵀ
    size = grid.group or width
    for _ in range(passes):
        for g, start in enumerate(range(0, width, size)):
            inputs = slice(start, start + size)
            group = Group(
                grid,
                sparse[inputs],
                mask[inputs],
                scale[g],
                zero[g],
                slopes[inputs].clone(),
                norm[inputs, inputs],
            )
            before = group.values.clone()
            group.rescale()
            for first in range(0, len(before), BLOCK):
                group.recode(slice(first, first + BLOCK))
            slopes.addmm_(norm[:, inputs], group.values - before, alpha=-1)
    return Pruned(sparse.T.contiguous(), Scaling(grid, scale.T, zero.T))


def transposed(matrix: Tensor) -> Tensor:
    """A contiguous copy of the transpose."""
    return matrix.T.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Group:
    """The inputs of a group, in all rows of S. The steps change values, scale, zero and slope in
    place.

    Args:
        values: of S, (group, out).
        support: 0 or 1, (group, out).
        scale, zero: (out,).
        slope: of H Rᵀ, (group, out).
        norm: of H, (group, group).
    """

    grid: Grid
    values: Tensor
    support: Tensor
    scale: Tensor
    zero: Tensor
    slope: Tensor
    norm: Tensor

    def rescale(self) -> None:
        """Take the scale and the offset that suit the codes best, in the rows where they lower the
        loss.
        """
        shifted = self.values - self.zero if self.grid.offset else self.values
        steps = (shifted / self.scale).round_().mul_(self.support)
        weighed = self.norm @ steps
        square = (steps * weighed).sum(0)
        along = (steps * self.slope).sum(0)
        if self.grid.offset:
            cross = weighed.sum(0)
            total = self.norm.sum()
            across = self.slope.sum(0)
            determinant = square * total - cross.square()
            determinant = determinant.clamp_min(SINGULAR * square * total)
            scale = stored(self.scale + (total * along - cross * across) / determinant)
            zero = stored(self.zero + (square * across - cross * along) / determinant)
            change = steps * scale + zero - self.values
        else:
            scale = stored(self.scale + along / square)
            zero = self.zero
            change = steps * scale - self.values
        moved = self.norm @ change
        gain = (change * (2 * self.slope - moved)).sum(0)
        better = (gain > 0) & (scale > 0)  # not after a division by zero
        self.scale.copy_(torch.where(better, scale, self.scale))
        self.zero.copy_(torch.where(better, zero, self.zero))
        self.values.add_(torch.where(better, change, 0.0))
        self.slope.sub_(torch.where(better, moved, 0.0))

    def recode(self, block: slice) -> None:
        """Give the entries of some inputs of the group their best codes, one input after the
        other.
        """
        values = self.values[block]
        support = self.support[block]
        slope = self.slope[block].clone()
        norm = self.norm[block, block]
        before = values.clone()
        for j in range(len(values)):
            wanted = values[j] + slope[j] / norm[j, j]
            nearest = self.grid.nearest(wanted, self.scale, self.zero)
            change = nearest.mul_(support[j]).sub_(values[j])
            values[j] += change
            slope.addr_(norm[j], change, alpha=-1)
        self.slope.addmm_(self.norm[:, block], values - before, alpha=-1)
