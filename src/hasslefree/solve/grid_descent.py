"""Coordinate descent on a quantised S: each step changes one code, or one scale and offset, in the
best way.

With R = T − S, the loss tr(R H Rᵀ) falls by 2 d·(R H)_j − H_jj d² if entry j of a row of S rises by
d. So the best value of one entry is S_j + (R H)_j / H_jj, rounded to the grid, and the best scale
and offset of a group solve two linear equations in each row. A sweep such as GPTQ's decides each
entry once, before the rounding of later entries is known; descent starts from the result of a
sweep. Descent on codes alone is QuantEase (arXiv 2309.01885).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.grids import Levels, Scaling
from hasslefree.core.protocols import Pruned
from hasslefree.core.scales import Floats, Multiples

# The number of inputs whose codes are decided before R H is updated for the rest of their group, in
# one product.
BLOCK = 128
# The smallest determinant of the two equations, relative to that of independent ones.
SINGULAR = 1e-6


def descend(
    target: Tensor,
    swept: Pruned,
    norm: Tensor,
    support: Tensor,
    passes: int,
) -> Pruned:
    """Return S on its grid and its support, with at most the loss of `swept`, up to rounding.

    Args:
        target: T, (out, in).
        swept: the first S, on a grid.
        norm: H, damped, (in, in).
        support: the entries that have a code, bool (out, in).
        passes: the number of passes over all groups.
    """
    assert swept.scaling is not None
    grid = swept.scaling.grid
    width = len(norm)
    # Columns become rows, (in, out), so that each update runs over contiguous memory.
    sparse = transposed(swept.sparse)
    scale = transposed(swept.scaling.scale).T
    scaling = Scaling(grid, scale, transposed(swept.scaling.zero).T, swept.scaling.storage)
    mask = support.T.to(sparse.dtype)
    slopes = norm @ (target.T - sparse)  # H Rᵀ
    size = grid.group or width
    for _ in range(passes):
        for start in range(0, width, size):
            inputs = slice(start, start + size)
            group = Group(
                scaling.at(start),
                scaling.storage_at(start),
                sparse[inputs],
                mask[inputs],
                slopes[inputs].clone(),
                norm[inputs, inputs],
            )
            before = group.values.clone()
            group.rescale()
            for first in range(0, len(before), BLOCK):
                group.recode(slice(first, first + BLOCK))
            slopes.addmm_(norm[:, inputs], group.values - before, alpha=-1)
    return Pruned(sparse.T.contiguous(), scaling)


def transposed(matrix: Tensor) -> Tensor:
    """Return a contiguous copy of the transpose."""
    return matrix.T.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Group:
    """A group of inputs in all rows of S. Steps change levels, values and slope in place.

    Args:
        levels: scale and zero, (out,).
        storage: the numbers that scale and zero may be.
        values: the part of Sᵀ, (group, out).
        support: 0 or 1, (group, out).
        slope: the part of H Rᵀ, (group, out).
        norm: the part of H, (group, group).
    """

    levels: Levels
    storage: Floats | Multiples
    values: Tensor
    support: Tensor
    slope: Tensor
    norm: Tensor

    def rescale(self) -> None:
        """Set the scale and the offset to the best ones for the codes, in the rows where they lower
        the loss.
        """
        old = self.levels
        offset = old.grid.offset
        shifted = self.values - old.zero if offset else self.values
        steps = (shifted / old.scale).round_().mul_(self.support)
        weighed = self.norm @ steps
        square = (steps * weighed).sum(0)
        along = (steps * self.slope).sum(0)
        if offset:
            cross = weighed.sum(0)
            total = self.norm.sum()
            across = self.slope.sum(0)
            determinant = square * total - cross.square()
            determinant = determinant.clamp_min(SINGULAR * square * total)
            scale = self.storage.scales(old.scale + (total * along - cross * across) / determinant)
            zero = self.storage.offsets(old.zero + (square * across - cross * along) / determinant)
            change = steps * scale + zero - self.values
        else:
            scale = self.storage.scales(old.scale + along / square)
            zero = old.zero
            change = steps * scale - self.values
        moved = self.norm @ change
        gain = (change * (2 * self.slope - moved)).sum(0)
        better = (gain > 0) & (scale * old.scale > 0)  # not after a division by zero
        old.scale.copy_(torch.where(better, scale, old.scale))
        old.zero.copy_(torch.where(better, zero, old.zero))
        self.values.add_(torch.where(better, change, 0.0))
        self.slope.sub_(torch.where(better, moved, 0.0))

    def recode(self, block: slice) -> None:
        """Set the entries of some inputs to their best codes, one input after another."""
        values = self.values[block]
        support = self.support[block]
        slope = self.slope[block].clone()
        norm = self.norm[block, block]
        before = values.clone()
        for j in range(len(values)):
            wanted = values[j] + slope[j] / norm[j, j]
            nearest = self.levels.nearest(wanted)
            change = nearest.mul_(support[j]).sub_(values[j])
            values[j] += change
            slope.addr_(norm[j], change, alpha=-1)
        self.slope.addmm_(self.norm[:, block], values - before, alpha=-1)
