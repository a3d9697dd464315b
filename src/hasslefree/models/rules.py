"""Choose the matrices to compress, and give a reason for every matrix in the blocks that stays
dense.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from hasslefree.errors import ModelError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.experts import SplitExperts
from hasslefree.models.sites import Site, find_sites

# A parameter that is no linear layer stays dense automatically if it has at most this share of the
# parameters of its block.
SMALL_SHARE = 0.02
# Number of weights that an error lists.
LISTED = 12

# Reasons for a matrix to stay dense.
EXCLUDED = "excluded by the user"
SHARED = "shared by several blocks"
ROUTER = "router of a mixture of experts"
TIME_STEP = "projection of time steps, which kernels read without calling the layer"
DEPTHWISE = "depthwise convolution"
SMALL = "small, and not a linear layer"


@dataclass(frozen=True)
class Matrix:
    """A matrix to compress. It holds no module: the weight of a layer is freed once it is replaced.

    Args:
        name: in its block.
        shape: (out, in).
        dtype: of the dense model.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype


# Called with each matrix that no other rule keeps dense; returns a reason to keep it dense, or
# None.
Refuse = Callable[[Matrix], str | None]


@dataclass(frozen=True)
class Selection:
    """The matrices in the blocks that are compressed, and those that stay dense.

    Args:
        blocks: the blocks of the model.
        sites: for each block, the matrices to compress by their name in the block.
        dense: the full name of each matrix that stays dense, with the reason.
    """

    blocks: Blocks
    sites: tuple[dict[str, Matrix], ...]
    dense: dict[str, str]

    @property
    def automatically_dense(self) -> list[str]:
        """The full names of the matrices that stay dense without being excluded by the user."""
        return [name for name, reason in self.dense.items() if reason != EXCLUDED]

    def reasons(self) -> list[str]:
        """What stays dense without being excluded by the user: a line for each reason."""
        names: dict[str, list[str]] = {}
        for name in self.automatically_dense:
            names.setdefault(self.dense[name], []).append(name)
        return [f"{', '.join(by_kind(group))}: {reason}" for reason, group in names.items()]


@dataclass(frozen=True)
class BlockView:
    """A block as the rules see it.

    Args:
        block: the module.
        sites: its linear layers by their name in the block.
        shared: ids of its parameters that other blocks have too.
        experts: number of experts, by the name of the module that holds them.
    """

    block: nn.Module
    sites: dict[str, Site]
    shared: frozenset[int]
    experts: dict[str, int]

    @classmethod
    def of(cls, blocks: Blocks, index: int) -> "BlockView":
        block = blocks.modules[index]
        prefix = blocks.prefix(index)
        shared = set()
        for name, parameter in block.named_parameters():
            if f"{prefix}.{name}" in blocks.shared:
                shared.add(id(parameter))
        experts = {}
        for name, module in block.named_modules():
            holder, _, leaf = name.rpartition(".")
            if isinstance(module, SplitExperts):
                experts[holder] = module.count
            elif isinstance(module, nn.ModuleList) and leaf == "experts":
                experts[holder] = len(module)
        return cls(block, find_sites(block), frozenset(shared), experts)


def is_shared(view: BlockView, name: str) -> bool:
    """Return True if the weight of a layer belongs to several blocks."""
    return id(view.sites[name].parameter) in view.shared


def is_router(view: BlockView, name: str) -> bool:
    """Return True if a layer chooses experts."""
    return chooses_experts(view, name, view.sites[name].shape[0])


def chooses_experts(
    view: BlockView,
    path: str,
    outputs: int,
) -> bool:
    """Return True if a module is a router, or a part of one.

    A router is a module beside the experts with one output, or with one output per expert; or it
    is called `gate` and is beside the experts, or it is called `router`. path: of the module.
    """
    parts = path.split(".")
    if "router" in parts:
        return True
    holder = path.rpartition(".")[0]
    if holder in view.experts and outputs in (1, view.experts[holder]):
        return True
    for depth in range(len(parts) - 1):
        if parts[depth] == "gate" and ".".join(parts[:depth]) in view.experts:
            return True
    return False


def is_time_step(view: BlockView, name: str) -> bool:
    """Return True for a projection of time steps, as state-space layers have them."""
    holder, _, leaf = name.rpartition(".")
    return leaf == "dt_proj" and hasattr(view.block.get_submodule(holder), "A_log")


# The rules for linear layers, in order: the first that applies gives the reason.
RULES: tuple[tuple[str, Callable[[BlockView, str], bool]], ...] = (
    (SHARED, is_shared),
    (ROUTER, is_router),
    (TIME_STEP, is_time_step),
)


