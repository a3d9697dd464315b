"""OWL: blocks with more outliers keep more (Yin et al., arXiv 2310.05175)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hasslefree.errors import BudgetError

# M of the paper, which takes 3, 5, 7 or 10: an entry above this multiple of the mean is an outlier. And its λ.
MULTIPLE, SPREAD = 5.0, 0.08


def outlier_share(layers: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The share of a block's entries whose A_ij = |W_ij|·‖X_j‖ is more than `MULTIPLE` times the mean of all A_ij.

    Args:
        layers: W, (out, in), and diag H, (in,), of each linear layer of the block; ‖X_j‖² is tokens·H_jj, and the
            number of tokens cancels. The mean is over all entries of all of them.
    """
    if not layers:
        raise BudgetError("outliers are counted over at least one layer, and no layer was given")
    scores = [weight.abs() * diagonal.sqrt() for weight, diagonal in layers]
    count = sum(score.numel() for score in scores)
    mean = sum(score.sum(dtype=torch.float64).item() for score in scores) / count
    return sum(int(torch.count_nonzero(score > MULTIPLE * mean)) for score in scores) / count


def owl_ratios(shares: Sequence[float], ratio: float, sizes: Sequence[int]) -> tuple[float, ...]:
    """For every block the share of its parameters that is saved: the more outliers, the fewer.

    What is kept grows linearly with the outlier share, by 2λ from the block of the fewest to that of the most, and is
    shifted so that ρ is saved on average: the ratios lie within 2λ of ρ. Blocks that are all alike get ρ.

    Args:
        shares: `outlier_share` of every block. ratio: ρ, over all blocks.
        sizes: parameters of every block, by which the average is weighted.
    """
    least, most = min(shares), max(shares)
    moves = [(share - least) / (most - least) if most > least else 0.0 for share in shares]
    mean = sum(move * weight for move, weight in zip(moves, sizes, strict=True)) / sum(sizes)
    ratios = tuple(ratio - 2 * SPREAD * (move - mean) for move in moves)
    if min(ratios) < 0 or max(ratios) > 1:
        raise BudgetError(
            f"OWL with a mean of {ratio} would remove from {min(ratios):.3f} to {max(ratios):.3f} of a block's "
            "parameters, which must be within 0 to 1; choose another ratio or sparsity"
        )
    return ratios
