"""SparseGPT and GPTQ: one sweep of optimal-brain-surgeon updates over columns, which prunes,
rounds, or both.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid, Quantised, Scaling
from hasslefree.core.linalg import inverse_factor
from hasslefree.core.patterns import KnownSupport, Pattern, Row
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.solve.at_rate import at_rate
from hasslefree.validation import Figure

# The smallest root mean square of a row relative to that of the matrix, for relative steps.
SHORTEST = 2.0**-6


@dataclass(frozen=True)
class SparseGPT(Pruner):
    """Columns are pruned and rounded in turn, and later columns compensate for the errors.

    With H⁻¹ = UᵀU, U upper triangular, the loss of changing entry j of a row by e, given the
    columns before it, is (e / U_jj)², and the update of the later columns is −(e / U_jj)·U_j
    (arXiv 2301.00774, section 3.3). A pruned entry changes by its whole value, and a rounded one by
    its rounding error (GPTQ, arXiv 2210.17323); with both, kept entries are rounded in the same
    step (SparseGPT, section 3.5). The entries of an N:M group are chosen at its first
    column, after the updates; for other patterns, at the first column of a block.

    Args:
        block: the number of columns whose updates are applied to the rest in one product.
        grid: the values that S may have; None for any number. The scale of a group is fitted at its
            first column, after the updates, as in GPTQ. If the pattern prunes, it is fitted to the
            result of pruning the group without rounding: updates within a group enlarge the entries
            that are kept, and the grid must reach that far.
            On an entropy-coded grid, the steps of the inputs are proportional to U_jj, and a few
            sweeps are made until the codes take the bits of the grid (`solve.at_rate`).
        ranges: the number of ranges of values that are tried for each group smaller than a row; see
            `Grid.search`. Errors are weighted by their cost in the sweep, 1 / U_jj².
        relative: on an entropy-coded grid, make the steps of a row proportional to its root mean
            square, as the rows of an embedding need; False for equal steps in all rows.
        scaling: the scaling of S on an entropy-coded grid, if known; None to search for one.
        rate_tolerance: the relative deviation of the bits of S from those of an entropy-coded grid
            that is accepted. Above 0, the codes may not fit into a file: for estimates only.
    """

    block: int = 128
    grid: Grid | None = None
    ranges: int = 1
    relative: bool = False
    scaling: Scaling | None = None
    rate_tolerance: Figure = 0.0

    def prepare(self, gram: Gram) -> Tensor:
        return inverse_factor(gram.matrix)

    def prune(
        self,
        target: Tensor,
        prepared: Tensor,
        pattern: Pattern,
    ) -> Pruned:
        if self.grid is not None:
            self.grid.check(target.shape, pattern)
            if self.grid.rate is not None and self.scaling is None:
                quantised = self.at_rate(target, prepared)
                return Pruned(quantised.values(), quantised.scaling)
        scaling = self._scaling(target, prepared, pattern)
        return Pruned(self._swept(target, prepared, pattern, scaling), scaling)

    def at_rate(self, target: Tensor, prepared: Tensor) -> Quantised:
        """Put S on an entropy-coded grid, some rows at a time.

        Args:
            target: (out, in).
            prepared: the result of `prepare`.
        """
        assert self.grid is not None

        def decide(rows: slice, scaling: Scaling) -> Tensor:
            part = target[rows]
            return self._swept(part, prepared, Row(part.shape[1]), scaling)

        return at_rate(
            self.grid,
            target,
            prepared.diagonal().abs(),
            decide,
            lengths(target) if self.relative else None,
            self.rate_tolerance,
        )

    def _swept(
        self,
        target: Tensor,
        prepared: Tensor,
        pattern: Pattern,
        scaling: Scaling | None,
    ) -> Tensor:
        """Return S (out, in) on this scaling, which is written if groups are smaller than a row."""
        # Columns become rows, (in, out), so that each update runs over contiguous memory.
        columns = target.T.clone(memory_format=torch.contiguous_format)
        width = len(columns)
        whole = pattern.group or 1
        if self.grid and self.grid.group:
            whole = max(whole, self.grid.group)
        block = max(self.block // whole, 1) * whole
        for start in range(0, width, block):
            stop = min(start + block, width)
            inputs = slice(start, stop)
            sweep = Sweep(pattern.restricted(inputs, width), start, scaling, self.ranges)
            errors = sweep.run(columns[inputs], prepared[inputs, inputs])
            columns[stop:].addmm_(prepared[inputs, stop:].T, errors, alpha=-1)
        return columns.T.contiguous()

    def _scaling(
        self,
        target: Tensor,
        prepared: Tensor,
        pattern: Pattern,
    ) -> Scaling | None:
        """Return the first scaling: final for whole rows; the sweep fills it for smaller groups."""
        if self.grid is None or self.scaling is not None:
            return self.scaling
        if self.grid.group is not None:
            return self.grid.empty_scaling(target)
        pruned = replace(self, grid=None).prune(target, prepared, pattern)
        return self.grid.scaling(pruned.sparse)


def lengths(matrix: Tensor) -> Tensor:
    """Return the root mean squares of the rows of a matrix, relative to that of the matrix: (out,),
    at least SHORTEST.
    """
    squares = matrix.square().mean(1)
    mean = squares.mean()
    if not mean:
        return torch.ones_like(squares)
    return (squares / mean).clamp_min(SHORTEST**2).sqrt()


@dataclass(frozen=True)
class Sweep:
    """A sweep over consecutive columns of a weight.

    Args:
        pattern: the pattern of these columns.
        start: the input of the first column.
        scaling: the scaling of a quantised S, written at the first column of each group.
        ranges: as in `SparseGPT`.
    """

    pattern: Pattern
    start: int = 0
    scaling: Scaling | None = None
    ranges: int = 1

    def run(self, columns: Tensor, factor: Tensor) -> Tensor:
        """Prune and round columns.

        Args:
            columns: (b, out), of the inputs start … start + b − 1; it is overwritten.
            factor: the part of U of these inputs, (b, b).

        Returns:
            The scaled errors, (b, out).
        """
        group = self.pattern.group or len(columns)
        pivots = factor.diagonal().unsqueeze(1)
        removed = torch.empty_like(columns, dtype=torch.bool)
        errors = torch.empty_like(columns)
        for j in range(len(columns)):
            if j % group == 0:
                chosen = slice(j, j + group)
                score = (columns[chosen] / pivots[chosen]).square().T
                removed[chosen] = ~self.pattern.mask(score).T
            decided = columns[j].masked_fill(removed[j], 0.0)
            if self.scaling is not None:
                size = self.scaling.grid.group
                if size is not None and j % size == 0:
                    self._fit(self.scaling, slice(j, j + size), columns, factor, removed)
                decided = self.scaling.at(self.start + j).nearest(decided)
            torch.sub(columns[j], decided, out=errors[j]).div_(pivots[j])
            columns[j] = decided
            columns[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        return errors

    def _fit(
        self,
        scaling: Scaling,
        inputs: slice,
        columns: Tensor,
        factor: Tensor,
        removed: Tensor,
    ) -> None:
        """Write the scale and the zero of a group of columns.

        Args:
            inputs: the columns of the group.
            columns, factor: as for `run`.
            removed: the entries to remove, bool (b, out), as far as they are known yet.
        """
        pattern = self.pattern
        if pattern.group is None:
            pattern = KnownSupport(~removed[inputs].T)
        group = columns[inputs].clone()
        group_factor = factor[inputs, inputs]
        if pattern.kept(group.T.shape) < group.numel():
            Sweep(pattern).run(group, group_factor)
        weights = group_factor.diagonal().reciprocal().square()
        first = self.start + inputs.start
        storage = scaling.storage_at(first)
        best = scaling.grid.search(group.T, self.ranges, weights, storage)
        levels = scaling.at(first)
        levels.scale.copy_(best.scale.squeeze(1))
        levels.zero.copy_(best.zero.squeeze(1))
