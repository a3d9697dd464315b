"""OSSCAR: whole input channels, one after the other, each time with an exact refit (Meng et al.,
arXiv 2403.12983).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import lower_cholesky
from hasslefree.core.patterns import Pattern, Structured
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.validation import Count, Positive

# A swap must lower the loss by this share of the layer's output, or rounding error would swap for
# ever.
LEAST_GAIN = 1e-10


@dataclass(frozen=True)
class OSSCAR(Pruner):
    """S keeps the channels whose removal would raise the least-squares loss most, with the values
    of that fit.

    With A = H⁻¹, removing the channels R and refitting the rest to K leaves tr(T_R (A_RR)⁻¹ T_Rᵀ)
    and makes T_K − T_R (A_RR)⁻¹ A_RK of T_K: the sweep operator, of which each removal is a step
    and which can be taken back. Channels are removed in order of least loss; then a removed one is
    exchanged for a kept one while that lowers the loss.

    Args:
        steps: the maximum of removal steps; with more channels to remove, a step removes several.
        swaps: the maximum of exchanges. candidates: the number of removed channels that are tried
            against all kept ones: those whose return alone would lower the loss most.
    """

    whole_channels = True
    steps: Positive = 256
    swaps: Count = 100
    candidates: Positive = 16

    def prepare(self, gram: Gram) -> Tensor:
        return torch.cholesky_inverse(lower_cholesky(gram.matrix))

    def prune(self, target: Tensor, prepared: Tensor, pattern: Pattern) -> Pruned:
        self.check_pattern(pattern)
        assert isinstance(pattern, Structured)
        state = Swept(prepared.clone(), target.double(), pattern.unit)
        excess = len(state.gone) - pattern.count // pattern.unit
        if excess == 0:
            return Pruned(target.clone())
        while left := excess - int(state.gone.sum()):
            several = min(-(-excess // self.steps), left)
            state.exchange(state.losses().topk(several, largest=False).indices)
        least = LEAST_GAIN * state.total
        for _ in range(self.swaps):
            won, back, out = max(self._exchanges(state))
            if won <= least:
                break
            state.exchange(torch.tensor([back], device=target.device))
            state.exchange(torch.tensor([out], device=target.device))
        kept = ~state.gone.repeat_interleave(pattern.unit)
        return Pruned((state.target * kept).to(target.dtype))

    def _exchanges(self, state: "Swept") -> list[tuple[float, int, int]]:
        """The gain of each exchange, the unit that returns, and the best unit to remove for it."""
        gains, exchanges = state.gains(), []
        for back in gains.topk(min(self.candidates, int(state.gone.sum()))).indices.tolist():
            least, out = state.losses_with(back).min(0)
            exchanges.append((gains[back].item() - least.item(), back, int(out)))
        return exchanges


class Swept:
    """T (out, in), refitted in the kept channels, and A = H⁻¹, swept on the others. gone: removed
    units, (units,).
    """

    def __init__(self, inverse: Tensor, target: Tensor, unit: int):
        self.inverse, self.target, self.unit = inverse, target.clone(), unit
        self.gone = torch.zeros(len(inverse) // unit, dtype=torch.bool, device=target.device)
        self.total = self._forms(self.target, self._blocks()).sum().item()

    def losses(self) -> Tensor:
        """(units,): the rise of the loss without each unit; infinite for removed units."""
        return self._forms(self.target, self._blocks()).masked_fill_(self.gone, torch.inf)

    def gains(self) -> Tensor:
        """(units,): the fall of the loss when each unit returns; minus infinity for kept units."""
        return self._forms(self.target, self._blocks()).neg_().masked_fill_(~self.gone, -torch.inf)

    def losses_with(self, back: int) -> Tensor:
        """`losses` if a removed unit returned; infinite for that unit too."""
        place = slice(back * self.unit, (back + 1) * self.unit)
        rows = self.inverse[place]
        step = torch.linalg.solve(self.inverse[place, place], rows)
        target = self.target - self.target[:, place] @ step
        by_unit = (self.unit, len(self.gone), self.unit)
        blocks = self._blocks() - torch.einsum(
            "igv,igw->gvw", rows.view(by_unit), step.view(by_unit)
        )
        blocks[self.gone] = torch.eye(self.unit, dtype=blocks.dtype, device=blocks.device)
        return self._forms(target, blocks).masked_fill_(self.gone, torch.inf)

    def exchange(self, units: Tensor) -> None:
        """Remove kept units, or return removed ones: all units must be of one kind."""
        sign = -1.0 if self.gone[units[0]] else 1.0
        places = (
            units.unsqueeze(1) * self.unit + torch.arange(self.unit, device=units.device)
        ).flatten()
        rows = self.inverse[places]
        pivot = torch.linalg.inv(rows[:, places])
        step, columns = pivot @ rows, self.target[:, places]
        self.target.addmm_(columns, step, alpha=-1)
        self.inverse.addmm_(rows.T, step, alpha=-1)
        self.target[:, places] = sign * columns @ pivot
        self.inverse[places], self.inverse[:, places] = sign * step, sign * step.T
        self.inverse[places.unsqueeze(1), places] = -pivot
        self.gone[units] = ~self.gone[units]

    def _blocks(self) -> Tensor:
        """(units, unit, unit): the diagonal blocks of A."""
        units = len(self.gone)
        return (
            self.inverse.view(units, self.unit, units, self.unit)
            .diagonal(dim1=0, dim2=2)
            .permute(2, 0, 1)
            .clone()
        )

    def _forms(self, target: Tensor, blocks: Tensor) -> Tensor:
        """(units,): tr(T_g A_gg⁻¹ T_gᵀ)."""
        if self.unit == 1:
            return target.square().sum(0) / blocks.flatten()
        parts = target.view(len(target), -1, self.unit).transpose(0, 1)
        return (torch.linalg.solve(blocks, parts.mT) * parts.mT).sum((1, 2))
