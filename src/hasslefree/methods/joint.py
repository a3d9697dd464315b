"""joint: ADMM on the support that follows the best low-rank part in every step (docs/joint.md derives it)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import inverse, masked_cg, matmul_precision, unit_diagonal_scale
from hasslefree.core.low_rank import LowRank, subspace_steps
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Solution
from hasslefree.errors import BudgetError

# Kernels are kept for the next layer with the same input as long as they take no more than this.
KERNEL_BYTES = 2 << 30
# How fast ρ at first falls with the share of the parameters that L holds: the more L takes, the less S needs holding.
RANK_RELIEF = 7.0
# Steps of orthogonal iteration for L in the first round, which begins with noise; one is enough in the others.
FIRST_STEPS = 8
# Steps of conjugate gradients on S in a sweep of the polish.
CG_STEPS = 5


@dataclass(frozen=True)
class ScaledProblem:
    """What depends on the Gram alone, in units where a penalty of one number suits all inputs.

    Args:
        scale: D, (in,): W D takes the place of W.
        gram: D⁻¹HD⁻¹, of the damped H.
    """

    scale: Tensor
    gram: Gram
    _kernels: dict[float, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def kernel(self, rho: float) -> Tensor:
        """K = H(H + ρI)⁻¹ = I − ρ(H + ρI)⁻¹: (in, in). Computed once for each ρ while there is room."""
        found = self._kernels.get(rho)
        if found is None:
            shifted = self.gram.matrix.clone()
            shifted.diagonal().add_(rho)
            found = inverse(shifted).mul_(-rho)
            found.diagonal().add_(1)
            if (len(self._kernels) + 1) * found.nbytes <= KERNEL_BYTES:
                self._kernels[rho] = found
        return found


@dataclass(frozen=True)
class Joint:
    """S and L together: each round of the ADMM minimises over the dense copy of S and L at once.

    The minimum over the copy is exact for every L; L takes a step towards its own.

    Args:
        rounds: time against quality; each costs one out × in × in product.
        damping: λ over the mean of diag H.
        penalty: ρ at first is this times the odds that an entry of S is removed (at least one), times e^(−7s), s
            being the share of the parameters that L holds.
        growth, stages: ρ is multiplied by `growth` from one stage to the next; the stages begin where
            (round/rounds)² passes a multiple of 1/stages.
        sweeps: of the polish on the final support: five steps of conjugate gradients on S, and one step on L.
        tf32: let the product of a round run in TF32 on CUDA. The polish is in float32 all the same.

    Example:
        >>> hasslefree.decompose(weight, gram, pattern="2:4", rank=64, method=Joint(rounds=50))
    """

    rounds: int = 100
    damping: float = 0.01
    penalty: float = 0.4
    growth: float = 1.4
    stages: int = 8
    sweeps: int = 2
    tf32: bool = False

    def __post_init__(self) -> None:
        for name, least in {"rounds": 1, "stages": 1, "sweeps": 0}.items():
            if getattr(self, name) < least:
                raise BudgetError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.penalty <= 0 or self.growth <= 1:
            raise BudgetError(f"penalty must be above 0 and growth above 1, got {self.penalty} and {self.growth}")

    def check(self, rank: int) -> None:
        """Every rank will do; with 0 it is a pruner."""

    def prepare(self, gram: Gram) -> ScaledProblem:
        damped = gram.damped(self.damping)
        scale = refit_scale(damped.matrix)
        return ScaledProblem(scale, Gram(damped.matrix / torch.outer(scale, scale), damped.tokens))

    def solve(
        self, weight: Tensor, prepared: ScaledProblem, pattern: Pattern, rank: int, generator: torch.Generator
    ) -> Solution:
        low_rank = LowRank.gaussian_start(weight, rank, generator)
        scaled = weight * prepared.scale
        density = pattern.kept((weight.shape[0], weight.shape[1])) / weight.numel()
        penalties = self.penalties(density, rank * sum(weight.shape) / weight.numel())
        with matmul_precision(self.tf32, weight.device):
            sparse, mask, low_rank = self._search(scaled, prepared, pattern, low_rank, penalties)
        with matmul_precision(False, weight.device):
            return self._polish(scaled, prepared, sparse, mask, low_rank)

    def penalties(self, density: float, rank_share: float) -> list[float]:
        """ρ of every round, for a layer that keeps these shares of its parameters in S and in the factors of L.

        They are powers of `growth`, so that layers with the same input meet the same ρ.
        """
        odds = max((1 - density) / max(density, 0.02), 1.0)
        start = max(self.penalty * odds * math.exp(-RANK_RELIEF * rank_share), 0.01)
        first = round(math.log(start, self.growth))
        return [self.growth ** (first + int(self.stages * (t / self.rounds) ** 2)) for t in range(self.rounds)]

    def _search(
        self, weight: Tensor, problem: ScaledProblem, pattern: Pattern, low_rank: LowRank, penalties: list[float]
    ) -> tuple[Tensor, Tensor, LowRank]:
        """S, its support, and L, by ADMM. weight: (out, in), scaled.

        The state is X = Z + Y, the dense copy of S with the scaled dual: S = project(X) and Y = X − S.
        """
        low_rank = LowRank(torch.linalg.qr(low_rank.u).Q, low_rank.v)
        state, sparse, target = torch.zeros_like(weight), torch.zeros_like(weight), torch.empty_like(weight)
        mask = torch.ones_like(weight, dtype=torch.bool)
        kernel, before = problem.kernel(penalties[0]), penalties[0]
        for t, rho in enumerate(penalties):
            if rho != before:
                del kernel  # there may be no room for two
                kernel = problem.kernel(rho)
                state.sub_(sparse).mul_(before / rho).add_(sparse)  # Y ← Y·ρ_before/ρ
                before = rho
            torch.add(weight, state, out=target).sub_(sparse, alpha=2)  # T = W − S + Y
            if low_rank.rank:
                low_rank = subspace_steps(target, kernel, low_rank.u, 1 if t else FIRST_STEPS)
                target.addmm_(low_rank.u, low_rank.v, alpha=-1)
            torch.addmm(sparse, target, kernel, out=state)  # Z + Y = S + (T − L) K
            mask = pattern.mask(torch.mul(state, state, out=target))
            torch.mul(state, mask, out=sparse)
        return sparse, mask, low_rank

    def _polish(
        self, weight: Tensor, problem: ScaledProblem, sparse: Tensor, mask: Tensor, low_rank: LowRank
    ) -> Solution:
        """Conjugate gradients on S and a subspace step on L in turn, on the support that was found."""
        gram, history = problem.gram, []
        norm = gram.loss(weight) or 1.0
        for sweep in range(self.sweeps + 1):
            if sweep:
                sparse = masked_cg(gram.matrix, weight - low_rank.product(), sparse, mask, CG_STEPS)
            if low_rank.rank:
                low_rank = subspace_steps(weight - sparse, gram.matrix, low_rank.u, 1)
            history.append(gram.loss(weight - sparse - low_rank.product()) / norm)
        return Solution(sparse / problem.scale, LowRank(low_rank.u, low_rank.v / problem.scale), tuple(history))


def refit_scale(matrix: Tensor) -> Tensor:
    """D, (in,), with D² = 1/[H⁻¹]_jj, for a positive semi-definite H (in, in) with a positive diagonal.

    D² is what is left of H_jj when all other inputs are refitted. Inputs that repeat others would get a scale of almost
    nothing: a hundredth of H_jj is added before the inversion.
    """
    diagonal = unit_diagonal_scale(matrix.diagonal())
    unit = matrix / torch.outer(diagonal, diagonal)
    unit.diagonal().add_(1e-2)
    return diagonal * inverse(unit).diagonal().rsqrt()
