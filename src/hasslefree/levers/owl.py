"""OWL: blocks with more outliers keep more (Yin et al., arXiv 2310.05175)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hasslefree.errors import BudgetError


def outlier_share(layers: Sequence[tuple[Tensor, Tensor]], multiple: float = 5.0) -> float:
    """The share of a block's entries whose A_ij = |W_ij|·‖X_j‖ is more than `multiple` times the mean of all A_ij.

    Args:
        layers: W, (out, in), and diag H, (in,), of each linear layer of the block; ‖X_j‖² is tokens·H_jj, and the
            number of tokens cancels. The mean is over all entries of all of them.
        multiple: M of the paper, which takes 3, 5, 7 or 10.
    """
    if not multiple > 0:
        raise BudgetError(
            f"multiple must be above 0, got {multiple}: an entry above multiple times the mean is an outlier"
        )
    if not layers:
        raise BudgetError("outliers are counted over at least one layer, and no layer was given")
    scores = [weight.abs() * diagonal.sqrt() for weight, diagonal in layers]
    count = sum(score.numel() for score in scores)
    mean = sum(score.sum(dtype=torch.float64).item() for score in scores) / count
    return sum(int(torch.count_nonzero(score > multiple * mean)) for score in scores) / count


def owl_ratios(
    shares: Sequence[float], ratio: float, spread: float = 0.08, sizes: Sequence[int] | None = None
) -> tuple[float, ...]:
    """For every block the share of its parameters that is saved: the more outliers, the fewer.

    What is kept grows linearly with the outlier share, by 2λ from the block of the fewest to that of the most, and is
    shifted so that ρ is saved on average: the ratios lie within 2λ of ρ. Blocks that are all alike get ρ.

    Args:
        shares: `outlier_share` of every block. ratio: ρ, over all blocks. spread: λ; the paper takes 0.08.
        sizes: parameters of every block, by which the average is weighted; None where all are of one size.
    """
    if not shares:
        raise BudgetError("OWL needs the share of outliers of at least one block, got none")
    if spread < 0:
        raise BudgetError(f"spread, the λ of OWL, must not be negative, got {spread}")
    if sizes is not None and len(sizes) != len(shares):
        raise BudgetError(f"sizes must have one entry for each of the {len(shares)} blocks, got {len(sizes)}")
    least, most = min(shares), max(shares)
    weights = sizes or [1] * len(shares)
    moves = [(share - least) / (most - least) if most > least else 0.0 for share in shares]
    mean = sum(move * weight for move, weight in zip(moves, weights, strict=True)) / sum(weights)
    ratios = tuple(ratio - 2 * spread * (move - mean) for move in moves)
    if min(ratios) < 0 or max(ratios) > 1:
        highest, lowest = max(moves) - mean, mean - min(moves)
        room = min(ratio / (2 * highest) if highest else 1.0, (1 - ratio) / (2 * lowest) if lowest else 1.0)
        raise BudgetError(
            f"OWL with λ = {spread} and a mean of {ratio} would remove from {min(ratios):.3f} to {max(ratios):.3f} of "
            f"a block's parameters, which must be within 0 to 1; choose another ratio or sparsity, or a λ of at most "
            f"{max(room, 0.0):.3f}"
        )
    return ratios
