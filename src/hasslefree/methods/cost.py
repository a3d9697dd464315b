"""What a method costs on a layer: FLOPs, and bytes of memory beside W and H. Measured in docs/measured/speed.md.

FLOPs are leading terms; a multiplication with an addition is two. A thin SVD of p × q, p ≥ q, is counted as
6pq² + 20q³, an eigendecomposition as 9n³, a Cholesky factorisation with the inverse as n³ and a QR of p × q as 4pq²
(Golub & Van Loan, Matrix Computations, tables 5.5.1 and 8.6.1; the QR with its Q).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hasslefree.core.protocols import LowRankSolver, Method, Pruner
from hasslefree.low_rank_solvers.adam import Adam
from hasslefree.low_rank_solvers.diagonal_svd import DiagonalSVD
from hasslefree.low_rank_solvers.exact import Exact
from hasslefree.low_rank_solvers.subspace import Subspace
from hasslefree.low_rank_solvers.svd import SVD, RandomizedSVD
from hasslefree.methods.alternating import AlternatingMinimization
from hasslefree.methods.joint import CG_STEPS, FIRST_STEPS, LOOKS, PARTS, SAMPLED, Joint, kernel_bytes
from hasslefree.methods.joint_on_grid import CG_STEPS as CG_ON_GRID
from hasslefree.methods.joint_on_grid import JointOnGrid
from hasslefree.methods.prune import Prune
from hasslefree.methods.pursuit import PrincipalComponentPursuit
from hasslefree.methods.three_block import ThreeBlock
from hasslefree.pruners.alps import ALPS
from hasslefree.pruners.dsnot import DSNoT
from hasslefree.pruners.magnitude import Magnitude
from hasslefree.pruners.osscar import OSSCAR
from hasslefree.pruners.refit import Refit
from hasslefree.pruners.round_to_nearest import RoundToNearest
from hasslefree.pruners.sparsegpt import SparseGPT
from hasslefree.pruners.wanda import Wanda

FLOAT = 4
# What the libraries of products and factorisations keep for themselves.
LIBRARIES = 16 << 20


def flops(method: Method, out: int, width: int, rank: int) -> int:
    """FLOPs of a method on a layer (out, in), with all that depends on H made anew.

    3BASiL, ALPS, a refit and a pursuit stop by themselves: theirs is the count of the most rounds that they may take. A
    method or part that is not of this package counts as the dearest one of it.
    """
    match method:
        case Joint():
            return _joint_flops(method, out, width, rank)
        case JointOnGrid():
            turn = _prune_flops(SparseGPT(), out, width) + _fit_flops(Exact(), out, width, rank) * (rank > 0)
            turn += (CG_ON_GRID + 1) * 2 * out * width**2 + _objective(out, width)
            found = _joint_flops(Joint(rounds=method.rounds), out, width, rank) + 2 * width**3
            return found + (method.turns if rank else 1) * turn
        case ThreeBlock():
            return _three_block_flops(method, out, width, rank)
        case PrincipalComponentPursuit():
            return method.searches * (method.rounds + 1) * (_svd_flops(out, width) + 2 * out * width * min(out, width))
        case AlternatingMinimization() if rank:
            fit = _fit_flops(method.low_rank, out, width, rank) + 4 * out * width * rank
            rounds = method.rounds * (_prune_flops(method.pruner, out, width) + fit + _objective(out, width))
            return _prepare_flops(method.pruner, width) + rounds
        case AlternatingMinimization() | Prune():
            once = _prune_flops(method.pruner, out, width) + _objective(out, width)
            return _prepare_flops(method.pruner, width) + once
    return _three_block_flops(ThreeBlock(), out, width, rank)


def _objective(out: int, width: int) -> int:
    """tr(R H Rᵀ) and tr(W H Wᵀ), by which an alternation keeps its best round."""
    return 4 * out * width**2


def _joint_flops(method: Joint, out: int, width: int, rank: int) -> int:
    """The scale and about eight kernels; a product and a subspace step a round; the polish.

    A subspace step is K vᵀ, T (K vᵀ), BᵀT twice and a QR; L = B v is multiplied out once more.
    """
    large, thin = 2 * out * width**2, 2 * out * width * rank
    subspace = 2 * width**2 * rank + 3 * thin + 4 * out * rank**2
    rounds = (1 + min(method.rounds, 8)) * width**3 + method.rounds * (large + subspace + thin)
    course = max(min(PARTS, method.rounds // 5) - 1, 0) * large // SAMPLED
    polish = method.sweeps * ((CG_STEPS + 1) * large + thin) + (method.sweeps + 1) * (subspace + thin)
    return rounds + course + (FIRST_STEPS - 1) * subspace + polish + (method.sweeps + 2) * large


def _three_block_flops(method: ThreeBlock, out: int, width: int, rank: int) -> int:
    """Two products a round, the randomised SVD, a resolvent at every look."""
    fit = 2 * out * width**2 + _fit_flops(method.svd, out, width, rank) + rank * width**2
    most = method.penalty.most
    looks = most // method.penalty.every * 2 * width**3
    return 9 * width**3 + looks + most * (2 * out * width**2 + fit + 2 * out * width * rank)


def _prepare_flops(pruner: Pruner, width: int) -> int:
    match pruner:
        case Magnitude() | Wanda() | RoundToNearest():
            return 0
        case DSNoT():
            return _prepare_flops(pruner.start, width)
        case Refit():
            return _prepare_flops(pruner.pruner, width)
        case SparseGPT() | OSSCAR():
            return width**3
    return 9 * width**3


def _prune_flops(pruner: Pruner, out: int, width: int) -> int:
    """DSNoT scores all entries twice a cycle; SparseGPT's columns each update those to their right; ALPS takes a
    product a round, then those of its refit.

    Where whole rows share a grid, SparseGPT may sweep twice.
    """
    match pruner:
        case Magnitude() | Wanda() | RoundToNearest():
            return 0
        case DSNoT():
            return _prune_flops(pruner.start, out, width) + pruner.cycles * 4 * out * width
        case Refit():
            return _prune_flops(pruner.pruner, out, width) + (pruner.steps + 1) * 2 * out * width**2
        case OSSCAR():
            tried = pruner.swaps * min(pruner.candidates, width) * 4 * out * width
            return 2 * (out + width) * width**2 + tried
        case SparseGPT():
            twice = pruner.grid is not None and pruner.grid.group is None
            return (1 + twice) * out * width**2
    alps = pruner if isinstance(pruner, ALPS) else ALPS()
    most = alps.penalty.most
    return (most + alps.cg_steps + 1) * 2 * out * width**2 + most // alps.penalty.every * 2 * width**3


def _svd_flops(out: int, width: int) -> int:
    large, least = max(out, width), min(out, width)
    return 6 * large * least**2 + 20 * least**3


def _fit_flops(solver: LowRankSolver, out: int, width: int, rank: int) -> int:
    svd = _svd_flops(out, width)
    match solver:
        case Adam():
            return 2 * out * width**2 + solver.steps * 2 * rank * (2 * out * width + width**2)
        case RandomizedSVD():
            columns, products = rank + solver.oversampling, 2 + 2 * solver.iterations
            return products * 2 * columns * (out * width + (out + width) * columns)
        case Subspace():
            return 2 * width**2 * rank + 6 * out * width * rank + 4 * out * rank**2
        case DiagonalSVD():
            return _fit_flops(solver.svd, out, width, rank)
        case SVD():
            return svd
    # T C, its SVD, and a triangular solve for the factor.
    return 2 * out * width**2 + svd + rank * width**2


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
        """Of two parts that are prepared one after the other, and take turns."""
        return Need(
            max(self.prepare, self.kept + other.prepare),
            self.kept + other.kept,
            max(self.large, other.large),
            max(self.square, other.square),
            max(self.thin, other.thin),
            self.svd or other.svd,
        )

    def around(self, prepare: float, large: float) -> Need:
        """With arrays of the method's own that stay, in × in and out × in."""
        return dataclasses.replace(
            self, prepare=self.prepare + prepare, kept=self.kept + prepare, large=self.large + large
        )


