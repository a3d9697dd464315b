"""One layer: a weight and the Gram of its inputs become S + L."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.budgets import Budget
from hasslefree.core.factors import check_factor_bits, quantised
from hasslefree.core.gram import Gram, check_floating, relative, working_dtype
from hasslefree.core.grids import Quantised
from hasslefree.core.linalg import LinAlgError
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Decomposition, Method, Solution
from hasslefree.errors import FactorizationError, NonFiniteError, ShapeError, option
from hasslefree.solve.methods import build_method
from hasslefree.validation import Checked, Seed

DATA_FREE = (
    "no Gram was given, so H = I (data-free): errors are those of the weight, not of the layer's"
    " output"
)


@dataclass(frozen=True)
class _Given(Checked):
    """What must have these types before anything is computed."""

    gram: Gram | None
    pattern: str | Pattern
    method: str | Method
    seed: Seed


def decompose(
    weight: Tensor,
    gram: Gram | None = None,
    pattern: str | Pattern = "2:4",
    rank: int | None = None,
    *,
    sparsity: float | None = None,
    ratio: float | None = None,
    rank_share: float | None = None,
    method: str | Method = "joint",
    factor_bits: int | None = None,
    seed: int = 0,
) -> Decomposition:
    """Find a sparse S and a low-rank L with tr((W−S−L) H (W−S−L)ᵀ) small.

    Args:
        weight: W, (out, in), any floating dtype. The result has its dtype and device.
        gram: the second moment H of the layer's inputs, (in, in). None for a matrix in general, or
            where there are no data: H = I, the errors are ‖W − S − L‖² / ‖W‖², and a remark says
            so.
        pattern, rank, sparsity, ratio, rank_share: the budget; see `Budget`.
        method: a name, or an object such as `Joint(rounds=50)`.
        factor_bits: 8 for u and v as int8 codes (`core.factors`); None for the dtype of W.
        seed: of the random start. Same seed, same machine, same result.

    Raises:
        HasslefreeError: shapes that do not match, NaN or Inf, an impossible budget, an unknown
            name.

    Example:
        >>> gram = hasslefree.Gram.from_activations(x)  # x: (tokens, in)
        >>> result = hasslefree.decompose(weight, gram, pattern="2:4", rank=64)
        >>> result.relative_error
    """
    if not isinstance(weight, Tensor) or weight.is_meta:
        raise ShapeError(
            f"weight must be a tensor (out, in), not on meta, got {type(weight).__name__}; use"
            " as_tensor"
        )
    check_floating("weight", weight)
    seed = _Given(gram, pattern, method, seed).seed
    solver = build_method(method) if isinstance(method, str) else method
    weight = weight.detach()
    data_free = gram is None
    gram = Gram.identity(weight.shape[-1:].numel()) if gram is None else gram
    if weight.ndim != 2 or weight.shape[1] != len(gram.matrix):
        raise ShapeError(
            "weight and Gram matrix do not match: expected shapes (out, in) and (in, in), got "
            f"{tuple(weight.shape)} and {tuple(gram.matrix.shape)}"
        )
    if not torch.isfinite(weight).all():
        raise NonFiniteError(
            "the weight contains NaN or Inf; check the checkpoint that it comes from"
        )
    if not torch.isfinite(gram.matrix).all():
        raise NonFiniteError(
            "the Gram matrix (XᵀX of the layer's inputs) contains NaN or Inf; mask or drop the"
            " tokens that cause it"
        )
    gram = gram.to(weight)
    if not torch.isfinite(gram.matrix).all():
        raise NonFiniteError(
            f"the Gram matrix (XᵀX of the layer's inputs) overflows {_name(gram.matrix)}; scale the"
            " activations down, or pass the weight in float64"
        )
    exact_pattern, exact_rank = Budget(pattern, rank, sparsity, ratio, rank_share).resolve(
        *weight.shape
    )
    solver.check(exact_rank)
    check_factor_bits(factor_bits, exact_rank)
    if grid := solver.grid:
        grid.check((weight.shape[0], weight.shape[1]), exact_pattern)
    result = solve_layer(
        weight, gram, solver, solver.prepare(gram), exact_pattern, exact_rank, seed, factor_bits
    )
    return (
        dataclasses.replace(result, remarks=(DATA_FREE, *result.remarks)) if data_free else result
    )


def solve_layer(
    weight: Tensor,
    gram: Gram,
    method: Method,
    prepared: Any,
    pattern: Pattern,
    rank: int,
    seed: int,
    factor_bits: int | None = None,
) -> Decomposition:
    """`decompose` for inputs that were checked, with `prepared` = method.prepare(gram) shared
    between layers.

    factor_bits: without effect at rank 0.

    Inputs that are always zero (H_jj = 0) get no weight in S nor in L, whatever the method; on a
    grid with offsets, S has the value nearest to zero.
    """
    full = weight.to(working_dtype(weight))
    norm = checked_norm(live(full, gram), gram)
    solution = approximation(method, full, gram, prepared, pattern, rank, seed)
    sparse, low_rank = solution.sparse, solution.low_rank.balanced()
    before = relative(gram.loss(low_rank.residual(full, sparse)), norm)
    if not math.isfinite(before):
        raise NonFiniteError(
            "NaN or Inf appeared while the layer was solved; raise the damping"
            f" ({option('damping', 0.01)}) or use another method ({option('method', 'joint')})"
        )
    on_grid = Quantised.of(sparse, solution.scaling, weight.dtype) if solution.scaling else None
    cast, cast_low_rank, factors = sparse.to(weight.dtype), low_rank.to(weight.dtype), None
    if factor_bits and rank:
        factors = quantised(low_rank, full, cast.to(full.dtype), gram, weight.dtype)
        cast_low_rank = factors.values()
    after = before
    if weight.dtype != full.dtype or factors:
        residual = cast_low_rank.to(full.dtype).residual(full, cast.to(full.dtype))
        after = relative(gram.loss(residual), norm)
    if not math.isfinite(after):
        raise NonFiniteError(
            f"values of S or L overflow {_name(weight)}; use another dtype"
            f" ({option('dtype', 'float32')}) or raise the damping ({option('damping', 0.01)})"
        )
    rounding = f"the cast to {_name(weight)}" + (", with factors in int8," if factors else "")
    remarks = (*gram.remarks(), *solution.remarks, *_remarks_on(after, before, rounding))
    return Decomposition(
        cast, cast_low_rank, after, before, solution.history, remarks, on_grid, factors
    )


def live(weight: Tensor, gram: Gram) -> Tensor:
    """A weight (out, in) with zeros for the inputs that are always zero."""
    return weight if gram.alive.all() else weight * gram.alive


def approximation(
    method: Method,
    weight: Tensor,
    gram: Gram,
    prepared: Any,
    pattern: Pattern,
    rank: int,
    seed: int,
) -> Solution:
    """S and L of a weight in the working dtype, without a measurement of their error; arguments as
    in `solve_layer`.
    """
    alive, weight = gram.alive, live(weight, gram)
    solution = None if method.grid else unchanged(weight, pattern, rank)
    if solution is None:
        generator = torch.Generator().manual_seed(seed)
        try:
            solution = method.solve(weight, prepared, pattern, rank, generator)
        except LinAlgError as error:
            remedy = f"raise the damping ({option('damping', 0.01)})"
            raise FactorizationError(f"a factorisation failed: {error}; {remedy}") from None
    low_rank = LowRank(solution.low_rank.u, solution.low_rank.v * alive)
    sparse, scaling = solution.sparse * alive, solution.scaling
    if scaling and scaling.grid.offset:  # zero need not be on the grid
        sparse = scaling.nearest(sparse)
    return dataclasses.replace(solution, sparse=sparse, low_rank=low_rank)


def checked_norm(weight: Tensor, gram: Gram) -> float:
    """tr(W H Wᵀ) of a weight (out, in), by which errors are divided; 0 for a weight of zeros."""
    norm, limits = gram.loss(weight), torch.finfo(weight.dtype)
    # Its value if the inputs were uncorrelated: where terms cancel, the rounding error is relative
    # to this.
    apart = (weight.square() @ gram.diagonal).sum(dtype=torch.float64).item()
    some = bool(torch.count_nonzero(weight))
    if not (limits.tiny / limits.eps < apart < limits.max * limits.eps) and some:
        extreme = "small" if apart < 1 else "large"
        raise NonFiniteError(
            f"the mean square of the layer's output, {apart:.0e}, is too {extreme} for"
            f" {_name(weight)}; scale the weight or the activations, pass the weight in float64, or"
            f" keep the layer dense ({option('leave_dense')})"
        )
    if norm <= limits.eps * apart and some:
        raise NonFiniteError(
            "the layer's output is zero, up to rounding, on every calibration token, so its error"
            f" cannot be measured; keep the layer dense ({option('leave_dense')}) or use more"
            " calibration tokens"
        )
    return norm


def unchanged(weight: Tensor, pattern: Pattern, rank: int) -> Solution | None:
    """S = W and L = 0 where the pattern keeps every non-zero of W; None otherwise."""
    shape = (weight.shape[0], weight.shape[1])
    kept = pattern.kept(shape)
    if torch.count_nonzero(weight) > kept:
        return None
    if ((weight != 0) & ~pattern.mask(weight.square())).any():
        return None
    nothing = LowRank(weight.new_zeros(len(weight), rank), weight.new_zeros(rank, weight.shape[1]))
    remarks = (
        ()
        if kept == math.prod(shape)
        else ("the pattern keeps every non-zero of the weight: S = W, L = 0",)
    )
    return Solution(weight, nothing, (), remarks)


def _remarks_on(after: float, before: float, rounding: str) -> Iterator[str]:
    if after > 2 * before + 1e-4:
        yield f"{rounding} raised the relative error from {before:.2g} to {after:.2g}"
    if after > 1:
        yield f"the relative error is {after:.2g}: a layer of zeros would be closer"


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
