"""FLOPs of the methods by formula (a multiplication with an addition is two), leading terms.

out, width and rank are the layer's o, n and r. A thin SVD of p × q, p ≥ q, is counted as 6pq² + 20q³, an
eigendecomposition as 9n³, a Cholesky factorisation with the inverse as n³ and a QR of p × q as 4pq² (Golub & Van Loan,
Matrix Computations, tables 5.5.1 and 8.6.1; the QR with its Q).
"""

from __future__ import annotations

from collections.abc import Callable


def thin_svd(out: int, width: int) -> int:
    large, least = max(out, width), min(out, width)
    return 6 * large * least**2 + 20 * least**3


def sparsegpt(out: int, width: int) -> int:
    """One sweep: each column updates those to its right."""
    return out * width**2


def exact(out: int, width: int, rank: int) -> int:
    """T C, its SVD, and a triangular solve for the factor."""
    return 2 * out * width**2 + thin_svd(out, width) + rank * width**2


def log(out: int, width: int) -> int:
    """The objective, by which an alternation keeps its best round: tr(R H Rᵀ) and tr(W H Wᵀ)."""
    return 4 * out * width**2


def oats(out: int, width: int, rank: int, rounds: int) -> int:
    return rounds * (thin_svd(out, width) + 4 * out * width * rank + log(out, width))


def hassle_free(out: int, width: int, rank: int, rounds: int) -> int:
    """A sweep, T H, 50 steps of Adam and the product u v a round."""
    step = 2 * rank * (2 * out * width + width**2)
    fit = 2 * out * width**2 + 50 * step + 4 * out * width * rank
    return width**3 + rounds * (sparsegpt(out, width) + fit + log(out, width))


def hassle_free_exact(out: int, width: int, rank: int, rounds: int) -> int:
    """A sweep and an exact fit a round."""
    fit = exact(out, width, rank) + 4 * out * width * rank
    return width**3 + rounds * (sparsegpt(out, width) + fit + log(out, width))


def three_block(out: int, width: int, rank: int, rounds: int) -> int:
    """Two products a round, the randomised SVD (six thin products), a resolvent every ten rounds."""
    columns = rank + 5
    fit = 2 * out * width**2 + 12 * out * width * columns + 12 * (out + width) * columns**2 + rank * width**2
    return 9 * width**3 + rounds // 10 * 2 * width**3 + rounds * (2 * out * width**2 + fit + 2 * out * width * rank)


def joint(out: int, width: int, rank: int, rounds: int) -> int:
    """The scale and about eight kernels; a product and a subspace step a round; two sweeps of polish.

    A subspace step is K vᵀ, T (K vᵀ), BᵀT twice and a QR; L = B v is multiplied out once more.
    """
    large, thin = 2 * out * width**2, 2 * out * width * rank
    subspace = 2 * width**2 * rank + 3 * thin + 4 * out * rank**2
    sweeps = 2 * (6 * large + thin) + 3 * (subspace + thin)
    return (1 + min(rounds, 8)) * width**3 + rounds * (large + subspace + thin) + 7 * subspace + sweeps + 4 * large


COUNTS: dict[str, Callable[[int, int, int, int], int]] = {
    "oats": oats,
    "hassle-free": hassle_free,
    "hassle-free, exact step": hassle_free_exact,
    "eora": lambda out, width, rank, rounds: hassle_free_exact(out, width, rank, 1),
    "3basil": three_block,
    "joint": joint,
}
