"""The budget of a layer: a pattern, and a rank or a compression ratio (arXiv 2502.00899,
section 4).
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from hasslefree.core.patterns import Counted, Pattern, Row, SemiStructured, Structured, Unstructured
from hasslefree.core.protocols import About
from hasslefree.errors import (
    BudgetError,
    HasslefreeError,
    PatternError,
    Problem,
    UnknownNameError,
    option,
)
from hasslefree.validation import Checked, Count, Share

COUNTED: dict[str, type[Counted]] = {
    "unstructured": Unstructured,
    "row": Row,
    "structured": Structured,
}
ABOUT = {
    "N:M": About("N of M consecutive inputs, such as 2:4", "arXiv 2104.08378"),
    "unstructured": About("the largest entries of the whole matrix", "arXiv 1506.02626"),
    "row": About("the same number of entries in each row", "arXiv 2306.11695"),
    "structured": About("whole input channels", "arXiv 2403.12983"),
    "dense": About("every entry, for methods with a grid", "docs: grids"),
}
_N_OF_M = re.compile(r"(\d{1,9}):(\d{1,9})")


@dataclass(frozen=True)
class Budget(Checked):
    """A budget in one of three modes, the same for layers of every shape.

    Args:
        pattern: "N:M", "unstructured", "row", "structured" or "dense"; or a `Pattern` with its
            exact count.
        rank: the rank r of L (fixed rank; 0 if not given).
        sparsity: the share of zeros in S, for patterns other than N:M; combine with `rank`.
        ratio: ρ, the share of the parameters that are saved. With N:M it fixes the rank,
            r = ⌊(1 − ρ − N/M)·out·in / (out + in)⌋.
        rank_share: κ, the share of the kept parameters that goes to L, for patterns other than N:M;
            combine with `ratio`: r = ⌊κ(1 − ρ)·out·in / (out + in)⌋ and
            k = ⌊(1 − κ)(1 − ρ)·out·in⌋.

    Example:
        >>> Budget("2:8", ratio=0.5).resolve(4096, 4096)
        (SemiStructured(n=2, m=8), 512)
    """

    pattern: str | Pattern = "2:4"
    rank: Count | None = None
    sparsity: Share | None = None
    ratio: Share | None = None
    rank_share: Share | None = None

    def problems(self) -> Iterator[Problem]:
        """Yield the problems that do not depend on shapes."""
        if self.rank is not None and self.ratio is not None:
            yield Problem(
                ("rank", "ratio"), "give rank or ratio, not both: the ratio fixes the rank"
            )
        if not isinstance(self.pattern, str):
            yield from self._exact_problems()
            return
        try:
            semi = parse_pattern(self.pattern)
        except HasslefreeError as error:
            yield Problem(("pattern",), error.message)
            return
        if semi:
            yield from self._semi_structured_problems(semi)
        else:
            yield from self._counted_problems()

    def _given(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if getattr(self, name) is not None)

    def _exact_problems(self) -> Iterator[Problem]:
        given = self._given(("sparsity", "ratio", "rank_share"))
        if given:
            message = (
                f"leave out {', '.join(given)}: the pattern is an object that already holds its"
                " count"
            )
            yield Problem(given, message)

    def _semi_structured_problems(self, semi: SemiStructured) -> Iterator[Problem]:
        for name in self._given(("sparsity", "rank_share")):
            fixed = name.replace("_", " ")
            message = f"pattern {semi} already fixes the {fixed}: leave out {name}"
            yield Problem((name, "pattern"), message)
        feasible = 1 - Fraction(semi.n, semi.m)
        if self.ratio is not None and _exact(self.ratio) > feasible:
            message = (
                f"ratio {self.ratio} is infeasible with {semi}: S alone keeps {semi.n}/{semi.m} of"
                f" the weights; the largest feasible ratio is {float(feasible):g} (rank 0)"
            )
            yield Problem(("ratio", "pattern"), message)

    def _counted_problems(self) -> Iterator[Problem]:
        if self.sparsity is None and self.ratio is None:
            message = (
                f"pattern {self.pattern} needs a sparsity (with rank) or a ratio (with rank_share)"
            )
            yield Problem(("pattern", "sparsity", "ratio", "rank"), message)
        elif self.sparsity is not None and self.ratio is not None:
            message = "give sparsity (with rank) or ratio (with rank_share), not both"
            yield Problem(("sparsity", "ratio"), message)
        elif self.sparsity is not None and self.rank_share is not None:
            message = "rank_share can only be combined with ratio; with sparsity, give rank"
            yield Problem(("rank_share",), message)
        elif self.ratio is not None and self.rank_share is None:
            message = (
                f"ratio with pattern {self.pattern} needs rank_share, the share of the kept"
                " parameters that goes to L"
            )
            yield Problem(("ratio", "rank_share"), message)

    def resolve(
        self,
        out: int,
        width: int,
        unit: int = 1,
    ) -> tuple[Pattern, int]:
        """Return the pattern with its exact count, and the rank, for a weight (out, width).

        Args:
            unit: with "structured", the number of consecutive channels that are kept or removed
                together.

        Raises:
            BudgetError: all `problems`, or a rank that is too large for the weight.
            PatternError: the pattern does not fit the weight.
        """
        problems = list(self.problems())
        if problems:
            raise BudgetError("; ".join(problem.message for problem in problems))
        pattern, rank = self._resolve(out, width)
        if isinstance(pattern, Structured) and unit > 1:
            pattern = Structured(pattern.count // unit * unit, unit)
        pattern.check((out, width))
        if rank > min(out, width):
            raise BudgetError(
                f"rank {rank} is larger than the weight ({out}×{width}); use"
                f" {option('rank', min(out, width))} or less"
            )
        return pattern, rank

    def _resolve(self, out: int, width: int) -> tuple[Pattern, int]:
        rank = self.rank or 0
        if not isinstance(self.pattern, str):
            return self.pattern, rank
        # The rank whose factors have as many parameters as the weight.
        whole_rank = Fraction(out * width, out + width)
        kept = 1 - _exact(self.ratio or 0)
        semi = parse_pattern(self.pattern)
        if semi:
            density = Fraction(semi.n, semi.m)
        elif self.ratio is None:
            density = 1 - _exact(self.sparsity or 0)
        else:
            density = (1 - _exact(self.rank_share or 0)) * kept
        if self.ratio is not None:
            rank = math.floor((kept - density) * whole_rank)
        if semi:
            return semi, rank
        positions = out * width if self.pattern == "unstructured" else width
        return COUNTED[self.pattern](math.floor(density * positions)), rank


def parse_pattern(name: str) -> SemiStructured | None:
    """Return the N:M pattern of this name (dense is 1:1); None for a pattern that needs a count.

    Raises:
        PatternError, UnknownNameError: the name is not a pattern.
    """
    if name == "dense":
        return SemiStructured(1, 1)
    match = _N_OF_M.fullmatch(name)
    if match:
        return SemiStructured(int(match[1]), int(match[2]))
    if ":" in name:
        raise PatternError(
            f"pattern {name!r} is not of the form N:M with two whole numbers, such as 2:4"
        )
    if name not in COUNTED:
        raise UnknownNameError("pattern", name, ["2:4", *ABOUT])
    return None


def _exact(share: float) -> Fraction:
    """Return the decimal that the user typed: 0.9 becomes 9/10, so no count is one too small."""
    return Fraction(str(share))