# A score and its mask; float64 counts twice. Where rows are ranked, positions are 64 bits wide.
SCORED = Need(large=5)
# The eigenvectors in float64 with LAPACK's own arrays; then Z, S, Y, W, a support, and what they are made from.
SPECTRAL = Need(prepare=10, kept=3, large=11, square=6)
WHITENED = Need(prepare=5, kept=1, large=4, svd=True)
PRUNER_NEEDS: dict[type, Need] = {
    Magnitude: SCORED,
    Wanda: SCORED,
    DSNoT: Need(large=8),
    RoundToNearest: SCORED,
    OSSCAR: Need(prepare=10, kept=2, large=8, square=6),
    SparseGPT: Need(prepare=10, kept=2, large=5),
    ALPS: SPECTRAL,
}
SOLVER_NEEDS: dict[type, Need] = {
    SVD: Need(large=3, svd=True),
    DiagonalSVD: Need(large=3, svd=True),
    RandomizedSVD: Need(large=1, thin=8),
    Subspace: Need(large=1, thin=6),
    Adam: Need(prepare=2, kept=1, large=2, thin=10),
    Exact: WHITENED,
}
# What a layer takes at the end: S before and after the cast, and the residual.
RESULT = 5.5


def workspace(method: Method, out: int, width: int, rank: int, device: str = "cpu") -> int:
    """Bytes at most that a layer (out, in) takes beside W and H: of a float32 solver, with what it returns.

    device: its kind, such as "cuda".

    An upper bound, for planning: every pattern, inputs that are always zero, and what the libraries keep. Where layers
    share an input, what is kept of it is counted once by each. A method or part that is not of this package counts as
    the dearest one of it; one that takes more must be planned for by its author.
    """
    need = _need(method)
    large, square, thin = out * width, width**2, (out + width) * rank
    least = min(out, width)
    solve = (2 + max(need.large, RESULT)) * large + need.square * square + need.thin * thin
    if need.svd and rank:
        solve += least * (out + width) + 8 * least**2
    kernels = 0
    if isinstance(method, Joint | JointOnGrid):
        # ρ may grow at every look, but after the last round. One kernel is there even where there is no room for it.
        kernels = max(min(kernel_bytes(device), min(method.rounds, LOOKS) * square * FLOAT), square * FLOAT)
    numbers = max(need.prepare * square, need.kept * square + solve)
    return LIBRARIES + max(round(numbers * FLOAT), round((need.kept * square + solve) * FLOAT) + kernels)


