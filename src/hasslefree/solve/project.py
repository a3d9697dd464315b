"""The entry-wise part of a round of ADMM, in one pass over memory if Numba is installed.

    X = S + P,   M = mask(X²),   S = X on M,   T = W + X − 2 S

with P the product that the round computed. PyTorch needs ten passes for this, and more for the
mask. For N:M with M = 4 or 8, in float32 on a CPU, a Numba kernel computes the same numbers in the
same order.
"""

import importlib.util

import torch
from torch import Tensor

from hasslefree.core.patterns import Pattern, SemiStructured

# Without Numba, torch is used.
HAS_NUMBA = importlib.util.find_spec("numba") is not None
# The values of M that have a kernel.
GROUPS = (4, 8)


def project_step(
    pattern: Pattern,
    weight: Tensor,
    state: Tensor,
    sparse: Tensor,
    target: Tensor,
) -> Tensor:
    """Compute X, the support, S and the next target; return the support, bool (out, in).

    Args:
        weight: W, (out, in).
        state: P, overwritten with X.
        sparse: S of the previous round, overwritten with the new S.
        target: overwritten with T. All are contiguous, of one dtype and on one device.
    """
    compiled = HAS_NUMBA and weight.dtype == torch.float32 and weight.device.type == "cpu"
    if compiled and isinstance(pattern, SemiStructured) and pattern.m in GROUPS:
        from hasslefree.solve.project_numba import LANES, project_spans

        if weight.numel() % (pattern.m * LANES) == 0:
            return project_spans(weight, state, sparse, target, pattern.n, pattern.m)
    state.add_(sparse)
    mask = pattern.mask(torch.mul(state, state, out=target))
    torch.mul(state, mask, out=sparse)
    torch.add(weight, state, out=target).sub_(sparse, alpha=2)
    return mask
