"""Coordinate descent on a quantised S: each step is the best change of one code, or of one scale
and its offset.

With R = T − S, the loss tr(R H Rᵀ) falls by 2 d·(R H)_j − H_jj d² if entry j of a row of S rises by
d. So the best value of one entry is S_j + (R H)_j / H_jj, rounded to the grid, and the best scale
and offset of a group solve two linear equations in each row. A sweep such as GPTQ's decides each
entry once, before it knows how later entries are rounded; descent continues from there. For codes
alone this is QuantEase (arXiv 2309.01885).
"""

import torch
from torch import Tensor

from hasslefree.core.grids import Grid, Scaling, stored
from hasslefree.core.protocols import Pruned

# Inputs whose codes are decided before R H is updated for the rest of their group, in one product.
BLOCK = 128
# The least determinant of the two equations, relative to that of independent ones.
SINGULAR = 1e-6


def descend(
    target: Tensor, swept: Pruned, norm: Tensor, support: Tensor | None, passes: int
) -> Pruned:
    """S on its grid and its support, with a loss no larger than that of `swept`, up to rounding.

    target: T, (out, in). norm: H, damped, (in, in). support: bool (out, in); None where every entry
    has a code.
    """
    assert swept.scaling is not None
    grid, width = swept.scaling.grid, len(norm)
    # Columns become rows, (in, out), so that each update runs over contiguous memory.
    sparse, scale, zero = (each.T.clone(memory_format=torch.contiguous_format)
                           for each in (swept.sparse, swept.scaling.scale, swept.scaling.zero))  # fmt: skip  # noqa: E501
    mask = torch.ones_like(sparse) if support is None else support.T.to(sparse.dtype)
    slopes = norm @ (target.T - sparse)  # H Rᵀ
    group = grid.group or width
    for _ in range(passes):
        for g, start in enumerate(range(0, width, group)):
            here = slice(start, start + group)
            part, kept, inner = sparse[here], mask[here], norm[here, here]
            before, slope = part.clone(), slopes[here].clone()
            rescale(grid, part, kept, scale[g], zero[g], slope, inner)
            for first in range(0, len(part), BLOCK):
                block = slice(first, first + BLOCK)
                recode(grid, part, kept, scale[g], zero[g], slope, inner, block)
            slopes.addmm_(norm[:, here], part - before, alpha=-1)
    return Pruned(sparse.T.contiguous(), Scaling(grid, scale.T, zero.T))


def rescale(
    grid: Grid,
    part: Tensor,
    kept: Tensor,
    scale: Tensor,
    zero: Tensor,
    slope: Tensor,
    inner: Tensor,
) -> None:
    """Give a group the scale and the offset that suit its codes best, in the rows where they lower
    the loss.

    All tensors but the last are changed in place, except `kept`. part, kept, slope: of S, of its
    support (0 or 1) and of H Rᵀ, (group, out). scale, zero: (out,). inner: of H, (group, group).
    """
    steps = ((part - zero) / scale if grid.offset else part / scale).round_().mul_(kept)
    weighed = inner @ steps
    square, along = (steps * weighed).sum(0), (steps * slope).sum(0)
    if grid.offset:
        cross, total, across = weighed.sum(0), inner.sum(), slope.sum(0)
        determinant = (square * total - cross.square()).clamp_min(SINGULAR * square * total)
        new_scale = stored(scale + (total * along - cross * across) / determinant)
        new_zero = stored(zero + (square * across - cross * along) / determinant)
        change = steps * new_scale + new_zero - part
    else:
        new_scale, new_zero = stored(scale + along / square), zero
        change = steps * new_scale - part
    moved = inner @ change
    better = ((change * (2 * slope - moved)).sum(0) > 0) & (
        new_scale > 0
    )  # not where a division was by zero
    scale.copy_(torch.where(better, new_scale, scale))
    zero.copy_(torch.where(better, new_zero, zero))
    part.add_(torch.where(better, change, 0.0))
    slope.sub_(torch.where(better, moved, 0.0))


def recode(
    grid: Grid,
    part: Tensor,
    kept: Tensor,
    scale: Tensor,
    zero: Tensor,
    slope: Tensor,
    inner: Tensor,
    block: slice,
) -> None:
    """Give the entries of some inputs of a group their best codes, one input after the other;
    arguments as above.
    """
    values, support, local, before = (
        part[block],
        kept[block],
        slope[block].clone(),
        part[block].clone(),
    )
    curvature = inner[block, block]
    for j in range(len(values)):
        wanted = values[j] + local[j] / curvature[j, j]
        change = grid.nearest(wanted, scale, zero).mul_(support[j]).sub_(values[j])
        values[j] += change
        local.addr_(curvature[j], change, alpha=-1)
    slope.addmm_(inner[:, block], values - before, alpha=-1)