def _need(method: Method) -> Need:
    match method:
        case Prune(pruner=Refit() as refit) | AlternatingMinimization(pruner=Refit() as refit):
            before = dataclasses.replace(method, pruner=refit.pruner)
            return _need(before).joined(Need(prepare=1, kept=1, large=7))
        case Joint():
            return Need(prepare=4.5, kept=1, large=7.5, square=3, thin=8)
        case PrincipalComponentPursuit():
            return Need(large=10, svd=True)
        case JointOnGrid():
            joint = Need(prepare=4.5, kept=1, large=7.5, square=3, thin=8)
            return joint.joined(PRUNER_NEEDS[SparseGPT]).joined(WHITENED).around(1, 3)
        case ThreeBlock():
            return SPECTRAL.joined(Need(prepare=5, kept=1, thin=8)).around(1, 1)
        case Prune():
            return PRUNER_NEEDS.get(type(method.pruner), SPECTRAL).around(1, 0)
        case AlternatingMinimization():
            pruner = PRUNER_NEEDS.get(type(method.pruner), SPECTRAL)
            return pruner.joined(_solver_need(method.low_rank)).around(1, 3)
    return SPECTRAL.joined(WHITENED).joined(SOLVER_NEEDS[Adam]).around(1, 3)


def _solver_need(solver: LowRankSolver) -> Need:
    if isinstance(solver, DiagonalSVD) and isinstance(solver.svd, RandomizedSVD):
        return SOLVER_NEEDS[RandomizedSVD].joined(Need(large=2))  # T D beside T
    return SOLVER_NEEDS.get(type(solver), WHITENED)
