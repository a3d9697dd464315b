"""L in eight bits: both factors as whole numbers from −127 to 127, with one scale per row.

    u_ik = scale_i · code_ik,   v_kj = scale_k · code_kj        u: (out, r), v: (r, in)

As for S on a grid, scales have the eight significant bits of bfloat16, and values are rounded once,
to the dtype of the scale. The factors are not unique: L = (u R)(R⁻¹ v) for every invertible R. Once
v is rounded, the best u solves a least squares problem. `quantised` uses both facts;
docs/results/appendix.md reports the gain of each.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.linalg import eigh
from hasslefree.core.low_rank import LowRank
from hasslefree.errors import BudgetError, GridError

BITS = 8
# The largest code.
TOP = 127
# Tensors by name, with their shapes and dtypes; None is the model's dtype.
TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype | None]]
# Eigenvalues of v H vᵀ below this share of the largest count as rounding error.
FLOOR = 1e-6


@dataclass(frozen=True)
class CodedRows:
    """A matrix (m, n): codes, int8 (m, n) from −127 to 127, and a floating scale per row, (m,)."""

    codes: Tensor
    scale: Tensor

    def values(self) -> Tensor:
        """(m, n), in the dtype of the scale. Gradients flow to the scale."""
        return self.codes.to(self.scale.dtype) * self.scale.unsqueeze(1)


@dataclass(frozen=True)
class CodedFactors:
    """The factors of L as codes: u (out, r) and v (r, in)."""

    u: CodedRows
    v: CodedRows

    def values(self) -> LowRank:
        return LowRank(self.u.values(), self.v.values())


def check_factor_bits(bits: int | None, rank: int | None = None) -> None:
    """Check the bits of the factors.

    Args:
        bits: 8, or None for the model's dtype.
        rank: the rank of L; None if not known yet.

    Raises:
        GridError: any other number of bits.
        BudgetError: there are bits, and the rank is 0.
    """
    if bits not in (None, BITS):
        raise GridError(f"factor_bits must be {BITS}, got {bits}; leave it out for the default")
    if bits is not None and rank == 0:
        raise BudgetError(
            "factor_bits quantises the factors of L, and with rank 0 there are none; give a rank,"
            " or leave out factor_bits"
        )


def factor_tensors(
    out: int,
    width: int,
    rank: int,
    bits: int | None,
) -> TensorSpecs:
    """The tensors that hold the factors; none at rank 0."""
    if not rank:
        return {}
    dtype = torch.int8 if bits else None
    tensors: TensorSpecs = {
        "low_rank_u": ((out, rank), dtype),
        "low_rank_v": ((rank, width), dtype),
    }
    if bits:
        tensors["low_rank_u_scale"] = ((out,), None)
        tensors["low_rank_v_scale"] = ((rank,), None)
    return tensors


def quantised(
    low_rank: LowRank,
    weight: Tensor,
    sparse: Tensor,
    gram: Gram,
    dtype: torch.dtype,
) -> CodedFactors:
    """Quantise the factors of a good L to eight bits, with tr((T − L) H (T − L)ᵀ) small for
    T = W − S.

    The balanced factors are mixed by R, which makes all components similar in size. v is rounded to
    nearest, u is refitted to the rounded v, and the columns of u are rounded in turn.

    Args:
        low_rank: L.
        weight, sparse: W and S, (out, in).
        dtype: the dtype of the scales, which is that of the model.
    """
    balanced = low_rank.balanced()
    # A row of v whose column of u is zero adds nothing to L, but mixing would spread it everywhere.
    counts = balanced.u.norm(dim=0) > 0
    mixing = hartley(low_rank.rank, weight.device)
    v = nearest(mixing @ (balanced.v * counts.unsqueeze(1)).double(), dtype)
    rounded_v = v.values().to(weight.dtype)
    image = gram.matrix @ rounded_v.T
    norm = positive_definite((rounded_v @ image).double())
    start = balanced.u.double() @ mixing
    residual = LowRank(start.to(weight.dtype), rounded_v).residual(weight, sparse)
    # A Newton step in a norm of at least v H vᵀ. It does not raise the loss, and is exact where
    # v H vᵀ is regular.
    u = start + torch.linalg.solve(norm, (residual @ image).double(), left=False)
    return CodedFactors(swept(u, norm, dtype), v)


def hartley(rank: int, device: torch.device) -> Tensor:
    """The discrete Hartley transform, (cos + sin)(2πjk / r) / √r: (r, r), its own inverse
    (Bracewell, 1983).
    """
    steps = torch.arange(rank, device=device)
    angle = (torch.outer(steps, steps) % rank).double() * (2 * math.pi / rank)
    return (angle.cos() + angle.sin()) / math.sqrt(rank)


def positive_definite(norm: Tensor) -> Tensor:
    """Raise the eigenvalues of a symmetric matrix (r, r) to FLOOR times the largest; return the
    identity for a matrix of zeros.
    """
    values, vectors = eigh(norm)
    largest = float(values[-1])
    if not largest > 0:  # also for NaN, which the caller detects in the loss
        return torch.eye(len(norm), dtype=norm.dtype, device=norm.device)
    return vectors * values.clamp_min(FLOOR * largest) @ vectors.T


def nearest(matrix: Tensor, dtype: torch.dtype) -> CodedRows:
    """Round a matrix (m, n) to the nearest codes.

    The scale of a row gives its largest entry the largest code; it is 1 for rows of zeros, and
    never subnormal.

    Args:
        dtype: the dtype of the scales.
    """
    largest = matrix.abs().amax(1)
    least = max(_least_scale(dtype), _least_scale(torch.bfloat16))
    scale = (largest / TOP).clamp_min(least).bfloat16()
    scale = torch.where(largest > 0, scale, 1.0).to(dtype)
    return CodedRows(_codes(matrix, scale.to(matrix.dtype).unsqueeze(1)), scale)


def swept(
    u: Tensor,
    norm: Tensor,
    dtype: torch.dtype,
) -> CodedRows:
    """Quantise u (out, r), float64, to û with tr((u − û) G (u − û)ᵀ) small, for a positive definite
    G (r, r).

    With G = C Cᵀ, C lower triangular, column k of (u − û) C depends only on û_k and the columns
    after it. This is the sweep of GPTQ (arXiv 2210.17323) from the last column to the first. Rows
    for which rounding to nearest is better are rounded to nearest.
    """
    plain = nearest(u, dtype)
    wide_scale = plain.scale.to(u.dtype)
    factor = torch.linalg.cholesky(norm)
    codes = torch.empty_like(plain.codes)
    error = torch.zeros_like(u)
    for k in reversed(range(u.shape[1])):
        wanted = u[:, k] + error[:, k + 1 :] @ factor[k + 1 :, k] / factor[k, k]
        codes[:, k] = _codes(wanted, wide_scale)
        error[:, k] = u[:, k] - (codes[:, k].to(dtype) * plain.scale).to(u.dtype)
    plain_error = u - plain.values().to(u.dtype)
    plain_loss = (plain_error @ factor).square().sum(1, keepdim=True)
    better = (error @ factor).square().sum(1, keepdim=True) < plain_loss
    return CodedRows(torch.where(better, codes, plain.codes), plain.scale)


def _least_scale(dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    return 128 * limits.tiny * limits.eps


def _codes(entries: Tensor, scale: Tensor) -> Tensor:
    return (entries / scale).round_().clamp_(-TOP, TOP).to(torch.int8)
