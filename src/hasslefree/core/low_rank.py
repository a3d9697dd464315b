"""A low-rank matrix as its two factors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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

    def balanced(self) -> LowRank:
        """The same product with ‖column of u‖ = ‖row of v‖, so that neither factor overflows a narrow dtype."""
        columns, rows = self.u.norm(dim=0), self.v.norm(dim=1)
        scale = torch.where((columns > 0) & (rows > 0), (rows / columns).sqrt(), 1.0)
        return LowRank(self.u * scale, self.v / scale.unsqueeze(1))

    def to(self, dtype: torch.dtype) -> LowRank:
        return LowRank(self.u.to(dtype), self.v.to(dtype))

    @classmethod
    def gaussian_start(cls, weight: Tensor, rank: int, generator: torch.Generator) -> LowRank:
        """L = 0 for a weight (out, in): u gaussian, v zero.

        The paper (arXiv 2502.00899, Algorithm 2) writes W transposed, so that its U = 0 is v and its gaussian V is u.
        The numbers are drawn on the generator's device, so that a seed means the same on every device.
        """
        out, width = weight.shape
        u = torch.randn(out, rank, generator=generator, dtype=torch.float32, device=generator.device)
        return cls(u.to(weight), weight.new_zeros(rank, width))


def truncated_svd(matrix: Tensor, rank: int) -> LowRank:
    """C_r(matrix): the best rank-r approximation in the Frobenius norm (Eckart–Young). matrix: (out, in)."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    return LowRank(u[:, :rank] * s[:rank], vh[:rank])
