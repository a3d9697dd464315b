"""Methods by name, most of them compositions of a pruner and a low-rank solver:

    hassle-free = sparsegpt × adam        the paper's method
    oats        = wanda × diagonal-svd    L first, the last round
    eora        = sparsegpt × exact       one round
    godec       = magnitude × svd         L first, the last round, without data
    losparse    = osscar × exact          whole channels
    loftq       = rtn × svd               S on a grid, without data
    lq-lora     = rtn × diagonal-svd      S on a grid
    caldera     = gptq × exact            S on a grid, L first

`joint`, `3basil` and `pcp` find S and L together; joint-grid = joint, then gptq × exact with
coordinate descent. Every pruner is also a method, without L.
"""

import dataclasses
from typing import Any

from hasslefree.core.grids import Grid
from hasslefree.core.protocols import About, Method
from hasslefree.errors import BudgetError, GridError, UnknownNameError, option
from hasslefree.solve.low_rank import LOW_RANK_SOLVERS
from hasslefree.solve.low_rank.svd import SVD, DiagonalSVD, Exact, RandomizedSVD
from hasslefree.solve.methods.alternating import AlternatingMinimization
from hasslefree.solve.methods.joint import Joint
from hasslefree.solve.methods.joint_on_grid import JointOnGrid
from hasslefree.solve.methods.prune import Prune
from hasslefree.solve.methods.pursuit import PrincipalComponentPursuit
from hasslefree.solve.methods.three_block import ThreeBlock
from hasslefree.solve.pruners import ABOUT as ABOUT_PRUNERS
from hasslefree.solve.pruners import PRUNERS
from hasslefree.solve.pruners.diagonal import Magnitude, RoundToNearest, Wanda
from hasslefree.solve.pruners.osscar import OSSCAR
from hasslefree.solve.pruners.refit import Refit

# λ over the mean of diag H for a refit, in a method without damping.
REFIT_DAMPING = 0.01

# Magnitude, Wanda, DSNoT, OATS, rounding, LoftQ and LQ-LoRA are defined with the undamped H: they
# invert nothing. GoDec and the pursuit do not use H.
UNDAMPED = ("magnitude", "wanda", "dsnot", "rtn")
_TABLE: dict[str, tuple[Method, str, str]] = {
    "joint": (Joint(), "S and L at once, by ADMM; default if pruning", "docs: joint"),
    "hassle-free": (
        AlternatingMinimization(),
        "alternates sparsegpt and adam",
        "arXiv 2502.00899",
    ),
    "oats": (
        AlternatingMinimization(
            Wanda(), DiagonalSVD(), damping=0.0, low_rank_first=True, keep_best=False
        ),
        "alternates wanda and diagonal-svd",
        "arXiv 2409.13652",
    ),
    "eora": (
        AlternatingMinimization(low_rank=Exact(), rounds=1),
        "prunes by sparsegpt, then fits L exactly",
        "arXiv 2410.21271",
    ),
    "3basil": (
        ThreeBlock(),
        "fits S and L at once, by ADMM on three blocks",
        "arXiv 2603.01376",
    ),
    "godec": (
        AlternatingMinimization(
            Magnitude(), SVD(), damping=0.0, low_rank_first=True, keep_best=False
        ),
        "alternates magnitude and svd; uses no data",
        "Zhou & Tao 2011",
    ),
    "pcp": (
        PrincipalComponentPursuit(),
        "robust PCA, cut to the budget; uses no data",
        "arXiv 0912.3599",
    ),
    "losparse": (
        AlternatingMinimization(OSSCAR(), Exact(), rounds=10),
        "alternates osscar and exact",
        "arXiv 2306.11222",
    ),
    "loftq": (
        AlternatingMinimization(RoundToNearest(), SVD(), rounds=5, damping=0.0, keep_best=False),
        "alternates rtn and svd; uses no data",
        "arXiv 2310.08659",
    ),
    "lq-lora": (
        AlternatingMinimization(
            RoundToNearest(weighted=True), DiagonalSVD(RandomizedSVD()), rounds=20, damping=0.0
        ),
        "alternates rtn and a randomised diagonal-svd",
        "arXiv 2311.12023",
    ),
    "caldera": (
        AlternatingMinimization(
            PRUNERS["gptq"], Exact(), rounds=15, low_rank_first=True, last_fit=True
        ),
        "alternates gptq and exact",
        "arXiv 2405.18886",
    ),
    "joint-grid": (JointOnGrid(), "fits S on a grid and L in turn; the default", "docs: grids"),
}
METHODS: dict[str, Method] = {
    **{name: method for name, (method, _, _) in _TABLE.items()},
    **{name: Prune(PRUNERS[name], damping=0.0) for name in UNDAMPED},
    **{name: Prune(pruner) for name, pruner in PRUNERS.items() if name not in UNDAMPED},
}
ABOUT = {name: About(*about) for name, (_, *about) in _TABLE.items()} | ABOUT_PRUNERS


