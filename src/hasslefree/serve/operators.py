"""The product of a stack of compressed layers as one torch operator, for torch.compile and CUDA graphs.

Which kernel runs is decided within the operator, so that a compiled graph for any number of tokens has one node. A
captured CUDA graph holds the kernels for the number of tokens that it was captured with.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.packed.kernels import Case, LayerTensors, choose, layer_products, product, takes_layers
from hasslefree.packed.layouts import PackedGroups


def stacked_product(
    x: Tensor, values: Tensor, positions: Tensor, n: int, m: int,
    low_rank_u: Tensor, low_rank_v: Tensor, outs: list[int], ranks: list[int],
) -> Tensor:  # fmt: skip
    """x (S + L)ᵀ for layers that read the same inputs, with S of all of them stacked by rows.

    Args:
        x: (tokens, in). values: (Σ out, in/M·N), of x's dtype. positions: (Σ out, bytes), uint8: the codes of the
            groups. low_rank_u, low_rank_v, outs, ranks: as for `add_low_rank`.

    Returns:
        (tokens, Σ out), in x's dtype.
    """
    layout = PackedGroups(n, m)
    backend = choose(Case(x.device.type, x.dtype, layout, len(x), grad=False))
    if takes_layers(backend, x, layout, max(ranks)) and (backend == "triton" or len(outs) == 1):
        layers = layers_of(layout, values, positions, low_rank_u, low_rank_v, outs, ranks)
        return torch.cat(layer_products(x, layers), dim=1)
    if backend == "numba":
        y = product(backend, x, values, positions, layout)
    else:
        y = F.linear(x, layout.unpack(values, positions, x.shape[1]))
    return add_low_rank(y, x, low_rank_u, low_rank_v, outs, ranks)


stacked_linear = torch.library.custom_op("hasslefree::stacked_linear", stacked_product, mutates_args=())


@stacked_linear.register_fake
def _(
    x: Tensor, values: Tensor, positions: Tensor, n: int, m: int,
    low_rank_u: Tensor, low_rank_v: Tensor, outs: list[int], ranks: list[int],
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], positions.shape[0])


def layers_of(
    layout: PackedGroups,
    values: Tensor,
    positions: Tensor,
    low_rank_u: Tensor,
    low_rank_v: Tensor,
    outs: list[int],
    ranks: list[int],
) -> list[LayerTensors]:
    """The layers of a stack, as views. The arguments are those of `stacked_product`."""
    us = low_rank_u.split([out * rank for out, rank in zip(outs, ranks, strict=True)])
    parts = zip(values.split(outs), positions.split(outs), us, low_rank_v.split(ranks), strict=True)
    return [LayerTensors(layout, value, index, u.view(len(value), len(v)), v, None) for value, index, u, v in parts]


def add_low_rank(
    y: Tensor, x: Tensor, low_rank_u: Tensor, low_rank_v: Tensor, outs: list[int], ranks: list[int]
) -> Tensor:
    """y with the low-rank part of each layer added in place to its outputs.

    Args:
        y: (tokens, Σ out). x: (tokens, in). low_rank_v: (Σ r, in), the v of all layers stacked by rows.
        low_rank_u: (Σ out·r,), the u (out, r) of one layer after the other. outs, ranks: out and r of each layer.
    """
    if not len(low_rank_v):
        return y
    hidden = F.linear(x, low_rank_v)
    factors = low_rank_u.split([out * rank for out, rank in zip(outs, ranks, strict=True)])
    for part, inner, u, out in zip(y.split(outs, 1), hidden.split(ranks, 1), factors, outs, strict=True):
        if inner.shape[1]:
            part.addmm_(inner, u.view(out, -1).T)
    return y
