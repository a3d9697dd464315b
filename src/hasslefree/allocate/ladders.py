"""One budget for many layers, spent step by step where the gain per byte is largest."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import orthonormal

# If less than one in FEW of all eigenvalues is needed, they come from orthogonal iteration with
# SPARE more columns and ITERATIONS steps.
FEW = 4
SPARE = 8
ITERATIONS = 6

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Ladder:
    """Steps that can only be taken in order, each with less gain per byte than the last.

    Args:
        gains: (steps,) float64, on any device.
        cost: the bytes of a step: one number for all steps, or (steps,) int64.
    """

    gains: Tensor
    cost: int | Tensor

    @property
    def costs(self) -> Tensor:
        """The bytes of each step: (steps,) int64, on the CPU."""
        return torch.as_tensor(self.cost).expand(len(self.gains))

    def scaled(self, factor: float) -> "Ladder":
        """The same steps, with their gains multiplied by `factor`."""
        return Ladder(self.gains * factor, self.cost)

    def __add__(self, other: "Ladder") -> "Ladder":
        """Steps that are taken together on two ladders of the same length."""
        return Ladder(self.gains + other.gains, self.costs + other.costs)


def greedy_allocate(ladders: Mapping[Key, Ladder], budget: int) -> dict[Key, int]:
    """Choose the number of steps on each ladder that gains most within a budget.

    The step with the most gain per byte comes first. Gains fall along a ladder, so no step is taken
    before the one below it. The result is optimal up to the bytes that are left over, which are
    fewer than the most expensive step costs. Equal gains go to the earlier ladder. Steps without a
    gain are not taken.

    Args:
        budget: in bytes.
    """
    keys = list(ladders)
    steps = dict.fromkeys(keys, 0)
    if not keys:
        return steps
    costs = torch.cat([ladder.costs for ladder in ladders.values()])
    gains = torch.cat([ladder.gains.cpu() for ladder in ladders.values()])
    lengths = torch.tensor([len(ladder.gains) for ladder in ladders.values()])
    owners = torch.arange(len(keys)).repeat_interleave(lengths)
    rates = gains / costs
    order = rates.argsort(descending=True, stable=True)
    order = order[rates[order] > 0]
    closed: set[int] = set()
    for owner, cost in zip(owners[order].tolist(), costs[order].tolist(), strict=True):
        if cost > budget:
            closed.add(owner)
        if owner not in closed:
            steps[keys[owner]] += 1
            budget -= cost
    return steps


def hull(points: Sequence[tuple[int, float]]) -> list[int]:
    """Find the choices that are best for some price per byte.

    They are the corners of the lower convex hull, up to the least loss: each step along them gains
    less per byte than the one before.

    Args:
        points: (bytes, loss) of each choice.

    Returns:
        Indices into `points`, by rising bytes.
    """
    corners: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        size, loss = points[index]
        if corners and loss >= points[corners[-1]][1]:
            continue
        while len(corners) > 1:
            size0, loss0 = points[corners[-2]]
            size1, loss1 = points[corners[-1]]
            if (loss0 - loss1) * (size - size1) > (loss1 - loss) * (size1 - size0):
                break
            corners.pop()
        corners.append(index)
    return corners


def rank_gains(
    residual: Tensor,
    gram: Gram,
    count: int,
) -> tuple[Tensor, float]:
    """Compute how much each further rank of L lowers tr(R H Rᵀ), R = W − S.

    The gains are the squared singular values of R H^½ (Eckart and Young), which are the eigenvalues
    of A = R H Rᵀ. A few of many eigenvalues come from orthogonal iteration, which does not form A;
    they are then slightly below the true ones.

    Args:
        residual: R, (out, in).
        count: the number of ranks.

    Returns:
        The gains in falling order, float64 (count,) or fewer; and tr(R H Rᵀ).
    """
    matrix = gram.matrix
    residual = residual.to(matrix.dtype)
    total = gram.loss(residual)
    if count == 0:
        return matrix.new_zeros(0, dtype=torch.float64), total
    if min(residual.shape) <= FEW * (count + SPARE):
        values = _all_eigenvalues(residual.double(), matrix.double())
    else:
        values = _largest_eigenvalues(residual, matrix, count + SPARE)
    return values.flip(0).clamp_min(0)[:count], total


def _all_eigenvalues(residual: Tensor, matrix: Tensor) -> Tensor:
    """All eigenvalues of R H Rᵀ except zeros, rising; arguments and result in float64."""
    out, width = residual.shape
    if out <= width:
        return torch.linalg.eigvalsh((residual @ matrix) @ residual.T)
    # With H = F Fᵀ, FᵀRᵀRF has the same eigenvalues, and fewer zeros.
    squares, vectors = torch.linalg.eigh(matrix)
    factor = residual @ (vectors * squares.clamp_min(0).sqrt())
    return torch.linalg.eigvalsh(factor.T @ factor)


def _largest_eigenvalues(
    residual: Tensor,
    matrix: Tensor,
    count: int,
) -> Tensor:
    """Estimates of the largest eigenvalues of R H Rᵀ: (count,) float64, rising."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(len(residual), count, generator=generator).to(residual)
    for _ in range(ITERATIONS):
        basis = orthonormal(image)
        image = residual @ (matrix @ (residual.T @ basis))
    return torch.linalg.eigvalsh((basis.T @ image).double())
