"""The layer that takes the place of a linear one: y = x (S + u v)ᵀ + b, with S and the factors apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.core.protocols import Decomposition


class SparseLowRankLinear(nn.Module):
    """A linear layer whose weight is a sparse matrix plus a low-rank one.

    Args:
        sparse: S, (out, in), with its zeros stored. It is not called `weight` in the file: a reader that does not know
            this layer then misses a weight, and cannot take S alone for the model.
        low_rank_u, low_rank_v: (out, r) and (r, in); absent for rank 0.
        bias: (out,) or None. pattern: the name of the sparsity pattern, for `repr` and for the file.
    """

    low_rank_u: nn.Parameter | None
    low_rank_v: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool,
        pattern: str,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features, self.rank, self.pattern = in_features, out_features, rank, pattern

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=dtype, device=device))

        self.sparse = parameter(out_features, in_features)
        self.register_parameter("low_rank_u", parameter(out_features, rank) if rank else None)
        self.register_parameter("low_rank_v", parameter(rank, in_features) if rank else None)
        self.register_parameter("bias", parameter(out_features) if bias else None)

    @classmethod
    def from_decomposition(cls, result: Decomposition, bias: Tensor | None, pattern: str) -> SparseLowRankLinear:
        """The layer of a decomposition, in its dtype and on its device. bias: (out,) of the layer replaced."""
        out, width = result.sparse.shape
        like = result.sparse
        layer = cls(width, out, result.low_rank.rank, bias is not None, pattern, like.dtype, like.device)
        with torch.no_grad():
            layer.sparse.copy_(result.sparse)
            if layer.low_rank_u is not None and layer.low_rank_v is not None:
                layer.low_rank_u.copy_(result.low_rank.u)
                layer.low_rank_v.copy_(result.low_rank.v)
            if bias is not None and layer.bias is not None:
                layer.bias.copy_(bias)
        return layer

    @property
    def weight(self) -> Tensor:
        """S, under the name that model code looks for when it asks a linear layer for its dtype or device."""
        return self.sparse

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in) → (..., out)."""
        y = F.linear(x, self.sparse, self.bias)
        if self.low_rank_u is None or self.low_rank_v is None:
            return y
        return y + F.linear(F.linear(x, self.low_rank_v), self.low_rank_u)

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, pattern={self.pattern}, rank={self.rank}, bias={self.bias is not None}"
