"""joint: ADMM on the support, with L as a function of the dense copy of S.

Each round takes a step of orthogonal iteration for L and projects S on the pattern, as in the ADMM
of ALPS. A polish follows, which alternates masked conjugate gradients for S with the same step for
L. docs/explanation/joint.md has the derivation.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from hasslefree.core import linalg, products
from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank, subspace_steps
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method, Pruned, Solution
from hasslefree.solve.objective import Objective
from hasslefree.solve.project import project_step
from hasslefree.solve.scaled import ScaledProblem, refit_scale
from hasslefree.validation import Count, Factor, Figure, Positive

# How fast the initial ρ and S fall with the share of the parameters in L: a larger L leaves less
# for S.
RANK_RELIEF = 7.0
# Steps of orthogonal iteration for L in the first round, which starts from noise; in later rounds,
# one step is enough.
FIRST_STEPS = 8
# CHECKS times per run we measure how much of the support changed in one round. ρ grows if that is
# more than planned; the plan falls linearly from the share MOVING of the kept entries to none at
# the share SETTLED of the rounds.
CHECKS = 20
MOVING = 0.3
SETTLED = 0.95
# Steps of conjugate gradients on S in a sweep of the polish.
CG_STEPS = 5
# The rounds are split into PARTS parts of at least five rounds. After each part the objective is
# measured on one row in SAMPLED: on all rows, that would cost as much as a round. An odd step does
# not select the same rows of every head.
PARTS = 10
SAMPLED = 9
# Sampled rows are not representative if their share of the objective is below this times their
# share of all rows.
LEAST_SHARE = 0.1

# The dtype of the products of the rounds.
Precision = Literal["auto", "float32", "tf32", "bfloat16"]


@dataclass(frozen=True)
class Searched:
    """The result of the rounds of the ADMM.

    Args:
        sparse: S, (out, in).
        mask: the support of S, bool (out, in).
        low_rank: L.
        course: `sampled_loss` after every part of the rounds except the last.
    """

    sparse: Tensor
    mask: Tensor
    low_rank: LowRank
    course: list[float]


@dataclass(frozen=True)
class Joint(Method):
    """S and L together: each round of the ADMM minimises over the dense copy of S and L at once.

    The minimum over the copy is exact for every L; L takes one step towards its minimum. With few
    tokens, the correlations between inputs are shrunk (`Gram.shrunk`).

    Args:
        rounds: more rounds are better and slower; each one takes one out × in × in product.
        damping: λ over the mean of diag H.
        penalty: the initial ρ is this number times the odds that an entry of S is removed (at least
            one), times e^(−7s), with s the share of the parameters in L. The rounds start at
            e^(−7s)·W.
        growth: the factor of ρ if more of the support changes in a round than planned. The plan
            falls from 30 % of the kept entries at the start to none at the end.
        sweeps: the number of sweeps of the polish on the final support: five steps of conjugate
            gradients for S, and one step for L.
        precision: the dtype of the products of the rounds; sums are in float32. "auto" is TF32 on
            CUDA, bfloat16 on a processor with instructions for it, and the dtype of the solver
            elsewhere; it also applies to the products of the polish. "tf32" is for CUDA.

    The history of a solution ends with the objective before the polish and after each sweep. It
    starts with estimates after each tenth of the rounds except the last (every fifth round, if
    there are fewer than 50): the objective of every ninth row, scaled by the ratio of all rows to
    these rows at the end. If the sampled rows are not representative, there are no estimates.

    Example:
        >>> hasslefree.decompose(weight, gram, pattern="2:4", rank=64, method=Joint(rounds=50))
    """

    rounds: Positive = 100
    damping: Figure = 0.01
    penalty: Annotated[float, Field(gt=0)] = 0.4
    growth: Factor = 1.4
    sweeps: Count = 2
    precision: Precision = "auto"

    def prepare(self, gram: Gram) -> ScaledProblem:
        damped = gram.shrunk().damped(self.damping)
        scale = refit_scale(damped)
        return ScaledProblem(scale, damped.scaled(scale), self.product_dtype(gram.matrix))

    def solve(
        self,
        weight: Tensor,
        prepared: ScaledProblem,
        pattern: Pattern,
        start: LowRank,
    ) -> Solution:
        scaled = weight * prepared.scale
        out, width = weight.shape
        density = pattern.kept(weight.shape) / (out * width)
        relief = math.exp(-RANK_RELIEF * start.rank * (out + width) / (out * width))
        power = self.first_power(density, relief)
        with products.matmul_precision(weight.device, tf32=self.precision in ("auto", "tf32")):
            searched = self._search(scaled, prepared, pattern, start, power, scaled * relief)
        with products.matmul_precision(weight.device):
            polished = self._polish(Objective(scaled, prepared.gram), searched)
        low_rank = LowRank(polished.low_rank.u, polished.low_rank.v / prepared.scale)
        return replace(polished, sparse=polished.sparse / prepared.scale, low_rank=low_rank)

    def first_power(self, density: float, relief: float) -> int:
        """Return log ρ to the base `growth` for the first round: a whole number, so that layers
        with the same input use the same values of ρ.
        """
        odds = max((1 - density) / max(density, 0.02), 1.0)
        rho = max(self.penalty * odds * relief, 0.01)
        return round(math.log(rho, self.growth))

    def moves_too_much(
        self,
        mask: Tensor,
        last: Tensor,
        done: int,
    ) -> bool:
        """Return True if ρ must grow: a check is due after `done` rounds, and too much of the
        support (out, in) changed from `last` to `mask`.
        """
        due = done * CHECKS // self.rounds > (done - 1) * CHECKS // self.rounds
        if not due or done == self.rounds:
            return False
        planned = MOVING * max(1 - done / (SETTLED * self.rounds), 0.0)
        changed = torch.count_nonzero(mask ^ last)
        kept = torch.count_nonzero(mask)
        # Only one number is read, because each read waits for the GPU.
        return bool(changed >= 2 * planned * kept.double())

    def product_dtype(self, like: Tensor) -> torch.dtype:
        """Return the dtype to which T − L and K are rounded for their product."""
        if self.precision == "bfloat16":
            return torch.bfloat16
        may_round = self.precision == "auto" and like.dtype == torch.float32
        if may_round and products.multiplies_bfloat16(like.device):
            return torch.bfloat16
        return like.dtype

    def _search(
        self,
        weight: Tensor,
        problem: ScaledProblem,
        pattern: Pattern,
        start: LowRank,
        power: int,
        state: Tensor,
    ) -> Searched:
        """Run the rounds of the ADMM.

        Args:
            weight: W, (out, in).
            start: the first L.
            power: log ρ to the base `growth` for the first round.
            state: the first X = Z + Y, (out, in), the dense copy of S with the scaled dual; it is
                overwritten. S = project(X) and Y = X − S.
        """
        low_rank = LowRank(linalg.orthonormal(start.u), start.v)
        target = torch.empty_like(weight)
        mask = pattern.mask(torch.mul(state, state, out=target))
        sparse = state * mask
        kernel = problem.kernel(self.growth**power)
        course: list[float] = []
        parts = min(PARTS, self.rounds // 5)
        torch.add(weight, state, out=target).sub_(sparse, alpha=2)  # T = W − S + Y
        for t in range(self.rounds):
            if low_rank.rank:
                steps = 1 if t else FIRST_STEPS
                low_rank = subspace_steps(target, kernel, low_rank.u, steps)
                target.addmm_(low_rank.u, low_rank.v, alpha=-1)
            if kernel.dtype == weight.dtype:
                torch.mm(target, kernel, out=state)
            else:
                state.copy_(target.to(kernel.dtype) @ kernel)
            # Z + Y = S + (T − L) K; then the next S, Y and T.
            last = mask
            mask = project_step(pattern, weight, state, sparse, target)
            if t * parts // self.rounds < (t + 1) * parts // self.rounds < parts:
                course.append(sampled_loss(problem.gram, weight, sparse, low_rank))
            if self.moves_too_much(mask, last, t + 1):
                del kernel  # there may be no memory for two
                power += 1
                kernel = problem.kernel(self.growth**power)
                state.sub_(sparse).div_(self.growth)  # Y ← Y·ρ_before/ρ
                torch.sub(weight, sparse, out=target).add_(state)
        return Searched(sparse, mask, low_rank, course)

    def _polish(self, objective: Objective, searched: Searched) -> Solution:
        """Alternate steps of conjugate gradients for S with a subspace step for L, on the support
        from the rounds.
        """
        weight = objective.weight
        gram = objective.gram
        narrow = self.precision in ("auto", "bfloat16")
        low_rank = subspace_steps(weight - searched.sparse, gram.matrix, searched.low_rank.u, 1)
        best = objective.measure(Pruned(searched.sparse), low_rank)
        history = [*estimates(searched.course, objective, best), best.error]
        remarks: tuple[str, ...] = ()
        for sweep in range(1, self.sweeps + 1):
            target = weight - best.low_rank.product()
            sparse = linalg.masked_cg(
                gram.matrix, target, best.sparse, searched.mask, CG_STEPS, narrow=narrow
            )
            low_rank = subspace_steps(weight - sparse, gram.matrix, best.low_rank.u, 1)
            tried = objective.measure(Pruned(sparse), low_rank)
            if not tried.error <= 1.01 * best.error + 1e-9:  # NaN too
                remarks = (
                    f"sweep {sweep} of the polish was undone: rounding raised the objective to"
                    f" {tried.error:.2g}",
                )
                break
            best = tried
            history.append(best.error)
        return replace(best, history=tuple(history), remarks=remarks)


def sampled_loss(
    gram: Gram,
    weight: Tensor,
    sparse: Tensor,
    low_rank: LowRank,
) -> float:
    """Return tr(R H Rᵀ), R = W − S − L, of one row in SAMPLED. weight, sparse: (out, in)."""
    sampled = LowRank(low_rank.u[::SAMPLED], low_rank.v)
    return gram.loss(sampled.residual(weight[::SAMPLED], sparse[::SAMPLED]))


def estimates(
    course: list[float],
    objective: Objective,
    end: Solution,
) -> list[float]:
    """Estimate the relative objective during the rounds from the sampled rows; return nothing if
    they are not representative.

    Args:
        course: the loss of the sampled rows during the rounds.
        end: the solution at the end of the rounds.
    """
    loss_at_end = sampled_loss(objective.gram, objective.weight, end.sparse, end.low_rank)
    out = len(objective.weight)
    sampled = -(-out // SAMPLED)
    if loss_at_end > LEAST_SHARE * (end.error * objective.norm * sampled / out):
        return [loss * end.error / loss_at_end for loss in course]
    return []


# For a quick estimate of the loss that a pattern causes in a layer: few rounds, and no polish.
# The polish gains about the same in every layer unless some inputs are nearly equal.
QUICK_PRUNING = Joint(rounds=10, sweeps=0)