def build_method(
    name: str,
    pruner: str | None = None,
    low_rank: str | None = None,
    rounds: int | None = None,
    damping: float | None = None,
    refit: bool = False,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    offset: bool | None = None,
    scale_bits: int | None = None,
    coding: str | None = None,
) -> Method:
    """Return the method of this name, with some parts replaced.

    Args:
        pruner, low_rank: names from the tables, which replace the parts of the method.
        rounds, damping: hyper-parameters of the method.
        refit: after the pruner, fit the values on its support by least squares (`Refit`), with the
            method's damping, or 0.01 for a method without damping.
        bits, group_size, symmetric, offset, scale_bits: the grid of its pruner; see `Grid`. A
            group size of 0 means one group per row.
        coding: "entropy" for an entropy-coded grid, with `bits` as its rate and one scale per row.

    Raises:
        UnknownNameError: an unknown name.
        BudgetError, GridError: the method lacks a part.
    """
    method: Any = look_up("method", name, METHODS, "method")
    parts = given(rounds=rounds, damping=damping)
    if pruner is not None:
        parts["pruner"] = look_up("pruner", pruner, PRUNERS, "pruner")
    if low_rank is not None:
        parts["low_rank"] = look_up("low-rank solver", low_rank, LOW_RANK_SOLVERS, "low_rank")
    needed = {part: part for part in parts}
    if refit:
        needed["refit"] = "pruner"
    _check_parts(name, method, needed)
    method = dataclasses.replace(method, **parts)
    fields = given(
        bits=bits, group=group_size, symmetric=symmetric, offset=offset, scale_bits=scale_bits
    )
    if group_size == 0:
        fields["group"] = None
    if coding == "entropy":
        fields = _entropy_coded(fields)
    elif coding is not None:
        fields["rate"] = None  # like the other fields, it needs a method with a grid
    if fields:
        method = _with_fields_of_grid(name, method, fields)
    if not refit:
        return method
    refitted = Refit(method.pruner, damping=0.0 if method.damping else REFIT_DAMPING)
    return dataclasses.replace(method, pruner=refitted)


def _entropy_coded(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an entropy-coded grid; GridError if a field other than bits is given."""
    others = {"group": "group_size"}
    unused = [others.get(name, name) for name in fields if name != "bits"]
    if unused:
        raise GridError(
            "an entropy-coded grid has one scale for each row and each input, and no offsets:"
            f" leave out {', '.join(unused)}, or use {option('coding', 'fixed')}",
            ("coding", *unused),
        )
    return vars(Grid.entropy_coded(float(fields.get("bits", Grid().bits))))


def given(**values: Any) -> dict[str, Any]:
    """Return the arguments that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def _check_parts(
    name: str,
    method: Method,
    needed: dict[str, str],
) -> None:
    """Raise BudgetError if a method lacks a field that an argument needs.

    Args:
        needed: the field of each argument.
    """
    missing = {
        argument: part for argument, part in needed.items() if part not in settings_of(method)
    }
    if not missing:
        return
    able = [
        other
        for other, candidate in METHODS.items()
        if settings_of(candidate).issuperset(missing.values())
    ]
    unused = " and ".join(missing)
    raise BudgetError(
        f"method {name!r} does not use {unused}: leave out {unused}, or use method"
        f" {' or '.join(able)}",
        ("method", *missing),
    )


def _with_fields_of_grid(
    name: str,
    method: Method,
    fields: dict[str, Any],
) -> Method:
    """Replace fields of the grid of a method; GridError if the method has no grid."""
    if method.grid is None:
        able = ", ".join(other for other, candidate in METHODS.items() if candidate.grid)
        raise GridError(
            f"method {name!r} does not quantise S: leave out bits, group_size, symmetric, offset,"
            f" scale_bits and coding, or use method {able}, or"
            f" {option('method', 'hassle-free')} with {option('pruner', 'gptq')}",
            ("method", "bits", "group_size", "symmetric", "offset", "scale_bits", "coding"),
        )
    return with_grid(method, dataclasses.replace(method.grid, **fields))


def with_grid(method: Method, grid: Grid | None) -> Method:
    """Replace the grid of a method, for example by the grid of a layer's plan. The result of
    `prepare` does not depend on the grid.
    """
    if grid == method.grid:
        return method
    part: Any = method
    if "grid" in settings_of(part):
        return dataclasses.replace(part, grid=grid)
    return dataclasses.replace(part, pruner=dataclasses.replace(part.pruner, grid=grid))


def settings_of(method: Any) -> set[str]:
    """Return the names of the fields of a plug-in: hyper-parameters, and replaceable parts."""
    return {field.name for field in dataclasses.fields(method)}


# The end of an error about an unknown name.
LISTED = "`hasslefree methods` lists all names"


def look_up(
    kind: str,
    name: str,
    table: dict[str, Any],
    field: str,
) -> Any:
    """Return the entry of this name in a table; UnknownNameError if there is none.

    Args:
        kind: the noun of the entries.
        field: the argument that gave the name.
    """
    if name not in table:
        raise UnknownNameError(kind, name, table, (field,), LISTED)
    return table[name]
