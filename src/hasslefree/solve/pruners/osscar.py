"""OSSCAR: remove whole input channels one after another, each time with an exact refit (Meng et
al., arXiv 2403.12983).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import lower_cholesky
from hasslefree.core.patterns import Pattern, Structured
from hasslefree.core.protocols import Pruned, Pruner
from hasslefree.validation import Count, Positive

# A swap must lower the loss by this share of the layer's output, or rounding errors would cause
# endless swaps.
LEAST_GAIN = 1e-10


@dataclass(frozen=True)
class OSSCAR(Pruner):
    """S keeps the channels whose removal would raise the least-squares loss most, with the values
    of that fit.

    With A = H⁻¹, removing the channels R and refitting the kept channels K gives the loss
    tr(T_R (A_RR)⁻¹ T_Rᵀ) and replaces T_K by T_K − T_R (A_RR)⁻¹ A_RK. This is the sweep operator:
    each removal is one step, which can be undone. Channels are removed in order of least loss; then
    a removed channel is exchanged for a kept one as long as this lowers the loss.

    Args:
        steps: the maximum number of removal steps; with more channels to remove, a step removes
            several.
        swaps: the maximum number of exchanges.
        candidates: the number of removed channels that are tried against all kept ones: the
            channels whose return alone would lower the loss most.
    """

    whole_channels = True
    steps: Positive = 256
    swaps: Count = 100
    candidates: Positive = 16

    def prepare(self, gram: Gram) -> Tensor:
        return torch.cholesky_inverse(lower_cholesky(gram.matrix))

    def prune(
        self,
        target: Tensor,
        prepared: Tensor,
        pattern: Pattern,
    ) -> Pruned:
        self.check_pattern(pattern)
        assert isinstance(pattern, Structured)
        state = Swept(prepared.clone(), target.double(), pattern.unit)
        excess = len(state.gone) - pattern.count // pattern.unit
        if excess == 0:
            return Pruned(target.clone())
        step = -(-excess // self.steps)
        for done in range(0, excess, step):
            losses = state.costs().masked_fill_(state.gone, torch.inf)
            cheapest = losses.topk(min(step, excess - done), largest=False).indices
            state.exchange(cheapest)
        least_gain = LEAST_GAIN * state.total
        for _ in range(self.swaps):
            gain, back, out = max(self._exchanges(state))
            if gain <= least_gain:
                break
            state.exchange(torch.tensor([back], device=target.device))
            state.exchange(torch.tensor([out], device=target.device))
        kept = ~state.gone.repeat_interleave(pattern.unit)
        return Pruned((state.target * kept).to(target.dtype))

    def _exchanges(self, state: "Swept") -> list[tuple[float, int, int]]:
        """Return, for each candidate, the gain of the best exchange, the unit that returns, and the
        unit that is removed instead.
        """
        gains = state.costs().neg_().masked_fill_(~state.gone, -torch.inf)
        count = min(self.candidates, int(state.gone.sum()))
        exchanges = []
        for back in gains.topk(count).indices.tolist():
            loss, out = state.losses_with(back).min(0)
            exchanges.append((gains[back].item() - loss.item(), back, int(out)))
        return exchanges


class Swept:
    """T (out, in), refitted on the kept channels, and A = H⁻¹, swept on the removed channels.

    Args:
        inverse: A, (in, in); it is overwritten.
        target: T.
        unit: the number of consecutive channels that are removed together.

    Attributes:
        gone: the removed units, bool (units,).
        total: the loss of removing all units.
    """

    def __init__(
        self,
        inverse: Tensor,
        target: Tensor,
        unit: int,
    ):
        self.inverse = inverse
        self.target = target.clone()
        self.unit = unit
        self.gone = torch.zeros(len(inverse) // unit, dtype=torch.bool, device=target.device)
        self.total = self.costs().sum().item()

    def costs(self) -> Tensor:
        """(units,): for kept units, how much their removal raises the loss; for removed units,
        minus how much their return lowers the loss.
        """
        return self._forms(self.target, self._blocks())

    def losses_with(self, back: int) -> Tensor:
        """Return the costs of the kept units if a removed unit returned, and infinity elsewhere."""
        channels = slice(back * self.unit, (back + 1) * self.unit)
        rows = self.inverse[channels]
        step = torch.linalg.solve(self.inverse[channels, channels], rows)
        target = self.target - self.target[:, channels] @ step
        by_unit = (self.unit, len(self.gone), self.unit)
        change = torch.einsum("igv,igw->gvw", rows.view(by_unit), step.view(by_unit))
        blocks = self._blocks() - change
        blocks[self.gone] = torch.eye(self.unit, dtype=blocks.dtype, device=blocks.device)
        return self._forms(target, blocks).masked_fill_(self.gone, torch.inf)

    def exchange(self, units: Tensor) -> None:
        """Remove units that are all kept, or return units that are all removed."""
        sign = -1.0 if self.gone[units[0]] else 1.0
        offsets = torch.arange(self.unit, device=units.device)
        channels = (units.unsqueeze(1) * self.unit + offsets).flatten()
        rows = self.inverse[channels]
        columns = self.target[:, channels]
        pivot = torch.linalg.inv(rows[:, channels])
        step = pivot @ rows
        self.target.addmm_(columns, step, alpha=-1)
        self.target[:, channels] = sign * columns @ pivot
        self.inverse.addmm_(rows.T, step, alpha=-1)
        self.inverse[channels] = sign * step
        self.inverse[:, channels] = sign * step.T
        self.inverse[channels.unsqueeze(1), channels] = -pivot
        self.gone[units] = ~self.gone[units]

    def _blocks(self) -> Tensor:
        """(units, unit, unit): the diagonal blocks of A."""
        units = len(self.gone)
        blocks = self.inverse.view(units, self.unit, units, self.unit)
        return blocks.diagonal(dim1=0, dim2=2).permute(2, 0, 1).clone()

    def _forms(self, target: Tensor, blocks: Tensor) -> Tensor:
        """(units,): tr(T_g A_gg⁻¹ T_gᵀ)."""
        if self.unit == 1:
            return target.square().sum(0) / blocks.flatten()
        parts = target.view(len(target), -1, self.unit).transpose(0, 1).mT
        return (torch.linalg.solve(blocks, parts) * parts).sum((1, 2))
