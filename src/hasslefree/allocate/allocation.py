"""A plan that is not uniform: the sensitivity of each layer of the dense model decides its share of
one budget.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hasslefree.allocate.ladders import GainCurve, greedy_allocate, hull, rank_gains
from hasslefree.allocate.sensitivity import ProbedLayer, sensitivities
from hasslefree.core.gram import Gram
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Unstructured
from hasslefree.distributed import World
from hasslefree.models.walk import Walk
from hasslefree.planning.plan import STEP as RANK_STEP
from hasslefree.planning.plan import LayerPlan, Plan
from hasslefree.recipe.resolve import Resolved

# A layer keeps at least this share of its uniform rank and non-zeros, and gets at most this.
LEAST, MOST = 0.5, 2.0
# A layer on a grid gets at least this rank to choose from, or as much as MOST allows.
RANKS = 128
# Non-zeros move in this number of steps between the two.
STEPS = 256


@dataclass(frozen=True)
class Choice:
    """The plans that a layer may get.

    Args:
        plan: the one with a number of steps along each curve. curves: what the steps gain.
        loss: what one of the plans loses, of the layer's sensitivity.
    """

    plan: Callable[..., LayerPlan]
    curves: Sequence[GainCurve]
    loss: Callable[[LayerPlan], float]

    def weighed(self, sensitivity: float) -> "Choice":
        """The same with each step winning its share of a sensitivity."""
        curves = [curve.weighed(sensitivity) for curve in self.curves]
        return Choice(self.plan, curves, lambda plan: sensitivity * self.loss(plan))


@dataclass(frozen=True)
class Allocation:
    """A plan, and what was measured for it.

    Args:
        sensitivities: by the full name of each layer, in nats per token; None if the allocation
            does not measure them.
        output_weights: of layers whose S is not on a grid, by their full names; see
            `ProbedLayer.output_weights`.
        choices: of each block, by the name of each layer.
    """

    plan: Plan
    sensitivities: dict[str, float] | None = None
    output_weights: Mapping[str, Tensor] = field(default_factory=dict)
    choices: Sequence[Mapping[str, Choice]] = ()

    def divergence(self, plan: Plan) -> float:
        """The sum over layers of what a plan is estimated to lose, in nats per token."""
        blocks = zip(self.choices, plan, strict=True)
        return sum(
            choice.loss(plans[name])
            for choices, plans in blocks
            for name, choice in choices.items()
        )


def by_sensitivity(
    walk: Walk, plan: Plan, room: int, resolved: Resolved, segments: Tensor, world: World
) -> Allocation:
    """The bytes that all layers may take, spent where they bring the model's predictions closest to
    the dense ones.

    `sensitivities` estimates how each layer, pruned or rounded alone, changes the predictions. The
    spectrum of the error tells what share of that change each rank would undo, the scores of Wanda
    what share each non-zero, and the errors on other grids what each bit is worth.

    Args:
        plan: the uniform one. room: in bytes, at least those of the plan. segments: of this
            process.
    """

    output_weights: dict[str, Tensor] = {}

    def inspect(layer: ProbedLayer, its_plan: LayerPlan) -> tuple[Choice, float]:
        if its_plan.spec.grid is not None:
            return choice_on_grids(layer, its_plan, resolved)
        sparse = layer.changed(its_plan.pattern, None)
        if (weights := layer.output_weights()) is not None:
            output_weights[layer.full] = weights.cpu()
        return choice_of(layer.weight, sparse, layer.gram, its_plan), layer.divergence(sparse)

    measured = sensitivities(walk, plan, segments, world, inspect, resolved.seed)
    choices: list[dict[str, Choice]] = [{} for _ in measured]
    by_name = {}
    for index, layers in enumerate(measured):
        for name, (choice, sensitivity) in layers.items():
            choices[index][name] = choice.weighed(sensitivity)
            by_name[f"{walk.blocks.prefix(index)}.{name}"] = sensitivity
    every = [choice for block in choices for choice in block.values()]
    curves = [curve for choice in every for curve in choice.curves]
    least = sum(choice.plan(*(0 for _ in choice.curves)).bytes for choice in every)
    steps = iter(greedy_allocate(curves, room - least))
    moved = [
        {name: its.plan(*(next(steps) for _ in its.curves)) for name, its in block.items()}
        for block in choices
    ]
    return Allocation(moved, by_name, output_weights, choices)


def choice_of(weight: Tensor, sparse: Tensor, gram: Gram, plan: LayerPlan) -> Choice:
    """Ranks, and non-zeros where the pattern counts them, and what share of its sensitivity to
    pruning each undoes.
    """
    spec, (out, width) = plan.spec, plan.spec.shape
    dense = weight.to(gram.matrix.dtype)
    one, two = (dataclasses.replace(spec, rank=rank).bytes(plan.dtype) for rank in (1, 2))
    cost = two - one
    # Beyond the bytes of the dense layer there is nothing to win.
    room = spec.rank + max(plan.dense_bytes - plan.bytes, 0) // cost
    low, high = int(LEAST * spec.rank), min(int(MOST * spec.rank), room, out, width)
    if spec.factor_bits:
        low = max(
            low, min(spec.rank, 1)
        )  # the scales of u come with the first rank, and are no part of its cost
    spectrum, total = rank_gains(dense - sparse.to(dense.dtype), gram, high)
    curves, lost = (
        [GainCurve(spectrum[low:] * per_unit(total), cost)],
        1 - spectrum[:low].sum().item() * per_unit(total),
    )
    first, step = spec.nonzeros, 1
    if isinstance(plan.pattern, Unstructured):
        count = plan.pattern.count
        first, last = int(LEAST * count), min(int(MOST * count), out * width)
        step = max((last - first) // STEPS, 1)
        scores = (
            (dense.square() * gram.matrix.diagonal())
            .flatten()
            .sort(descending=True)
            .values.double()
        )
        gains = scores[first : first + (last - first) // step * step].view(-1, step).sum(1)
        entries = GainCurve(
            gains * per_unit(scores[count:].sum().item()), step * plan.dtype.itemsize
        )
        lost += entries.gains[: (count - first) // step].sum().item()
        curves.append(entries)

    def taken(ranks: int, steps: int = 0) -> LayerPlan:
        pattern = plan.pattern if len(curves) == 1 else Unstructured(first + steps * step)
        return LayerPlan.of(
            spec.shape, pattern, low + ranks, plan.dtype, spec.grid, spec.factor_bits
        )

    def loss(other: LayerPlan) -> float:
        steps = other.spec.rank - low, (other.spec.nonzeros - first) // step
        return lost - sum(
            float(curve.gains[:count].sum()) for curve, count in zip(curves, steps, strict=False)
        )

    return Choice(taken, curves, loss)


def ranks_of(plan: LayerPlan, resolved: Resolved) -> list[int]:
    """The ranks that a layer on a grid may get: the one that is given within a size, or multiples
    of STEP.
    """
    if resolved.fixed_rank is not None and (resolved.size or not plan.spec.rank):
        return [resolved.fixed_rank]
    most = min(max(RANKS, int(MOST * plan.spec.rank)), *plan.spec.shape)
    return sorted({plan.spec.rank, *range(0, most + 1, RANK_STEP)})


def choice_on_grids(
    layer: ProbedLayer, plan: LayerPlan, resolved: Resolved
) -> tuple[Choice, float]:
    """Bits and ranks, the best for some price of a byte; and the layer's sensitivity to the fewest
    bits, without L.

    Few tokens decide how much a layer matters where the model has attention sinks: the divergence
    for an error in the norm of H is the mean over the grids. Each rank undoes nearly the same share
    of the error on all of them.
    """
    grids, ranks = resolved.grids, ranks_of(plan, resolved)
    spec, own, errors, rates = plan.spec, plan.spec.grid, dict[Grid, float](), list[float]()
    assert own is not None
    for grid in grids:
        changed = layer.changed(plan.pattern, grid)
        residual = layer.weight.to(changed.dtype) - changed
        if grid == own:
            spectrum, _ = rank_gains(residual, layer.gram, ranks[-1])
        errors[grid] = layer.gram.loss(residual)
        rates.append(layer.divergence(changed) * per_unit(errors[grid]))
    undone = torch.cat(
        [torch.zeros(1).double(), spectrum.cpu().double().cumsum(0) * per_unit(errors[own])]
    )
    most = errors[grids[0]]  # weights may lie on the finer grids
    losses = {grid: (1 - undone) * error * per_unit(most) for grid, error in errors.items()}
    every = [
        LayerPlan.of(spec.shape, plan.pattern, rank, plan.dtype, grid, resolved.factor_bits)
        for grid in grids
        for rank in ranks
        if rank < len(undone)
    ]

    def loss(other: LayerPlan) -> float:
        assert other.spec.grid is not None
        return float(losses[other.spec.grid][other.spec.rank])

    every = [each for each in every if each.bytes <= each.dense_bytes]
    best = [every[index] for index in hull([(each.bytes, loss(each)) for each in every])]
    lost = torch.tensor(list(map(loss, best)), dtype=torch.float64)
    curve = GainCurve(-lost.diff(), torch.tensor([each.bytes for each in best]).diff())
    return Choice(best.__getitem__, [curve], loss), most * sum(rates) / len(rates)


def per_unit(total: float) -> float:
    """One over a sum of parts; 0 where there are none."""
    return 1 / total if total > 0 else 0.0
