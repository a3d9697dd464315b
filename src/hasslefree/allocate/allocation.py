"""Non-uniform plans: the sensitivity of each layer decides its share of one budget."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hasslefree.allocate.ends import EndProbe
from hasslefree.allocate.ladders import Ladder, greedy_allocate
from hasslefree.allocate.options import (
    LayerChoice,
    Options,
    budget_options,
    grid_options,
    joined,
)
from hasslefree.allocate.sensitivity import ProbedLayer, sensitivities
from hasslefree.distributed import World
from hasslefree.models.walk import Walk
from hasslefree.planning.plan import LayerPlan, Plan
from hasslefree.recipe.resolve import Resolved

# The choice of each matrix by name, in the order of `Plan.parts`.
Choices = Sequence[Mapping[str, LayerChoice]]
# A ladder: the index in `Plan.parts`, the unit of matrices, and the name of the ladder.
LadderKey = tuple[int, str, str]


@dataclass(frozen=True)
class Allocation:
    """A plan, and the measurements behind it.

    Args:
        sensitivities: by the full name of each layer, in nats per token; None if they were not
            measured.
        output_weights: of layers whose S is not on a grid, by their full names; see
            `ProbedLayer.output_weights`.
        look_ups: α by the name of an embedding tied to the head, which is added to the diagonal of
            the head's H (`allocate.ends`).
        choices: empty if no matrix had a choice.
    """

    plan: Plan
    sensitivities: dict[str, float] | None = None
    output_weights: Mapping[str, Tensor] = field(default_factory=dict)
    look_ups: Mapping[str, float] = field(default_factory=dict)
    choices: Choices = ()

    def divergence(self, plan: Plan) -> float:
        """The estimated divergence of predictions with a plan, summed over layers, in nats."""
        total = 0.0
        for choices, plans in zip(self.choices, plan.parts, strict=True):
            for name, choice in choices.items():
                total += choice.loss(plans[name])
        return total


@dataclass
class Inspection:
    """Measure layers of the dense model on the probes.

    Args:
        output_weights: filled by the calls; see `Allocation`.
    """

    resolved: Resolved
    output_weights: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, layer: ProbedLayer, plan: LayerPlan) -> tuple[Options, float]:
        """The options of a layer, and its sensitivity. plan: the uniform plan of the layer."""
        if plan.grid is not None:
            return grid_options(layer, plan, self.resolved)
        sparse = layer.changed(plan.kept, None)
        weights = layer.output_weights()
        if weights is not None:
            self.output_weights[layer.name] = weights.cpu()
        options = budget_options(layer.weight, sparse, layer.gram, plan)
        residual = layer.weight.to(sparse.dtype) - sparse
        return options, layer.rate(sparse) * layer.gram.expected_loss(residual)


def by_sensitivity(
    walk: Walk, plan: Plan, resolved: Resolved, room: int, segments: Tensor, world: World
) -> Allocation:
    """Spend bytes on the layers where they bring the predictions closest to the dense model's.

    `sensitivities` estimates how much the predictions change if one layer alone is pruned or
    rounded. The spectrum of the layer's error gives the share of that change that each rank undoes,
    the scores of Wanda the share that each non-zero undoes, and the errors on other grids the worth
    of each bit.

    Args:
        plan: the uniform plan.
        room: bytes for all matrices, at least the size of the plan.
        segments: of this process, (samples, tokens).
    """
    inspection = Inspection(resolved)
    ends = EndProbe(walk, plan.ends, world, segments.shape[1])
    measured = sensitivities(walk, plan, segments, world, inspection, resolved.seed, ends)
    blocks: list[dict[str, LayerChoice]] = []
    by_name: dict[str, float] = {}
    for index, layers in enumerate(measured):
        choices_of: dict[str, LayerChoice] = {}
        for name, (options, sensitivity) in layers.items():
            choices_of[name] = LayerChoice(options, sensitivity, resolved.unit(name))
            by_name[f"{walk.blocks.prefix(index)}.{name}"] = sensitivity
        blocks.append(joined(choices_of))
    choices = [joined(ends.choices(resolved)), *blocks]
    dealt = allocated(choices, room)
    return Allocation(dealt, by_name, inspection.output_weights, ends.look_ups, choices)


def allocated(choices: Choices, room: int) -> Plan:
    """The plan with the least loss within a number of bytes."""
    ladders: dict[LadderKey, Ladder] = {}
    for index, matrices in enumerate(choices):
        for choice in matrices.values():
            for axis, ladder in choice.options.ladders.items():
                key = index, choice.unit, axis
                steps = ladder.scaled(choice.sensitivity)
                ladders[key] = ladders[key] + steps if key in ladders else steps
    bottom = plan_after(choices, dict.fromkeys(ladders, 0))
    return plan_after(choices, greedy_allocate(ladders, room - bottom.size))


def plan_after(choices: Choices, steps: Mapping[LadderKey, int]) -> Plan:
    """The plan after a number of steps on each ladder."""
    parts: list[dict[str, LayerPlan]] = []
    for index, matrices in enumerate(choices):
        plans: dict[str, LayerPlan] = {}
        for name, choice in matrices.items():
            taken = {axis: steps[index, choice.unit, axis] for axis in choice.options.ladders}
            plans[name] = choice.options.plan(taken)
        parts.append(plans)
    ends, *blocks = parts
    return Plan(blocks, ends)
