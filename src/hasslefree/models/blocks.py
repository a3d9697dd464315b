"""Find the decoder blocks of a model and the matrices in them, with no code for any one family."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from hasslefree.errors import ModelError, option
from hasslefree.models.experts import SplitExperts
from hasslefree.models.sites import Site, find_sites

# A matrix may stay dense without being named if it has at most this share of the parameters of its
# block.
LITTLE = 0.02
# A list of blocks has at least this share of the parameters of the largest list.
LARGE = 0.1
# How many weights an error lists.
SHOWN = 12


@dataclass(frozen=True)
class Blocks:
    """The decoder blocks in order. name: of the module list. shared: names of parameters that
    several blocks have.
    """

    name: str
    modules: tuple[nn.Module, ...]
    shared: frozenset[str] = frozenset()

    def prefix(self, index: int) -> str:
        return f"{self.name}.{index}"

    def part(self, index: int) -> Callable[[], Iterable[nn.Module]] | None:
        """All modules of a block, as `Weights.present` takes them; None where no block has this
        index.
        """
        return self.modules[index].modules if 0 <= index < len(self.modules) else None


def find_blocks(model: nn.Module) -> Blocks:
    """The module list nearest to the input embeddings that has linear layers in every element.

    The innermost module around the embeddings that holds such lists is searched: multimodal models
    have further lists in their towers. Among large lists the least nested one wins, then the one
    with most parameters.
    """
    for prefix in around(model):
        lists = {
            name: module
            for name, module in model.get_submodule(prefix).named_modules(prefix=prefix)
            if isinstance(module, nn.ModuleList) and module and all(map(find_sites, module))
        }
        if not lists:
            continue
        sizes = {
            name: sum(p.numel() for p in module.parameters()) for name, module in lists.items()
        }
        large = [name for name, size in sizes.items() if size >= LARGE * max(sizes.values())]
        name = min(large, key=lambda name: (name.count("."), -sizes[name]))
        tied = getattr(model, "all_tied_weights_keys", {}).items()
        pairs = (
            pair for pair in tied if all(parameter.startswith(f"{name}.") for parameter in pair)
        )
        depth = len(name.split("."))
        across = (
            pair for pair in pairs if len({parameter.split(".")[depth] for parameter in pair}) > 1
        )
        return Blocks(
            name, tuple(lists[name]), frozenset(parameter for pair in across for parameter in pair)
        )
    raise ModelError(
        f"{type(model).__name__} has no list of blocks with linear layers; hasslefree compresses"
        " causal language models"
    )


def around(model: Any) -> list[str]:
    """The names of the modules that hold the input embeddings, the innermost first, and last the
    model's own: "".
    """
    try:
        embeddings = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        embeddings = None
    path = next((name for name, module in model.named_modules() if module is embeddings), "")
    parts = path.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def towers(model: Any, blocks: Blocks) -> list[str]:
    """The names of the modules, beside those that hold the blocks, that process other inputs than
    text.
    """
    names, head, prefixes = [], model.get_output_embeddings(), around(model)
    while not f"{blocks.name}.".startswith(f"{prefixes[0]}." if prefixes[0] else ""):
        prefixes.pop(0)
    for prefix in reversed(prefixes[1:]):  # those around the module that holds the blocks
        for name, child in model.get_submodule(prefix).named_children():
            full = f"{prefix}.{name}" if prefix else name
            inside = any(module is head for module in child.modules()) or blocks.name.startswith(
                f"{full}."
            )
            if not inside and any(True for _ in child.parameters()):
                names.append(full)
    return names


@dataclass(frozen=True)
class Selection:
    """Which matrices in the blocks are compressed, by their name in each block, and which stay
    dense.

    dense: the full names of those that stay dense automatically: weights shared by several blocks,
    routers, projections of time steps, depthwise convolutions, and small matrices outside linear
    layers.
    """

    sites: list[dict[str, Site]]
    dense: tuple[str, ...] = ()


def select_sites(blocks: Blocks, leave_dense: tuple[str, ...]) -> Selection:
    """The matrices to compress. leave_dense: globs of full names, of layers or parameters, that the
    user keeps.
    """
    unused = set(leave_dense)

    def excused(name: str) -> bool:
        hits = {glob for glob in leave_dense if fnmatchcase(name, glob)}
        unused.difference_update(hits)
        return bool(hits)

    chosen, left, dense = [], [], []
    for index, block in enumerate(blocks.modules):
        prefix, sites = blocks.prefix(index), find_sites(block)
        staying = routers(block, sites) | read_by_kernels(block, sites)
        names = {id(parameter): f"{prefix}.{name}" for name, parameter in block.named_parameters()}
        staying |= {
            name for name, site in sites.items() if names[id(site.parameter)] in blocks.shared
        }
        inside = {id(site.parameter) for site in sites.values()}
        total = sum(parameter.numel() for parameter in block.parameters())
        for name, parameter in block.named_parameters():
            if (
                id(parameter) in inside
                or sum(side > 1 for side in parameter.shape) < 2
                or excused(f"{prefix}.{name}")
            ):
                continue
            short = (
                isinstance(block.get_submodule(name.rpartition(".")[0]), nn.Conv1d)
                and parameter.shape[1] == 1
            )
            if short or parameter.numel() <= LITTLE * total:
                dense.append(f"{prefix}.{name}")
            else:
                left.append(f"{prefix}.{name} {tuple(parameter.shape)}")
        dense += [
            f"{prefix}.{name}"
            for name in sites
            if name in staying and not excused(f"{prefix}.{name}")
        ]
        chosen.append(
            {
                n: site
                for n, site in sites.items()
                if n not in staying and not excused(f"{prefix}.{n}")
            }
        )
    if left:
        more = f", … ({len(left) - SHOWN} more)" if len(left) > SHOWN else ""
        raise ModelError(
            f"{len(left)} weights are not linear layers and would stay dense:"
            f" {', '.join(left[:SHOWN])}{more}. To accept that, list them with"
            f" {option('leave_dense')} (globs, such as '*.experts.*')"
        )
    if unused:
        raise ModelError(
            f"{option('leave_dense', ' '.join(sorted(unused)))} matches no layer of {blocks.name}"
        )
    if not any(chosen):
        raise ModelError(
            f"{option('leave_dense')} matches every linear layer, so nothing would be compressed;"
            " match fewer"
        )
    return Selection(chosen, tuple(dense))


def by_kind(names: Iterable[str]) -> list[str]:
    """Names of layers or parameters with * for their numbers, each with its count."""
    counts = Counter(re.sub(r"\.\d+(?=\.)", ".*", name) for name in names)
    return [f"{name} ({count})" for name, count in counts.items()]


def routers(block: nn.Module, sites: Mapping[str, Site]) -> set[str]:
    """The names of the routers: sites beside experts with one output, or one output for each
    expert.
    """
    counts = {
        n.rpartition(".")[0]: m.count
        for n, m in block.named_modules()
        if isinstance(m, SplitExperts)
    }
    beside = {name: counts.get(name.rpartition(".")[0]) for name in sites}
    return {
        name
        for name, count in beside.items()
        if count is not None and sites[name].shape[0] in (1, count)
    }


def read_by_kernels(block: nn.Module, sites: Mapping[str, Site]) -> set[str]:
    """The projections of time steps, whose weights the kernels of state-space layers read without a
    call.
    """
    parents = {
        name: name.rpartition(".")[0] for name in sites if name.rpartition(".")[2] == "dt_proj"
    }
    return {
        name for name, parent in parents.items() if hasattr(block.get_submodule(parent), "A_log")
    }


def head_unit(block: nn.Module, name: str) -> int:
    """How many consecutive inputs of a layer belong together: 1, but where the layer reads the
    heads of attention.

    There it is the channels of all query heads that share a key head, of which a model cannot leave
    out one alone. Attention is recognised by the names of Llama. name: of the layer in the block.
    """
    parent, _, leaf = name.rpartition(".")
    attention: Any = block.get_submodule(parent)
    if leaf != "o_proj" or not hasattr(attention, "head_dim") or not hasattr(attention, "k_proj"):
        return 1
    key_heads: int = attention.k_proj.out_features // attention.head_dim
    width: int = attention.o_proj.in_features
    return width // key_heads
