"""Choose the matrices to compress, and state a reason for each matrix in the blocks that stays
dense.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from hasslefree.errors import ModelError, option
from hasslefree.models.blocks import Blocks
from hasslefree.models.ends import End
from hasslefree.models.experts import SplitExperts
from hasslefree.models.sites import find_sites

# A parameter outside linear layers stays dense automatically if it has at most this share of the
# parameters of its block.
SMALL_SHARE = 0.02
# Weights that an error lists at most.
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
    """A matrix to compress, without a reference to its module, whose weight is freed when the layer
    is replaced.

    Args:
        name: name in its block.
        shape: (out, in).
        dtype: dtype in the dense model.
    """

    name: str
    shape: tuple[int, int]
    dtype: torch.dtype


@dataclass(frozen=True)
class Selection:
    """The matrices that are compressed, and those that stay dense.

    Args:
        blocks: the blocks of the model.
        sites: for each block, the matrices to compress, by name in the block.
        dense: for each matrix that stays dense, the reason, by full name.
        ends: the embedding and the head to compress, by full name.
    """

    blocks: Blocks
    sites: tuple[dict[str, Matrix], ...]
    dense: dict[str, str]
    ends: dict[str, End]

    @property
    def automatically_dense(self) -> list[str]:
        """Full names of the matrices that stay dense without being excluded by the user."""
        return [name for name, reason in self.dense.items() if reason != EXCLUDED]

    def reasons(self) -> list[str]:
        """Summary of the matrices that are dense automatically: one line per reason."""
        names: dict[str, list[str]] = {}
        for name in self.automatically_dense:
            names.setdefault(self.dense[name], []).append(name)
        return [f"{', '.join(by_kind(group))}: {reason}" for reason, group in names.items()]


@dataclass(frozen=True)
class Candidate:
    """A linear layer, or a parameter outside linear layers with two or more sides.

    Args:
        name: name of the layer or the parameter in its block.
        path: name of the module that holds the parameter.
        parameter: the weight.
        shape: shape of the weight, (out, in) if `is_layer`.
        is_layer: True for a linear layer.
    """

    name: str
    path: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    is_layer: bool


class BlockView:
    """A block, with what the rules need to know about it.

    Attributes:
        block: the module.
        shared: ids of the parameters that it shares with other blocks.
        experts: number of experts, by the name of the module that holds them.
    """

    def __init__(self, blocks: Blocks, index: int):
        self.block = blocks.modules[index]
        self.shared: set[int] = set()
        for name, parameter in self.block.named_parameters(blocks.prefix(index)):
            if name in blocks.shared:
                self.shared.add(id(parameter))
        self.experts: dict[str, int] = {}
        for name, module in self.block.named_modules():
            holder, _, leaf = name.rpartition(".")
            if isinstance(module, SplitExperts):
                self.experts[holder] = module.count
            elif isinstance(module, nn.ModuleList) and leaf == "experts":
                self.experts[holder] = len(module)

    def candidates(self) -> list[Candidate]:
        """All matrices of the block; linear layers last."""
        layers = []
        for name, site in find_sites(self.block).items():
            layers.append(Candidate(name, name, site.parameter, site.shape, is_layer=True))
        inside = {id(layer.parameter) for layer in layers}
        others = []
        for name, parameter in self.block.named_parameters():
            shape = tuple(parameter.shape)
            sides = [side for side in shape if side > 1]
            if id(parameter) not in inside and len(sides) >= 2:
                path = name.rpartition(".")[0]
                others.append(Candidate(name, path, parameter, shape, is_layer=False))
        return others + layers


def is_router(view: BlockView, matrix: Candidate) -> bool:
    """Return True if a matrix belongs to a module that chooses experts.

    A router is a module next to the experts with one output, or with one output per expert; a
    module `gate` next to the experts; or a module `router`.
    """
    if len(matrix.shape) != 2:
        return False
    parts = matrix.path.split(".")
    if "router" in parts:
        return True
    holder = matrix.path.rpartition(".")[0]
    if holder in view.experts and matrix.shape[0] in (1, view.experts[holder]):
        return True
    for depth in range(len(parts) - 1):
        if parts[depth] == "gate" and ".".join(parts[:depth]) in view.experts:
            return True
    return False


def is_time_step(view: BlockView, matrix: Candidate) -> bool:
    """Return True for the projection of time steps in a state-space layer."""
    holder, _, leaf = matrix.path.rpartition(".")
    return leaf == "dt_proj" and hasattr(view.block.get_submodule(holder), "A_log")


def reason_for(view: BlockView, matrix: Candidate) -> str | None:
    """Return the reason why a matrix stays dense, by the first rule that applies, or None."""
    if id(matrix.parameter) in view.shared:
        return SHARED
    if is_router(view, matrix):
        return ROUTER
    if is_time_step(view, matrix):
        return TIME_STEP
    if matrix.is_layer:
        return None
    if isinstance(view.block.get_submodule(matrix.path), nn.Conv1d) and matrix.shape[1] == 1:
        return DEPTHWISE
    total = sum(parameter.numel() for parameter in view.block.parameters())
    if matrix.parameter.numel() <= SMALL_SHARE * total:
        return SMALL
    return None


def select_sites(blocks: Blocks, leave_dense: Collection[str] = ()) -> Selection:
    """Apply the rules to every matrix in the blocks.

    Args:
        blocks: the blocks of the model.
        leave_dense: globs of full names of layers or parameters that the user excludes.

    Raises:
        ModelError: a large weight is not a linear layer and not excluded, a glob matches nothing,
            or no layer is left to compress.
    """
    names = [name for end in blocks.ends for name in end.names]
    dense: dict[str, str] = {}
    selected = []
    unsupported = []
    for index in range(len(blocks.modules)):
        view = BlockView(blocks, index)
        sites = {}
        for matrix in view.candidates():
            full_name = f"{blocks.prefix(index)}.{matrix.name}"
            names.append(full_name)
            is_excluded = matches_any([full_name], leave_dense)
            reason = EXCLUDED if is_excluded else reason_for(view, matrix)
            if reason is not None:
                dense[full_name] = reason
            elif matrix.is_layer:
                out, width = matrix.shape
                sites[matrix.name] = Matrix(matrix.name, (out, width), matrix.parameter.dtype)
            else:
                unsupported.append(f"{full_name} {matrix.shape}")
        selected.append(sites)
    if unsupported:
        raise unsupported_weights(unsupported)
    unused = {glob for glob in leave_dense if not matches_any(names, [glob])}
    if unused:
        globs = " ".join(sorted(unused))
        raise ModelError(
            f"{option('leave_dense', globs)} matches no layer of {blocks.name}, and neither"
            " embedding nor head"
        )
    if not any(selected):
        raise nothing_selected(dense)
    return Selection(blocks, tuple(selected), dense, ends={})


def select_ends(
    blocks: Blocks, leave_dense: Collection[str]
) -> tuple[dict[str, End], dict[str, str]]:
    """Return the embedding and the head to compress, and the reasons for those that stay dense, by
    name.

    A glob that matches the embedding or the head excludes both if they are tied.
    """
    ends: dict[str, End] = {}
    dense: dict[str, str] = {}
    for end in blocks.ends:
        if matches_any(end.names, leave_dense):
            dense[end.name] = EXCLUDED
        elif end.obstacle is not None:
            dense[end.name] = end.obstacle
        else:
            ends[end.name] = end
    return ends, dense


def matches_any(names: Iterable[str], globs: Collection[str]) -> bool:
    """Return True if a glob matches one of the names."""
    return any(fnmatchcase(name, glob) for name in names for glob in globs)


def unsupported_weights(weights: list[str]) -> ModelError:
    shown = ", ".join(weights[:LISTED])
    if len(weights) > LISTED:
        shown += f", … ({len(weights) - LISTED} more)"
    return ModelError(
        f"{len(weights)} weights are not linear layers and would stay dense: {shown}. To accept"
        f" that, list them with {option('leave_dense')} (globs, such as '*.experts.*')"
    )


def nothing_selected(dense: dict[str, str]) -> ModelError:
    counts = Counter(dense.values())
    reasons = ", ".join(f"{reason} ({count})" for reason, count in counts.items())
    return ModelError(
        f"nothing would be compressed, since every matrix stays dense: {reasons}; if"
        f" {option('leave_dense')} is set, exclude fewer"
    )


def by_kind(names: Iterable[str]) -> list[str]:
    """Group names of layers or parameters that differ only in numbers: `a.*.b (count)`."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return [f"{name} ({count})" for name, count in counts.items()]
