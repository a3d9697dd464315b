"""The plans that one layer may get, the loss with each, and the ladders that lead to them."""

import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hasslefree.allocate.ladders import Ladder, hull, rank_gains
from hasslefree.allocate.sensitivity import BitsAndError, ProbedLayer
from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import KnownSupport, Unstructured
from hasslefree.planning.plan import LayerPlan
from hasslefree.planning.uniform import STEP as RANK_STEP
from hasslefree.recipe.engines import types_for
from hasslefree.recipe.resolve import Resolved, takes_types

# The least and the largest share of its uniform rank and non-zeros that a layer may get.
LEAST = 0.5
MOST = 2.0
# A layer on a grid may choose from ranks up to this one, or as many as MOST allows.
RANKS = 128
# Non-zeros move in this number of steps between the two shares.
NONZERO_STEPS = 256
# The errors of this many rows on a grid stand for the errors of all rows.
ROWS = 256
# An error on a grid up to this share of the error with the fewest bits counts as none.
NO_ERROR = 1e-6
# Rates at which errors are measured, besides the outer ones; logarithms are interpolated between.
MEASURED_RATES = (4.0,)
# Plans of a matrix, each with its loss in nats per token.
PricedPlans = list[tuple[LayerPlan, float]]


@dataclass(frozen=True)
class BudgetOptions:
    """Ranks around the uniform one, and non-zeros if the pattern counts them.

    Args:
        uniform: the layer's plan in the uniform budget.
        first_rank: the rank below the first step.
        first_nonzeros: the non-zeros below the first step.
        nonzeros_per_step: non-zeros that a step on the ladder "nonzeros" adds.
        ladders: "rank", and "nonzeros" for an unstructured pattern.
        lost_at_bottom: the loss below the first steps.
    """

    uniform: LayerPlan
    first_rank: int
    first_nonzeros: int
    nonzeros_per_step: int
    ladders: Mapping[str, Ladder]
    lost_at_bottom: float

    def plan(self, steps: Mapping[str, int]) -> LayerPlan:
        """The plan after a number of steps on each ladder."""
        plan = replace(self.uniform, rank=self.first_rank + steps["rank"])
        if "nonzeros" not in self.ladders:
            return plan
        count = self.first_nonzeros + steps["nonzeros"] * self.nonzeros_per_step
        return replace(plan, kept=Unstructured(count), nonzeros=count)

    def loss(self, plan: LayerPlan) -> float:
        """The loss of the layer with a plan, as a share of its sensitivity."""
        steps = {
            "rank": plan.rank - self.first_rank,
            "nonzeros": (plan.nonzeros - self.first_nonzeros) // self.nonzeros_per_step,
        }
        undone = 0.0
        for name, ladder in self.ladders.items():
            undone += float(ladder.gains[: steps[name]].sum())
        return self.lost_at_bottom - undone


