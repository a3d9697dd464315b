"""The entries of a round in one pass on CUDA, by Triton (`hasslefree.solve.fused`).

No GPU has run it: its results are tested in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Entries of a program: sixteen for each of its 128 threads.
ENTRIES = 2048


@triton.jit
def _settle(weight, state, sparse, target, mask, groups, N: tl.constexpr, M: tl.constexpr, GROUPS: tl.constexpr):
    """All arrays are (groups, M), row-major."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]
    entry = tl.arange(0, M)[None, :]
    at = group * M + entry
    exists = (group < groups) & (entry < M)
    x = tl.load(sparse + at, mask=exists, other=0.0) + tl.load(state + at, mask=exists, other=0.0)
    score = x * x
    # An entry is kept if fewer than N others of its group come before it: larger ones, and equal ones to its left.
    other, one = score[:, None, :], score[:, :, None]
    left = (tl.arange(0, M)[None, :] < tl.arange(0, M)[:, None])[None, :, :]
    before = tl.sum(((other > one) | ((other == one) & left)).to(tl.int32), axis=2)
    kept = before < N
    new = tl.where(kept, x, 0.0)
    tl.store(state + at, x, mask=exists)
    tl.store(sparse + at, new, mask=exists)
    tl.store(mask + at, kept.to(tl.int8), mask=exists)
    tl.store(target + at, tl.load(weight + at, mask=exists, other=0.0) + x - 2 * new, mask=exists)


def settle(weight: Tensor, state: Tensor, sparse: Tensor, target: Tensor, n: int, m: int) -> Tensor:
    """As `hasslefree.solve.fused.settle_groups`."""
    mask = torch.empty_like(weight, dtype=torch.bool)
    groups = weight.numel() // m
    block = ENTRIES // m
    _settle[(triton.cdiv(groups, block),)](
        weight, state, sparse, target, mask.view(torch.int8), groups, N=n, M=m, GROUPS=block
    )
    return mask
