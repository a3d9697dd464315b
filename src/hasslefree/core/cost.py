"""What plug-ins cost on a layer (out, in): FLOPs, and arrays beside W and H (measured in docs/results/speed.md).

FLOPs are leading terms; a multiplication with an addition is two. A thin SVD of p × q, p ≥ q, is counted as
6pq² + 20q³, an eigendecomposition as 9n³, a Cholesky factorisation with the inverse as n³ and a QR of p × q as 4pq²
(Golub & Van Loan, Matrix Computations, tables 5.5.1 and 8.6.1; the QR with its Q).

Each plug-in states its own cost (`core.protocols`). One that states none is counted by `unstated_pruner`,
`unstated_solver` or `unstated_method`: as much as the most expensive plug-in of this package.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

FLOAT = 4
# Memory that the libraries for products and factorisations keep, in bytes.
LIBRARIES = 16 << 20


@dataclass(frozen=True)
class Need:
    """Arrays of numbers at most: in × in while `prepare` runs, kept of it, and while a layer is solved; out × in then.

    Args:
        prepare, kept, square: arrays in × in. large: arrays out × in, beside the two of `solve_layer`.
        thin: arrays (out + in) × rank. svd: whether a thin SVD of the whole is taken.
    """

    prepare: float = 0
    kept: float = 0
    large: float = 0
    square: float = 0
    thin: float = 0
    svd: bool = False

    def joined(self, other: Need) -> Need:
        """The need of two parts that are prepared one after the other and then run in turn."""
        return Need(
            max(self.prepare, self.kept + other.prepare),
            self.kept + other.kept,
            max(self.large, other.large),
            max(self.square, other.square),
            max(self.thin, other.thin),
            self.svd or other.svd,
        )

    def around(self, prepare: float, large: float) -> Need:
        """This need plus arrays that the method itself keeps, in × in and out × in."""
        return dataclasses.replace(
            self, prepare=self.prepare + prepare, kept=self.kept + prepare, large=self.large + large
        )


# A score and its mask; float64 counts twice. Where rows are ranked, positions are 64 bits wide.
SCORED = Need(large=5)
# The eigenvectors in float64 with LAPACK's own arrays; then Z, S, Y, W, a support, and what they are made from.
SPECTRAL = Need(prepare=10, kept=3, large=11, square=6)
# A Cholesky factor in float64, then T C and its SVD.
WHITENED = Need(prepare=5, kept=1, large=4, svd=True)
# A Cholesky factor in float64 and its inverse.
INVERTED = Need(prepare=10, kept=2, large=5)
# What a layer takes at the end: S before and after the cast, and the residual.
RESULT = 5.5


@dataclass(frozen=True)
class Cost:
    """What a plug-in takes on one layer.

    Args:
        flops: of a method in all; of a pruner or low-rank solver in each call.
        once: FLOPs of what a pruner or solver prepares from the Gram.
        need: its arrays. kernels: bytes of matrices that are kept for the next layer with the same input.
        unstated: the plug-ins in it that state no cost, and are counted by the rule for those.
    """

    flops: int
    once: int = 0
    need: Need = Need()
    kernels: int = 0
    unstated: tuple[str, ...] = ()


def workspace(cost: Cost, out: int, width: int, rank: int) -> int:
    """The maximum of bytes that a layer (out, in) takes beside W and H: of a float32 solver, with its result.

    An upper bound, for planning: every pattern, inputs that are always zero, and what the libraries keep. Where layers
    share an input, what is kept of it is counted once by each.
    """
    need, large, square, thin = cost.need, out * width, width**2, (out + width) * rank
    least = min(out, width)
    solve = (2 + max(need.large, RESULT)) * large + need.square * square + need.thin * thin
    if need.svd and rank:
        solve += least * (out + width) + 8 * least**2
    numbers = max(need.prepare * square, need.kept * square + solve)
    return LIBRARIES + max(round(numbers * FLOAT), round((need.kept * square + solve) * FLOAT) + cost.kernels)


def svd_flops(out: int, width: int) -> int:
    """Of a thin SVD."""
    large, least = max(out, width), min(out, width)
    return 6 * large * least**2 + 20 * least**3


def whitened_svd_flops(out: int, width: int, rank: int) -> int:
    """Of T C, its SVD, and a triangular solve for the factor."""
    return 2 * out * width**2 + svd_flops(out, width) + rank * width**2


def sketched_svd_flops(out: int, width: int, columns: int, iterations: int) -> int:
    """Of a randomised SVD (Halko et al.) with this many columns and power iterations."""
    return (2 + 2 * iterations) * 2 * columns * (out * width + (out + width) * columns)


def objective_flops(out: int, width: int) -> int:
    """Of tr(R H Rᵀ), by which an alternation keeps its best round."""
    return 2 * out * width**2


def admm_flops(out: int, width: int, rounds: int, every: int, others: int = 0) -> int:
    """Of the rounds of `SupportPenalty`: a product each, and a resolvent per check. others: further FLOPs a round."""
    return rounds * (2 * out * width**2 + others) + rounds // every * 2 * width**3


def unstated_pruner(name: str, out: int, width: int) -> Cost:
    """As ALPS with its defaults: 300 rounds of ADMM, and ten steps of conjugate gradients."""
    flops = admm_flops(out, width, 300, 3) + 11 * 2 * out * width**2
    return Cost(flops, 9 * width**3, SPECTRAL, unstated=(name,))


def unstated_solver(name: str, out: int, width: int, rank: int) -> Cost:
    """As the exact solver: an SVD in whitened space."""
    return Cost(whitened_svd_flops(out, width, rank), need=WHITENED, unstated=(name,))


def unstated_method(name: str, out: int, width: int, rank: int) -> Cost:
    """FLOPs as 3BASiL's 2,000 rounds; arrays as an alternation of ALPS and the exact solver or Adam."""
    fit = sketched_svd_flops(out, width, rank + 5, 2) + 2 * out * width**2 + rank * width**2 + 2 * out * width * rank
    need = SPECTRAL.joined(WHITENED).joined(Need(prepare=2, kept=1, large=2, thin=10)).around(1, 3)
    return Cost(9 * width**3 + admm_flops(out, width, 2000, 10, fit), need=need, unstated=(name,))
