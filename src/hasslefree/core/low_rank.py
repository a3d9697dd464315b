"""A low-rank matrix as its two factors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hasslefree.core.linalg import eigh, orthonormal


@dataclass(frozen=True)
class LowRank:
    """L = u v with u: (out, r) and v: (r, in)."""

    u: Tensor
    v: Tensor

    @property
    def rank(self) -> int:
        return self.u.shape[1]

    def product(self) -> Tensor:
        """L: (out, in)."""
        return self.u @ self.v

    def residual(self, weight: Tensor, sparse: Tensor) -> Tensor:
        """Return W − S − L, (out, in). At most two arrays of this size are allocated."""
        return torch.sub(weight, sparse).sub_(self.product())

    def added_to(self, sparse: Tensor) -> Tensor:
        """S + L for S (out, in), summed in float32 at least and rounded once to the dtype of S."""
        wide = torch.promote_types(sparse.dtype, torch.float32)
        total = torch.addmm(sparse.to(wide), self.u.to(wide), self.v.to(wide))
        return total.to(sparse.dtype)

    def balanced(self) -> "LowRank":
        """Return the same product with ‖column of u‖ = ‖row of v‖, which keeps both factors within
        the range of a narrow dtype.
        """
        of_columns, of_rows = self.balancing()
        return LowRank(self.u * of_columns, self.v / of_rows.unsqueeze(1))

    def balancing(self) -> tuple[Tensor, Tensor]:
        """Return the factors of `balanced`, (rank,) each: columns of u are multiplied by the first,
        and rows of v divided by the second.

        Both are the same, except where a column or a row is zero and the other one adds nothing to
        the product: the other one gets the largest of the remaining norms, or 1.
        """
        u_norms = self.u.norm(dim=0)
        v_norms = self.v.norm(dim=1)
        counts = (u_norms > 0) & (v_norms > 0)
        norms = (u_norms * v_norms).sqrt()[counts]
        largest = norms.amax() if len(norms) else u_norms.new_ones(())
        scale = (v_norms / u_norms).sqrt()
        u_scale = torch.where(counts, scale, largest / u_norms)
        v_scale = torch.where(counts, scale, v_norms / largest)
        of_columns = torch.where(u_norms > 0, u_scale, 1.0)
        of_rows = torch.where(v_norms > 0, v_scale, 1.0)
        return of_columns, of_rows

    def to(self, dtype: torch.dtype) -> "LowRank":
        return LowRank(self.u.to(dtype), self.v.to(dtype))

    @classmethod
    def gaussian_start(
        cls,
        weight: Tensor,
        rank: int,
        seed: int,
    ) -> "LowRank":
        """Return L = 0 for a weight (out, in): u gaussian, v zero.

        The paper (arXiv 2502.00899, Algorithm 2) writes W transposed: its U = 0 is v here, and its
        gaussian V is u. The numbers are drawn on the CPU, so a seed gives the same numbers on every
        device.
        """
        generator = torch.Generator().manual_seed(seed)
        u = torch.randn(weight.shape[0], rank, generator=generator, dtype=torch.float32)
        return cls(u.to(weight), weight.new_zeros(rank, weight.shape[1]))


def truncated_svd(matrix: Tensor, rank: int) -> LowRank:
    """Return C_r(matrix): the best approximation of rank r in the Frobenius norm (Eckart–Young) of
    a matrix (out, in). The norms of the columns of u are the singular values; the rows of v are
    unit vectors, or zero if the singular value is zero.

    On a CPU, the leading singular vectors of the shorter side are computed as eigenvectors of M Mᵀ
    or MᵀM, which is much faster than an SVD. The product squares the singular values, so it is
    computed in float64: singular vectors down to 10⁻⁴ of the largest value are still exact to
    float32. Most GPUs are slow in float64 and compute the SVD.
    """
    if not matrix.is_cpu:
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return LowRank(u[:, :rank] * s[:rank], vh[:rank])
    out, width = matrix.shape
    exact = matrix.double()
    if out < width:
        basis = leading_eigenvectors(exact @ exact.T, rank)
        rows = basis.T @ exact
        norms = rows.norm(dim=1)
        u = basis * norms
        v = rows / norms.clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(1)
    else:
        basis = leading_eigenvectors(exact.T @ exact, rank)
        u = exact @ basis
        v = basis.T
    return LowRank(u.to(matrix), v.to(matrix))


def leading_eigenvectors(symmetric: Tensor, count: int) -> Tensor:
    """Return the eigenvectors of the largest eigenvalues, in descending order: (n, count)."""
    _, vectors = eigh(symmetric)
    return vectors.flip(1)[:, :count]


def subspace_steps(
    target: Tensor,
    norm: Tensor,
    basis: Tensor,
    steps: int,
) -> LowRank:
    """Return L = B BᵀT after steps B ← qr(T H (BᵀT)ᵀ) of orthogonal iteration.

    For every orthonormal B the best L with that column space is B BᵀT, whatever H is; at the fixed
    point B spans the leading eigenvectors of T H Tᵀ (Golub & Van Loan, section 8.2). No step raises
    tr((T − L) H (T − L)ᵀ).

    Args:
        target: T, (out, in).
        norm: H, (in, in). Products with H are computed in the dtype of H.
        basis: the first B, (out, r), orthonormal.
    """
    v = basis.T @ target
    for _ in range(steps):
        image = target.to(norm.dtype) @ (norm @ v.T.to(norm.dtype))
        basis = orthonormal(image.to(target.dtype))
        v = basis.T @ target
    return LowRank(basis, v)
