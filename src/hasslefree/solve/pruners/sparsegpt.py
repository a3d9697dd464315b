"""SparseGPT and GPTQ: one sweep of optimal-brain-surgeon updates over columns, which prunes,
rounds, or both.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid, Scaling
from hasslefree.core.linalg import inverse_factor
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Pruned, Pruner


@dataclass(frozen=True)
class SparseGPT(Pruner):
    """Columns are decided from left to right, and later columns compensate the error of each
    decision.

    With H⁻¹ = UᵀU, U upper triangular, the loss of changing entry j of a row by e, given the
    columns before it, is (e / U_jj)², and the update of the later columns is −(e / U_jj)·U_j:
    (arXiv 2301.00774, section 3.3). A pruned entry changes by its whole value, a rounded one by its
    rounding error (GPTQ, arXiv 2210.17323), and with both a kept entry is rounded in the same step
    (SparseGPT, section 3.5). An N:M group is chosen at its first column, after the updates; other
    patterns at the first column of a block.

    Args:
        block: the number of columns whose updates are applied to the rest in one product.
        grid: the values that S may have; None for any number. The scale of a group is fitted at its
            first column, after the updates, as in GPTQ. If the pattern prunes, it is fitted to the
            result of pruning the group without rounding: updates within a group enlarge the entries
            that are kept, and the grid must reach that far.
        ranges: the number of ranges of values that are tried for each group of less than a row; see
            `Grid.fit`. Errors are weighed by their cost in the sweep, 1 / U_jj².
    """

    block: int = 128
    grid: Grid | None = None
    ranges: int = 1

    def prepare(self, gram: Gram) -> Tensor:
        return inverse_factor(gram.matrix)

    def prune(
        self,
        target: Tensor,
        prepared: Tensor,
        pattern: Pattern,
    ) -> Pruned:
        scaling = self._scaling(target, prepared, pattern)
        # Columns become rows, (in, out), so that each update runs over contiguous memory.
        columns = target.T.clone(memory_format=torch.contiguous_format)
        width = len(columns)
        whole = pattern.group or 1
        if self.grid and self.grid.group:
            whole = max(whole, self.grid.group)
        block = max(self.block // whole, 1) * whole
        for start in range(0, width, block):
            stop = min(start + block, width)
            here = slice(start, stop)
            sweep = Sweep(pattern, start, width, scaling, self.ranges)
            errors = sweep.run(columns[here], prepared[here, here])
            columns[stop:].addmm_(prepared[here, stop:].T, errors, alpha=-1)
        return Pruned(columns.T.contiguous(), scaling)

    def _scaling(
        self,
        target: Tensor,
        prepared: Tensor,
        pattern: Pattern,
    ) -> Scaling | None:
        """The scaling to begin with. That of whole rows is final; the sweep writes that of smaller
        groups.
        """
        if self.grid is None:
            return None
        self.grid.check((target.shape[0], target.shape[1]), pattern)
        if self.grid.group is not None:
            return self.grid.empty_scaling(target)
        pruned = replace(self, grid=None).prune(target, prepared, pattern)
        return self.grid.scaling(pruned.sparse)


@dataclass(frozen=True)
class Sweep:
    """A sweep over consecutive columns of a weight.

    Args:
        start: the input of the first column.
        width: the number of inputs of the whole weight.
        scaling: of a quantised S. It is written at the first column of each group of its grid.
        ranges: as in `SparseGPT`.
    """

    pattern: Pattern
    start: int
    width: int
    scaling: Scaling | None = None
    ranges: int = 1

    def run(
        self,
        columns: Tensor,
        factor: Tensor,
        known: Tensor | None = None,
    ) -> Tensor:
        """Decide columns.

        Args:
            columns: (b, out), of the inputs start … start + b − 1; it is overwritten.
            factor: the part of U of these inputs, (b, b).
            known: the entries to remove, bool (b, out), of a pattern without groups; None to choose
                them here.

        Returns:
            The scaled errors, (b, out).
        """
        group = self.pattern.group or len(columns)
        removed = torch.zeros_like(columns, dtype=torch.bool) if known is None else known
        pivots = factor.diagonal().unsqueeze(1)
        errors = torch.empty_like(columns)
        for j in range(len(columns)):
            if known is None and j % group == 0:
                removed = self._removed(j, columns[j : j + group], pivots[j : j + group])
            if self.scaling is not None:
                size = self.scaling.grid.group
                if size is not None and j % size == 0:
                    support = None if self.pattern.group else removed[j : j + size]
                    self._fit(j, columns[j : j + size], factor[j : j + size, j : j + size], support)
            decided = columns[j].masked_fill(removed[j % group], 0.0)
            if self.scaling is not None:
                decided = self.scaling.nearest_column(decided, self.start + j)
            torch.sub(columns[j], decided, out=errors[j]).div_(pivots[j])
            columns[j] = decided
            columns[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        return errors

    def _removed(
        self,
        j: int,
        columns: Tensor,
        pivots: Tensor,
    ) -> Tensor:
        """The entries to remove of columns (g, out) from column j on, bool (g, out)."""
        score = (columns / pivots).square().T
        first = self.start + j
        part = self.pattern.restricted(first, first + score.shape[1], self.width)
        return ~part.mask(score).T

    def _fit(
        self,
        j: int,
        columns: Tensor,
        factor: Tensor,
        removed: Tensor | None,
    ) -> None:
        """Write the scale and the zero of the group of columns (g, out) from column j on.

        Args:
            factor: the part of U of these inputs, (g, g).
            removed: the entries to remove, bool (g, out), of a pattern without groups.
        """
        assert self.scaling is not None
        grid = self.scaling.grid
        assert grid.group is not None
        out = columns.shape[1]
        if self.pattern.kept((out, self.width)) < out * self.width:
            columns = columns.clone()
            Sweep(self.pattern, self.start + j, self.width).run(columns, factor, removed)
        weights = factor.diagonal().reciprocal().square()
        scale, zero = grid.fit(columns.T, self.ranges, weights)
        g = (self.start + j) // grid.group
        self.scaling.scale[:, g : g + 1] = scale
        self.scaling.zero[:, g : g + 1] = zero
