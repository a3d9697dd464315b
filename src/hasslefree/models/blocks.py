"""Find the decoder blocks of a model and the matrices in them, with no code for any one family."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from hasslefree.errors import ModelError, option
from hasslefree.models.experts import SplitExperts
from hasslefree.models.sites import Site, find_sites

# What stays dense without being named may hold this share of the parameters of a block, each matrix for itself.
LITTLE = 0.02


@dataclass(frozen=True)
class Blocks:
    """The decoder blocks in order. name: the module list in the model, such as model.layers."""

    name: str
    modules: tuple[nn.Module, ...]

    def prefix(self, index: int) -> str:
        return f"{self.name}.{index}"


def find_blocks(model: nn.Module) -> Blocks:
    """The module list that holds the most parameters and has linear layers in every element.

    An outer list holds at least what a list in it holds, and comes first.

    Raises:
        ModelError: there is none.
    """
    best: tuple[int, Blocks] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not module or not all(map(find_sites, module)):
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if best is None or size > best[0]:
            best = size, Blocks(name, tuple(module))
    if best is None:
        raise ModelError(f"{type(model).__name__} has no list of blocks with linear layers; is it a decoder?")
    return best[1]


@dataclass(frozen=True)
class Selection:
    """What becomes of the matrices in the blocks.

    Args:
        sites: what is compressed of each block, by its name there.
        dense: the full names of what stays as it is by itself: routers, convolutions of each channel alone, and small
            matrices that are no linear layer.
    """

    sites: list[dict[str, Site]]
    dense: tuple[str, ...] = ()


def select_sites(blocks: Blocks, leave_dense: tuple[str, ...]) -> Selection:
    """The weight matrices of every block to compress.

    Args:
        leave_dense: glob patterns of full names (layers or parameters) that the user accepts to stay as they are.

    Raises:
        ModelError: matrices that the user did not name would stay dense, of a kind that is not known here and with more
            than `LITTLE` of a block's parameters; or a glob pattern matches nothing.
    """
    unused = set(leave_dense)

    def excused(name: str) -> bool:
        hits = {glob for glob in leave_dense if fnmatchcase(name, glob)}
        unused.difference_update(hits)
        return bool(hits)

    chosen, left, dense = [], [], []
    for index, block in enumerate(blocks.modules):
        prefix, sites = blocks.prefix(index), find_sites(block)
        routing = routers(block, sites)
        inside = {id(site.parameter) for site in sites.values()}
        total = sum(parameter.numel() for parameter in block.parameters())
        for name, parameter in block.named_parameters():
            if id(parameter) in inside or not _is_matrix(parameter) or excused(f"{prefix}.{name}"):
                continue
            short = isinstance(block.get_submodule(name.rpartition(".")[0]), nn.Conv1d) and parameter.shape[1] == 1
            if short or parameter.numel() <= LITTLE * total:
                dense.append(f"{prefix}.{name}")
            else:
                left.append(f"{prefix}.{name} {tuple(parameter.shape)}")
        dense += [f"{prefix}.{name}" for name in sites if name in routing and not excused(f"{prefix}.{name}")]
        chosen.append({n: site for n, site in sites.items() if n not in routing and not excused(f"{prefix}.{n}")})
    if left:
        raise ModelError(
            f"{len(left)} weights are no linear layers and would stay dense: {_shortened(left)}. "
            f"Accept that by naming them with {option('leave_dense')} (globs, such as '*.experts.*')"
        )
    if unused:
        raise ModelError(f"{option('leave_dense', ' '.join(sorted(unused)))} matches no layer of {blocks.name}")
    if not any(chosen):
        raise ModelError(f"{option('leave_dense')} names every linear layer: nothing is left to compress")
    return Selection(chosen, tuple(dense))


def by_kind(names: Iterable[str]) -> list[str]:
    """Names of layers or parameters in words: without the numbers in them, and how many there are of each."""
    found = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return [f"{name} ({count})" for name, count in found.items()]


def routers(block: nn.Module, sites: Mapping[str, Site]) -> set[str]:
    """The names of the sites beside experts that choose between them, or weigh one: one output, or one for each."""
    counts = {
        name.rpartition(".")[0]: module.count
        for name, module in block.named_modules()
        if isinstance(module, SplitExperts)
    }
    beside = {name: counts.get(name.rpartition(".")[0]) for name in sites}
    return {name for name, count in beside.items() if count is not None and sites[name].shape[0] in (1, count)}


def _is_matrix(parameter: Tensor) -> bool:
    return sum(side > 1 for side in parameter.shape) >= 2


def _shortened(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names) - most} more)" if len(names) > most else "")
