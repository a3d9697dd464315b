"""`hasslefree.solve.project` in one pass on a CPU, by Numba, for groups of 4 or 8 inputs.

LLVM turns the loops over the `LANES` groups of a span into vector instructions, since M is a
constant of each compiled function. Spans are distributed over threads of Python instead of Numba,
whose threads do not survive a fork.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
from numba import njit
from torch import Tensor

from hasslefree.core.compiled import compiled

# Number of groups that are ranked together: enough to fill vector registers, and few enough to stay
# in the L1 cache.
LANES = 32
# Number of entries per thread that make starting a thread worthwhile.
ENTRIES = 1 << 19


def project_spans(
    weight: Tensor,
    state: Tensor,
    sparse: Tensor,
    target: Tensor,
    n: int,
    m: int,
) -> Tensor:
    """`project_step` for N:M and a whole number of spans, on at most torch's number of threads."""
    mask = torch.empty_like(weight, dtype=torch.bool)
    tensors = (weight, state, sparse, target, mask)
    spans = [each.detach().view(-1, m * LANES).numpy() for each in tensors]
    project = partial(kernel_for(m), n)
    threads = min(torch.get_num_threads(), weight.numel() // ENTRIES)
    if threads < 2:
        project(*spans)
        return mask
    with ThreadPoolExecutor(threads) as pool:
        chunks = [np.array_split(each, threads) for each in spans]
        list(pool.map(project, *chunks))  # raises the errors of threads
    return mask


@cache
def kernel_for(m: int) -> Callable[..., None]:
    """Compile the function for groups of m entries, on arrays (spans, m·LANES). An entry is kept if
    fewer than n other entries of the group rank before it.
    """

    @njit(nogil=True, error_model="numpy", inline="always")
    def project_span(weight, state, sparse, target, mask, n, score, before):
        for lane in range(LANES):
            for i in range(m):
                x = sparse[lane * m + i] + state[lane * m + i]
                state[lane * m + i] = x
                score[i, lane] = x * x
        for i in range(m):
            for lane in range(LANES):
                before[i, lane] = m - 1 - i  # as if all later entries were larger
        for i in range(m):
            for j in range(i + 1, m):
                for lane in range(LANES):
                    larger = np.int32(score[i, lane] >= score[j, lane])
                    before[j, lane] += larger
                    before[i, lane] -= larger
        for lane in range(LANES):
            for i in range(m):
                mask[lane * m + i] = before[i, lane] < n
        for at in range(m * LANES):
            x = state[at]
            kept = x if mask[at] else np.float32(0)
            sparse[at] = kept
            target[at] = weight[at] + x - 2 * kept

    @compiled()
    def project(n, weight, state, sparse, target, mask):
        score = np.empty((m, LANES), np.float32)
        before = np.empty((m, LANES), np.int32)
        for i in range(len(weight)):
            project_span(weight[i], state[i], sparse[i], target[i], mask[i], n, score, before)

    return project
