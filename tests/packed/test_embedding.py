"""An embedding that is stored as codes, and the head that shares them."""

import copy
import pickle
import threading

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from hasslefree import Grid, JointOnGrid, decompose
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import GridError
from hasslefree.packed.embedding import PackedEmbedding, TiedHead
from hasslefree.packed.kernels.int4 import without_cpu
from hasslefree.packed.kernels.interleaved import interleaved, rows_of
from hasslefree.packed.linear import SparseLowRankLinear, use_backend

GRIDS = {
    "3 bits": Grid(3, 16, offset=True),
    "4 bits": Grid(4, 32, offset=True),
    "6 bits, symmetric": Grid(6, 32, symmetric=True),
    "8 bits in rows": Grid(8, None, offset=True),
    "entropy-coded": Grid.entropy_coded(4.0),
}
grids = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS.keys())
# With torch's operators for 4 bits, the last 16 of 208 rows are no whole block of their order.
ROWS = 208


def embedding(grid: Grid, dtype: torch.dtype = torch.float32) -> tuple[PackedEmbedding, torch.Tensor]:
    """An embedding of rows of 64, and by the definition of its grid, in float64, its matrix."""
    matrix = torch.randn(ROWS, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = decompose(matrix, pattern="dense", rank=0, method=JointOnGrid(grid, passes=1, ranges=2))
    layer = PackedEmbedding.from_decomposition(result, None, "dense")
    scaling = result.quantised.scaling
    width = 64 // scaling.scale.shape[1]
    scale, zero = (numbers.double().repeat_interleave(width, 1) for numbers in (scaling.scale, scaling.zero))
    codes = result.quantised.codes.double()
    if grid.offset:
        return layer, codes * scale + zero
    if scaling.input_scale is not None:
        scale = scale * scaling.input_scale.double()
    return layer, (codes - zero) * scale


def ids() -> torch.Tensor:
    """Of all rows, in an order of its own, with repetitions: (2, 150)."""
    return torch.randint(0, ROWS, (2, 150), generator=torch.Generator().manual_seed(1))


@grids
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_matrix(grid, dtype):
    """Oracle: the definition of the grid in float64, rounded once."""
    layer, matrix = embedding(grid, dtype)
    assert torch.equal(layer(ids()), matrix.to(dtype)[ids()])
    assert layer(torch.zeros(3, 0, dtype=torch.long)).shape == (3, 0, 64)
    use_backend(layer, "unpacked")
    assert torch.equal(layer(ids()), matrix.to(dtype)[ids()])


def test_it_compiles_into_one_graph_with_its_head():
    """Oracle: both, not compiled. The head has taken the codes."""
    layer, _ = embedding(GRIDS["6 bits, symmetric"], torch.bfloat16)
    both = nn.Sequential(layer, TiedHead(layer, None)).requires_grad_(False)
    expected = both(ids())
    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="eager")(ids()), expected)


@grids
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_multiplies_by_the_same_codes(grid, dtype):
    """Oracle: the matrix in float64. Rows are looked up before the product and after it, when a kernel may hold the
    codes.
    """
    layer, matrix = embedding(grid, dtype)
    bias = nn.Parameter(torch.randn(ROWS).to(dtype))
    head = TiedHead(layer, bias)
    x = torch.randn(2, 3, 64).to(dtype)
    with torch.no_grad():
        found = head(x)
        assert torch.equal(layer(ids()), matrix.to(dtype)[ids()])
    expected = x.double() @ matrix.T + bias.double()
    assert (found - expected).norm() <= 4 * torch.finfo(dtype).eps * expected.norm()
    if dtype == torch.bfloat16 and without_cpu() is None:
        assert layer._buffers["weight_packed"] is None, "one copy of the codes is in memory"
    assert list(head.state_dict()) == ["bias"]


def test_a_copy_of_a_model_has_a_tied_head_of_its_own():
    layer, _ = embedding(GRIDS["4 bits"], torch.bfloat16)
    model = nn.ModuleDict({"embedding": layer, "head": TiedHead(layer, None)})
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied["head"].embedding is copied["embedding"]
        assert copied["embedding"] is not layer
        assert torch.equal(copied["embedding"](ids()), layer(ids()))


