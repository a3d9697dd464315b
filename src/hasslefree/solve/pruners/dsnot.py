"""DSNoT: swap entries in and out until the expected error stops falling (Zhang et al., arXiv
2310.08915).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.patterns import Pattern, Structured
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.solve.pruners.diagonal import Wanda

# The means and the variances of the inputs, (in,) each; and the result of `prepare` of `start`.
Prepared = tuple[Tensor, Tensor, Any]


@dataclass(frozen=True)
class DSNoT(Pruner):
    """S keeps entries of T unchanged. It starts with the support of another pruner, and swaps
    entries to lower the expected error.

    Suppose that the inputs are independent, with means μ and variances σ². If a row loses the
    entries P, the expected squared error is e² + Σ_P t²σ² with e = Σ_P t·μ. In every cycle, a row
    takes back the entry of P that reduces e the most per variance, t·μ/σ² in the direction of e
    (the paper's growing criterion), and gives up the entry that makes the sum smallest; it stops
    when no such swap lowers the sum. The paper gives up the entry with the smallest `|t|·‖x‖`, and
    stops when e changes sign; judging a swap by the sum is better (docs/explanation/maths.md).
    Swaps stay within a group of an N:M pattern; for structured patterns, whole channels are
    swapped, and e is a vector.

    Args:
        start: the pruner that chooses the first support; its values are not used.
        cycles: the maximum number of swaps per row; the authors use 50.
    """

    start: Pruner = Wanda()
    cycles: int = 50

    def prepare(self, gram: Gram) -> Prepared:
        # The variance of a constant input must not be zero, since it is a divisor.
        rounding = torch.finfo(gram.matrix.dtype).eps * torch.where(gram.alive, gram.diagonal, 1.0)
        variance = torch.maximum(gram.diagonal - gram.means.square(), rounding)
        return gram.means, variance, self.start.prepare(gram)

    def prune(
        self,
        target: Tensor,
        prepared: Prepared,
        pattern: Pattern,
    ) -> Pruned:
        mean, variance, for_start = prepared
        kept = self.start.prune(target, for_start, pattern).sparse != 0
        # Each row is a problem of its own; for a structured pattern, all rows are one problem.
        if isinstance(pattern, Structured):
            problems = target.unsqueeze(0)
            kept = kept.any(0, keepdim=True)
        else:
            problems = target.unsqueeze(1)
        return Pruned(target * self._swapped(problems, kept, mean, variance, pattern.group))

    def _swapped(
        self,
        target: Tensor,
        start: Tensor,
        mean: Tensor,
        variance: Tensor,
        group: int | None,
    ) -> Tensor:
        """Return the support after the swaps, bool (b, in).

        Args:
            target: (b, o, in), for b problems with o outputs each.
            start: the support before the swaps, bool (b, in).
            mean, variance: those of the inputs, (in,).
            group: the number of consecutive inputs within which entries are swapped; None for all.
        """
        mask = start.clone()
        problems = torch.arange(len(mask), device=mask.device)
        group_of = torch.arange(mask.shape[1], device=mask.device) // (group or mask.shape[1])
        pull = target * mean  # what an entry adds to e
        scatter = target.square().sum(1) * variance + pull.square().sum(1)
        error = (pull * ~mask.unsqueeze(1)).sum(2)
        rounding = torch.finfo(target.dtype).eps * (scatter * ~mask).sum(1)
        for _ in range(self.cycles):
            along = torch.einsum("bo,boi->bi", error, pull)
            back = (along / variance).masked_fill_(mask, -torch.inf).argmax(1)
            returned = pull[problems, :, back]
            gain = 2 * along[problems, back] - 2 * returned.square().sum(1)
            gain = gain + scatter[problems, back]
            allowed = mask & (group_of == group_of[back].unsqueeze(1))
            cost = torch.einsum("bo,boi->bi", error - returned, pull).mul_(2).add_(scatter)
            cost, out = cost.masked_fill_(~allowed, torch.inf).min(1)
            better = (gain - cost > rounding) & ~mask[problems, back]
            if not better.any():
                break
            rows = problems[better]
            mask[rows, back[better]] = True
            mask[rows, out[better]] = False
            error[rows] += pull[rows, :, out[better]] - returned[better]
        return mask
