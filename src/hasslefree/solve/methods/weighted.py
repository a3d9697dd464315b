"""Weighted outputs: a method that minimises tr(G R H Rᵀ), R = W − S − L, for a diagonal G."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hasslefree.core.gram import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method, Solution


@dataclass(frozen=True, eq=False)
class Weighted(Method):
    """Apply a method to √G W, and multiply S and u by G^(−½): G weights the errors of the outputs.

    Given L, the rows of S do not depend on each other; rows with a larger weight gain through L,
    and through patterns that count over all rows and keep more of their entries. If g_i is the mean
    square of the gradient of the model's log-likelihood with respect to output i, the objective is
    a second-order approximation of the loss of the model, provided that inputs and gradients are
    independent (Martens and Grosse, arXiv 1503.05671) and outputs do not interact.

    Args:
        method: a method without a grid.
        weights: the diagonal of G, (out,), positive.
    """

    method: Method
    weights: Tensor = field(repr=False)

    @property
    def inner(self) -> Method:
        return self.method

    def start(self, weight: Tensor, rank: int, seed: int) -> LowRank:
        return self.method.start(weight, rank, seed)

    def prepare(self, gram: Gram) -> Any:
        return self.method.prepare(gram)

    def solve(
        self,
        weight: Tensor,
        prepared: Any,
        pattern: Pattern,
        start: LowRank,
    ) -> Solution:
        root = self.weights.to(weight).sqrt().unsqueeze(1)
        solution = self.method.solve(weight * root, prepared, pattern, start)
        low_rank = LowRank(solution.low_rank.u / root, solution.low_rank.v)
        return dataclasses.replace(solution, sparse=solution.sparse / root, low_rank=low_rank)
