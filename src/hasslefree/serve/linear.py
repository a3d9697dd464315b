"""vLLM's linear layers with compressed weights: how they are divided, loaded and multiplied."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear

from hasslefree.checkpoint.entries import Entry
from hasslefree.serve.kernels import kernel_for
from hasslefree.serve.parts import Division
from hasslefree.serve.stacked import LoadBuffer, StackedLinear

logger = logging.getLogger(__name__)

UNPACKED = (
    "No kernel on this machine multiplies packed layers of %s: they are unpacked when they are"
    " loaded, and take the memory of dense layers"
)
BY_TORCH = "vLLM has no kernel for layers of %s: torch's operators multiply them"
INPUTS_ROUNDED = (
    "On this processor, vLLM's kernel rounds the inputs of layers of %s to 8 bits;"
    " VLLM_CPU_INT4_W4A8=0 prevents it"
)


class StackedLinearMethod(LinearMethodBase):
    """A linear layer made of these compressed layers, in the order of their outputs; None for one
    that stayed dense.
    """

    def __init__(self, entries: Mapping[str, Entry | None]):
        self.entries = entries

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the stack, and for each tensor of the folder a `WeightSlot` that vLLM's loaders
        find by its name.
        """
        sizes = slice_sizes(layer, output_size)
        local = (output_partition_sizes, input_size, input_size_per_partition)
        division = Division(sizes, *local, layer.tp_rank, layer.tp_size)
        parts = division.parts(self.entries)
        layer.compressed = StackedLinear(parts, params_dtype, kernel_for=kernel_for)
        buffer = LoadBuffer(layer.compressed)
        for leaf, dtype in {
            leaf: dtype for part in parts for leaf, (_, dtype) in part.tensors().items()
        }.items():
            layer.register_parameter(leaf, WeightSlot(leaf, buffer, dtype or params_dtype))
        if layer.compressed.is_unpacked or (layer.compressed.grid and not layer.compressed.kernel):
            kind = ", ".join(dict.fromkeys(part.kind for part in parts))
            warn(UNPACKED if layer.compressed.is_unpacked else BY_TORCH, kind)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Remove the slots; a CheckpointError if the weight files lack a tensor of the layer."""
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if isinstance(parameter, WeightSlot):
                delattr(layer, name)
        layer.compressed.finish()
        if getattr(layer.compressed.kernel, "use_w4a8", False):
            warn(INPUTS_ROUNDED, str(layer.compressed.grid))

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: (…, in) → (…, out), of this rank."""
        y = layer.compressed(x)
        return y if bias is None else y + bias


class WeightSlot(nn.Parameter):
    """A parameter without elements, which passes the tensors that vLLM loads to the stack. dtype:
    of these tensors.
    """

    def __new__(cls, leaf: str, buffer: LoadBuffer, dtype: torch.dtype) -> "WeightSlot":
        return super().__new__(cls, torch.empty(0, dtype=dtype), requires_grad=False)

    def __init__(self, leaf: str, buffer: LoadBuffer, dtype: torch.dtype):
        self.leaf, self.buffer = leaf, buffer

    def weight_loader(
        self,
        parameter: nn.Parameter,
        tensor: Tensor,
        slices: str | int | tuple[int, ...] | None = None,
    ) -> None:
        """vLLM calls it for every tensor. slices: which part of a fused layer the tensor is for."""
        self.buffer.add(self.leaf, tensor, slices)


def slice_sizes(layer: LinearBase, output_size: int) -> list[int]:
    """The outputs of each slice of a layer on all ranks together; key heads that ranks share count
    once.
    """
    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads
        return [
            layer.total_num_heads * layer.head_size,
            keys * layer.head_size,
            keys * layer.v_head_size,
        ]
    return list(getattr(layer, "output_sizes", [output_size]))


@functools.cache
def warn(message: str, kind: str) -> None:
    """Log a message once for each kind of layer."""
    logger.warning(message, kind)
