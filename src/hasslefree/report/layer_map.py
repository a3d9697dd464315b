"""Where the layers of a model stand: their blocks and their kinds, such as q_proj."""

import re
from collections.abc import Iterable

_BLOCK = re.compile(r"(?:.*?\.)?(\d{1,9})\.(.+)")
_EXPERT = re.compile(r"\.\d+(?=\.)")


def place(name: str) -> tuple[int, str]:
    """The block of a layer and its kind: model.layers.3.mlp.up_proj → 3, mlp.up_proj. Without a number, block 0."""
    match = _BLOCK.fullmatch(name)
    return (int(match[1]), match[2]) if match else (0, name)


def short_names(names: Iterable[str]) -> dict[str, str]:
    """The last part of each name where that tells them apart, else all of it."""
    leaves: dict[str, set[str]] = {}
    for name in names:
        leaves.setdefault(name.rpartition(".")[2], set()).add(name)
    return {name: leaf if len(alike) == 1 else name for leaf, alike in leaves.items() for name in alike}


def places(names: Iterable[str], merge_experts: bool = False) -> dict[str, tuple[int, str]]:
    """The block and the shortened kind of each layer.

    Args:
        merge_experts: mlp.experts.5.w1 becomes mlp.experts.w1, so that all experts of a block are one kind.
    """
    long = {name: place(name) for name in names}
    if merge_experts:
        long = {name: (block, _EXPERT.sub("", kind)) for name, (block, kind) in long.items()}
    short = short_names(kind for _, kind in long.values())
    return {name: (block, short[kind]) for name, (block, kind) in long.items()}


def error_range(errors: Iterable[float]) -> tuple[float, float]:
    """The least error above 0 and the most; both 1 where all are 0."""
    positive = [error for error in errors if error > 0] or [1.0]
    return min(positive), max(positive)
