"""A plan that is not uniform: what each layer of the dense model has to lose decides its share of one budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.blockwise import Job
from hasslefree.core.allocation import Ladder, climb, rank_gains, root_of
from hasslefree.core.factors import factor_bytes
from hasslefree.core.gram import Gram, working_dtype
from hasslefree.core.owl import outlier_share, owl_ratios
from hasslefree.core.patterns import Unstructured
from hasslefree.decompose import solve_layer
from hasslefree.distributed import World
from hasslefree.methods.joint import LOOK
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import dense_weight, replace_module
from hasslefree.models.calibration import first_hidden_states, gather, groups_by_input, run_block, widest_dtype
from hasslefree.models.calls import BlockCall
from hasslefree.models.streaming import outside
from hasslefree.plan import LayerPlan, Plan, plan_block, plan_layer

# A layer keeps at least this share of its uniform rank and non-zeros, and gets at most this.
LEAST, MOST = 0.5, 2.0
# Non-zeros move in so many steps between the two.
STEPS = 256
# Calibration segments on which the harm to a block's output is measured.
PROBES = 16


@dataclass(frozen=True)
class Choice:
    """What a layer may become: at least `rank` and `count` non-zeros (None: as the pattern has it), and then more.

    Args:
        ranks: a ladder of single ranks. entries: one of `step` non-zeros at a time, where the pattern counts them.
    """

    plan: LayerPlan
    dtype: torch.dtype
    rank: int
    ranks: Ladder
    count: int | None = None
    entries: Ladder | None = None
    step: int = 0

    @property
    def ladders(self) -> list[Ladder]:
        return [self.ranks] if self.entries is None else [self.ranks, self.entries]

    def taken(self, ranks: int, steps: int = 0) -> LayerPlan:
        """The plan with so many steps on each ladder."""
        pattern = self.plan.pattern if self.count is None else Unstructured(self.count + steps * self.step)
        rank, plan = self.rank + ranks, self.plan
        return plan_layer(plan.shape, pattern, rank, self.dtype, plan.grid, plan.factor_bits)


def allocated(job: Job, calls: list[BlockCall], segments: Tensor, folder: Path) -> Plan:
    """The plan that the recipe's `allocate` asks for, from one pass of the dense model over the calibration text.

    Args:
        segments: of this process. folder: for hidden states on the disk.
    """
    ways: dict[str | None, tuple[Callable[..., Any], Callable[..., Plan]]] = {
        "error": (choices_of, by_error),
        "owl": (outliers_of, by_outliers),
    }
    look, plan = ways[job.recipe.allocate]
    with job.weights.present(outside(job.model, job.blocks)):
        hidden = first_hidden_states(job.model, job.blocks, segments, job.place, folder)
    seen: list[Any] = []
    for index, block in enumerate(job.blocks.modules):
        with job.weights.present(block.modules):
            seen.append(look(job, index, calls[index], hidden))
            run_block(block, calls[index], hidden)
    return plan(job, seen)


def by_outliers(job: Job, shares: list[float]) -> Plan:
    """OWL (arXiv 2310.05175): every block has a ratio, or a sparsity, of its own, around the recipe's."""
    recipe, sizes = job.recipe, [sum(math.prod(p.shape) for p in plans.values()) for plans in job.plan]
    field = "sparsity" if recipe.ratio is None else "ratio"
    ratios = owl_ratios(shares, getattr(recipe, field), sizes=sizes)
    fields: list[dict[str, Any]] = [{field: ratio} for ratio in ratios]
    return [
        plan_block(job.blocks, index, job.plan[index], dataclasses.replace(recipe, **own))
        for index, own in enumerate(fields)
    ]


def outliers_of(job: Job, index: int, call: BlockCall, hidden: Activations) -> float:
    """The share of outliers in the planned layers of a block. hidden: what enters it."""
    block, layers = job.blocks.modules[index], []
    for group in groups_by_input(block, call, hidden[0], job.plan[index]):
        [moments] = gather(block, job.blocks.prefix(index), call, hidden, [group], add=job.world.add)
        linears: list[Any] = [block.get_submodule(name) for name in group]
        layers += [(dense_weight(linear), moments.gram.matrix.diagonal()) for linear in linears]
    return outlier_share(layers)


def by_error(job: Job, choices: list[dict[str, Choice]]) -> Plan:
    """The bytes of the uniform plan, spent where they bring the blocks' outputs closest to the dense ones.

    In the dense model each layer was pruned alone, by its pattern, and it was measured how far that moves the output
    of its block. The spectrum of what was pruned tells what share of it each rank would undo; the scores of Wanda,
    what share each non-zero.
    """
    every = [choice for block in choices for choice in block.values()]
    budget = sum(layer.bytes for plans in job.plan for layer in plans.values())
    ladders = [ladder for choice in every for ladder in choice.ladders]
    steps = iter(climb(ladders, budget - sum(choice.taken(0).bytes for choice in every)))
    return [
        {name: block[name].taken(*(next(steps) for _ in block[name].ladders)) for name in block} for block in choices
    ]


