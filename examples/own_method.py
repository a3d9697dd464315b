"""A method of your own, compared with one of the package: python own_method.py [MODEL]"""

import sys
from dataclasses import dataclass
from importlib.resources import files

import hasslefree
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Method, Solution
from hasslefree.solve.methods import METHODS


@dataclass(frozen=True)
class LowRankFirst(Method):
    """L is the best rank-r fit of the scaled weight; S keeps the largest entries of the rest."""

    power: float = 0.5

    def prepare(self, gram):
        return gram.diagonal**self.power  # (in,): the size of each input

    def solve(self, weight, scale, pattern, start):
        rank = start.rank
        scale = scale.clamp_min(1e-6 * scale.max())
        u, s, v = (weight * scale).svd()
        low_rank = LowRank(u[:, :rank] * s[:rank], v[:, :rank].T / scale)
        rest = weight - low_rank.u @ low_rank.v
        return Solution(rest * pattern.mask((rest * scale).square()), low_rank, history=())


METHODS["low-rank-first"] = LowRankFirst()
model = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
text = str(files("hasslefree.demo") / "calibration.jsonl")  # a small text of the package; real models need none
for method in ("low-rank-first", "oats"):
    recipe = hasslefree.Recipe(method=method, rank=16, calibration=text, samples=16, seqlen=256)
    record = hasslefree.compress(model, "compressed", recipe, overwrite=True)
    print(f"{method}: mean relative error {record.mean_relative_error:.4f}")
