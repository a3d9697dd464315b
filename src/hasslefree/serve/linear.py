"""vLLM's linear layers with compressed weights: how they are divided, loaded and multiplied."""

import logging
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, QKVParallelLinear

from hasslefree.errors import ServeError
from hasslefree.serve.fused import FusedLinear, Slices
from hasslefree.serve.kernels import kernel_for
from hasslefree.serve.parts import Division, Entries
from hasslefree.serve.requirements import DENSE
from hasslefree.units import size

logger = logging.getLogger(__name__)

SUMMED = (
    "vLLM has no kernel for layers of %s, such as %s: S + u v is summed when they are loaded, and"
    " this layer takes %s of memory per process, as in the dense model"
)
INPUTS_ROUNDED = (
    "On this processor, vLLM's kernel rounds the inputs of layers of %s to 8 bits;"
    " VLLM_CPU_INT4_W4A8=0 prevents it"
)


class FusedLinearMethod(LinearMethodBase):
    """A linear layer of vLLM that is made of compressed layers."""

    def __init__(self, entries: Entries):
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
        """Register the fused layer, and for each tensor of the folder a `WeightSlot` that vLLM's
        loaders find by its name.
        """
        division = Division(
            slice_sizes(layer, output_size),
            output_partition_sizes,
            input_size,
            input_size_per_partition,
            layer.tp_rank,
            layer.tp_size,
        )
        parts = division.parts(self.entries)
        layer.compressed = FusedLinear(parts, params_dtype, kernel_for=kernel_for)
        for part in parts:
            for leaf, (_, dtype) in part.tensors().items():
                slot = WeightSlot(leaf, layer.compressed, dtype or params_dtype)
                layer.register_parameter(leaf, slot)
        if layer.compressed.kernel is None:
            kinds = ", ".join(dict.fromkeys(part.kind for part in parts))
            names = ", ".join(part.name for part in parts)
            memory = size(layer.compressed.weight.nbytes)
            warn_once((kinds, memory), SUMMED, kinds, names, memory)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Remove the slots. Raises a CheckpointError if the weight files lack one of the layer's
        tensors.
        """
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if isinstance(parameter, WeightSlot):
                delattr(layer, name)
        layer.compressed.finish()
        if getattr(layer.compressed.kernel, "use_w4a8", False):
            grid = str(layer.compressed.grid)
            warn_once((grid,), INPUTS_ROUNDED, grid)

    def apply(
        self,
        layer: LinearBase,
        x: Tensor,
        bias: Tensor | None = None,
    ) -> Tensor:
        """x: (…, in) → this rank's outputs, (…, out)."""
        y = layer.compressed(x)
        if bias is None:
            return y
        return y + bias


class WeightSlot(nn.Parameter):
    """An empty parameter that passes the tensors that vLLM loads to a fused layer.

    Args:
        leaf: the name of the tensor within the layer.
        fused: the layer.
        dtype: of the tensors.
    """

    leaf: str
    fused: FusedLinear

    def __new__(
        cls,
        leaf: str,
        fused: FusedLinear,
        dtype: torch.dtype,
    ) -> "WeightSlot":
        slot = super().__new__(cls, torch.empty(0, dtype=dtype), requires_grad=False)
        slot.leaf = leaf
        slot.fused = fused
        return slot

    @property
    def output_dim(self) -> int:
        """Raise a ServeError: vLLM's loaders read this attribute only to reorder rows by head, as
        in GPT-NeoX, BLOOM, Falcon and Persimmon. Packed tensors would keep their order.
        """
        raise ServeError(
            f"vLLM reorders the rows of {self.fused.parts[0].name} as it loads them, which is not"
            f" possible for a compressed layer: {DENSE}"
        )

    def weight_loader(
        self,
        parameter: nn.Parameter,
        tensor: Tensor,
        slices: Slices = None,
    ) -> None:
        """Called by vLLM with a tensor. slices: the part of the fused layer that it belongs to."""
        self.fused.add(self.leaf, tensor, slices)


def slice_sizes(layer: LinearBase, output_size: int) -> list[int]:
    """The number of outputs of each slice of a layer over all ranks. Key heads that several ranks
    hold count once.
    """
    if isinstance(layer, QKVParallelLinear):
        keys = layer.total_num_kv_heads
        return [
            layer.total_num_heads * layer.head_size,
            keys * layer.head_size,
            keys * layer.v_head_size,
        ]
    return list(getattr(layer, "output_sizes", [output_size]))


_warned: set[tuple[str, ...]] = set()


def warn_once(key: tuple[str, ...], message: str, *arguments: str) -> None:
    """Log a warning, once per key."""
    if key not in _warned:
        _warned.add(key)
        logger.warning(message, *arguments)
