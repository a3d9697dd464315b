"""Hard layers, drawn by hypothesis, and what every method owes each of them. The oracle is float64 and its own."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from hasslefree import (
    OSSCAR,
    AlternatingMinimization,
    Gram,
    Grid,
    JointOnGrid,
    Prune,
    Row,
    SemiStructured,
    SparseGPT,
    Structured,
    ThreeBlock,
    Unstructured,
)
from hasslefree.core.patterns import Pattern
from hasslefree.solve.admm import SupportPenalty
from hasslefree.solve.low_rank import LOW_RANK_SOLVERS
from hasslefree.solve.low_rank.svd import Exact
from hasslefree.solve.methods import METHODS
from hasslefree.solve.pruners import PRUNERS

# What may be wrong with the inputs of a layer, and with its weight.
INPUT_TROUBLES = (
    "dead", "all dead", "twins", "negated twins", "one direction", "outliers", "faint", "outliers and faint",
    "constant", "sparse in time", "large", "small", "wide range",
)  # fmt: skip
WEIGHT_TROUBLES = (
    "zero", "zero rows", "zero columns", "all equal", "large", "small", "one entry", "low rank", "in the pattern",
    "silent",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    """One layer: everything that it takes to draw it again."""

    out: int
    width: int
    tokens: int
    pattern: Pattern
    rank: int
    dtype: str
    activations: str
    method: str
    damping: float | None
    input_troubles: frozenset[str]
    weight_troubles: frozenset[str]
    seed: int
    factor_bits: int | None = None

    def solver(self):
        """The method, with few rounds and the damping of the case."""
        name, _, parts = self.method.partition(" ")
        changes = {} if self.damping is None else {"damping": self.damping}
        if parts:
            pruner, solver = parts.split("+")
            return AlternatingMinimization(self.fitted(PRUNERS[pruner]), LOW_RANK_SOLVERS[solver], rounds=3, **changes)
        method = METHODS[name]
        if not hasattr(method, "damping"):
            changes = {}
        if method.grid:
            part = self.fitted(getattr(method, "pruner", method))
            changes |= {"pruner": part} if hasattr(method, "pruner") else {"grid": part.grid}
        if hasattr(method, "rounds"):
            changes["rounds"] = min(method.rounds, 20 if name in ("joint", "pcp") else 6)
        if name == "3basil":
            changes["penalty"] = SupportPenalty(0.1, every=10, most=200, growth=(1.1, 1.05, 1.02), settled=100)
        return dataclasses.replace(method, **changes)

    def fitted(self, pruner):
        """The pruner, with a grid that goes with the shape and the pattern, if it has one."""
        if not pruner.grid:
            return pruner
        group = self.pattern.m if isinstance(self.pattern, SemiStructured) and self.seed % 2 else None
        return dataclasses.replace(pruner, grid=Grid(8 if self.seed % 3 else 4, group, self.seed % 5 == 0))

    def layer(self) -> tuple[Tensor, Tensor]:
        """The weight, (out, width), and the activations, (tokens, width)."""
        random = torch.Generator().manual_seed(self.seed)
        mixing = torch.randn(self.width, self.width, generator=random, dtype=torch.float64)
        x = torch.randn(self.tokens, self.width, generator=random, dtype=torch.float64) @ mixing
        weight = torch.randn(self.out, self.width, generator=random, dtype=torch.float64) / self.width**0.5
        some = torch.rand(self.width, generator=random) < 0.3
        some[torch.randint(self.width, (1,), generator=random)] = True
        for trouble in sorted(self.input_troubles):
            x = troubled_inputs(trouble, x, some, random)
        for trouble in sorted(self.weight_troubles):
            weight = troubled_weight(trouble, weight, x, self.pattern, random)
        x = x.to(DTYPES[self.activations])
        limit = torch.finfo(DTYPES[self.dtype]).max
        return weight.clamp(-limit, limit).to(DTYPES[self.dtype]), x


def troubled_inputs(trouble: str, x: Tensor, some: Tensor, random: torch.Generator) -> Tensor:
    """x: (tokens, in) with a trouble in some of its columns, or in all."""
    x, tokens, width = x.clone(), *x.shape
    first = x[:, :1].clone()
    if trouble == "dead":
        x[:, some] = 0
    elif trouble == "all dead":
        x.zero_()
    elif trouble == "twins":
        x[:, some] = first.expand(-1, int(some.sum()))
    elif trouble == "negated twins":
        x[:, some] = -first.expand(-1, int(some.sum()))
    elif trouble == "one direction":
        x = first * torch.randn(1, width, generator=random, dtype=x.dtype)
    elif trouble == "outliers":
        x[:, some] *= 1e4
    elif trouble == "faint":
        x[:, some] *= 1e-8
    elif trouble == "outliers and faint":
        x[:, some] *= 1e4
        x[:, ~some] *= 1e-8
    elif trouble == "constant":
        x[:] = 1.0
    elif trouble == "sparse in time":
        x[torch.rand(tokens, generator=random) < 0.8] = 0
    elif trouble in ("large", "small"):
        x *= 1e5 if trouble == "large" else 1e-6
    elif trouble == "wide range":
        x *= 10.0 ** torch.linspace(-6, 3, width, dtype=x.dtype)
    return x


def troubled_weight(trouble: str, weight: Tensor, x: Tensor, pattern: Pattern, random: torch.Generator) -> Tensor:
    """weight: (out, in) with a trouble."""
    weight = weight.clone()
    if trouble == "zero":
        weight.zero_()
    elif trouble == "zero rows":
        weight[::2] = 0
    elif trouble == "zero columns":
        weight[:, ::2] = 0
    elif trouble == "all equal":
        weight[:] = 0.5
    elif trouble in ("large", "small"):
        weight *= 1e4 if trouble == "large" else 1e-6
    elif trouble == "one entry":
        weight *= 0
        weight[-1, -1] = 1.0
    elif trouble == "low rank":
        weight = weight[:, :1] @ weight[:1]
    elif trouble == "in the pattern":
        weight = weight * pattern.mask(weight.square())
    elif trouble == "silent":
        # No calibration token gets anything out of it, but for rounding.
        weight -= weight @ torch.linalg.pinv(x) @ x
    return weight


@st.composite
def cases(draw) -> Case:
    """Any case whose budget is possible."""
    semi = draw(st.sampled_from([None, (2, 4), (1, 4), (0, 4), (4, 4), (3, 8), (2, 3), (1, 2), (1, 1), (5, 16)]))
    out = draw(st.integers(1, 12))
    width = draw(st.integers(1, 4)) * semi[1] if semi else draw(st.integers(1, 24))
    kind = draw(st.sampled_from([Unstructured, Row, Structured]))
    pattern = (
        SemiStructured(*semi) if semi else kind(draw(st.integers(0, out * width if kind is Unstructured else width)))
    )
    composed = [f"alternating {pruner}+{solver}" for pruner in PRUNERS for solver in LOW_RANK_SOLVERS]
    method = draw(st.one_of(st.sampled_from(list(METHODS)), st.sampled_from(composed)))
    alone = isinstance(METHODS.get(method), Prune)
    if "osscar" in method or method == "losparse":  # nothing but whole channels
        pattern = pattern if isinstance(pattern, Structured) else Structured(draw(st.integers(0, width)))
    rank = 0 if alone else draw(st.integers(0, min(out, width)))
    return Case(
        out, width,
        tokens=draw(st.integers(1, 3 * width)),
        pattern=pattern,
        rank=rank,
        dtype=draw(st.sampled_from(list(DTYPES))),
        activations=draw(st.sampled_from(list(DTYPES))),
        method=method,
        damping=draw(st.sampled_from([None, None, 0.0, 1e-8, 1.0])),
        input_troubles=draw(st.frozensets(st.sampled_from(INPUT_TROUBLES), max_size=2)),
        weight_troubles=draw(st.frozensets(st.sampled_from(WEIGHT_TROUBLES), max_size=1)),
        seed=draw(st.integers(0, 999)),
        factor_bits=draw(st.sampled_from([None, 8])) if rank else None,
    )  # fmt: skip


def feasible(sparse: Tensor, pattern: Pattern) -> bool:
    """Whether the non-zeros of S: (out, in) are as the pattern has it, counted one by one."""
    kept = sparse != 0
    if isinstance(pattern, SemiStructured):
        return bool((kept.unflatten(1, (-1, pattern.m)).sum(-1) <= pattern.n).all())
    if isinstance(pattern, Unstructured):
        return int(kept.sum()) <= pattern.count
    if isinstance(pattern, Row):
        return bool((kept.sum(1) <= pattern.count).all())
    return int(kept.any(0).sum()) <= pattern.count


def bilinear(residual: Tensor, h: Tensor) -> float:
    """tr(R H Rᵀ) in float64."""
    return float((residual.double() @ h.double() * residual.double()).sum().clamp_min(0))


def magnitude_of_terms(residual: Tensor, h: Tensor) -> float:
    """Σ|R||H||R|ᵀ: the size of what cancels in tr(R H Rᵀ), and with it of its rounding."""
    return float((residual.double().abs() @ h.double().abs() * residual.double().abs()).sum())


def damped(gram: Gram, damping: float) -> Tensor:
    """H + λI in float64, with a one for what is nothing even so."""
    h = gram.matrix.double()
    diagonal = h.diagonal() + damping * h.diagonal().mean()
    return h - torch.diag(h.diagonal()) + torch.diag(torch.where(diagonal == 0, 1.0, diagonal))


def least_eigenvalue(h: Tensor) -> float:
    """Of H in the units where its diagonal is one: (in, in), float64."""
    scale = h.diagonal().sqrt()
    return float(torch.linalg.eigvalsh(h / scale / scale[:, None])[0])


def factors_the_gram(method) -> bool:
    """Whether the method cannot do without a Cholesky factor of H itself."""
    if isinstance(method, ThreeBlock | JointOnGrid):
        return True
    return isinstance(getattr(method, "pruner", None), SparseGPT | OSSCAR) or isinstance(
        getattr(method, "low_rank", None), Exact
    )
