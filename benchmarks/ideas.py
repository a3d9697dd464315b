"""What was tried on `joint`, winners and losers: the error over that of joint as it is.

    python benchmarks/ideas.py [--model MODEL --calibration FILE] [--only NAME …]

The problems are those of layers.py of 512×512 and 1024×256, and its layers of a model. A variant is joint with one
thing changed: a field of `Joint`, or the loop below, which is joint's own with the ideas switched off (the first row).
All but one in float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layers
import torch
from common import geometric_mean, machine, write
from torch import Tensor

import hasslefree
from hasslefree import Gram, Joint, SemiStructured
from hasslefree.core.low_rank import LowRank, subspace_steps
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Solution
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.methods.joint import FIRST_STEPS, RANK_RELIEF, ScaledProblem, refit_scale


@dataclass(frozen=True)
class Tried:
    """joint with ideas.

    Args:
        blend: D² = H_jj^(1 − blend) · (1/[H⁻¹]_jj)^blend.
        relaxation: Z ← αZ + (1 − α)S before the projection. momentum: β of a heavy ball on the state.
        fade: removed entries are only shrunk, to this share at first and to nothing at the end.
        start: of W that the rounds begin with; None for joint's own. wait: the share of rounds before L joins in.
        subspace_steps, first_steps: in a round, in the first. fixed: ρ from and to these, not by the odds of removal.
        stages: ρ grows so often whatever the support does, later ever faster. cycles: and is run through so many
            times. swaps: exchanges a row on the final support.
        mantissa: bits that the product's inputs are rounded to (10: TF32).
    """

    joint: Joint = Joint(precision="float32")
    blend: float = 1.0
    relaxation: float = 1.0
    momentum: float = 0.0
    fade: float = 0.0
    start: float | None = None
    wait: float = 0.0
    subspace_steps: int = 1
    first_steps: int = FIRST_STEPS
    fixed: tuple[float, float] | None = None
    stages: int | None = None
    cycles: int = 1
    swaps: int = 0
    mantissa: int | None = None

    def check(self, rank: int) -> None: ...

    def prepare(self, gram: Gram) -> ScaledProblem:
        damped = gram.damped(self.joint.damping)
        alone = damped.diagonal.sqrt()
        scale = alone * (refit_scale(damped.matrix) / alone) ** self.blend
        return ScaledProblem(scale, Gram(damped.matrix / torch.outer(scale, scale), damped.tokens))

    def planned(self, density: float, relief: float) -> list[float] | None:
        """ρ of every round, where it does not follow the support."""
        rounds = self.joint.rounds
        if self.fixed:
            low, high = self.fixed
            return [low * (high / low) ** ((t // 10 * 10 / rounds) ** 2) for t in range(rounds)]
        if self.stages:
            first = self.joint.first_power(density, relief)
            powers = [first + int(self.stages * (t / rounds) ** 2) for t in range(rounds)]
            return [self.joint.growth**power for power in powers[:: self.cycles]] * self.cycles
        return None

    def solve(
        self, weight: Tensor, prepared: ScaledProblem, pattern: Pattern, rank: int, generator: torch.Generator
    ) -> Solution:
        scaled = weight * prepared.scale
        density = pattern.kept((weight.shape[0], weight.shape[1])) / weight.numel()
        low_rank = LowRank.gaussian_start(weight, rank, generator)
        relief = math.exp(-RANK_RELIEF * rank * sum(weight.shape) / weight.numel())
        penalties, rho = self.planned(density, relief), self.joint.growth ** self.joint.first_power(density, relief)
        first = scaled * (relief if self.start is None else self.start)
        sparse, mask, low_rank = self.search(scaled, prepared, pattern, low_rank, penalties or [rho], first)
        if self.swaps and isinstance(pattern, SemiStructured):
            sparse = exchanged(prepared.gram.matrix, scaled - low_rank.product(), sparse, mask, pattern.m, self.swaps)
            mask = sparse != 0
        return self.joint._polish(scaled, prepared, sparse, mask, low_rank, [])

    def search(
        self,
        weight: Tensor,
        problem: ScaledProblem,
        pattern: Pattern,
        low_rank: LowRank,
        penalties: list[float],
        state: Tensor,
    ) -> tuple[Tensor, Tensor, LowRank]:
        u, v = torch.linalg.qr(low_rank.u).Q, low_rank.v
        mask = pattern.mask(state.square())
        sparse, before, rho, rounds = state * mask, penalties[0], penalties[0], self.joint.rounds
        for t in range(rounds):
            rho = penalties[t] if len(penalties) == rounds else rho
            kernel = problem.kernel(rho, weight.dtype)
            state = sparse + (state - sparse) * (before / rho)
            before = rho
            rest = weight + state - 2 * sparse
            if t >= self.wait * rounds:
                first = t - 1 < self.wait * rounds
                step = subspace_steps(rest, kernel, u, self.first_steps if first else self.subspace_steps)
                u, v = step.u, step.v
                rest = rest - u @ v
            image = rounded(rest, self.mantissa) @ rounded(kernel, self.mantissa)
            moved = sparse + self.relaxation * image + (1 - self.relaxation) * (state - sparse)
            moved = moved + self.momentum * (moved - state) if t else moved
            state, last = moved, mask
            mask = pattern.mask(state.square())
            if self.joint.moves_too_much(mask, last, t + 1):
                rho *= self.joint.growth
            fade = self.fade * (1 - (t + 1) / rounds)
            sparse = torch.where(mask, state, fade * state)
        return sparse, mask, LowRank(u, v)


def rounded(matrix: Tensor, bits: int | None) -> Tensor:
    """float32 with so many bits of mantissa, as the inputs of products in TF32 have (10)."""
    if bits is None:
        return matrix
    drop = 23 - bits
    whole = matrix.contiguous().view(torch.int32)
    return ((whole + (1 << (drop - 1))) & -(1 << drop)).view(torch.float32)


def exchanged(h: Tensor, target: Tensor, sparse: Tensor, mask: Tensor, m: int, count: int) -> Tensor:
    """In each row, up to `count` times, the exchange of a kept and a removed entry of a group that gains most.

    Removing s_j and adding the best a at i changes the loss by s_j² H_jj + 2 s_j g_j − (g_i + s_j H_ij)² / H_ii, with
    g = (T − S) H.
    """
    sparse, mask = sparse.clone(), mask.clone()
    gradient, diagonal, rows = (target - sparse) @ h, h.diagonal(), torch.arange(len(sparse))
    within = torch.stack([h[k : k + m, k : k + m] for k in range(0, len(h), m)])
    for _ in range(count):
        s, g, kept = (x.reshape(len(sparse), -1, m) for x in (sparse, gradient, mask))
        cost = (s.square() * diagonal.view(-1, m) + 2 * s * g).unsqueeze(-1)
        gain = (g.unsqueeze(-2) + s.unsqueeze(-1) * within).square() / diagonal.view(-1, 1, m) - cost
        gain = torch.where(kept.unsqueeze(-1) & ~kept.unsqueeze(-2), gain, -1.0).flatten(1)
        best, place = gain.max(1)
        group = place // (m * m) * m
        j, i = group + place % (m * m) // m, group + place % m
        leaving = torch.where(best > 0, sparse[rows, j], 0.0)
        entering = torch.where(best > 0, (gradient[rows, i] + leaving * h[j, i]) / diagonal[i], 0.0)
        gradient += leaving[:, None] * h[j] - entering[:, None] * h[i]
        changed = rows[best > 0]
        sparse[changed, j[best > 0]], mask[changed, j[best > 0]] = 0.0, False
        sparse[changed, i[best > 0]], mask[changed, i[best > 0]] = entering[best > 0], True
    return sparse


PLAIN = Joint(precision="float32")
IDEAS: dict[str, Any] = {
    "scale by diag H": Tried(blend=0.0),
    "scale between: blend 0.5": Tried(blend=0.5),
    "scale between: blend 0.7": Tried(blend=0.7),
    "scale by diag H, ρ from 0.05 to 1 for every layer": Tried(blend=0.0, fixed=(0.05, 1.0)),
    "… and from S = 0": Tried(blend=0.0, fixed=(0.05, 1.0), start=0.0),
    "ρ from 0.1 to 1 for every layer": Tried(fixed=(0.1, 1.0)),
    "ρ half as large": dataclasses.replace(PLAIN, penalty=0.2),
    "ρ twice as large": dataclasses.replace(PLAIN, penalty=0.8),
    "ρ grows by 1.2 at a time": dataclasses.replace(PLAIN, growth=1.2),
    "ρ grows by 2 at a time": dataclasses.replace(PLAIN, growth=2.0),
    "ρ grows in eight stages for every layer": Tried(stages=8),
    "… in two cycles, half as long": Tried(stages=8, cycles=2),
    "from S = 0": Tried(start=0.0),
    "from W": Tried(start=1.0),
    "from half of W": Tried(start=0.5),
    "L joins after a tenth of the rounds": Tried(wait=0.1),
    "three subspace steps a round": Tried(subspace_steps=3),
    "one subspace step in the first round": Tried(first_steps=1),
    "over-relaxation 1.3": Tried(relaxation=1.3),
    "over-relaxation 1.6": Tried(relaxation=1.6),
    "heavy ball 0.3": Tried(momentum=0.3),
    "removed entries fade from 0.3": Tried(fade=0.3),
    "up to 50 exchanges a row at the end (N:M)": Tried(swaps=50),
    "no polish": dataclasses.replace(PLAIN, sweeps=0),
    "ten sweeps of polish": dataclasses.replace(PLAIN, sweeps=10),
    "25 rounds": dataclasses.replace(PLAIN, rounds=25),
    "25 rounds, no polish": dataclasses.replace(PLAIN, rounds=25, sweeps=0),
    "damping 0": dataclasses.replace(PLAIN, damping=0.0),
    "product's inputs rounded to TF32": Tried(mantissa=10),
    "products in bfloat16": dataclasses.replace(PLAIN, precision="bfloat16"),
}


def errors(problems: list[layers.Problem], method: Any) -> list[float]:
    """The relative error on every problem."""
    return [
        hasslefree.decompose(p.weight, p.gram, p.pattern, p.rank, sparsity=p.sparsity, method=method).relative_error
        for p in problems
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--calibration", default=str(CALIBRATION))
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--only", nargs="+", default=list(IDEAS), choices=list(IDEAS))
    parser.add_argument("--output", type=Path, default=layers.ROOT / "benchmarks" / "results" / "ideas.json")
    args = parser.parse_args()
    problems = list(layers.model_problems(args.model, args.calibration, args.samples, args.seqlen, layers.BUDGETS))
    problems += layers.synthetic_problems(layers.SHAPES[:2], layers.BUDGETS)
    base = errors(problems, PLAIN)
    content: dict[str, Any] = {"machine": machine(), "seed": 0, "model": Path(args.model).name}
    content |= {"problems": len(problems), "ideas": {}}
    for name, method in {"(the loop of this script)": Tried(), **{name: IDEAS[name] for name in args.only}}.items():
        ratios = [error / plain for error, plain in zip(errors(problems, method), base, strict=True)]
        row = {"error": geometric_mean(ratios), "least": min(ratios), "most": max(ratios)}
        content["ideas"][name] = row
        write(args.output, content)
        print(f"{name:50s}", {key: round(value, 4) for key, value in row.items()}, flush=True)


if __name__ == "__main__":
    main()