def test_gradients_reach_the_scales():
    """Oracle: the derivative of Σ row is Σ codes of the group, by the definition of the grid."""
    layer, matrix = embedding(GRIDS["4 bits"])
    layer(torch.tensor([5, 5, 7])).sum().backward()
    groups = matrix.view(ROWS, 2, 32)
    scale = layer.weight_scale.detach().double()
    codes = (groups - layer.weight_offset.detach().double().unsqueeze(-1)).sum(-1) / scale
    expected = torch.zeros_like(codes)
    expected[5] = 2 * codes[5]
    expected[7] = codes[7]
    torch.testing.assert_close(layer.weight_scale.grad.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.skipif(without_cpu() is not None, reason="torch has no operators for 4 bits here")
@pytest.mark.parametrize("rows", [16, 64, 80, 208])
def test_rows_in_the_order_of_torch_s_operators(rows):
    codes = torch.randint(0, 16, (rows, 64), dtype=torch.uint8)
    packed = interleaved(codes)
    selected = torch.randint(0, rows, (100,))
    assert torch.equal(rows_of(packed, selected), codes[selected])
    last = slice((rows - 1) // 64 * 64, rows)
    assert torch.equal(rows_of(packed, last), codes[last])


@pytest.mark.parametrize("grid", [None, Grid(4, 32)], ids=["values", "whole zeros"])
def test_rows_that_are_not_stored_one_by_one_are_refused(grid):
    matrix = torch.randn(16, 64)
    if grid is None:
        result = Decomposition(matrix, LowRank(matrix[:, :0], matrix[:0]), 0.0, 0.0, ())
    else:
        result = decompose(matrix, pattern="dense", rank=0, method=JointOnGrid(grid))
    with pytest.raises(GridError, match="an embedding is stored on a symmetric grid, or one with offsets"):
        PackedEmbedding.from_decomposition(result, None, "dense")


@pytest.mark.parametrize("backend", ["dense", "unpacked"])
@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_an_id_outside_the_vocabulary_is_an_error(wrong, backend):
    """Oracle: torch's embedding."""
    layer, matrix = embedding(GRIDS["4 bits"])
    use_backend(layer, backend)
    for module in (nn.Embedding.from_pretrained(matrix), layer):
        with pytest.raises(IndexError):
            module(torch.tensor([3, wrong]))


def test_the_weight_has_the_rows_of_the_vocabulary():
    """Transformers reads the size of an embedding there, also where the scales have units: one a row."""
    for grid in (*GRIDS.values(), Grid(4, 16, offset=True, scale_bits=4)):
        layer, _ = embedding(grid)
        assert layer.weight.ndim == 2
        assert TiedHead(layer, None).weight.shape[0] == ROWS


def test_a_tied_head_of_a_matrix_that_is_on_a_disk():
    """Oracle: the head with the matrix in memory."""
    layer, _ = embedding(GRIDS["4 bits"])
    model = nn.ModuleDict({"embedding": layer, "head": TiedHead(layer, None)})
    x = torch.randn(2, 64)
    with torch.no_grad():
        expected = model["head"](x)
        cpu_offload(model["embedding"], torch.device("cpu"), offload_buffers=True)
        assert layer.weight.is_meta
        assert torch.equal(model["head"](x), expected)


READS = {
    "tensors": lambda layer: layer.tensors()["weight_packed"].clone(),
    "state dict": lambda layer: layer.state_dict()["weight_packed"],
    "copy": lambda layer: copy.deepcopy(layer).state_dict()["weight_packed"],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_reading_while_another_thread_multiplies(read, monkeypatch):
    """Oracle: the codes before. The other thread takes the codes as soon as they are released."""
    layer, _ = embedding(GRIDS["4 bits"], torch.bfloat16)
    layer.requires_grad_(False)
    expected = layer.state_dict()["weight_packed"].clone()
    x = torch.randn(1, 64).bfloat16()
    layer(x)
    release = type(layer.kernel).release
    multiplying = []

    def release_and_multiply(kernel, released):
        release(kernel, released)
        if not multiplying:
            multiplying.append(threading.Thread(target=layer, args=(x,)))
            multiplying[0].start()
            multiplying[0].join(0.2)

    monkeypatch.setattr(type(layer.kernel), "release", release_and_multiply)
    found = read(layer)
    assert multiplying
    multiplying[0].join()
    assert torch.equal(found, expected)


def test_a_release_between_the_codes_and_the_bias(monkeypatch):
    """Oracle: the call alone."""
    grid = Grid(4, 32, offset=True)
    matrix = torch.randn(64, 64, dtype=torch.bfloat16)
    result = decompose(matrix, pattern="dense", rank=2, method=JointOnGrid(grid, passes=1, ranges=2))
    layer = SparseLowRankLinear.from_decomposition(result, torch.randn(64).bfloat16(), "dense").requires_grad_(False)
    x = torch.randn(1, 64).bfloat16()
    expected = layer(x)
    kind = type(layer.kernel.prepared.operands)
    product = kind.few_product

    def product_and_release(operands, inputs):
        layer.kernel.release(layer)
        return product(operands, inputs)

    monkeypatch.setattr(kind, "few_product", product_and_release)
    assert torch.equal(layer(x), expected)