def choices_of(job: Job, index: int, call: BlockCall, hidden: Activations) -> dict[str, Choice]:
    """What each planned layer of a block may become, in the order of the plan. hidden: what enters the block."""
    block, prefix, plans = job.blocks.modules[index], job.blocks.prefix(index), job.plan[index]
    probes = [hidden[i] for i in range(len(hidden)) if job.world.rank + i * job.world.size < PROBES]
    wanted = outputs(block, call, probes)
    found = {}
    for group in groups_by_input(block, call, hidden[0], plans):
        [moments] = gather(block, prefix, call, hidden, [group], add=job.world.add)
        owners = job.world.deal([math.prod(plans[name].shape) for name in group])
        prepared = LOOK.prepare(moments.gram) if job.world.rank in owners else None
        tall = any(plans[name].shape[0] > plans[name].shape[1] for name in group)
        root = root_of(moments.gram) if tall else None
        for name, owner in zip(group, owners, strict=True):
            linear: Any = block.get_submodule(name)
            weight = dense_weight(linear)
            if owner == job.world.rank:
                sparse = solve_layer(weight, moments.gram, LOOK, prepared, plans[name].pattern, 0, 0).sparse
            else:
                sparse = torch.empty_like(weight)
            job.world.spread(sparse, owner)
            replace_module(block, name, Pruned(sparse, linear.bias))
            harm = distance(outputs(block, call, probes), wanted, hidden.device, job.world)
            replace_module(block, name, linear)
            found[name] = choice_of(weight, sparse, moments.gram, harm, plans[name], root)
    return {name: found[name] for name in plans}


class Pruned(nn.Module):
    """A linear layer for a look: weight (out, in), bias (out,) or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def outputs(block: nn.Module, call: BlockCall, inputs: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [call.run(block, states) for states in inputs]


def distance(found: list[Tensor], wanted: list[Tensor], device: torch.device, world: World) -> float:
    """The mean over tokens, those of all processes, of ‖found − wanted‖² / ‖wanted‖²."""
    total = torch.zeros(2, dtype=widest_dtype(device), device=device)
    for one, other in zip(found, wanted, strict=True):
        dense = other.to(working_dtype(other))
        apart = (one.to(dense.dtype) - dense).square().sum(-1) / dense.square().sum(-1).clamp_min(1e-30)
        total[0] += apart.sum(dtype=total.dtype)
        total[1] += apart.numel()
    world.add(total)
    return float(total[0] / total[1])


def choice_of(
    weight: Tensor, sparse: Tensor, gram: Gram, harm: float, plan: LayerPlan, root: Tensor | None = None
) -> Choice:
    """What a layer may become, and what each step would undo of the harm that pruning alone does.

    Args:
        root: as for `rank_gains`.
    """
    (out, width), size = plan.shape, weight.element_size()
    dense = weight.to(gram.matrix.dtype)
    one, two = (factor_bytes(out, width, rank, plan.factor_bits, weight.dtype) for rank in (1, 2))
    cost = two - one
    # Beyond the bytes of the dense layer there is nothing to win.
    room = plan.rank + max(plan.dense_bytes - plan.bytes, 0) // cost
    low, high = int(LEAST * plan.rank), min(int(MOST * plan.rank), room, out, width)
    if plan.factor_bits:
        low = max(low, min(plan.rank, 1))  # the scales of u come with the first rank, and are no part of its cost
    spectrum = rank_gains(dense - sparse.to(dense.dtype), gram, root)
    ranks = Ladder(spectrum[low:high] * per_unit(harm, spectrum), cost)
    if not isinstance(plan.pattern, Unstructured) or plan.grid is not None:
        return Choice(plan, weight.dtype, low, ranks)
    count = plan.pattern.count
    first, last = int(LEAST * count), min(int(MOST * count), out * width)
    step = max((last - first) // STEPS, 1)
    scores = (dense.square() * gram.matrix.diagonal()).flatten().sort(descending=True).values.double()
    gains = scores[first : first + (last - first) // step * step].view(-1, step).sum(1)
    entries = Ladder(gains * per_unit(harm, scores[count:]), step * size)
    return Choice(plan, weight.dtype, low, ranks, first, entries, step)


def per_unit(harm: float, parts: Tensor) -> float:
    """The harm over the sum of the parts that did it; 0 where there are none, and harm is rounding."""
    total = float(parts.sum())
    return harm / total if total > 0 else 0.0
