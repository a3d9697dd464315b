"""Layers on the backend `triton`. The fake GPU cannot run Triton: the kernels are tested by themselves, interpreted."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from hasslefree import SparseLowRankLinear
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.packed.kernels import backends
from hasslefree.packed.spec import LayerSpec
from tests.cuda.plain import decoded


def random_layer(out, rank, with_bias, seed):
    """A layer (out, 32) with 2:4, and its weight in float64."""
    generator = torch.Generator().manual_seed(seed)
    sparse, u, v, bias = (
        torch.randn(shape, generator=generator) for shape in ((out, 32), (out, rank), (rank, 32), (out,))
    )
    sparse.view(out, 8, 4)[..., 1:3] = 0
    result = Decomposition(sparse, LowRank(u, v), 0.0, 0.0, ())
    layer = SparseLowRankLinear.from_decomposition(result, bias if with_bias else None, "2:4")
    return layer, sparse.double() + u.double() @ v.double()


@pytest.mark.parametrize(("out", "rank", "with_bias"), [(16, 3, True), (24, 0, False)])
def test_a_layer_is_one_call(out, rank, with_bias, gpu, monkeypatch):
    """Oracle: the dense weights in float64. A long prompt is computed without the operator."""
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    calls = []

    def counted(*args):
        calls.append(len(args[3]))
        return decoded(*args)

    if gpu:
        gpu.instead[torch.ops.hasslefree.decode_cuda.default] = counted
    layer, weight = random_layer(out, rank, with_bias, seed=0)
    bias = layer.bias.detach().double() if with_bias else None
    layer.cuda().use("triton")
    for tokens, expected in (((2, 3), [1]), ((17,), [])):
        x = torch.randn(*tokens, 32)
        calls.clear()
        with torch.no_grad():
            y = layer(x.cuda())
        assert calls == expected or not gpu
        torch.testing.assert_close(y.cpu().double(), F.linear(x.double(), weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_layer_compiles_in_one_graph(rank, monkeypatch):
    """Without data: the operator's fake implementation gives the shapes. Oracle: what `F.linear` would give."""
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    with FakeTensorMode(), torch.no_grad():
        spec = LayerSpec("2:4", (24, 32), rank, 24 * 16)
        layer = SparseLowRankLinear(spec, bias=True, dtype=torch.bfloat16, device="cuda")
        layer.use("triton")
        x = torch.empty(2, 3, 32, dtype=torch.bfloat16, device="cuda")
        y = torch.compile(layer, fullgraph=True, backend=backend)(x)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 24), torch.bfloat16, "cuda")
    [graph] = graphs
    assert [node.target for node in graph.graph.nodes].count(torch.ops.hasslefree.decode_cuda.default) == 1
