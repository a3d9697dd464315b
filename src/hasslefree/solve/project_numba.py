"""`hasslefree.solve.project` in one pass on a CPU, by Numba, for groups of 4 or 8 inputs.

LLVM turns the loops over `LANES` groups into vector instructions, since M is a constant of each
compiled function. Rows are shared by Python's threads and not by Numba's, which do not survive a
fork.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numba import njit
from torch import Tensor

# Groups that are ranked together: a register of vectors for each comparison, and few enough to stay
# in the first cache.
LANES = 32
# Entries for which a thread is worth its start.
ENTRIES = 1 << 19

compiled = njit(nogil=True, error_model="numpy", cache=True)
inlined = njit(nogil=True, error_model="numpy", inline="always")


def project_groups(
    weight: Tensor,
    state: Tensor,
    sparse: Tensor,
    target: Tensor,
    n: int,
    m: int,
) -> Tensor:
    """`project_step` for N:M, on as many threads as torch uses at most."""
    mask = torch.empty_like(weight, dtype=torch.bool)
    arrays = [tensor.detach().numpy() for tensor in (weight, state, sparse, target, mask)]
    kernel: Callable[..., None] = {4: _project_4, 8: _project_8}[m]
    threads = min(torch.get_num_threads(), weight.numel() // ENTRIES)
    if threads < 2:
        kernel(*arrays, n)
    else:
        with ThreadPoolExecutor(threads) as pool:
            running = []
            for thread in range(threads):
                first = len(weight) * thread // threads
                end = len(weight) * (thread + 1) // threads
                parts = [array[first:end] for array in arrays]
                running.append(pool.submit(kernel, *parts, n))
        for part in running:
            part.result()  # raises the error of a thread
    return mask


@compiled
def _project_4(
    weight,
    state,
    sparse,
    target,
    mask,
    n,
):
    for row in range(len(weight)):
        _project_row(weight[row], state[row], sparse[row], target[row], mask[row], n, 4)


@compiled
def _project_8(
    weight,
    state,
    sparse,
    target,
    mask,
    n,
):
    for row in range(len(weight)):
        _project_row(weight[row], state[row], sparse[row], target[row], mask[row], n, 8)


@inlined
def _project_row(
    weight,
    state,
    sparse,
    target,
    mask,
    n,
    m,
):
    """One row, `LANES` groups at a time, and what is left one group at a time."""
    score = np.empty((m, LANES), np.float32)
    before = np.empty((m, LANES), np.int32)
    done = len(weight) // (m * LANES) * LANES
    for first in range(0, done, LANES):
        _project_span(weight, state, sparse, target, mask, n, m, first, LANES, score, before)
    for first in range(done, len(weight) // m):
        _project_span(weight, state, sparse, target, mask, n, m, first, 1, score, before)


@inlined
def _project_span(
    weight,
    state,
    sparse,
    target,
    mask,
    n,
    m,
    first,
    count,
    score,
    before,
):
    """`count` groups from the group `first` on. An entry is kept if fewer than n others of its
    group come before it.
    """
    start = first * m
    for lane in range(count):
        for i in range(m):
            x = sparse[start + lane * m + i] + state[start + lane * m + i]
            state[start + lane * m + i] = x
            score[i, lane] = x * x
    for i in range(m):
        for lane in range(count):
            before[i, lane] = m - 1 - i  # as if all later entries were larger
    for i in range(m):
        for j in range(i + 1, m):
            for lane in range(count):
                larger = np.int32(score[i, lane] >= score[j, lane])
                before[j, lane] += larger
                before[i, lane] -= larger
    for lane in range(count):
        for i in range(m):
            mask[start + lane * m + i] = before[i, lane] < n
    for at in range(start, start + count * m):
        x = state[at]
        kept = x if mask[at] else np.float32(0)
        sparse[at] = kept
        target[at] = weight[at] + x - 2 * kept
