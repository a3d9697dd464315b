"""SparseGPT: one sweep of optimal-brain-surgeon updates over the columns (Frantar & Alistarh, arXiv 2301.00774)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import inverse_factor
from hasslefree.core.patterns import Pattern


@dataclass(frozen=True)
class SparseGPT:
    """Columns are decided from left to right, and what a pruned entry leaves is made good by the columns to come.

    With H⁻¹ = UᵀU, U upper triangular, the loss of removing entry j of a row, given the columns before it, is
    (t_j / U_jj)², and the update of the later columns is −(t_j / U_jj)·U_j: (arXiv 2301.00774, section 3.3).
    An N:M group is chosen at its first column, after the updates; other patterns at the first column of a block.

    Args:
        block: the number of columns whose updates are applied to the rest in one product.
    """

    block: int = 128

    def prepare(self, gram: Gram) -> Tensor:
        return inverse_factor(gram.matrix)

    def prune(self, target: Tensor, prepared: Tensor, pattern: Pattern) -> Tensor:
        # Columns become rows, (in, out), so that each update runs over contiguous memory.
        columns = target.T.clone(memory_format=torch.contiguous_format)
        width = len(columns)
        block = max(self.block // (pattern.group or 1), 1) * (pattern.group or 1)
        for start in range(0, width, block):
            stop = min(start + block, width)
            errors = self._sweep(columns[start:stop], prepared[start:stop, start:stop], pattern, start, width)
            columns[stop:].addmm_(prepared[start:stop, stop:].T, errors, alpha=-1)
        return columns.T.contiguous()

    def _sweep(self, columns: Tensor, factor: Tensor, pattern: Pattern, start: int, width: int) -> Tensor:
        """Prune columns: (b, out) in place, the inputs start … start + b − 1; return the scaled errors (b, out)."""
        group = pattern.group or len(columns)
        pivots = factor.diagonal().unsqueeze(1)
        errors = torch.zeros_like(columns)
        for j in range(len(columns)):
            if j % group == 0:
                ahead = slice(j, j + group)
                score = (columns[ahead] / pivots[ahead]).square().T
                part = pattern.restricted(start + j, start + j + score.shape[1], width)
                removed = ~part.mask(score).T
            torch.mul(columns[j] / pivots[j], removed[j % group], out=errors[j])
            columns[j].masked_fill_(removed[j % group], 0.0)
            columns[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        return errors
