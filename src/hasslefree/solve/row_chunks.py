"""A layer in chunks of rows, where the arrays for all of them do not fit: rows are independent once L is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.grids import Scaling
from hasslefree.core.linalg import orthonormal
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern, Row, SemiStructured, Unstructured
from hasslefree.core.protocols import Method, Solution
from hasslefree.errors import MemoryShortError, option


@dataclass(frozen=True)
class InRowChunks(Method):
    """The S of another method for W − L, chunk by chunk, and the L closest to W − S, in turn.

    More error than the method on all rows at once: L and S are fitted one after the other.

    Args:
        method: solves each chunk, at rank 0. chunks: how many there are.
        gram: the damped H of all, by which L is fitted. rounds: of S and L.
    """

    method: Method
    chunks: int
    gram: Gram
    rounds: int = 4

    @property
    def inner(self) -> Method:
        return self.method

    def check(self, rank: int) -> None:
        self.method.check(rank)

    def prepare(self, gram: Gram) -> Any:
        return self.method.prepare(gram)

    def solve(self, weight: Tensor, prepared: Any, pattern: Pattern, rank: int, generator: torch.Generator) -> Solution:
        if not isinstance(pattern, SemiStructured | Row | Unstructured):
            raise MemoryShortError(
                f"not enough memory for the layer: pattern {pattern} needs all its rows at once, so they cannot be "
                f"solved in chunks; use another pattern, a larger device, or {option('device', 'cpu')}"
            )
        out = len(weight)
        low_rank = LowRank.gaussian_start(weight, rank, generator)
        basis = orthonormal(low_rank.u)
        sparse = torch.empty_like(weight)
        for _ in range(self.rounds if rank else 1):
            scalings = []
            for chunk in range(self.chunks):
                start, stop = out * chunk // self.chunks, out * (chunk + 1) // self.chunks
                own = pattern.restricted(start, stop, out) if isinstance(pattern, Unstructured) else pattern
                target = weight[start:stop] - low_rank.u[start:stop] @ low_rank.v
                solution = self.method.solve(target, prepared, own, 0, generator)
                sparse[start:stop] = solution.sparse
                scalings += [solution.scaling] if solution.scaling else []
            if rank:
                low_rank = self._fit(weight, sparse, basis)
                basis = low_rank.u
        remark = f"not enough memory for all rows at once: solved in {self.chunks} chunks of rows"
        return Solution(sparse, low_rank, (), (remark,), Scaling.of_rows(scalings) if scalings else None)

    def _fit(self, weight: Tensor, sparse: Tensor, basis: Tensor, steps: int = 4) -> LowRank:
        """Steps of orthogonal iteration for W − S in the norm of H, with no array out × in."""
        h = self.gram.matrix

        def residual(v: Tensor) -> Tensor:  # (W − S) v
            return weight @ v - sparse @ v

        for _ in range(steps):
            v = basis.T @ weight - basis.T @ sparse
            basis = orthonormal(residual(h @ v.T))
        return LowRank(basis, basis.T @ weight - basis.T @ sparse)
