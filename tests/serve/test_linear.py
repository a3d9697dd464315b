"""The linear layers of vLLM, with a stand-in for vLLM where it is not installed."""

import importlib
import logging
import sys
import types

import pytest
import torch

from hasslefree.errors import CheckpointError, ServeError
from tests.serve.layers import dense, layer_of

WIDTH = 64


@pytest.fixture
def served(monkeypatch):
    """`hasslefree.serve.linear`, in a vLLM without kernels."""
    prefix = "vllm.model_executor.layers"
    schemes = f"{prefix}.quantization.compressed_tensors.schemes"
    for name in ("vllm", "vllm.model_executor", prefix, f"{prefix}.linear", schemes):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    linear = sys.modules[f"{prefix}.linear"]
    linear.LinearBase = torch.nn.Module
    linear.LinearMethodBase = object
    linear.QKVParallelLinear = type("QKVParallelLinear", (torch.nn.Module,), {})
    sys.modules[schemes].CompressedTensorsWNA16 = None
    for name in ("kernels", "linear"):
        monkeypatch.delitem(sys.modules, f"hasslefree.serve.{name}", raising=False)
    yield importlib.import_module("hasslefree.serve.linear")
    for name in ("kernels", "linear"):
        sys.modules.pop(f"hasslefree.serve.{name}", None)


def created(served, layers, sizes):
    """A layer of vLLM on one rank, and its method."""
    layer = torch.nn.Module()
    layer.tp_rank, layer.tp_size, layer.output_sizes = 0, 1, sizes
    method = served.FusedLinearMethod({f"blocks.0.l{i}": each.entry for i, each in enumerate(layers)})
    method.create_weights(layer, WIDTH, sizes, WIDTH, sum(sizes), torch.float32)
    return layer, method


def test_a_layer_is_loaded_by_vllm_s_loaders(served, caplog):
    """Oracle: the float64 product. vLLM finds each slot by its name and calls its loader; then no slot is left."""
    layers = [layer_of("2:4", (16, WIDTH), 3), dense((8, WIDTH))]
    with caplog.at_level(logging.WARNING):
        layer, method = created(served, layers, [16, 8])
    [message] = caplog.messages
    assert "no kernel for layers of 2:4, no compression, such as blocks.0.l0, blocks.0.l1: S + u v is summed" in message
    assert "takes 6.1 kB" in message
    for number, each in enumerate(layers):
        for leaf, tensor in each.tensors.items():
            slot = getattr(layer, leaf)
            slot.weight_loader(slot, tensor, number)
    method.process_weights_after_loading(layer)
    x, bias = torch.randn(2, 3, WIDTH), torch.randn(24)
    expected = x.double() @ torch.cat([each.matrix for each in layers]).T + bias.double()
    torch.testing.assert_close(method.apply(layer, x, bias).double(), expected, rtol=1e-5, atol=1e-4)
    assert {name for name, _ in layer.named_parameters()} == {"compressed.weight"}


def test_rows_that_vllm_reorders_are_refused(served):
    """GPT-NeoX has q, k and v of each head together; vLLM asks each parameter for the dimension of its rows."""
    layer, _ = created(served, [layer_of("dense, int4", (16, WIDTH), 0)], [16])
    with pytest.raises(ServeError, match=r"reorders the rows of blocks\.0\.l0 .*hasslefree export"):
        getattr(layer.weight_packed, "output_dim", None)


def test_a_tensor_that_the_files_lack_is_an_error(served):
    layer, method = created(served, [layer_of("2:4", (16, WIDTH), 3)], [16])
    with pytest.raises(CheckpointError, match=r"lack tensors of blocks\.0\.l0"):
        method.process_weights_after_loading(layer)
