"""x Sᵀ by vLLM's own kernels for the pack-quantized layout of compressed-tensors, which folders
use.

vLLM's scheme for this layout chooses the kernel, such as Marlin or Humming on a GPU, and reorders
the codes for it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    CompressedTensorsWNA16,
)

from hasslefree.core.grids import Grid
from hasslefree.packed.storage import pack_codes
from hasslefree.recipe.engines import ENGINES


class VllmKernel(nn.Module):
    """A complete S (out, in) in codes. Raises a ValueError if vLLM has no kernel for it on this
    device.
    """

    weight_packed: Tensor
    weight_scale: Tensor
    weight_zero_point: Tensor

    def __init__(
        self,
        grid: Grid,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ):
        super().__init__()
        out, width = shape
        self.grid = grid
        self.bias = None  # the kernel for a CPU reads it
        self.has_bias = False  # Humming's kernel reads it
        group = ENGINES["vllm"].group_for(grid, width) if grid.group else None
        strategy = "group" if group else "channel"
        self.scheme: Any = CompressedTensorsWNA16(strategy, grid.bits, group, grid.symmetric)
        self.scheme.create_weights(self, out, width, [out], width, dtype, weight_loader=None)

    def load(
        self,
        codes: Tensor,
        scale: Tensor,
        zero: Tensor,
    ) -> None:
        """Copy codes, uint8 (out, in), and for each group the scale and the code of zero, (out,
        groups), into the kernel's tensors.
        """
        times = self.weight_scale.shape[1] // scale.shape[1]
        scale = scale.repeat_interleave(times, 1)
        zero = zero.repeat_interleave(times, 1)
        self.weight_packed.copy_(pack_codes(codes, self.grid.bits))
        self.weight_scale.copy_(scale)
        if not self.grid.symmetric:  # packed along the outputs
            self.weight_zero_point.copy_(pack_codes(zero.byte().T.contiguous(), self.grid.bits).T)

    def finish(self) -> None:
        """Reorder the tensors for the kernel."""
        if self.weight_packed.device.type == "cpu":
            torch.cpu._init_amx()  # asks the system to allow AMX, which vLLM's kernel does not do
        self.scheme.process_weights_after_loading(self)

    def product(self, x: Tensor) -> Tensor:
        """x Sᵀ: (tokens, in) → (tokens, out)."""
        return self.scheme.apply_weights(self, x, None)


def kernel_for(
    grid: Grid,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> VllmKernel | None:
    """The kernel that vLLM chooses on this device; None if it has none. No kernel computes in
    float32.
    """
    if dtype == torch.float32 or not ENGINES["vllm"].holds(grid):
        return None
    try:
        return VllmKernel(grid, shape, dtype)
    except ValueError:
        return None
