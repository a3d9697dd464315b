"""Choose the matrices to compress. A thin matrix that the recipe does not fit stays dense."""

import math
from collections.abc import Mapping, Sequence

from hasslefree.errors import (
    BudgetError,
    GridError,
    HasslefreeError,
    ModelError,
    PatternError,
    option,
)
from hasslefree.models.blocks import Blocks
from hasslefree.models.ends import End
from hasslefree.models.experts import experts_of
from hasslefree.models.rules import Matrix, Selection, select_ends, select_sites
from hasslefree.planning.fit import group_is_open, no_engine_group, plan_end, plan_layer, with_rank
from hasslefree.planning.plan import LayerPlan
from hasslefree.recipe.engines import ENGINES, GROUP, fused_apart
from hasslefree.recipe.resolve import Resolved

# Matrices that hold at most this share of the weights may be too thin for the recipe.
THIN_SHARE = 0.05
# A matrix with fewer rows is not entropy-coded.
FEWEST_ROWS = 8

# A matrix that the recipe does not fit, and the reason.
Misfit = tuple[Matrix, HasslefreeError]


def select(blocks: Blocks, resolved: Resolved) -> Selection:
    """Choose the matrices to compress; a thin one that the recipe does not fit stays dense.

    Without this rule, a single 4×4 matrix would make the whole recipe fail.

    Raises:
        BudgetError, PatternError, GridError: the recipe does not fit matrices that hold more than
            `THIN_SHARE` of the weights.
        ModelError: as for `select_sites`.
    """
    selection = select_sites(blocks, resolved.leave_dense)
    if resolved.size:
        resolved = with_rank(resolved, 0)
    sites: list[dict[str, Matrix]] = []
    dense = dict(selection.dense)
    misfits: list[Misfit] = []
    weights = 0
    for index, matrices in enumerate(selection.sites):
        fitting = {}
        for name, matrix in matrices.items():
            weights += math.prod(matrix.shape)
            check_experts(blocks, index, matrix, resolved.engine)
            try:
                check_entropy_coding(plan_layer(blocks, index, matrix, resolved), matrix)
                fitting[name] = matrix
            except (BudgetError, PatternError, GridError) as error:
                misfits.append((matrix, error))
                full_name = f"{blocks.prefix(index)}.{name}"
                dense[full_name] = short_reason(error, matrix, resolved)
        sites.append(fitting)
    refused = misfits
    if any(sites):
        refused = [misfit for misfit in misfits if not may_stay_dense(*misfit, resolved)]
    if sum(math.prod(matrix.shape) for matrix, _ in refused) > THIN_SHARE * weights:
        raise refusal(refused, resolved)
    if resolved.engine is not None and ENGINES[resolved.engine].fuses:
        check_fused(blocks, sites, dense)
    ends, dense_ends = fitting_ends(blocks, resolved)
    return Selection(blocks, tuple(sites), dense | dense_ends, ends)


def fitting_ends(blocks: Blocks, resolved: Resolved) -> tuple[dict[str, End], dict[str, str]]:
    """The embedding and the head to compress, by name, and why each of the others stays dense."""
    if not resolved.end_grids:
        return {}, {}
    ends, dense = select_ends(blocks, resolved.leave_dense)
    for name, end in list(ends.items()):
        try:
            plan_end(end, resolved.end_grids[0], resolved)
        except GridError as error:
            del ends[name]
            dense[name] = short_reason(error, end, resolved)
    return ends, dense


def check_entropy_coding(plan: LayerPlan, matrix: Matrix) -> None:
    """Raise a GridError if a matrix is to be entropy-coded and is too small for it.

    To decode the codes, the file stores numbers for each column and row. With few codes, these
    numbers take most of the bits.
    """
    if plan.grid is None or plan.grid.rate is None:
        return
    out, width = plan.shape
    if out < FEWEST_ROWS or plan.size >= plan.dense_size:
        raise GridError(
            f"{matrix.name}, {out} × {width}, is too small for entropy coding; use"
            f" {option('coding', 'fixed')}",
            ("coding",),
        )


def refusal(misfits: Sequence[Misfit], resolved: Resolved) -> HasslefreeError:
    """The error of the narrowest of some matrices, with a remedy that fits all of them."""
    _, narrowest = min(misfits, key=lambda misfit: min(misfit[0].shape))
    if isinstance(narrowest, GridError) and resolved.engine is None and resolved.group_size:
        automatic = f"or leave out {option('group_size')}: each layer then gets one that fits"
        return GridError(f"{narrowest.message}; {automatic}", narrowest.fields)
    return narrowest


def may_stay_dense(
    matrix: Matrix,
    error: HasslefreeError,
    resolved: Resolved,
) -> bool:
    """Return True if a matrix that the recipe does not fit stays dense however large it is: none of
    the group sizes that may be chosen divides its inputs.
    """
    return isinstance(error, GridError) and (
        no_engine_group(matrix.shape[1], resolved) or group_is_open(resolved)
    )


def check_experts(blocks: Blocks, index: int, matrix: Matrix, engine: str | None) -> None:
    """Raise a ModelError for the layer of an expert if the engine's export takes no experts."""
    if engine in (None, "transformers") or not experts_of(blocks.modules[index], matrix.name):
        return
    raise ModelError(
        f"layers of experts, such as {blocks.prefix(index)}.{matrix.name}, cannot be exported to"
        f" {engine} with their codes: leave out {option('engine')} and export to dense, or keep"
        f" them dense with {option('leave_dense', '*.experts.*')}"
    )


def check_fused(
    blocks: Blocks,
    sites: Sequence[Mapping[str, Matrix]],
    dense: Mapping[str, str],
) -> None:
    """Raise a ModelError if only some of the layers that an engine multiplies as one stay dense.

    Args:
        sites: the layers to compress, by block.
        dense: why each other matrix stays dense, by full name.
    """
    forms = dict.fromkeys(dense, "dense")
    for index, matrices in enumerate(sites):
        for name in matrices:
            forms[f"{blocks.prefix(index)}.{name}"] = "quantised"
    if apart := fused_apart(forms, dense):
        raise ModelError(f"{apart}; exclude all of them with {option('leave_dense')}, or none")


def short_reason(error: HasslefreeError, matrix: Matrix | End, resolved: Resolved) -> str:
    """The reason for which a matrix stays dense, in a few words."""
    if isinstance(error, BudgetError):
        return f"narrower than rank {resolved.budget.rank}"
    if isinstance(error, GridError) and no_engine_group(matrix.shape[1], resolved):
        return (
            f"its {matrix.shape[1]} inputs are no multiple of {GROUP}, as {resolved.engine} needs"
        )
    if error.fields == ("coding",):
        return "too small for entropy coding"
    thing = "pattern" if isinstance(error, PatternError) else "group size"
    return f"the {thing} does not fit its {matrix.shape[1]} inputs"
