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
        grid: what S may hold; None for any number. The scale of a group is fitted at its first
            column, after the updates, as in GPTQ; where the pattern prunes, to what pruning alone
            would leave of the group: updates within a group enlarge what is kept of it, and the
                grid must reach that far.
        ranges: how many ranges of values are tried for each group of less than a row; see
            `Grid.fit`. Errors are weighed by what they cost in the sweep, 1 / U_jj².
    """

    block: int = 128
    grid: Grid | None = None
    ranges: int = 1

    def prepare(self, gram: Gram) -> Tensor:
        return inverse_factor(gram.matrix)

    def prune(self, target: Tensor, prepared: Tensor, pattern: Pattern) -> Pruned:
        scaling = self._scaling(target, prepared, pattern)
        # Columns become rows, (in, out), so that each update runs over contiguous memory.
        columns = target.T.clone(memory_format=torch.contiguous_format)
        width = len(columns)
        whole = max(pattern.group or 1, (self.grid.group or 1) if self.grid else 1)
        block = max(self.block // whole, 1) * whole
        for start in range(0, width, block):
            stop = min(start + block, width)
            errors = self._sweep(
                columns[start:stop],
                prepared[start:stop, start:stop],
                pattern,
                start,
                width,
                scaling,
            )
            columns[stop:].addmm_(prepared[start:stop, stop:].T, errors, alpha=-1)
        return Pruned(columns.T.contiguous(), scaling)

    def _scaling(self, target: Tensor, prepared: Tensor, pattern: Pattern) -> Scaling | None:
        """The scaling to begin with: of whole rows for good, of smaller groups to be written by the
        sweep.
        """
        if self.grid is None:
            return None
        self.grid.check((target.shape[0], target.shape[1]), pattern)
        if self.grid.group is not None:
            return self.grid.empty_scaling(target)
        return self.grid.scaling(replace(self, grid=None).prune(target, prepared, pattern).sparse)

    def _sweep(
        self,
        columns: Tensor,
        factor: Tensor,
        pattern: Pattern,
        start: int,
        width: int,
        scaling: Scaling | None = None,
        known: Tensor | None = None,
    ) -> Tensor:
        """Decide columns: (b, out) in place, the inputs start … start + b − 1; return the scaled
        errors (b, out).

        scaling: written at the first column of each group of its grid. known: what is removed, bool
        (b, out), of a pattern without groups; None to choose it here.
        """
        group = pattern.group or len(columns)
        removed = torch.zeros_like(columns, dtype=torch.bool) if known is None else known
        pivots = factor.diagonal().unsqueeze(1)
        errors = torch.empty_like(columns)
        for j in range(len(columns)):
            if known is None and j % group == 0:
                ahead = slice(j, j + group)
                score = (columns[ahead] / pivots[ahead]).square().T
                part = pattern.restricted(start + j, start + j + score.shape[1], width)
                removed = ~part.mask(score).T
            if (
                scaling is not None
                and scaling.grid.group is not None
                and j % scaling.grid.group == 0
            ):
                ahead = slice(j, j + scaling.grid.group)
                pruned, out = columns[ahead], columns.shape[1]
                if (
                    pattern.kept((out, width)) < out * width
                ):  # fitted to what pruning alone would leave of the group
                    pruned, support = pruned.clone(), None if pattern.group else removed[ahead]
                    self._sweep(
                        pruned, factor[ahead, ahead], pattern, start + j, width, known=support
                    )
                weights, g = (
                    pivots[ahead, 0].reciprocal().square(),
                    (start + j) // scaling.grid.group,
                )
                fitted = scaling.grid.fit(pruned.T, self.ranges, weights)
                scaling.scale[:, g : g + 1], scaling.zero[:, g : g + 1] = fitted
            decided = columns[j].masked_fill(removed[j % group], 0.0)
            if scaling is not None:
                decided = scaling.nearest_column(decided, start + j)
            torch.sub(columns[j], decided, out=errors[j]).div_(pivots[j])
            columns[j] = decided
            columns[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        return errors
