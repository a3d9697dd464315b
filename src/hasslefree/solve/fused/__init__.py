"""The entry-wise part of a round of ADMM, in one pass over memory where there is a kernel for it.

    X = S + P,   M = mask(X²),   S = X on M,   T = W + X − 2 S

with P the product that the round computed. PyTorch makes ten passes of that and more for the mask. For N:M with M of 4
or 8, in float32, a Numba kernel takes its place on a CPU and a Triton kernel on CUDA, where the two packages are
installed. All compute the same numbers, in the same order.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from hasslefree.core.patterns import Pattern, SemiStructured

# Looked up once. The solvers need torch alone: without these packages torch does the work.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
HAS_TRITON = importlib.util.find_spec("triton") is not None
# The sizes of groups that the kernels are compiled for.
GROUPS = (4, 8)


def settle(pattern: Pattern, weight: Tensor, state: Tensor, sparse: Tensor, target: Tensor) -> Tensor:
    """One round's X, support, S and next target.

    Args:
        weight: W, (out, in). state: P at first, then X; (out, in). sparse: S of the round before, then of this one.
            target: overwritten by T. All contiguous, of one dtype and on one device.

    Returns:
        The support, bool (out, in).
    """
    if isinstance(pattern, SemiStructured) and pattern.m in GROUPS and weight.dtype == torch.float32:
        pattern.check((weight.shape[0], weight.shape[1]))
        if weight.device.type == "cuda" and HAS_TRITON:
            return settle_groups(weight, state, sparse, target, pattern.n, pattern.m)
        if weight.device.type == "cpu" and HAS_NUMBA:
            return _on_cpu(weight, state, sparse, target, pattern.n, pattern.m)
    state.add_(sparse)
    mask = pattern.mask(torch.mul(state, state, out=target))
    torch.mul(state, mask, out=sparse)
    torch.add(weight, state, out=target).sub_(sparse, alpha=2)
    return mask


@torch.library.custom_op("hasslefree::settle_groups", mutates_args=("state", "sparse", "target"))
def settle_groups(weight: Tensor, state: Tensor, sparse: Tensor, target: Tensor, n: int, m: int) -> Tensor:
    """`settle` for N:M, by the kernel of the device that the arrays are on."""
    from hasslefree.solve.fused import cuda

    return cuda.settle(weight, state, sparse, target, n, m)


@settle_groups.register_kernel("cpu")
def _on_cpu(weight: Tensor, state: Tensor, sparse: Tensor, target: Tensor, n: int, m: int) -> Tensor:
    from hasslefree.solve.fused import cpu

    return cpu.settle(weight, state, sparse, target, n, m)


@settle_groups.register_fake
def _shapes(weight: Tensor, state: Tensor, sparse: Tensor, target: Tensor, n: int, m: int) -> Tensor:
    return torch.empty_like(weight, dtype=torch.bool)
