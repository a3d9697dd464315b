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
from hasslefree.core.gram import Gram, check_floating, dtype_name, relative, working_dtype
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


# The largest difference between H and Hᵀ that counts as rounding, over the largest entry of H.
ASYMMETRY = 1e-3


@dataclass(frozen=True)
class _Given(Checked):
    """The arguments whose types are checked before anything is computed."""

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
        gram: the second moment H of the layer's inputs, (in, in). None for any other matrix, or
            without data: then H = I, errors are ‖W − S − L‖² / ‖W‖², and a remark is added.
        pattern, rank, sparsity, ratio, rank_share: the budget; see `Budget`.
        method: a name, or an object such as `Joint(rounds=50)`.
        factor_bits: 8 for u and v as int8 codes (`core.factors`); None for the dtype of W.
        seed: the seed of the random start. On one machine, a seed always gives the same result.

    Raises:
        HasslefreeError: the shapes do not match, a dtype is not floating, there are NaN or Inf, the
            budget is impossible, or a name is unknown.

    Example:
        >>> gram = hasslefree.Gram.from_activations(x)  # x: (tokens, in)
        >>> result = hasslefree.decompose(weight, gram, pattern="2:4", rank=64)
        >>> result.relative_error
    """
    check_floating("weight", weight)
    if weight.is_meta:
        raise ShapeError("weight is on the meta device and has no values; load it first")
    seed = _Given(gram, pattern, method, seed).seed
    solver = build_method(method) if isinstance(method, str) else method
    weight = weight.detach()
    given = Gram.identity(weight.shape[-1:].numel()) if gram is None else gram
    checked = checked_gram(weight, given)
    budget = Budget(pattern, rank, sparsity, ratio, rank_share)
    exact_pattern, exact_rank = budget.resolve(*weight.shape)
    solver.check(exact_rank)
    check_factor_bits(factor_bits, exact_rank)
    if solver.grid:
        solver.grid.check(weight.shape, exact_pattern)
    prepared = solver.prepare(checked)
    result = solve_layer(
        weight, checked, solver, prepared, exact_pattern, exact_rank, seed, factor_bits
    )
    if gram is not None:
        return result
    return dataclasses.replace(result, remarks=(DATA_FREE, *result.remarks))


def checked_gram(weight: Tensor, gram: Gram) -> Gram:
    """Return the Gram in the working dtype of a weight and on its device.

    Raises:
        ShapeError: weight and Gram do not match, or the weight has no entries.
        NonFiniteError: one of them contains NaN or Inf, or the Gram overflows the dtype.
        FactorizationError: the Gram is not a second moment.
    """
    if weight.ndim != 2 or weight.shape[1] != len(gram.matrix):
        raise ShapeError(
            "weight and Gram matrix do not match: expected shapes (out, in) and (in, in), got "
            f"{tuple(weight.shape)} and {tuple(gram.matrix.shape)}"
        )
    if not weight.numel():
        raise ShapeError(
            f"the weight has no entries: its shape is {tuple(weight.shape)}; leave the layer out"
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
            "the Gram matrix (XᵀX of the layer's inputs) overflows"
            f" {dtype_name(gram.matrix)}; scale the activations down, or pass the weight in float64"
        )
    # Factorisations read one triangle of H, and the loss reads both.
    asymmetry = (gram.matrix - gram.matrix.T).abs_().amax()
    if gram.diagonal.amin() < 0 or asymmetry > ASYMMETRY * gram.diagonal.amax():
        raise FactorizationError(
            f"the Gram matrix (XᵀX of the layer's {len(gram.matrix)} inputs) is not symmetric, or"
            " its diagonal has negative entries; compute it again from the activations"
            " (Gram.from_activations)"
        )
    return gram


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
    """`decompose` for arguments that have been checked.

    Inputs that are always zero (H_jj = 0) get no weight in S or in L, whatever the method; on a
    grid with offsets, S takes the value nearest to zero there.

    Args:
        prepared: method.prepare(gram), which layers with the same input share.
        factor_bits: as in `decompose`, but ignored at rank 0.
    """
    full = weight.to(working_dtype(weight))
    norm = checked_norm(live(full, gram), gram)
    solution = approximation(method, full, gram, prepared, pattern, rank, seed)
    low_rank = solution.low_rank.balanced()
    before = relative(gram.loss(low_rank.residual(full, solution.sparse)), norm)
    if not math.isfinite(before):
        raise NonFiniteError(
            "NaN or Inf appeared while the layer was solved; raise the damping"
            f" ({option('damping', 0.01)}) or use another method ({option('method', 'joint')})"
        )
    codes = None
    if solution.scaling:
        codes = Quantised.of(solution.sparse, solution.scaling, weight.dtype)
    sparse = solution.sparse.to(weight.dtype)
    low_rank_in_dtype = low_rank.to(weight.dtype)
    factors = None
    rounding = f"the cast to {dtype_name(weight)}"
    if factor_bits and rank:
        factors = quantised(low_rank, full, sparse.to(full.dtype), gram, weight.dtype)
        low_rank_in_dtype = factors.values()
        rounding += ", with factors in int8,"
    residual = low_rank_in_dtype.to(full.dtype).residual(full, sparse.to(full.dtype))
    after = relative(gram.loss(residual), norm)
    if not math.isfinite(after):
        raise NonFiniteError(
            f"values of S or L overflow {dtype_name(weight)}; use another dtype"
            f" ({option('dtype', 'float32')}) or raise the damping ({option('damping', 0.01)})"
        )
    remarks = (*gram.remarks(), *solution.remarks, *_remarks_on(after, before, rounding))
    return Decomposition(
        sparse, low_rank_in_dtype, after, before, solution.history, remarks, codes, factors
    )


def live(weight: Tensor, gram: Gram) -> Tensor:
    """Set the weights (out, in) of inputs that are always zero to zero."""
    if gram.alive.all():
        return weight
    return weight * gram.alive


def approximation(
    method: Method,
    weight: Tensor,
    gram: Gram,
    prepared: Any,
    pattern: Pattern,
    rank: int,
    seed: int,
) -> Solution:
    """Compute S and L for a weight in the working dtype, without measuring their error; arguments
    as in `solve_layer`.
    """
    weight = live(weight, gram).contiguous()  # experts may be stored transposed
    start = method.start(weight, rank, seed)
    solution = None if method.grid else unchanged(weight, pattern, start)
    if solution is None:
        try:
            solution = method.solve(weight, prepared, pattern, start)
        except LinAlgError as error:
            remedy = f"raise the damping ({option('damping', 0.01)})"
            raise FactorizationError(f"a factorisation failed: {error}; {remedy}") from None
    low_rank = LowRank(solution.low_rank.u, solution.low_rank.v * gram.alive)
    sparse = solution.sparse * gram.alive
    if solution.scaling and solution.scaling.grid.offset:  # zero need not be on the grid
        sparse = solution.scaling.nearest(sparse)
    return dataclasses.replace(solution, sparse=sparse, low_rank=low_rank)


def checked_norm(weight: Tensor, gram: Gram) -> float:
    """Return tr(W H Wᵀ) for a weight (out, in), the divisor of errors; 0 for a weight of zeros.

    Raises:
        NonFiniteError: the norm is near the limits of the dtype, or zero up to rounding.
    """
    norm = gram.loss(weight)
    if not weight.any():
        return norm
    limits = torch.finfo(weight.dtype)
    # The norm for uncorrelated inputs: if terms cancel, rounding errors are relative to this norm.
    uncorrelated = (weight.square() @ gram.diagonal).sum(dtype=torch.float64).item()
    if not limits.tiny / limits.eps < uncorrelated < limits.max * limits.eps:
        extreme = "small" if uncorrelated < 1 else "large"
        raise NonFiniteError(
            f"the mean square of the layer's output, {uncorrelated:.0e}, is too {extreme} for"
            f" {dtype_name(weight)}; scale the weight or the activations, pass the weight in"
            f" float64, or keep the layer dense ({option('leave_dense')})"
        )
    if norm <= limits.eps * uncorrelated:
        raise NonFiniteError(
            "the layer's output is zero, up to rounding, on every calibration token, so its error"
            f" cannot be measured; keep the layer dense ({option('leave_dense')}) or use more"
            " calibration tokens"
        )
    return norm


def unchanged(
    weight: Tensor,
    pattern: Pattern,
    start: LowRank,
) -> Solution | None:
    """Return S = W and L = 0 if the pattern keeps every non-zero of W; None otherwise."""
    kept = pattern.kept(weight.shape)
    if torch.count_nonzero(weight) > kept:
        return None
    if ((weight != 0) & ~pattern.mask(weight.abs())).any():  # a square may be zero
        return None
    remarks: tuple[str, ...] = ()
    if kept < weight.numel():
        remarks = ("the pattern keeps every non-zero of the weight: S = W, L = 0",)
    nothing = LowRank(torch.zeros_like(start.u), torch.zeros_like(start.v))
    return Solution(weight, nothing, (), remarks)


def _remarks_on(
    after: float,
    before: float,
    rounding: str,
) -> Iterator[str]:
    if after > 2 * before + 1e-4:
        yield f"{rounding} raised the relative error from {before:.2g} to {after:.2g}"
    if after > 1:
        yield f"the relative error is {after:.2g}: a layer of zeros would be closer"
