"""Products of an S on a grid where torch's int4 operators are not possible. Oracle: float64 on S unpacked."""

import pytest
import torch
from torch.nn import functional as F

import hasslefree
from hasslefree import Gram, Grid, Prune, SparseGPT, SparseLowRankLinear
from hasslefree.core.factors import CodedFactors, nearest
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.packed.kernels import byte_codes
from hasslefree.packed.kernels.byte_codes import ByteCodes
from tests import oracles

pytest.importorskip("numba", reason="needs hasslefree[fast]")
# With whole zeros and with offsets; scales of 16 bits, and multiples of units, which bfloat16 would round.
GRIDS = [
    Grid(3, 16),
    Grid(5, 32, offset=True, scale_bits=5),
    Grid(8, None, symmetric=True),
    Grid(4, 24, scale_bits=6),
    Grid.entropy_coded(3.5),
]


def layer_of(grid, dtype=torch.float32, pattern="dense", coded=False):
    """A layer (40, 96) on a grid, with factors and a bias."""
    weight, h = oracles.problem(40, 96)
    found = hasslefree.decompose(weight.to(dtype), Gram(h, 1), pattern, 0, method=Prune(SparseGPT(grid=grid)))
    u, v = torch.randn(40, 3), torch.randn(3, 96)
    factors = CodedFactors(nearest(u.double(), dtype), nearest(v.double(), dtype)) if coded else None
    low_rank = LowRank(u.to(dtype), v.to(dtype))
    result = Decomposition(found.sparse, low_rank, 0.0, 0.0, (), quantised=found.quantised, factors=factors)
    return SparseLowRankLinear.from_decomposition(result, torch.randn(40).to(dtype), pattern)


def assert_products(layer, x, bound):
    """The products of the layer are those of its unpacked tensors."""
    u, v = layer.factors()
    dense = layer.unpacked().double() + u.double() @ v.double()
    with torch.no_grad():
        y = layer(x)
    assert isinstance(layer.kernel.prepared.operands, ByteCodes)
    assert y.dtype == x.dtype
    expected = F.linear(x.double(), dense, layer.bias.double())
    scale = x.double().abs() @ dense.abs().T + 1
    assert ((y.double() - expected).abs() <= bound * scale).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, byte_codes.MOST + 1])
def test_products_in_float32(grid, coded, tokens, monkeypatch):
    monkeypatch.setattr(byte_codes, "TILE_BYTES", 4 * 96 * 16)  # three tiles, the last of 8 rows
    assert_products(layer_of(grid, coded=coded), torch.randn(tokens, 96), 2e-6)


def test_groups_that_are_pruned_as_a_whole_cost_no_digits():
    """Their scales stand for nothing; in files they may be large."""
    method = Prune(SparseGPT(grid=Grid(8, 16)))
    found = hasslefree.decompose(1e-4 * torch.randn(40, 96), None, "unstructured", 0, sparsity=0.9, method=method)
    layer = SparseLowRankLinear.from_decomposition(found, None, "unstructured")
    x = torch.randn(3, 96)
    with torch.no_grad():
        layer.weight_scale[(found.sparse == 0).view(40, -1, 16).all(-1)] = 1
        y = layer(x)
    assert isinstance(layer.kernel.prepared.operands, ByteCodes)
    expected = F.linear(x.double(), found.sparse.double())
    assert (y.double() - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tokens", [1, 20])
def test_products_of_groups_that_torch_does_not_take(tokens):
    """In bfloat16; sums are float32, and S, L and the bias are rounded one after the other."""
    assert_products(layer_of(Grid(4, 24), torch.bfloat16), torch.randn(tokens, 96).bfloat16(), 2.0**-6)


@pytest.mark.parametrize("pattern", ["2:4", "3:8"])
def test_pruned_entries_are_their_zeros(pattern):
    assert_products(layer_of(Grid(5, 32), pattern=pattern), torch.randn(2, 96), 2e-6)


def test_whoever_asks_gets_the_codes_in_the_file_s_order():
    """Oracle: the state before the first call. A copy of a layer that was used computes the same."""
    layer = layer_of(Grid(5, 32, offset=True))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(1, 96)
    with torch.no_grad():
        y = layer(x)
    assert layer._buffers["weight_packed"] is None, "one copy of the codes is in memory"
    assert layer.held_bytes == 40 * 96 + 2 * 4 * 40 * 3
    after = layer.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    with torch.no_grad():
        assert torch.equal(layer(x), y)


def test_a_layer_with_other_codes_has_a_kernel_again_after_use():
    layer = layer_of(Grid(5, 32))
    other = layer.weight_packed.flip(0)
    x = torch.randn(1, 96)
    with torch.no_grad():
        layer(x)
        layer.weight_packed = other
        layer.use(None)
    assert layer.held_bytes == 0, "the old codes"
    assert_products(layer, x, 2e-6)
    assert torch.equal(layer.tensors()["weight_packed"], other)
