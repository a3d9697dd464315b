"""Find the decoder blocks of a model and the matrices in them, with no code for any one family."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from hasslefree.errors import ModelError, option
from hasslefree.models.sites import Site, find_sites


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


def select_sites(blocks: Blocks, leave_dense: tuple[str, ...]) -> list[dict[str, Site]]:
    """For every block the weight matrices to compress, by their name in the block.

    Args:
        leave_dense: glob patterns of full names (layers or parameters) that the user accepts to stay as they are.

    Raises:
        ModelError: a matrix would stay dense that the user did not name (fused experts, a router, a convolution),
            or a glob pattern matches nothing.
    """
    unused = set(leave_dense)

    def excused(name: str) -> bool:
        hits = {glob for glob in leave_dense if fnmatchcase(name, glob)}
        unused.difference_update(hits)
        return bool(hits)

    chosen, left = [], []
    for index, block in enumerate(blocks.modules):
        prefix, sites = blocks.prefix(index), find_sites(block)
        inside = {id(site.parameter) for site in sites.values()}
        for name, parameter in block.named_parameters():
            if id(parameter) not in inside and _is_matrix(parameter) and not excused(f"{prefix}.{name}"):
                left.append(f"{prefix}.{name} {tuple(parameter.shape)}")
        chosen.append({name: site for name, site in sites.items() if not excused(f"{prefix}.{name}")})
    if left:
        raise ModelError(
            f"{len(left)} weights are no linear layers and would stay dense: {_shortened(left)}. "
            f"Accept that by naming them with {option('leave_dense')} (globs, such as '*.experts.*')"
        )
    if unused:
        raise ModelError(f"{option('leave_dense', ' '.join(sorted(unused)))} matches no layer of {blocks.name}")
    if not any(chosen):
        raise ModelError(f"{option('leave_dense')} names every linear layer: nothing is left to compress")
    return chosen


def _is_matrix(parameter: Tensor) -> bool:
    return sum(side > 1 for side in parameter.shape) >= 2


def _shortened(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names) - most} more)" if len(names) > most else "")
