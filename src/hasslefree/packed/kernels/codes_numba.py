"""The Numba kernel for codes of one byte each (`byte_codes`). Arrays and sums are as in `cpu`."""

import numpy as np
from numba import prange

from hasslefree.packed.kernels.cpu import sums_in_parallel, u64


@sums_in_parallel
def dot_codes(
    codes,
    scale,
    centre,
    x,
    y,
):
    """y = x Sᵀ for a few tokens. codes: minus the middle code, int8 (out, in); scale, centre: (out,
    groups); x: (tokens, in); y: (tokens, out); all except the codes are float32.
    """
    groups = u64(scale.shape[1])
    group = u64(codes.shape[1]) // max(groups, u64(1))
    totals = np.zeros((x.shape[0], scale.shape[1]), np.float32)
    for t in range(x.shape[0]):
        for g in range(groups):
            for j in range(g * group, (g + u64(1)) * group):
                totals[t, g] += x[t, j]
    for o in prange(codes.shape[0]):
        for t in range(x.shape[0]):
            total = np.float32(0)
            for g in range(groups):
                part = np.float32(0)
                for j in range(g * group, (g + u64(1)) * group):
                    part += np.float32(codes[o, j]) * x[t, j]
                total += scale[o, g] * part + centre[o, g] * totals[t, g]
            y[t, o] = total
