"""joint-grid: the support and the first L by `joint`; then GPTQ's sweep, coordinate descent on the
grid and an exact fit of L in turn.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid, Scaling
from hasslefree.core.linalg import masked_cg, orthonormal, with_rows
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import KnownSupport, Pattern
from hasslefree.core.products import tiles
from hasslefree.core.protocols import Method, Pruned, Solution
from hasslefree.solve.at_rate import ROWS
from hasslefree.solve.grid_descent import descend
from hasslefree.solve.low_rank.svd import Exact
from hasslefree.solve.methods.joint import Joint
from hasslefree.solve.objective import Objective
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from hasslefree.solve.scaled import ScaledProblem
from hasslefree.validation import Count, Figure, Positive

# Steps of conjugate gradients before each sweep; they start from the S of the previous sweep.
CG_STEPS = 20


@dataclass(frozen=True)
class Norm:
    """The norm in which S is put on a grid.

    Args:
        matrix: H, damped, or H⊥, (in, in).
        for_sweep: the upper U with UᵀU = matrix⁻¹, (in, in).
    """

    matrix: Tensor
    for_sweep: Tensor


@dataclass(frozen=True)
class Prepared:
    """H, and the results of `prepare` of `Joint`, of the sweep and of the exact fit, each computed
    at first use: a pattern that keeps everything does not need `Joint`, nor rank 0 a fit.

    Args:
        given: H without damping.
        gram: H, shrunk and damped.
        joint: the method that chooses the support.
    """

    given: Gram
    gram: Gram
    joint: Joint

    @cached_property
    def for_joint(self) -> ScaledProblem:
        return self.joint.prepare(self.given)

    @cached_property
    def for_sweep(self) -> Tensor:
        return SparseGPT().prepare(self.gram)

    @cached_property
    def for_fit(self) -> Tensor:
        return Exact().prepare(self.gram)

    def norm(self, low_rank: LowRank, left: float) -> Norm:
        """Return H⊥ = C (I − (1 − d) V Vᵀ)² Cᵀ with H = C Cᵀ, d = `left`, and V, (in, r), an
        orthonormal basis of the rows of L C; H itself at rank 0.

        Both are updates of rank r, and nothing is factored again:

            H⊥ = H − (1 − d²) C V (C V)ᵀ,    H⊥⁻¹ = H⁻¹ + (d⁻² − 1) C⁻ᵀV (C⁻ᵀV)ᵀ
        """
        matrix = self.gram.matrix
        if not low_rank.rank or left == 1:
            return Norm(matrix, self.for_sweep)
        factor = self.for_fit
        basis = orthonormal((low_rank.v @ factor).T)
        image = factor @ basis
        rows = torch.linalg.solve_triangular(factor, basis.T, upper=False, left=False)
        matrix = torch.addmm(matrix, image, image.T, alpha=left**2 - 1)
        return Norm(matrix, with_rows(self.for_sweep, rows * math.sqrt(left**-2 - 1)))


@dataclass(frozen=True)
class JointOnGrid(Method):
    """The support and L of `Joint`; then, in turn, S on that support and on a grid, and L exactly.

    Given L, let S be the best matrix on the support, without the grid. The gradient at S is zero on
    the support. So every S' on the support satisfies

        tr((T − S') H (T − S')ᵀ) = tr((T − S) H (T − S)ᵀ) + tr((S − S') H (S − S')ᵀ),    T = W − L

    and it remains to put S on the grid in the norm of H: by GPTQ's sweep, with the support known,
    and then by coordinate descent on codes, scales and offsets (`solve.grid_descent`). L is the
    exact fit to W − S'. If the pattern keeps everything, or the support is known, the turns start
    with the exact fit to W. The best turn is kept.

    The next L repairs whatever S loses in r directions. Therefore, the steps for S replace H by a
    norm in which these directions count little (ProjQ, arXiv 2606.00494),

        H⊥ = C (I − (1 − d) V Vᵀ)² Cᵀ,    H = C Cᵀ

    with V the r leading right singular vectors of (W − S) C for the previous S. They span the rows
    of L C, since L is the exact fit to W − S. The fit of L and the choice of the best turn use H.

    With few tokens, the correlations between inputs are shrunk (`Gram.shrunk`).

    Args:
        rounds: the number of rounds of `Joint`.
        damping: λ over the mean of diag H.
        turns: the number of turns of S and L.
        passes: the number of passes of the descent in each turn.
        ranges: the number of ranges of values that the sweep tries for each group.
        left: d, the factor by which H⊥ shortens the directions that L repairs; 1 for H⊥ = H.
        relative, scaling, rate_tolerance: as in `SparseGPT`.
    """

    grid: Grid = Grid()
    rounds: Positive = 100
    damping: Figure = 0.01
    turns: Positive = 5
    passes: Count = 3
    ranges: Positive = 20
    left: Annotated[float, Field(gt=0, le=1)] = 0.1
    relative: bool = False
    scaling: Scaling | None = None
    rate_tolerance: Figure = 0.0

    def prepare(self, gram: Gram) -> Prepared:
        joint = Joint(rounds=self.rounds, damping=self.damping)
        return Prepared(gram, gram.shrunk().damped(self.damping), joint)

    def solve(
        self,
        weight: Tensor,
        prepared: Prepared,
        pattern: Pattern,
        start: LowRank,
    ) -> Solution:
        prunes = pattern.kept(weight.shape) < weight.numel()
        if prunes and not isinstance(pattern, KnownSupport):
            free = prepared.joint.solve(weight, prepared.for_joint, pattern, start)
            sparse = free.sparse
            low_rank = free.low_rank
            support = sparse != 0
        else:
            low_rank = fit_exactly(weight, prepared, start)
            support = pattern.mask(weight)
            sparse = weight * support
        objective = Objective(weight, prepared.gram)
        best: Solution | None = None
        history: list[float] = []
        for _ in range(self.turns if start.rank else 1):
            norm = prepared.norm(low_rank, self.left)
            target = weight - low_rank.product()
            if prunes:
                target = masked_cg(norm.matrix, target, sparse, support, CG_STEPS)
            rounded = self._round(target, norm, support)
            del norm  # there may be no memory for two
            sparse = rounded.sparse
            low_rank = fit_exactly(weight - sparse, prepared, start)
            turn = objective.measure(rounded, low_rank)
            if best is None or turn.error < best.error:
                best = turn
            history.append(turn.error)
        assert best is not None
        return replace(best, history=tuple(history))

    def _round(
        self,
        target: Tensor,
        norm: Norm,
        support: Tensor,
    ) -> Pruned:
        """Put a target on the grid by a sweep, followed by passes of descent, unless the grid is
        entropy-coded: descent would change the bits that the codes take.

        Args:
            target: (out, in), zero off the support.
            support: bool (out, in).
        """
        swept = self._sweep().prune(target, norm.for_sweep, KnownSupport(support))
        if self.grid.rate is not None or not self.passes:
            return swept
        return descend(target, swept, norm.matrix, support, self.passes)

    def by_rows(self, weight: Tensor, prepared: Prepared) -> Iterator[tuple[slice, "JointOnGrid"]]:
        """Yield slices of the rows of a weight (out, in), of any floating dtype, with the method
        that solves these rows at rank 0.

        On an entropy-coded grid, all rows share the scales of the inputs, and the bits.
        """
        method = self
        scaling = None
        if self.grid.rate is not None and len(weight) > ROWS:
            target = weight.to(prepared.gram.matrix.dtype) * prepared.given.alive
            scaling = self._sweep().at_rate(target, prepared.for_sweep).scaling
            del target
        for rows in tiles(len(weight), ROWS):
            if scaling is not None:
                method = replace(self, scaling=scaling.of_rows(rows))
            yield rows, method

    def _sweep(self) -> SparseGPT:
        return SparseGPT(
            grid=self.grid,
            ranges=self.ranges,
            relative=self.relative,
            scaling=self.scaling,
            rate_tolerance=self.rate_tolerance,
        )


def fit_exactly(
    target: Tensor,
    prepared: Prepared,
    start: LowRank,
) -> LowRank:
    """Return the best L for a target (out, in), with the rank of `start`."""
    if start.rank:
        return Exact().fit(target, prepared.for_fit, start, 0)
    return start
