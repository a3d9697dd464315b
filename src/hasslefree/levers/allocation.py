"""A plan that is not uniform: the sensitivity of each layer of the dense model decides its share of one budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hasslefree.core.budgets import Budget
from hasslefree.core.gram import Gram
from hasslefree.core.patterns import Unstructured
from hasslefree.core.protocols import Method
from hasslefree.distributed import World
from hasslefree.levers.gains import GainCurve, greedy_allocate, rank_gains
from hasslefree.levers.owl import outlier_share, owl_ratios
from hasslefree.levers.sensitivity import sensitivities
from hasslefree.models.activations import Activations
from hasslefree.models.moments import gather, groups_by_input
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Visit, Walk
from hasslefree.phases import ALLOCATION
from hasslefree.recipe.plan import LayerPlan, Plan, plan_block

# A layer keeps at least this share of its uniform rank and non-zeros, and gets at most this.
LEAST, MOST = 0.5, 2.0
# Non-zeros move in this number of steps between the two.
STEPS = 256


@dataclass(frozen=True)
class Choice:
    """The budgets a layer may get: at least `rank` and `count` non-zeros (None: fixed by the pattern), and then more.

    Args:
        ranks: the gain of each single rank. entries: of `step` non-zeros at a time, where the pattern counts them.
    """

    plan: LayerPlan
    rank: int
    ranks: GainCurve
    count: int | None = None
    entries: GainCurve | None = None
    step: int = 0

    @property
    def curves(self) -> list[GainCurve]:
        return [self.ranks] if self.entries is None else [self.ranks, self.entries]

    def weighed(self, sensitivity: float) -> Choice:
        """The same with each step winning its share of a sensitivity."""
        entries = None if self.entries is None else self.entries.weighed(sensitivity)
        return dataclasses.replace(self, ranks=self.ranks.weighed(sensitivity), entries=entries)

    def taken(self, ranks: int, steps: int = 0) -> LayerPlan:
        """The plan with this number of steps along each curve."""
        pattern = self.plan.pattern if self.count is None else Unstructured(self.count + steps * self.step)
        spec, rank = self.plan.spec, self.rank + ranks
        return LayerPlan.of(spec.shape, pattern, rank, self.plan.dtype, spec.grid, spec.factor_bits)


@dataclass(frozen=True)
class Allocation:
    """A plan, and what was measured for it.

    Args:
        sensitivities: by the full name of each layer, in nats per token; None if the allocation does not measure them.
    """

    plan: Plan
    sensitivities: dict[str, float] | None = None


def by_outliers(
    walk: Walk, plan: Plan, budget: Budget, method: Method, factor_bits: int | None, segments: Tensor, world: World
) -> Allocation:
    """OWL (arXiv 2310.05175): each block gets its own ratio, or sparsity, around that of the budget.

    Args:
        plan: the uniform one, for this budget, method and factors. segments: of this process.
    """
    hidden = walk.entering(segments)
    visits = walk.phases.counted(ALLOCATION, walk.visits(hidden), len(plan), "blocks")
    shares = [outliers_of(visit, plan[visit.index], hidden, world) for visit in visits]
    sizes = [sum(layer.spec.dense_parameters for layer in plans.values()) for plans in plan]
    field = "sparsity" if budget.ratio is None else "ratio"
    moved: Plan = []
    for index, share in enumerate(owl_ratios(shares, getattr(budget, field), sizes=sizes)):
        sites = {name: site for name, site in find_sites(walk.blocks.modules[index]).items() if name in plan[index]}
        change: dict[str, Any] = {field: share}
        moved.append(plan_block(walk.blocks, index, sites, dataclasses.replace(budget, **change), method, factor_bits))
    return Allocation(moved)


def outliers_of(visit: Visit, plans: Mapping[str, LayerPlan], hidden: Activations, world: World) -> float:
    """The share of outliers in the planned layers of a block. hidden: what enters it."""
    layers, sites = [], visit.sites(list(plans))
    for group in groups_by_input(visit.block, visit.call, hidden[0], plans):
        [gram] = gather(visit.block, visit.prefix, visit.call, hidden, [group], add=world.add)
        layers += [(sites[name].weight(), gram.matrix.diagonal()) for name in group]
    return outlier_share(layers)


def by_sensitivity(walk: Walk, plan: Plan, segments: Tensor, world: World, seed: int) -> Allocation:
    """The bytes of the uniform plan, spent where they bring the model's predictions closest to the dense ones.

    `sensitivities` estimates how each layer, pruned alone by its pattern, changes the predictions. The spectrum of the
    pruned part tells what share of that change each rank would undo, and the scores of Wanda what share each non-zero.
    """
    measured = sensitivities(walk, plan, segments, world, choice_of, seed)
    choices = [
        {name: choice.weighed(sensitivity) for name, (choice, sensitivity) in layers.items()} for layers in measured
    ]
    all_choices = [choice for block in choices for choice in block.values()]
    budget = sum(layer.bytes for plans in plan for layer in plans.values())
    curves = [curve for choice in all_choices for curve in choice.curves]
    steps = iter(greedy_allocate(curves, budget - sum(choice.taken(0).bytes for choice in all_choices)))
    moved = [
        {name: block[name].taken(*(next(steps) for _ in block[name].curves)) for name in block} for block in choices
    ]
    by_name = {
        f"{walk.blocks.prefix(index)}.{name}": sensitivity
        for index, layers in enumerate(measured)
        for name, (_, sensitivity) in layers.items()
    }
    return Allocation(moved, by_name)


def choice_of(weight: Tensor, sparse: Tensor, gram: Gram, plan: LayerPlan) -> Choice:
    """The budgets a layer may get, and what share of its sensitivity to pruning each step would undo."""
    spec, (out, width) = plan.spec, plan.spec.shape
    dense = weight.to(gram.matrix.dtype)
    one, two = (dataclasses.replace(spec, rank=rank).bytes(plan.dtype) for rank in (1, 2))
    cost = two - one
    # Beyond the bytes of the dense layer there is nothing to win.
    room = spec.rank + max(plan.dense_bytes - plan.bytes, 0) // cost
    low, high = int(LEAST * spec.rank), min(int(MOST * spec.rank), room, out, width)
    if spec.factor_bits:
        low = max(low, min(spec.rank, 1))  # the scales of u come with the first rank, and are no part of its cost
    spectrum, total = rank_gains(dense - sparse.to(dense.dtype), gram, high)
    ranks = GainCurve(spectrum[low:] * per_unit(total), cost)
    if not isinstance(plan.pattern, Unstructured) or spec.grid is not None:
        return Choice(plan, low, ranks)
    count = plan.pattern.count
    first, last = int(LEAST * count), min(int(MOST * count), out * width)
    step = max((last - first) // STEPS, 1)
    scores = (dense.square() * gram.matrix.diagonal()).flatten().sort(descending=True).values.double()
    gains = scores[first : first + (last - first) // step * step].view(-1, step).sum(1)
    entries = GainCurve(gains * per_unit(scores[count:].sum().item()), step * plan.dtype.itemsize)
    return Choice(plan, low, ranks, first, entries, step)


def per_unit(total: float) -> float:
    """One over a sum of parts; 0 where there are none."""
    return 1 / total if total > 0 else 0.0