def budget_options(
    weight: Tensor,
    sparse: Tensor,
    gram: Gram,
    plan: LayerPlan,
) -> BudgetOptions:
    """Find the share of a layer's sensitivity to pruning that more ranks and non-zeros undo.

    For a rank, it is the share of its squared singular value of R H^½, R = W − S, with the
    correlations of H shrunk; for an entry, the share of its score of Wanda among removed entries.

    Args:
        weight: W, (out, in).
        sparse: S of the uniform plan, without L, (out, in).
        gram: of the layer's inputs.
        plan: the uniform plan.
    """
    dense = weight.to(gram.matrix.dtype)
    first_rank, last_rank, bytes_per_rank = _rank_bounds(plan)
    residual = dense - sparse.to(dense.dtype)
    spectrum, total = rank_gains(residual, gram.shrunk(), last_rank)
    shares = spectrum * reciprocal(total)
    ladders = {"rank": Ladder(shares[first_rank:], bytes_per_rank)}
    lost = 1 - spectrum[:first_rank].sum().item() * reciprocal(total)
    first_nonzeros = plan.nonzeros
    nonzeros_per_step = 1
    if isinstance(plan.kept, Unstructured):
        count = plan.kept.count
        scores = (dense.square() * gram.matrix.diagonal()).flatten()
        scores = scores.sort(descending=True).values.double()
        first_nonzeros = int(LEAST * count)
        needed = int(torch.count_nonzero(scores))
        if needed <= count:  # nothing is lost, so no step would have a gain
            first_nonzeros = max(first_nonzeros, needed)
        last = min(int(MOST * count), dense.numel())
        nonzeros_per_step = max((last - first_nonzeros) // NONZERO_STEPS, 1)
        steps = (last - first_nonzeros) // nonzeros_per_step
        added = scores[first_nonzeros:][: steps * nonzeros_per_step]
        removed = scores[count:].sum().item()
        gains = added.view(-1, nonzeros_per_step).sum(1) * reciprocal(removed)
        ladders["nonzeros"] = Ladder(gains, nonzeros_per_step * plan.dtype.itemsize)
        to_uniform = (count - first_nonzeros) // nonzeros_per_step
        lost += gains[:to_uniform].sum().item()
    return BudgetOptions(plan, first_rank, first_nonzeros, nonzeros_per_step, ladders, lost)


def _rank_bounds(plan: LayerPlan) -> tuple[int, int, int]:
    """The least and the largest rank that a layer may get, and the bytes of one rank."""

    def bytes_at(rank: int) -> int:
        return replace(plan, rank=rank).size

    bytes_per_rank = bytes_at(2) - bytes_at(1)
    # More bytes than the dense layer has would gain nothing.
    spare_ranks = max(plan.dense_size - plan.size, 0) // bytes_per_rank
    first = int(LEAST * plan.rank)
    last = min(int(MOST * plan.rank), plan.rank + spare_ranks, *plan.shape)
    if plan.factor_bits:
        # The scales of u come with the first rank, and are not part of the cost of a rank.
        first = max(first, min(plan.rank, 1))
    return first, last, bytes_per_rank


@dataclass(frozen=True)
class GridOptions:
    """Bits and ranks.

    Args:
        plans: the steps of the ladder, once `joined` has chosen and ordered them.
        losses: by grid, the loss at each rank, (ranks,) float64.
    """

    plans: Sequence[LayerPlan]
    losses: Mapping[Grid, Tensor]

    @property
    def ladders(self) -> Mapping[str, Ladder]:
        """One ladder: each step leads to the next plan."""
        lost = torch.tensor([self.loss(plan) for plan in self.plans], dtype=torch.float64)
        sizes = torch.tensor([plan.size for plan in self.plans])
        return {"plan": Ladder(-lost.diff(), sizes.diff())}

    def plan(self, steps: Mapping[str, int]) -> LayerPlan:
        """The plan after a number of steps on the ladder."""
        return self.plans[steps["plan"]]

    def loss(self, plan: LayerPlan) -> float:
        """The loss of the layer with a plan, as a share of its sensitivity; an upper bound for
        ranks above the measured ones.
        """
        assert plan.grid is not None
        losses = self.losses[plan.grid]
        return float(losses[min(plan.rank, len(losses) - 1)])


Options = BudgetOptions | GridOptions


@dataclass(frozen=True)
class LayerChoice:
    """The options of a matrix, and its largest loss.

    Args:
        options: losses and gains are shares of the sensitivity.
        sensitivity: the divergence of predictions, in nats per token, if the matrix alone is pruned
            or rounded to the fewest bits, without L.
        unit: matrices of a block with the same unit take their steps together (`joined`).
    """

    options: Options
    sensitivity: float
    unit: str

    def loss(self, plan: LayerPlan) -> float:
        """The estimated loss of the matrix with a plan, in nats per token."""
        return self.sensitivity * self.options.loss(plan)


def joined(choices: Mapping[str, LayerChoice]) -> dict[str, LayerChoice]:
    """Reduce the plans of matrices on grids to those that are best for some price per byte.

    Matrices of one unit get the same grid, but may differ in rank: their losses and their bytes are
    summed, and plan k of one matrix goes with plan k of the others.
    """
    units: dict[str, dict[str, PricedPlans]] = {}
    losses: dict[str, Mapping[Grid, Tensor]] = {}
    for name, choice in choices.items():
        options = choice.options
        if isinstance(options, GridOptions):
            losses[name] = options.losses
            priced = [(plan, choice.loss(plan)) for plan in options.plans]
            units.setdefault(choice.unit, {})[name] = priced
    found = dict(choices)
    for members in units.values():
        for name, plans in best_combinations(members).items():
            options = GridOptions(plans, losses[name])
            found[name] = replace(choices[name], options=options)
    return found


def best_combinations(members: Mapping[str, PricedPlans]) -> dict[str, list[LayerPlan]]:
    """The plans of each matrix of a unit in its best combinations, by rising bytes."""
    combinations: list[PricedPlans] = []
    points: list[tuple[int, float]] = []
    [first, *_] = members.values()
    for grid in dict.fromkeys(plan.grid for plan, _ in first):
        for combination in _combinations_on(grid, members):
            combinations.append(combination)
            size = sum(plan.size for plan, _ in combination)
            points.append((size, sum(loss for _, loss in combination)))
    corners = hull(points)
    found: dict[str, list[LayerPlan]] = {}
    for position, name in enumerate(members):
        found[name] = [combinations[corner][position][0] for corner in corners]
    return found


def _combinations_on(grid: Grid | None, members: Mapping[str, PricedPlans]) -> list[PricedPlans]:
    """The best combinations of ranks on one grid, by rising bytes: one plan for each matrix; none
    if a matrix has no plan on it.
    """
    ladders: list[PricedPlans] = []
    steps: list[tuple[float, int]] = []
    for position, plans in enumerate(members.values()):
        able = [(plan, loss) for plan, loss in plans if plan.grid == grid]
        corners = hull([(plan.size, loss) for plan, loss in able])
        ladder = [able[corner] for corner in corners]
        for (one, loss), (later, less) in itertools.pairwise(ladder):
            gain_per_byte = (loss - less) / (later.size - one.size)
            steps.append((gain_per_byte, position))
        ladders.append(ladder)
    if not all(ladders):
        return []
    combination = [ladder[0] for ladder in ladders]
    found = [combination]
    # Gains per byte fall along each ladder, so its steps come in order.
    for _, position in sorted(steps, reverse=True):
        combination = list(combination)
        taken = ladders[position].index(combination[position])
        combination[position] = ladders[position][taken + 1]
        found.append(combination)
    return found


def grid_options(
    layer: ProbedLayer, plan: LayerPlan, resolved: Resolved
) -> tuple[GridOptions, float]:
    """Find the share of a layer's sensitivity to rounding that remains with each bits and rank.

    The error on each grid is estimated from some rows. All rows are rounded only to the uniform
    grid, which gives the divergence per unit of error and the share of the error that each rank
    undoes: both are nearly the same on all grids.

    Args:
        plan: the uniform plan, on one of the grids.
        resolved: the recipe, with the grids that the layer may get.

    Returns:
        The options, and the layer's sensitivity to the fewest bits without L.
    """
    assert plan.grid is not None
    grids = grids_like(plan, resolved.grids, resolved)
    ranks = [plan.rank]
    if resolved.rank_on_grids is None:
        largest = min(max(RANKS, int(MOST * plan.rank)), *plan.shape)
        ranks = sorted({plan.rank, *range(0, largest + 1, RANK_STEP)})
    errors = _errors(layer, plan, grids)
    most = errors[grids[0]]
    whole = plan.grid
    if errors[whole] <= NO_ERROR * most:  # the weights lie on the grid: the model is quantised
        whole = grids[0]
    rounded = layer.changed(plan.kept, whole)
    residual = layer.weight.to(rounded.dtype) - rounded
    rate = layer.rate(rounded, rows_independent=True)
    spectrum, error = rank_gains(residual, layer.gram.shrunk(), ranks[-1])
    shares = spectrum.cpu().double().cumsum(0) * reciprocal(error)
    undone = torch.cat([torch.zeros(1, dtype=torch.float64), shares])
    losses = {grid: (1 - undone) * error * reciprocal(most) for grid, error in errors.items()}
    plans: list[LayerPlan] = []
    for grid, rank in itertools.product(grids, ranks):
        if rank < len(undone):
            candidate = replace(plan, grid=grid, rank=rank, factor_bits=resolved.factor_bits)
            # A given rank may make a narrow matrix larger than the dense one. So do the scales of
            # a tiny matrix, which then has this plan alone.
            fits = candidate.size <= candidate.dense_size
            if resolved.rank_on_grids or fits or not plans:
                plans.append(candidate)
    return GridOptions(plans, losses), most * rate


def _errors(layer: ProbedLayer, plan: LayerPlan, grids: Sequence[Grid]) -> dict[Grid, float]:
    """The expected loss of the error on each grid, estimated from some rows."""
    sample = layer.sample(ROWS)
    share = len(layer.weight) / len(sample.weight)
    kept = plan.kept
    if isinstance(kept, Unstructured):  # its count is for all rows
        kept = Unstructured(round(kept.count / share))
    if kept.kept(sample.weight.shape) < sample.weight.numel():
        # The search for the support takes far longer than rounding S to a grid, and hardly depends
        # on the grid. On the finest one, few values within the support become zero.
        kept = KnownSupport(sample.changed(kept, grids[-1]) != 0)

    return errors_on(grids, partial(sample.measured, kept), share)


def errors_on(
    grids: Sequence[Grid], measure: Callable[[Grid], BitsAndError], share: float = 1.0
) -> dict[Grid, float]:
    """The errors on all grids; errors on entropy-coded grids are mostly interpolated.

    Args:
        grids: by rising bits.
        share: number of all rows over the number of measured rows.
    """
    ends = (grids[0], grids[-1])
    points: list[BitsAndError] = []
    for grid in grids:
        if grid.rate in (None, *MEASURED_RATES) or grid in ends:
            bits, error = measure(grid)
            points.append((bits, share * error))
    if grids[0].rate is None:
        return {grid: error for grid, (_, error) in zip(grids, points, strict=True)}
    return interpolated(points, grids)


def interpolated(points: Sequence[BitsAndError], grids: Sequence[Grid]) -> dict[Grid, float]:
    """The errors on entropy-coded grids from measured ones.

    The logarithm is linear between two points. Beyond the outer points, it continues with the
    slope of the last two, within these limits: a bit at most quarters the error, and does not raise
    it. A bit does less if codes of eight bits do not reach the largest weights.
    """
    known = dict(sorted(points))  # one point for each number of bits
    bits = np.array(list(known))
    logarithms = np.log(np.maximum(list(known.values()), sys.float_info.min))
    slopes = np.array([-math.log(4)])
    if len(bits) > 1:
        slopes = (np.diff(logarithms) / np.diff(bits)).clip(-math.log(4), 0)
    wanted = np.array([grid.stored_bits for grid in grids])
    found = np.interp(wanted, bits, logarithms)  # beyond the outer points, their own values
    found += slopes[0] * np.minimum(wanted - bits[0], 0)
    found += slopes[-1] * np.maximum(wanted - bits[-1], 0)
    return dict(zip(grids, np.exp(found).tolist(), strict=True))


def grids_like(plan: LayerPlan, grids: Sequence[Grid], resolved: Resolved) -> list[Grid]:
    """The grids that a matrix may get: `grids` with the group of its plan, which may be smaller
    than that of other matrices, or the types of llama.cpp for its rows.
    """
    if takes_types(resolved):
        return list(types_for(plan.shape[1]))
    assert plan.grid is not None
    return [replace(grid, group=plan.grid.group) for grid in grids]


def reciprocal(total: float) -> float:
    """One over a sum; 0 if the sum is not positive."""
    if total > 0:
        return 1 / total
    return 0.0
