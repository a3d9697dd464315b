"""Find the decoder blocks of a model, without code for particular model families."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hasslefree.errors import ModelError
from hasslefree.models.ends import End, asked, find_ends
from hasslefree.models.sites import find_sites

# Minimum number of parameters in a list of blocks, as a share of those in the largest list.
LARGE = 0.1


@dataclass(frozen=True)
class Blocks:
    """The decoder blocks of a model.

    Args:
        name: name of the module list.
        modules: the blocks in order.
        shared: names of the parameters that several blocks share.
        ends: the matrices of the embedding and the head.
    """

    name: str
    modules: tuple[nn.Module, ...]
    shared: frozenset[str]
    ends: tuple[End, ...]

    def prefix(self, index: int) -> str:
        return f"{self.name}.{index}"

    def part(self, index: int) -> Callable[[], Iterable[nn.Module]] | None:
        """Return a function that lists a block's modules, for `Weights.present`; None if no block
        has this index.
        """
        if 0 <= index < len(self.modules):
            return self.modules[index].modules
        return None


def find_blocks(model: nn.Module) -> Blocks:
    """Find the list of decoder blocks: a module list with linear layers in every element.

    Multimodal models have such lists for other modalities too, so the list is searched in the
    innermost module that contains the input embeddings and at least one list. Of its large lists,
    take the least nested one, then the one with the most parameters. Raises a ModelError if there
    is none.
    """
    for prefix in embedding_ancestors(model):
        lists = {}
        sizes = {}
        for name, module in model.get_submodule(prefix).named_modules(prefix=prefix):
            if isinstance(module, nn.ModuleList) and module and all(map(find_sites, module)):
                lists[name] = module
                sizes[name] = sum(parameter.numel() for parameter in module.parameters())
        if lists:
            large = [name for name in lists if sizes[name] >= LARGE * max(sizes.values())]
            name = min(large, key=lambda name: (name.count("."), -sizes[name]))
            shared = shared_parameters(model, name)
            return Blocks(name, tuple(lists[name]), shared, find_ends(model))
    raise ModelError(
        f"{type(model).__name__} has no list of blocks with linear layers; hasslefree compresses"
        " causal language models"
    )


def shared_parameters(model: Any, name: str) -> frozenset[str]:
    """Names of the parameters that several blocks share. name: name of the list of blocks.

    Zamba2 ties `model.layers.3.shared_transformer…` to `model.layers.1.shared_transformer…`.
    """
    shared = set[str]()
    for pair in getattr(model, "all_tied_weights_keys", {}).items():
        blocks = set()
        for parameter in pair:
            if inside(parameter, name):
                blocks.add(parameter.removeprefix(f"{name}.").split(".")[0])
        if len(blocks) > 1:
            shared.update(pair)
    return frozenset(shared)


def inside(name: str, ancestor: str) -> bool:
    """Return True if a module or parameter belongs to the module `ancestor`; "" is the model."""
    return not ancestor or name.startswith(f"{ancestor}.")


def embedding_ancestors(model: Any) -> list[str]:
    """Names of the modules that contain the input embeddings, from the innermost one to the model
    itself, "".
    """
    embeddings, _ = asked(model, "get_input_embeddings")
    holders = [embeddings.rpartition(".")[0]]
    while holders[-1]:
        holders.append(holders[-1].rpartition(".")[0])
    return holders


def other_modalities(model: Any, blocks: Blocks) -> list[str]:
    """Names of the modules outside the text decoder that process images, sound or video."""
    names = []
    head = model.get_output_embeddings()
    holders = [prefix for prefix in embedding_ancestors(model) if inside(blocks.name, prefix)]
    for prefix in reversed(holders[1:]):  # the innermost one is the text decoder
        for name, child in model.get_submodule(prefix).named_children():
            full_name = f"{prefix}.{name}" if prefix else name
            is_head = head in child.modules()
            has_weights = any(True for _ in child.parameters())
            if has_weights and not is_head and not inside(blocks.name, full_name):
                names.append(full_name)
    return names


def head_unit(block: nn.Module, name: str) -> int:
    """Number of consecutive inputs of a layer that can only be removed together.

    For the output projection of attention, these are the channels of all query heads that share a
    key head; for other layers, it is 1. Attention is recognised by the names of Llama's layers.

    name: name of the layer in the block.
    """
    parent, _, leaf = name.rpartition(".")
    attention: Any = block.get_submodule(parent)
    if leaf != "o_proj" or not hasattr(attention, "head_dim") or not hasattr(attention, "k_proj"):
        return 1
    key_heads = attention.k_proj.out_features // attention.head_dim
    return attention.o_proj.in_features // key_heads
