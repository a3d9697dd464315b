"""One budget over many layers: the next bit, rank or non-zeros go to the layer that gains most by
them for a byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import orthonormal

# Fewer eigenvalues than one in FEW come from orthogonal iteration, with SPARE columns, in
# ITERATIONS steps.
FEW, SPARE, ITERATIONS = 4, 8, 6


@dataclass(frozen=True)
class GainCurve:
    """Steps that can be taken one after the other, each with less gain for a byte than the one
    before.

    gains: (steps,) float64. cost: of a step, in bytes: the same for all, or (steps,) int64.
    """

    gains: Tensor
    cost: int | Tensor

    def weighed(self, weight: float) -> "GainCurve":
        """The same steps with their gains multiplied by `weight`."""
        return GainCurve(self.gains * weight, self.cost)


def greedy_allocate(curves: Sequence[GainCurve], budget: int) -> list[int]:
    """How many steps to take on each curve, for the most gain within the budget, in bytes.

    The steps with the most gain per byte come first; since gains fall, none is taken before the one
    below it. That is optimal up to the bytes that are left over at the end, fewer than the most
    expensive step costs. Ties go to the earlier curve. A step without gain is not taken. Gains may
    be on any device; the choice is made on the CPU.
    """
    taken, closed = [0] * len(curves), [False] * len(curves)
    costs = torch.cat([torch.as_tensor(curve.cost).expand(len(curve.gains)) for curve in curves])
    rates = torch.cat([curve.gains.cpu() for curve in curves]) / costs
    owners = torch.cat([torch.full((len(curve.gains),), i) for i, curve in enumerate(curves)])
    order = rates.argsort(descending=True, stable=True)
    order = order[rates[order] > 0]
    for index, cost in zip(owners[order].tolist(), costs[order].tolist(), strict=True):
        if cost > budget:
            closed[index] = True
        if not closed[index]:
            taken[index] += 1
            budget -= cost
    return taken


def hull(points: Sequence[tuple[int, float]]) -> list[int]:
    """The choices (bytes, loss) that can be best for some price of a byte, by their indices, from
    the fewest bytes on.

    They are the corners of the lower convex hull, up to the least loss: each step gains less for a
    byte than the last.
    """
    corners: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        size, loss = points[index]
        if corners and loss >= points[corners[-1]][1]:
            continue
        while len(corners) > 1:
            (size0, loss0), (size1, loss1) = points[corners[-2]], points[corners[-1]]
            if (loss0 - loss1) * (size - size1) > (loss1 - loss) * (size1 - size0):
                break
            corners.pop()
        corners.append(index)
    return corners


def rank_gains(residual: Tensor, gram: Gram, count: int) -> tuple[Tensor, float]:
    """By how much each further rank of L lowers tr(R H Rᵀ), R = W − S: (count,) or fewer, falling;
    and that trace.

    They are the squared singular values of R H^½ (Eckart and Young), the eigenvalues of A = R H Rᵀ,
    in float64. Where `count` is a small part of them they come from orthogonal iteration, without
    A, slightly below the true ones.
    residual: R, (out, in).
    """
    wide, matrix = residual.to(gram.matrix.dtype), gram.matrix
    total, least = gram.loss(wide), min(wide.shape)
    if least <= FEW * (count + SPARE):
        if wide.shape[0] <= wide.shape[1]:
            values = torch.linalg.eigvalsh((wide.double() @ matrix.double()) @ wide.double().T)
        else:
            # The same but for zeros: of FᵀRᵀRF, with H = F Fᵀ.
            squares, vectors = torch.linalg.eigh(matrix.double())
            factor = wide.double() @ (vectors * squares.clamp_min(0).sqrt())
            values = torch.linalg.eigvalsh(factor.T @ factor)
        return values.flip(0).clamp_min(0)[:count], total
    start = torch.randn(len(wide), count + SPARE, generator=torch.Generator().manual_seed(0)).to(
        wide
    )
    for _ in range(ITERATIONS):
        basis = orthonormal(start)
        start = wide @ (matrix @ (wide.T @ basis))
    values = torch.linalg.eigvalsh((basis.T @ start).double())
    return values.flip(0).clamp_min(0)[:count], total
