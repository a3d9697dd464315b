"""torch's own 2:4 tensors: the sparse tensor cores of NVIDIA GPUs from compute capability 8.0 on.

A second copy of S in the layout of the hardware; torch pads the tokens to what the hardware takes. Not measured here.
"""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from hasslefree.errors import KernelError

logger = logging.getLogger(__name__)

# Both of torch's backends need rows and columns that are multiples of these.
LEAST = (32, 64)


def obstacle() -> str | None:
    """Why the current GPU and build of torch do not support 2:4 tensors; None where they do.

    torch multiplies them by cuSPARSELt, or by CUTLASS, whose kernels are for compute capability 8.x alone
    (github.com/pytorch/pytorch/issues/132009).
    """
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return "it needs a GPU of compute capability 8.0"
    if major > 8 and not torch.backends.cusparselt.is_available():
        return f"on a GPU of compute capability {major}.{minor} it needs cuSPARSELt, which this build of torch lacks"
    return None


@cache
def say_what_multiplies() -> None:
    """Log once that cuSPARSELt is missing."""
    if not torch.backends.cusparselt.is_available():
        logger.info("this build of torch has no cuSPARSELt: 2:4 layers are multiplied by CUTLASS instead")


def semi_structured(sparse: Tensor) -> Tensor:
    """S for `F.linear(x, …)`: a tensor in the layout of the hardware.

    Args:
        sparse: (out, in) with the pattern 2:4, bfloat16 or float16, on CUDA.

    Raises:
        KernelError: a shape that the hardware does not support.
    """
    if sparse.shape[0] % LEAST[0] or sparse.shape[1] % LEAST[1]:
        raise KernelError(
            f"the backend semi-structured needs out_features divisible by {LEAST[0]} and in_features by {LEAST[1]}, "
            f"got {tuple(sparse.shape)}; use the backend triton or dense"
        )
    say_what_multiplies()
    return torch.sparse.to_sparse_semi_structured(sparse.detach().contiguous())
