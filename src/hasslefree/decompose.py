"""One layer: a weight and the Gram of its inputs become S + L."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.budgets import Budget
from hasslefree.core.gram import Gram, relative, working_dtype
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Decomposition, Method, Solution
from hasslefree.errors import NonFiniteError, ShapeError
from hasslefree.methods import build_method


def decompose(
    weight: Tensor,
    gram: Gram,
    pattern: str | Pattern = "2:4",
    rank: int | None = None,
    *,
    sparsity: float | None = None,
    ratio: float | None = None,
    rank_share: float | None = None,
    method: str | Method = "joint",
    seed: int = 0,
) -> Decomposition:
    """Find a sparse S and a low-rank L with tr((W−S−L) H (W−S−L)ᵀ) small.

    Args:
        weight: W, (out, in), any floating dtype. The result has its dtype and device.
        gram: the second moment H of the layer's inputs, (in, in).
        pattern, rank, sparsity, ratio, rank_share: the budget; see `Budget`.
        method: a name, or an object such as `Joint(rounds=50)`.
        seed: of the random start. Same seed, same machine, same result.

    Raises:
        HasslefreeError: shapes that do not go together, NaN or Inf, an impossible budget, an unknown name.

    Example:
        >>> gram = hasslefree.Gram.from_activations(x)  # x: (tokens, in)
        >>> result = hasslefree.decompose(weight, gram, pattern="2:4", rank=64)
        >>> result.relative_error
    """
    solver = build_method(method) if isinstance(method, str) else method
    weight = weight.detach()
    if weight.ndim != 2 or weight.shape[1] != len(gram.matrix):
        raise ShapeError(
            f"weight (out, in) and Gram (in, in) do not go together: {tuple(weight.shape)}, {tuple(gram.matrix.shape)}"
        )
    if not torch.isfinite(weight).all() or not torch.isfinite(gram.matrix).all():
        raise NonFiniteError("the weight or the Gram holds NaN or Inf; repair the checkpoint or the activations")
    exact_pattern, exact_rank = Budget(pattern, rank, sparsity, ratio, rank_share).resolve(*weight.shape)
    solver.check(exact_rank)
    gram = gram.to(weight)
    return solve_layer(weight, gram, solver, solver.prepare(gram), exact_pattern, exact_rank, seed)


def solve_layer(
    weight: Tensor, gram: Gram, method: Method, prepared: Any, pattern: Pattern, rank: int, seed: int
) -> Decomposition:
    """`decompose` for inputs that were checked, with `prepared` = method.prepare(gram) shared between layers.

    Inputs that are always zero (H_jj = 0) get no weight in S nor in L, whatever the method.
    """
    full = weight.to(working_dtype(weight))
    alive = gram.alive
    if pattern.kept((full.shape[0], full.shape[1])) == full.numel():
        # Nothing is removed: S = W, exactly, and no method has anything to find.
        nothing = LowRank(full.new_zeros(len(full), rank), full.new_zeros(rank, full.shape[1]))
        solution = Solution(full, nothing, ())
    else:
        solution = method.solve(full * alive, prepared, pattern, rank, torch.Generator().manual_seed(seed))
    sparse = solution.sparse * alive
    low_rank = LowRank(solution.low_rank.u, solution.low_rank.v * alive).balanced()
    norm = gram.loss(full)
    before = relative(gram.loss(full - sparse - low_rank.product()), norm)
    cast, cast_low_rank = sparse.to(weight.dtype), low_rank.to(weight.dtype)
    after = before
    if weight.dtype != full.dtype:
        after = relative(gram.loss(full - cast.to(full.dtype) - cast_low_rank.to(full.dtype).product()), norm)
    if not math.isfinite(after):
        name = str(weight.dtype).removeprefix("torch.")
        raise NonFiniteError(f"S or L does not fit into {name}; use another dtype (--dtype float32)")
    return Decomposition(cast, cast_low_rank, after, before, solution.history)
