"""The backend int4 on CUDA: one copy of the codes, in the order of torch's operators, and every width."""

import pytest
import torch
from torch.nn import functional as F

from hasslefree.core.grids import Grid
from hasslefree.packed.kernels import codes, int4, whole
from tests.cuda.int4 import OPERATORS
from tests.packed.kernels.test_int4 import close, layer_of


@pytest.fixture
def operators(gpu, monkeypatch):
    """The operators: slow ones where the GPU is a fake one."""
    int4.without_cuda.cache_clear()
    codes.multiples_on.cache_clear()
    if gpu:
        monkeypatch.setattr(whole, "is_traced", lambda x: False)  # a fake tensor is of a class of its own
    yield gpu
    int4.without_cuda.cache_clear()
    codes.multiples_on.cache_clear()


@pytest.mark.parametrize(
    "grid",
    [
        Grid(2, 32, offset=True),
        Grid(3, 16, offset=True),
        Grid(4, 64, offset=True),
        Grid(4, 48, symmetric=True),
        Grid(5, 32, offset=True, scale_bits=5),
        Grid(6, 16, symmetric=True),
        Grid(8, None, offset=True),
    ],
    ids=str,
)
def test_every_width_multiplies_few_tokens_and_many_and_gives_its_codes_back(grid, operators):
    """Oracle: the matrix of the codes in float64."""
    layer, matrix, bias = layer_of(grid, out=48, width=192)
    words = layer.weight_packed.clone()
    layer = layer.to("cuda")
    for tokens in (1, 40):
        x = torch.randn(2, tokens, 192).bfloat16()
        assert close(layer(x.cuda()).cpu(), F.linear(x.double(), matrix, bias))
        assert layer.weight_packed is None
    chosen = torch.tensor([0, 47, 9, 9])
    rows = layer.rows(chosen.cuda()).cpu()
    assert torch.equal(rows, layer.to("cpu").unpacked()[chosen])
    assert torch.equal(layer.weight_packed, words)


def test_many_tokens_by_some_rows_at_a_time(operators, monkeypatch):
    monkeypatch.setattr(int4, "CUDA_TILE_BYTES", 2 * 192 * 24)
    layer, matrix, bias = layer_of(out=64)
    x = torch.randn(40, 192).bfloat16()
    assert close(layer.to("cuda")(x.cuda()).cpu(), F.linear(x.double(), matrix, bias))


@pytest.mark.parametrize(("grid", "bits"), [(Grid(3, 32), 4), (Grid(4, 32), 4), (Grid(6, 32), 8)], ids=str)
def test_one_copy_of_the_codes_is_in_memory(grid, bits, operators):
    """Oracle: nibbles of all inputs and two numbers of bfloat16 for each group, counted by hand."""
    layer, _, _ = layer_of(grid, out=64, width=192, rank=0, bias=False)
    layer = layer.to("cuda")
    words = layer.weight_packed.nbytes
    x = torch.randn(1, 192).bfloat16().cuda()
    layer(x)  # the one-off numbers
    layer.tensors()
    before = living_bytes(operators)
    for tokens in (1, 40, 1):
        layer(x.expand(tokens, -1))
        held = bits * 64 * 192 // 8 + 4 * 64 * 192 // 32
        assert living_bytes(operators) - before == held - words
        assert layer.held_bytes == held


def test_another_order_of_codes_is_seen(gpu):
    if gpu is None:
        pytest.skip("a GPU has one order")
    assert int4.without_cuda.__wrapped__() is None
    convert = OPERATORS[torch.ops.aten._convert_weight_to_int4pack.default]
    gpu.instead[torch.ops.aten._convert_weight_to_int4pack.default] = lambda *args: convert(*args).flip(2)
    assert "in a way that is not known here" in int4.without_cuda.__wrapped__()


def living_bytes(gpu):
    return gpu.bytes if gpu else torch.cuda.memory_allocated()
