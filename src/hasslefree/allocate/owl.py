"""OWL: blocks with more outliers keep more of their parameters (Yin et al., arXiv 2310.05175)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hasslefree.allocate.allocation import Allocation
from hasslefree.distributed import World
from hasslefree.errors import BudgetError
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import gather, groups_by_input, tensors_read
from hasslefree.models.experts import every_expert_called
from hasslefree.models.rules import Matrix
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Visit, Walk
from hasslefree.planning.plan import LayerPlan, Plan, plan_layer
from hasslefree.progress import ALLOCATION
from hasslefree.recipe.resolve import Resolved

# M of the paper, which tries 3, 5, 7 and 10: entries above this multiple of the mean are outliers.
MULTIPLE = 5.0
# λ of the paper: the ratios of blocks differ by at most twice this.
SPREAD = 0.08


def by_outliers(
    walk: Walk,
    plan: Plan,
    resolved: Resolved,
    segments: Tensor,
    world: World,
) -> Allocation:
    """Give each block its own ratio, or sparsity, around that of the budget.

    Args:
        plan: the uniform plan of the recipe.
        segments: of this process, (samples, tokens).
    """
    hidden = walk.entering(segments)
    shares: dict[int, float] = {}
    sizes: list[int] = []
    for visit in walk.phases.counted(ALLOCATION, walk.visits(hidden), len(plan.blocks), "blocks"):
        plans = plan.blocks[visit.index]
        if plans:  # other blocks stay dense
            shares[visit.index] = block_outliers(visit, plans, hidden, world)
            sizes.append(sum(layer.dense_parameters for layer in plans.values()))
    budget = resolved.budget
    mean = budget.sparsity if budget.ratio is None else budget.ratio
    assert mean is not None
    ratios = owl_ratios(list(shares.values()), mean, sizes)
    allocated: list[dict[str, LayerPlan]] = [{} for _ in plan.blocks]
    for index, ratio in zip(shares, ratios, strict=True):
        if budget.ratio is None:
            change = replace(budget, sparsity=ratio)
        else:
            change = replace(budget, ratio=ratio)
        changed = replace(resolved, budget=change)
        for name, layer in plan.blocks[index].items():
            matrix = Matrix(name, layer.shape, layer.dtype)
            allocated[index][name] = plan_layer(walk.blocks, index, matrix, changed)
    return Allocation(Plan(allocated, plan.ends))


def block_outliers(
    visit: Visit, plans: Mapping[str, LayerPlan], hidden: Activations, world: World
) -> float:
    """The share of outliers in the planned layers of a block. hidden: the inputs of the block."""
    sites = find_sites(visit.block)
    layers: list[tuple[Tensor, Tensor]] = []
    with every_expert_called(visit.block):
        reads = tensors_read(visit.block, visit.call, hidden[0], plans)
        for group in groups_by_input(reads):
            [gram] = gather(visit.block, visit.prefix, visit.call, hidden, [group], world)
            for name in group:
                layers.append((sites[name].weight(), gram.matrix.diagonal()))
    return outlier_share(layers)


def outlier_share(layers: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The share of entries whose A_ij = |W_ij|·‖X_j‖ is over `MULTIPLE` times the mean of all A_ij.

    Args:
        layers: W, (out, in), and diag H, (in,), of each linear layer of a block. ‖X_j‖² is H_jj
            times the number of tokens, which cancels. The mean is over the entries of all layers.
    """
    scores = [weight.abs() * diagonal.sqrt() for weight, diagonal in layers]
    count = sum(score.numel() for score in scores)
    mean = sum(score.sum(dtype=torch.float64).item() for score in scores) / count
    outliers = sum(int(torch.count_nonzero(score > MULTIPLE * mean)) for score in scores)
    return outliers / count


def owl_ratios(
    shares: Sequence[float],
    ratio: float,
    sizes: Sequence[int],
) -> tuple[float, ...]:
    """The share of its parameters that each block saves: the more outliers, the less.

    The kept share grows linearly with the share of outliers, by 2λ from the block with the fewest
    to the block with the most, and is shifted to save ρ on average. All ratios lie within 2λ of ρ.
    If all blocks have the same share of outliers, all get ρ.

    Args:
        shares: `outlier_share` of each block.
        ratio: ρ, over all blocks.
        sizes: the parameters of each block, which weight the average.

    Raises:
        BudgetError: a ratio would be below 0 or above 1.
    """
    least = min(shares)
    spread = max(shares) - least
    if spread == 0:
        return (ratio,) * len(shares)
    moves = [(share - least) / spread for share in shares]
    weighted = sum(move * size for move, size in zip(moves, sizes, strict=True))
    mean = weighted / sum(sizes)
    ratios = tuple(ratio - 2 * SPREAD * (move - mean) for move in moves)
    if min(ratios) < 0 or max(ratios) > 1:
        raise BudgetError(
            f"OWL with a mean of {ratio} would remove from {min(ratios):.3f} to {max(ratios):.3f}"
            " of a block's parameters, which must be between 0 and 1; choose another ratio or"
            " sparsity"
        )
    return ratios
