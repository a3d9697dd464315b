"""A plan that is not uniform: the sensitivity of each layer decides its share of one budget."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hasslefree.allocate.ladders import Ladder, greedy_allocate
from hasslefree.allocate.options import Options, budget_options, grid_options
from hasslefree.allocate.sensitivity import ProbedLayer, sensitivities
from hasslefree.distributed import World
from hasslefree.models.walk import Walk
from hasslefree.planning.plan import LayerPlan, Plan
from hasslefree.recipe.resolve import Resolved


@dataclass(frozen=True)
class LayerChoice:
    """The options of a layer, and what it loses at most.

    Args:
        sensitivity: in nats per token.
    """

    options: Options
    sensitivity: float

    def loss(self, plan: LayerPlan) -> float:
        """What the layer is estimated to lose with a plan, in nats per token."""
        return self.sensitivity * self.options.loss(plan)


# For every block: the name of a layer in it → its choice.
Choices = Sequence[Mapping[str, LayerChoice]]


@dataclass(frozen=True)
class Allocation:
    """A plan, and what was measured for it.

    Args:
        sensitivities: by the full name of each layer, in nats per token; None if they were not
            measured.
        output_weights: of layers whose S is not on a grid, by their full names; see
            `ProbedLayer.output_weights`.
        choices: empty if there were none.
    """

    plan: Plan
    sensitivities: dict[str, float] | None = None
    output_weights: Mapping[str, Tensor] = field(default_factory=dict)
    choices: Choices = ()

    def divergence(self, plan: Plan) -> float:
        """The estimated divergence of predictions with a plan, summed over layers, in nats."""
        total = 0.0
        for choices, plans in zip(self.choices, plan.blocks, strict=True):
            for name, choice in choices.items():
                total += choice.loss(plans[name])
        return total


@dataclass
class Inspection:
    """Look at each layer of the dense model on the probes.

    Args:
        output_weights: filled in; see `Allocation`.
    """

    resolved: Resolved
    output_weights: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, layer: ProbedLayer, plan: LayerPlan) -> tuple[Options, float]:
        """The options of a layer, and its sensitivity. plan: its uniform one."""
        if plan.grid is not None:
            return grid_options(layer, plan, self.resolved)
        sparse = layer.changed(plan.kept, None)
        weights = layer.output_weights()
        if weights is not None:
            self.output_weights[layer.full] = weights.cpu()
        options = budget_options(layer.weight, sparse, layer.gram, plan)
        return options, layer.divergence(sparse)


def by_sensitivity(
    walk: Walk, plan: Plan, resolved: Resolved, room: int, segments: Tensor, world: World
) -> Allocation:
    """Spend bytes on the layers where they bring the predictions closest to the dense model's.

    `sensitivities` estimates how much each layer, pruned or rounded alone, changes the predictions.
    The spectrum of its error tells what share of that change each rank undoes, the scores of Wanda
    what share each non-zero undoes, and the errors on other grids what each bit is worth.

    Args:
        plan: the uniform one.
        room: bytes for all layers, at least those of the plan.
        segments: those of this process, (samples, tokens).
    """
    inspection = Inspection(resolved)
    measured = sensitivities(walk, plan, segments, world, inspection, resolved.seed)
    choices: list[dict[str, LayerChoice]] = []
    by_name: dict[str, float] = {}
    for index, layers in enumerate(measured):
        choices.append({})
        for name, (options, sensitivity) in layers.items():
            choices[index][name] = LayerChoice(options, sensitivity)
            by_name[f"{walk.blocks.prefix(index)}.{name}"] = sensitivity
    room -= sum(end.size for end in plan.ends.values())
    dealt = dataclasses.replace(plan, blocks=allocated(choices, room).blocks)
    return Allocation(dealt, by_name, inspection.output_weights, choices)


def allocated(choices: Choices, room: int) -> Plan:
    """The plan that loses least within a number of bytes."""
    ladders: dict[tuple[int, str, str], Ladder] = {}
    for index, layers in enumerate(choices):
        for name, choice in layers.items():
            for axis, ladder in choice.options.ladders.items():
                ladders[index, name, axis] = ladder.scaled(choice.sensitivity)
    bottom = plan_after(choices, dict.fromkeys(ladders, 0))
    least = bottom.size
    return plan_after(choices, greedy_allocate(ladders, room - least))


def plan_after(choices: Choices, steps: Mapping[tuple[int, str, str], int]) -> Plan:
    """The plan after a number of steps. steps: by block, layer and ladder."""
    blocks: list[dict[str, LayerPlan]] = []
    for index, layers in enumerate(choices):
        blocks.append({})
        for name, choice in layers.items():
            taken = {axis: steps[index, name, axis] for axis in choice.options.ladders}
            blocks[index][name] = choice.options.plan(taken)
    return Plan(blocks)
