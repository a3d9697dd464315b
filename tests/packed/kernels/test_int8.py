"""Products of an S in symmetric codes of a byte by torch's operator. Oracle: float64 on S unpacked."""

import pytest
import torch
from torch.nn import functional as F

import hasslefree
from hasslefree import Gram, Grid, Prune, SparseGPT, SparseLowRankLinear
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import KernelError
from hasslefree.packed.kernels import int8
from hasslefree.packed.kernels.int8 import Int8
from tests import oracles

GRIDS = [Grid(8, None, symmetric=True), Grid.entropy_coded(3.5)]

needs_operator = pytest.mark.skipif(int8.without() is not None, reason=str(int8.without()))


def layer_of(grid, shape=(40, 96), rank=0, pattern="dense", bias=False):
    """A layer on a grid, in bfloat16."""
    out, width = shape
    weight, h = oracles.problem(out, width)
    method = Prune(SparseGPT(grid=grid))
    found = hasslefree.decompose(weight.bfloat16(), Gram(h, 1), pattern, 0, method=method)
    low_rank = LowRank(torch.randn(out, rank).bfloat16(), torch.randn(rank, width).bfloat16())
    result = Decomposition(found.sparse, low_rank, 0.0, 0.0, (), quantised=found.quantised)
    return SparseLowRankLinear.from_decomposition(result, torch.randn(out).bfloat16() if bias else None, pattern)


def assert_products(layer, tokens):
    """The products are those of the unpacked tensors, but for the rounding of inputs, sums and outputs."""
    x = torch.randn(tokens, layer.in_features).bfloat16()
    dense = layer.unpacked().double()
    factors = layer.factors()
    if factors is not None:
        u, v = factors
        dense += u.double() @ v.double()
    with torch.no_grad():
        y = layer(x)
    assert isinstance(layer.kernel.prepared.operands, Int8)
    assert y.dtype == torch.bfloat16
    bias = None if layer.bias is None else layer.bias.double()
    expected = F.linear(x.double(), dense, bias)
    scale = x.double().abs() @ dense.abs().T + 1
    assert ((y.double() - expected).abs() <= 2.0**-7 * scale).all()


@needs_operator
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, int8.MOST, int8.MOST + 1])
@pytest.mark.parametrize("more", [{}, {"rank": 3, "bias": True}], ids=str)
def test_products(grid, tokens, more, monkeypatch):
    monkeypatch.setattr(int8, "TILE_BYTES", 4 * 96 * 16)  # three tiles, the last of 8 rows
    assert_products(layer_of(grid, **more), tokens)


@needs_operator
@pytest.mark.parametrize("slowly", [False, True])
def test_many_tokens_with_and_without_instructions_for_bfloat16(slowly, monkeypatch):
    monkeypatch.setattr(int8, "multiplies_slowly", lambda dtype, device: slowly)
    assert_products(layer_of(GRIDS[1]), int8.MOST + 1)


@needs_operator
@pytest.mark.parametrize("out", [1, 3, 41])
def test_any_number_of_outputs(out):
    for tokens in (1, 4, 7):
        assert_products(layer_of(GRIDS[1], (out, 32)), tokens)


@needs_operator
def test_pruned_entries_are_zero():
    assert_products(layer_of(GRIDS[0], pattern="2:4"), 2)


@needs_operator
def test_codes_go_back_to_the_file_s_order():
    """Oracle: the state before the first call."""
    layer = layer_of(GRIDS[1])
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with torch.no_grad():
        layer(torch.randn(1, 96).bfloat16())
    assert layer._buffers["weight_packed"] is None, "one copy of the codes is in memory"
    assert layer.held_bytes == 40 * 96 + 2 * 40
    after = layer.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@needs_operator
def test_traced_calls_are_those_of_the_operator():
    """Oracle: the same layer without torch.compile."""
    layer = layer_of(GRIDS[1])
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for tokens in (2, int8.MOST + 2):
        x = torch.randn(tokens, 96).bfloat16()
        with torch.no_grad():
            expected = layer(x)
            assert torch.equal(compiled(x), expected)


@needs_operator
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, int8.MOST + 2])
def test_autocast_changes_nothing(dtype, tokens):
    """Sums of codes without their scales would be beyond float16."""
    codes = torch.randint(0, 256, (8, 576), dtype=torch.uint8)
    operands = Int8.of(codes, torch.full((8, 1), 2.0**-10))
    x = (30 * torch.randn(tokens, 576)).bfloat16()
    expected = operands.product(x)
    assert expected.isfinite().all()
    with torch.autocast("cpu", dtype):
        assert torch.equal(operands.product(x), expected)


@needs_operator
def test_the_backend_may_be_named():
    layer = layer_of(GRIDS[0])
    layer.use("int8")
    assert_products(layer, 3)
    layer.use("numba")
    with torch.no_grad():
        layer(torch.randn(1, 96).bfloat16())
    assert not isinstance(layer.kernel.prepared.operands, Int8)


@pytest.mark.parametrize(
    ("grid", "shape", "reason"),
    [
        (
            Grid(8, 32, symmetric=True),
            (40, 96),
            "symmetric codes of 8 bits in rows, and the layer has int8 in groups of 32",
        ),
        (Grid(8, None, offset=True), (40, 96), "and the layer has int8 in rows, with offsets"),
        (Grid(8, None), (40, 96), "symmetric codes of 8 bits in rows, and the layer has int8 in rows"),
        (Grid(4, None, symmetric=True), (40, 96), "and the layer has int4 in rows, symmetric"),
        (GRIDS[1], (40, 80), "a multiple of 32 inputs, and the layer has 80"),
    ],
)
def test_a_layer_that_the_operator_does_not_take_says_why(grid, shape, reason):
    layer = layer_of(grid, shape)
    layer.backend = "int8"
    with torch.no_grad(), pytest.raises(KernelError, match=f"{reason}.*; leave out the backend, or use dense"):
        layer(torch.randn(1, shape[1]).bfloat16())