class Exclusions:
    """The globs with which the user excludes layers or parameters, by their full names."""

    def __init__(self, globs: Iterable[str]):
        self.globs = tuple(globs)
        self.used: set[str] = set()

    def match(self, name: str) -> bool:
        """Return True if a glob matches the name, and remember every glob that does."""
        matching = [glob for glob in self.globs if fnmatchcase(name, glob)]
        self.used.update(matching)
        return bool(matching)

    @property
    def unused(self) -> list[str]:
        """The globs that have matched nothing."""
        return sorted(set(self.globs) - self.used)


def select_sites(
    blocks: Blocks, leave_dense: Iterable[str] = (), refuse: Refuse | None = None
) -> Selection:
    """Apply the rules to every matrix in the blocks.

    Args:
        blocks: the blocks of the model.
        leave_dense: globs of full names of layers or parameters that the user excludes.
        refuse: a further rule for linear layers; it gives the reason to keep one dense, or None.

    Raises:
        ModelError: a large weight is no linear layer and is not excluded, a glob matches nothing,
            or no layer is left to compress.
    """
    exclusions = Exclusions(leave_dense)
    dense: dict[str, str] = {}
    selected = []
    unsupported = []
    for index in range(len(blocks.modules)):
        prefix = blocks.prefix(index)
        view = BlockView.of(blocks, index)
        for name, parameter in other_matrices(view):
            full_name = f"{prefix}.{name}"
            if exclusions.match(full_name):
                dense[full_name] = EXCLUDED
            elif reason := parameter_reason(view, name, parameter):
                dense[full_name] = reason
            else:
                unsupported.append(f"{full_name} {tuple(parameter.shape)}")
        sites = {}
        for name, site in view.sites.items():
            full_name = f"{prefix}.{name}"
            matrix = Matrix(name, site.shape, site.parameter.dtype)
            if exclusions.match(full_name):
                dense[full_name] = EXCLUDED
            elif reason := layer_reason(view, matrix, refuse):
                dense[full_name] = reason
            else:
                sites[name] = matrix
        selected.append(sites)
    if unsupported:
        raise unsupported_weights(unsupported)
    if exclusions.unused:
        globs = " ".join(exclusions.unused)
        raise ModelError(f"{option('leave_dense', globs)} matches no layer of {blocks.name}")
    if not any(selected):
        raise nothing_selected(dense)
    return Selection(blocks, tuple(selected), dense)


def layer_reason(
    view: BlockView,
    matrix: Matrix,
    refuse: Refuse | None,
) -> str | None:
    """Return the reason for which a linear layer stays dense, or None."""
    for reason, applies in RULES:
        if applies(view, matrix.name):
            return reason
    if refuse:
        return refuse(matrix)
    return None


def other_matrices(view: BlockView) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a block with two sides or more that no linear layer holds."""
    inside = {id(site.parameter) for site in view.sites.values()}
    for name, parameter in view.block.named_parameters():
        sides = [side for side in parameter.shape if side > 1]
        if id(parameter) not in inside and len(sides) >= 2:
            yield name, parameter


def parameter_reason(
    view: BlockView,
    name: str,
    parameter: nn.Parameter,
) -> str | None:
    """Return the reason for which a parameter that is no linear layer may stay dense, or None."""
    path = name.rpartition(".")[0]
    if parameter.ndim == 2 and chooses_experts(view, path, parameter.shape[0]):
        return ROUTER
    module = view.block.get_submodule(path)
    if isinstance(module, nn.Conv1d) and parameter.shape[1] == 1:
        return DEPTHWISE
    total = sum(p.numel() for p in view.block.parameters())
    if parameter.numel() <= SMALL_SHARE * total:
        return SMALL
    return None


def unsupported_weights(weights: list[str]) -> ModelError:
    shown = ", ".join(weights[:LISTED])
    if len(weights) > LISTED:
        shown += f", … ({len(weights) - LISTED} more)"
    return ModelError(
        f"{len(weights)} weights are not linear layers and would stay dense: {shown}. To accept"
        f" that, list them with {option('leave_dense')} (globs, such as '*.experts.*')"
    )


def nothing_selected(dense: dict[str, str]) -> ModelError:
    if set(dense.values()) == {EXCLUDED}:
        return ModelError(
            f"{option('leave_dense')} matches every linear layer, so nothing would be compressed;"
            " match fewer"
        )
    counts = Counter(dense.values())
    reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.items())
    return ModelError(f"every matrix stays dense, so nothing would be compressed: {reasons}")


def by_kind(names: Iterable[str]) -> list[str]:
    """Names of layers or parameters with * for their numbers, each with its count."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return [f"{name} ({count})" for name, count in counts.items()]
