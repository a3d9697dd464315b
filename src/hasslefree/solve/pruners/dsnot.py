"""DSNoT: entries are swapped in and out until the expected error stops falling (Zhang et al., arXiv
2310.08915).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.cost import Cost
from hasslefree.core.gram import Gram
from hasslefree.core.patterns import Pattern, Structured
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.solve.pruners.diagonal import Wanda

# The means and the variances of the inputs, (in,) each, and what the first pruner prepared.
Prepared = tuple[Tensor, Tensor, Any]


@dataclass(frozen=True)
class DSNoT(Pruner):
    """S keeps entries of T as they are: first those of another pruner, then swaps make the expected
    error smaller.

    Take the inputs for independent, with means μ and variances σ². A row that loses the entries P
    has the expected squared error e² + Σ_P t²σ² with e = Σ_P t·μ. In every cycle a row takes back
    the entry of P that pulls e back the most per variance, t·μ/σ² in the direction of e (the
    paper's growing criterion), and gives up the one that makes the sum smallest; it stops when no
    such swap lowers the sum. The paper gives up the entry of the least `|t|·‖x‖`,
    and stops when e changes its sign: to judge the swap by its own sum does better
    (docs/explanation/maths.md). Swaps stay within a group of an N:M pattern; for a structured one,
    whole channels are swapped, and e is a vector.

    Args:
        start: the pruner whose support is the first; of its values nothing is kept.
        cycles: swaps of a row at most; 50 is the authors'.
    """

    start: Pruner = Wanda()
    cycles: int = 50

    def prepare(self, gram: Gram) -> Prepared:
        # An input that never varies can be divided by, too.
        rounding = torch.finfo(gram.matrix.dtype).eps * torch.where(gram.alive, gram.diagonal, 1.0)
        return gram.means, torch.maximum(gram.variances, rounding), self.start.prepare(gram)

    def prune(self, target: Tensor, prepared: Prepared, pattern: Pattern) -> Pruned:
        mean, variance, for_start = prepared
        kept = self.start.prune(target, for_start, pattern).sparse != 0
        # Problems × outputs of each × inputs: a row is a problem, or all rows together are one.
        together = isinstance(pattern, Structured)
        shaped = target.unsqueeze(0) if together else target.unsqueeze(1)
        mask = self._swapped(
            shaped, kept.any(0, keepdim=True) if together else kept, mean, variance, pattern.group
        )
        return Pruned(target * mask)

    @property
    def cost(self) -> Cost:
        return self.start.cost

    def _swapped(
        self, target: Tensor, mask: Tensor, mean: Tensor, variance: Tensor, group: int | None
    ) -> Tensor:
        """The support, bool (b, in), after the swaps from one. target: (b, o, in): b problems with
        o outputs each.
        """
        mask, problems = mask.clone(), torch.arange(len(mask), device=mask.device)
        places = torch.arange(mask.shape[1], device=mask.device) // (group or mask.shape[1])
        pull = target * mean  # what an entry adds to e
        scatter = target.square().sum(1) * variance + pull.square().sum(1)
        error = (pull * ~mask.unsqueeze(1)).sum(2)
        least = torch.finfo(target.dtype).eps * (scatter * ~mask).sum(1)
        for _ in range(self.cycles):
            along = torch.einsum("bo,boi->bi", error, pull)
            back = (along / variance).masked_fill_(mask, -torch.inf).argmax(1)
            returned = pull[problems, :, back]
            gain = (
                2 * along[problems, back] - 2 * returned.square().sum(1) + scatter[problems, back]
            )
            allowed = mask & (places == places[back].unsqueeze(1))
            cost = torch.einsum("bo,boi->bi", error - returned, pull).mul_(2).add_(scatter)
            cost, out = cost.masked_fill_(~allowed, torch.inf).min(1)
            better = (gain - cost > least) & ~mask[problems, back]
            if not better.any():
                break
            rows = problems[better]
            mask[rows, back[better]], mask[rows, out[better]] = True, False
            error[rows] += pull[rows, :, out[better]] - returned[better]
        return mask
