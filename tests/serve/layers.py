"""Compressed layers as a folder holds them, and the matrices that they stand for."""

from dataclasses import dataclass

import torch

from hasslefree import Grid
from hasslefree.checkpoint.entries import Entry, checksum
from hasslefree.core.factors import nearest
from hasslefree.core.grids import Quantised
from hasslefree.core.patterns import KnownSupport
from hasslefree.packed.spec import LayerSpec
from hasslefree.packed.storage import pack_sparse
from hasslefree.solve.pruners.diagonal import RoundToNearest

# How a layer may be stored: pattern, grid, bits of the factors.
KINDS = {
    "2:4": ("2:4", None, None),
    "2:8": ("2:8", None, None),  # codes of 6 bits: shares begin within a byte
    "1:16": ("1:16", None, None),
    "3:8": ("3:8", None, None),  # masks
    "2:4, int8 factors": ("2:4", None, 8),
    "row": ("row", None, None),
    "unstructured": ("unstructured", None, None),
    "structured": ("structured", None, None),
    "dense, int4": ("dense", Grid(bits=4, group=16, symmetric=False), None),
    "dense, offsets": ("dense", Grid(bits=4, group=32, offset=True), None),
    "dense, rows": ("dense", Grid(bits=4, group=None), None),
    "dense, entropy-coded": ("dense", Grid.entropy_coded(5.0), None),
    "2:4, int8": ("2:4", Grid(bits=8, group=16, symmetric=True), None),
}


@dataclass
class Layer:
    """entry: None if it is dense. tensors: of the folder. matrix: S + u v in float64."""

    entry: Entry | None
    tensors: dict[str, torch.Tensor]
    matrix: torch.Tensor


def dense(shape, seed=0):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return Layer(None, {"weight": weight}, weight.double())


def layer_of(kind, shape, rank, seed=0):
    """A random layer (out, in)."""
    pattern, grid, bits = KINDS[kind]
    (out, width), generator = shape, torch.Generator().manual_seed(seed)
    sparse = torch.randn(shape, generator=generator)
    n, _, m = pattern.partition(":")
    if m:
        order = torch.rand(out, width // int(m), int(m), generator=generator).argsort(-1)
        sparse = sparse * (order < int(n)).view(shape)
    elif pattern == "structured":
        sparse = sparse * (torch.rand(width, generator=generator) < 0.5)
    elif pattern != "dense":
        sparse = sparse * (torch.rand(shape, generator=generator) < 0.5)
    quantised = None
    if grid is not None:
        if grid.rate is None:
            scaling = grid.scaling(sparse)
        else:
            scaling = RoundToNearest(grid).prune(sparse, None, KnownSupport(sparse.bool())).scaling
        quantised = Quantised.of(sparse, scaling, torch.float32)
        sparse = torch.where(sparse != 0, quantised.values(), 0.0)
    tensors, nonzeros = pack_sparse(pattern, sparse, quantised)
    matrix = sparse.double()
    if rank:
        u, v = (torch.randn(each, generator=generator) for each in ((out, rank), (rank, width)))
        for name, factor in (("low_rank_u", u), ("low_rank_v", v)):
            coded = nearest(factor, torch.float32)
            tensors |= {name: coded.codes, f"{name}_scale": coded.scale} if bits else {name: factor}
            if bits:
                factor.copy_(coded.codes * coded.scale[:, None])
        matrix = matrix + u.double() @ v.double()
    spec = LayerSpec(pattern, shape, rank, nonzeros, grid, bits)
    return Layer(Entry(spec, checksum([tensors[spec.layout.index]])), tensors, matrix)
