"""S handed to vLLM's own kernels. It is skipped without vLLM; benchmarks/vllm_tokens.py runs whole models."""

import os

import pytest
import torch

from hasslefree import Grid
from hasslefree.packed.storage import unpack_codes
from hasslefree.serve.fused import FusedLinear
from hasslefree.serve.parts import Division
from tests.serve.layers import KINDS, layer_of

pytest.importorskip("vllm", reason="vLLM is not installed")

GRIDS = {
    "symmetric": Grid(4, 32, symmetric=True),
    "whole zeros": Grid(4, 64),
    "rows": Grid(4, None, symmetric=True),
    "wide groups": Grid(4, 256),
}


@pytest.fixture
def in_vllm(monkeypatch):
    """What vLLM sets up before it makes layers: a process group of one, and AMX. Inputs are not rounded."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    if hasattr(torch.cpu, "_init_amx"):
        torch.cpu._init_amx()
    with set_current_vllm_config(VllmConfig()):
        if not parallel_state.model_parallel_is_initialized():
            store = f"file:///tmp/hasslefree-{os.getpid()}"
            parallel_state.init_distributed_environment(1, 0, store, 0, backend="gloo")
            parallel_state.initialize_model_parallel(1)
        yield


@pytest.fixture
def on_cuda(monkeypatch):
    """vLLM takes the machine for one with a GPU of compute capability 8.0."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    import hasslefree.serve.kernels  # noqa: F401  before: vLLM's modules look for operators of a GPU

    kind = type(current_platform)
    monkeypatch.setattr(kind, "_enum", PlatformEnum.CUDA)
    monkeypatch.setattr(kind, "get_device_capability", classmethod(lambda *_: DeviceCapability(8, 0)))


def stack_of(layers, width, rank, ranks, dtype):
    """This rank's share of layers, divided by inputs."""
    from hasslefree.serve.kernels import kernel_for

    sizes = [len(layer.matrix) for layer in layers]
    division = Division(sizes, sizes, width, width // ranks, rank, ranks)
    parts = division.parts({f"layer{i}": layer.entry for i, layer in enumerate(layers)})
    stack = FusedLinear(parts, dtype, kernel_for=kernel_for)
    for part, layer in zip(parts, layers, strict=True):
        for leaf, tensor in layer.tensors.items():
            stack.add(leaf, tensor, part.slices.start)
    stack.finish()
    return stack


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_product_by_vllms_kernel_is_that_of_both_matrices(in_vllm, monkeypatch, kind, ranks, tokens):
    """Oracle: the float64 product; ranks share the inputs. Some scales and zeros repeat, and one layer has no L."""
    monkeypatch.setitem(KINDS, kind, ("dense", GRIDS[kind], None))
    layers, x = [layer_of(kind, (32, 512), 3), layer_of(kind, (64, 512), 0, seed=1)], torch.randn(tokens, 512).half()
    found = torch.zeros(tokens, 96, dtype=torch.float64)
    for rank, share in enumerate(x.chunk(ranks, 1)):
        stack = stack_of(layers, 512, rank, ranks, torch.float16)
        assert type(stack.kernel.scheme.kernel).__name__ == "CPUWNA16LinearKernel"
        found += stack(share).double()
    expected = x.double() @ torch.cat([layer.matrix for layer in layers]).T
    assert (found - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("grid", [Grid(4, 64), Grid(4, 128, symmetric=True), Grid(8, None, symmetric=True)], ids=str)
def test_on_a_gpu_marlin_gets_the_tensors_that_it_repacks(in_vllm, on_cuda, monkeypatch, grid):
    """Oracle: the codes themselves as GPTQ orders them, and vLLM's own functions for scales and zeros. No GPU runs."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils

    given = []
    repack = lambda words, **sizes: given.append((words, sizes)) or words  # noqa: E731
    monkeypatch.setattr(ops, "gptq_marlin_repack", repack)
    monkeypatch.setitem(KINDS, "coded", ("dense", grid, None))
    layer, (out, width), bits = layer_of("coded", (128, 512), 3), (128, 512), grid.bits
    kernel = stack_of([layer], width, 0, 1, torch.bfloat16).kernel
    assert type(kernel.scheme.kernel).__name__ == "MarlinLinearKernel"

    [(words, sizes)] = given
    assert words.dtype == torch.int32
    assert (sizes["size_k"], sizes["size_n"], sizes["num_bits"]) == (width, out, bits)
    shifts = torch.arange(0, 32, bits)[None, :, None]  # GPTQ: consecutive inputs share a word
    codes = (words[:, None] >> shifts & grid.top).flatten(0, 1).T
    assert torch.equal(codes.byte(), unpack_codes(layer.tensors["weight_packed"], bits, width))

    scale = layer.tensors["weight_scale"].bfloat16().T.contiguous()
    expected = marlin_utils.marlin_permute_scales(scale, width, out, grid.group or -1)
    assert kernel.weight_scale.dtype == torch.bfloat16
    assert torch.equal(kernel.weight_scale, expected)
    if not grid.symmetric:
        zeros = layer.entry.spec.zeros(layer.tensors).T.int().contiguous()
        assert torch.equal(kernel.weight_zero_point, marlin_utils.marlin_zero_points(zeros, len(zeros), out, bits))


@pytest.mark.parametrize("grid", [Grid(4, 32, offset=True), Grid(3, 64), Grid(4, 16), Grid(8, 64)], ids=str)
def test_what_no_kernel_takes_stays_with_us(in_vllm, on_cuda, monkeypatch, grid):
    """3 bits, and 8 bits with whole zeros, need Humming on such a GPU."""
    from hasslefree.serve.kernels import kernel_for

    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "HummingLinearKernel")
    assert kernel_for(grid, (128, 512), torch.bfloat16) is None


def test_in_float32_no_kernel_is_chosen(in_vllm):
    from hasslefree.serve.kernels import kernel_for

    assert kernel_for(Grid(4, 64), (128, 512), torch.float32) is None
    assert kernel_for(Grid(4, 64), (128, 512), torch.float16) is not None
