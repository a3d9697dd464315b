"""A plan that is not uniform: what each layer of the dense model has to lose decides its share of one budget."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasslefree.blockwise import Job, each_block, entering
from hasslefree.core.allocation import Ladder, climb, rank_gains
from hasslefree.core.factors import factor_bytes
from hasslefree.core.gram import Gram
from hasslefree.core.owl import outlier_share, owl_ratios
from hasslefree.core.patterns import Unstructured
from hasslefree.harm import harms
from hasslefree.models.activations import Activations
from hasslefree.models.blocks import dense_weight
from hasslefree.models.calibration import gather, groups_by_input
from hasslefree.models.calls import BlockCall
from hasslefree.plan import LayerPlan, Plan, plan_block, plan_layer

# A layer keeps at least this share of its uniform rank and non-zeros, and gets at most this.
LEAST, MOST = 0.5, 2.0
# Non-zeros move in so many steps between the two.
STEPS = 256


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

    def weighed(self, harm: float) -> Choice:
        """The same with what each step would undo of so much harm."""
        entries = None if self.entries is None else self.entries.weighed(harm)
        return dataclasses.replace(self, ranks=self.ranks.weighed(harm), entries=entries)

    def taken(self, ranks: int, steps: int = 0) -> LayerPlan:
        """The plan with so many steps on each ladder."""
        pattern = self.plan.pattern if self.count is None else Unstructured(self.count + steps * self.step)
        rank, plan = self.rank + ranks, self.plan
        return plan_layer(plan.shape, pattern, rank, self.dtype, plan.grid, plan.factor_bits)


def allocated(job: Job, calls: list[BlockCall], segments: Tensor, folder: Path) -> Plan:
    """The plan that the recipe's `allocate` asks for, from the dense model on the calibration text.

    Args:
        segments: of this process. folder: for hidden states on the disk.
    """
    way = by_outliers if job.recipe.allocate == "owl" else by_error
    return way(job, calls, segments, folder)


def by_outliers(job: Job, calls: list[BlockCall], segments: Tensor, folder: Path) -> Plan:
    """OWL (arXiv 2310.05175): every block has a ratio, or a sparsity, of its own, around the recipe's."""
    recipe, hidden = job.recipe, entering(job, segments, folder)
    shares = [outliers_of(job, index, calls[index], hidden) for index in each_block(job, calls, hidden)]
    sizes = [sum(math.prod(p.shape) for p in plans.values()) for plans in job.plan]
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


def by_error(job: Job, calls: list[BlockCall], segments: Tensor, folder: Path) -> Plan:
    """The bytes of the uniform plan, spent where they bring the model's predictions closest to the dense ones.

    It is measured what each layer, pruned alone by its pattern, does to the predictions (`harms`). The spectrum of
    what was pruned tells what share of it each rank would undo; the scores of Wanda, what share each non-zero.

    Raises:
        ModelError, NonFiniteError: as from `harms`.
    """
    choices = [
        {name: choice.weighed(harm) for name, (choice, harm) in layers.items()}
        for layers in harms(job, calls, segments, folder, choice_of)
    ]
    every = [choice for block in choices for choice in block.values()]
    budget = sum(layer.bytes for plans in job.plan for layer in plans.values())
    ladders = [ladder for choice in every for ladder in choice.ladders]
    steps = iter(climb(ladders, budget - sum(choice.taken(0).bytes for choice in every)))
    return [
        {name: block[name].taken(*(next(steps) for _ in block[name].ladders)) for name in block} for block in choices
    ]


def choice_of(weight: Tensor, sparse: Tensor, gram: Gram, plan: LayerPlan, root: Tensor | None = None) -> Choice:
    """What a layer may become, and what share of the harm of pruning it each step would undo.

    Args:
        sparse: the weight pruned. root: as for `rank_gains`.
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
    ranks = Ladder(spectrum[low:high] * per_unit(spectrum), cost)
    if not isinstance(plan.pattern, Unstructured) or plan.grid is not None:
        return Choice(plan, weight.dtype, low, ranks)
    count = plan.pattern.count
    first, last = int(LEAST * count), min(int(MOST * count), out * width)
    step = max((last - first) // STEPS, 1)
    scores = (dense.square() * gram.matrix.diagonal()).flatten().sort(descending=True).values.double()
    gains = scores[first : first + (last - first) // step * step].view(-1, step).sum(1)
    entries = Ladder(gains * per_unit(scores[count:]), step * size)
    return Choice(plan, weight.dtype, low, ranks, first, entries, step)


def per_unit(parts: Tensor) -> float:
    """One over the sum of parts; 0 where there are none."""
    total = float(parts.sum())
    return 1 / total if total > 0 else 0.0
