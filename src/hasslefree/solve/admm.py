"""ADMM with a penalty that depends on the changes of the support: the loop of ALPS (arXiv
2406.07831) and 3BASiL (arXiv 2603.01376).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import eigh, unit_diagonal_scale
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.errors import FactorizationError


@dataclass(frozen=True)
class ScaledSpectrum:
    """The problem in the units where H has a unit diagonal: D⁻¹HD⁻¹ = Q diag(λ) Qᵀ with D =
    diag(H)^½.

    Args:
        scale: D, (in,).
        matrix: D⁻¹HD⁻¹, (in, in).
        values: λ, (in,), in float64.
        vectors: Q, (in, in), computed in float64 and cast: every change of ρ multiplies by Q.
    """

    scale: Tensor
    matrix: Tensor
    values: Tensor
    vectors: Tensor

    @classmethod
    def of(cls, gram: Gram) -> "ScaledSpectrum":
        scale = unit_diagonal_scale(gram.diagonal)
        matrix = gram.scaled(scale).matrix
        values, vectors = eigh(matrix.double())
        if values[0] < -1e-5 * values[-1]:
            raise FactorizationError(
                f"the Gram matrix (XᵀX of the layer's {len(matrix)} inputs) is not positive"
                " semidefinite: with its diagonal scaled to 1, its smallest eigenvalue is"
                f" {values[0].item():.1e}; compute it again from the activations"
                " (Gram.from_activations)"
            )
        # Eigenvalues that are negative by rounding would make H + ρI singular for a small ρ.
        return cls(scale, matrix, values.clamp_min(0), vectors.to(matrix.dtype))

    def resolvent(self, rho: float) -> Tensor:
        """ρ(H + ρI)⁻¹: (in, in), in the working dtype."""
        shrinkage = (rho / (self.values + rho)).to(self.vectors.dtype)
        return (self.vectors * shrinkage) @ self.vectors.T


@dataclass(frozen=True)
class SupportPenalty:
    """A penalty ρ that grows while the support changes, faster if more of it changes. The loop ends
    when the support is stable.

    Args:
        start: the initial ρ.
        every: the number of rounds between two checks.
        most: the maximum number of rounds.
        growth: the factors of ρ if more than 10 %, more than 0.5 %, and at least one of the kept
            entries changed since the last check.
        settled: after this number of rounds, the loop ends if less than 0.03 % changed.
    """

    start: float
    every: int
    most: int
    growth: tuple[float, float, float]
    settled: int

    def run(
        self,
        weight: Tensor,
        spectrum: ScaledSpectrum,
        pattern: Pattern,
        start: LowRank,
        fit: Callable[[Tensor], LowRank],
    ) -> tuple[Tensor, LowRank]:
        """Run the ADMM for a weight in the units of `ScaledSpectrum`.

        With Y the dual over ρ, the minimum over Z of tr((W−Z−L) H (W−Z−L)ᵀ) + ρ‖Z − S + Y‖² is
        Z = M + (S − Y − M)·ρ(H + ρI)⁻¹ with M = W − L.

        Args:
            weight: W, (out, in).
            start: the first L.
            fit: computes L for a target W − Z, (out, in); it is called once per round.

        Returns:
            Z, the dense copy of S at the end, (out, in), and L.
        """
        rho = self.start
        resolvent = spectrum.resolvent(rho)
        first = weight * pattern.mask(weight.square())
        sparse = first
        dual = torch.zeros_like(weight)
        low_rank = start
        dense = weight
        checked = sparse != 0
        kept = max(pattern.kept(weight.shape), 1)
        grown = False
        for t in range(1, self.most + 1):
            free = weight - low_rank.product()
            dense = free + (sparse - dual - free) @ resolvent
            dual += dense
            sparse = dual * pattern.mask(dual.square())
            dual -= sparse
            low_rank = fit(weight - dense)
            if t % self.every:
                continue
            support = sparse != 0
            changed = int(torch.count_nonzero(support != checked))
            checked = support
            before = rho
            if changed > 0.005 * kept or (changed and grown):
                rho *= self._growth_for(changed, kept)
                grown = True
            elif grown:
                break
            else:
                # The support has hardly changed since the start: the penalty is too large. Start
                # again with a smaller one.
                rho /= 5
                if changed:
                    sparse = first
                    dual = torch.zeros_like(weight)
            rho = min(rho, 1e6)
            dual *= before / rho
            resolvent = spectrum.resolvent(rho)
            if t > self.settled and changed < 0.0003 * kept:
                break
        return dense, low_rank

    def _growth_for(self, changed: int, kept: int) -> float:
        if changed > 0.1 * kept:
            return self.growth[0]
        if changed > 0.005 * kept:
            return self.growth[1]
        return self.growth[2]
