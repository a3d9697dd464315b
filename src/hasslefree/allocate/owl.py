"""OWL: blocks with more outliers keep more of their parameters (Yin et al., arXiv 2310.05175)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hasslefree.allocate.allocation import Allocation
from hasslefree.core.gram import working_dtype
from hasslefree.distributed import World
from hasslefree.errors import BudgetError
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import check_finite, run_block, widest_dtype
from hasslefree.models.calls import hooks
from hasslefree.models.experts import every_expert_called
from hasslefree.models.precision import as_multiplied
from hasslefree.models.rules import Matrix
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Visit, Walk
from hasslefree.planning.fit import plan_layer
from hasslefree.planning.plan import LayerPlan, Plan
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
    """The share of outliers in the planned layers of a block.

    Args:
        hidden: the inputs of the block, which become its outputs.
    """
    sites = find_sites(visit.block)
    squares = {name: InputSquares(plan.shape[1], hidden.device) for name, plan in plans.items()}
    watching = hooks(sites[name].on_input(found.take) for name, found in squares.items())
    with watching, every_expert_called(visit.block):
        run_block(visit.block, visit.call, hidden)
    visit.has_run = True
    layers: list[tuple[Tensor, Tensor]] = []
    for name, found in squares.items():
        mean = found.mean(world)
        check_finite(mean, f"{visit.prefix}.{name}")
        layers.append((sites[name].weight(), mean))
    return outlier_share(layers)


class InputSquares:
    """The sum of the squares of each input of a layer: diag H times the number of tokens."""

    def __init__(self, width: int, device: torch.device):
        self.count = 0
        self.sums = torch.zeros(width, dtype=widest_dtype(device), device=device)

    def take(self, x: Tensor) -> None:
        """Add inputs (…, in) of the layer."""
        rows = as_multiplied(x.reshape(-1, x.shape[-1]))
        self.sums += rows.to(working_dtype(rows)).square().sum(0, dtype=self.sums.dtype)
        self.count += len(rows)

    def mean(self, world: World) -> Tensor:
        """The mean squares over the tokens of all processes; 1 without tokens, as in H = I."""
        tokens = int(world.total(self.count, self.sums.device))
        world.add(self.sums)
        if not tokens:
            return torch.ones_like(self.sums)
        return self.sums / tokens


def outlier_share(layers: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The share of entries whose A_ij = |W_ij|·‖X_j‖ is over `MULTIPLE` times the mean of all A_ij.

    Args:
        layers: W, (out, in), and diag H, (in,), of each linear layer of a block. ‖X_j‖² is H_jj
            times the number of tokens, which cancels. The mean is over the entries of all layers.
    """
    scores: list[Tensor] = []
    for weight, diagonal in layers:
        scores.append(weight.abs() * diagonal.sqrt().to(working_dtype(weight)))
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
