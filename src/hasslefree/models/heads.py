"""Which inputs of a layer are an attention head, by the names that Llama and its kin give to layers."""

from __future__ import annotations

from typing import Any

from torch import nn


def head_unit(block: nn.Module, name: str) -> int:
    """How many consecutive inputs of a layer belong together: 1, but where the layer reads the heads of attention.

    There it is the channels of all query heads that share a key head: one of them alone cannot be left out of a model
    that has the same number of query heads for every key head.

    Args:
        name: of the layer in the block.
    """
    parent, _, leaf = name.rpartition(".")
    attention: Any = block.get_submodule(parent)
    if leaf != "o_proj" or not hasattr(attention, "head_dim") or not hasattr(attention, "k_proj"):
        return 1
    key_heads: int = attention.k_proj.out_features // attention.head_dim
    width: int = attention.o_proj.in_features
    return width // key_heads
