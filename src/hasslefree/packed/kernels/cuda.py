"""torch's own 2:4 tensors: the sparse tensor cores of NVIDIA GPUs from compute capability 8.0 on.

A second copy of S in the layout of the hardware; torch pads the tokens to what the hardware takes. Not measured here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hasslefree.errors import KernelError

# What both of torch's backends take: rows and columns are multiples of these.
LEAST = (32, 64)


def semi_structured(sparse: Tensor) -> Tensor:
    """S for `F.linear(x, …)`: a tensor in the layout of the hardware.

    Args:
        sparse: (out, in) with the pattern 2:4, bfloat16 or float16, on CUDA.

    Raises:
        KernelError: a shape that the hardware does not take.
    """
    if sparse.shape[0] % LEAST[0] or sparse.shape[1] % LEAST[1]:
        raise KernelError(
            f"semi-structured needs out divisible by {LEAST[0]} and in by {LEAST[1]}, got "
            f"{tuple(sparse.shape)}; use triton or dense"
        )
    return torch.sparse.to_sparse_semi_structured(sparse.detach().contiguous())
