"""The packed tensors by their definition, slowly, and the product in float64. Shares nothing with what is tested."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def sparse(out: int, groups: int, n: int, m: int, dtype: torch.dtype, seed: int, empty_rows: bool = True) -> Tensor:
    """A random S (out, groups·m) with at most n entries in each m: some groups have fewer, a third of the rows none."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, groups, m, generator=generator)
    order = torch.rand(out, groups, m, generator=generator).argsort(-1)
    kept = order < torch.randint(max(n - 1, 0), n + 1, (out, groups, 1), generator=generator)
    s = (weight * kept + 0.0).reshape(out, -1).to(dtype)  # no −0.0, which would be a stored value
    if empty_rows:
        s[1::3] = 0
    return s


def bits_of(s: Tensor) -> Tensor:
    """The bits of each entry, as a whole number: equal numbers are equal floats, signs of zero included."""
    return s.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[s.element_size()])


def pack_groups(s: Tensor, n: int, m: int) -> tuple[Tensor, Tensor]:
    """Values (out, in/M·N) and codes (out, bytes), group by group and bit by bit."""
    bits = (m - 1).bit_length()
    values, codes = [], []
    for row in s:
        stream: list[int] = []
        for group in row.reshape(-1, m):
            stored = [j for j in range(m) if bits_of(group)[j] != 0]
            kept = sorted(stored + [j for j in range(m) if j not in stored][: n - len(stored)])
            values.extend(group[j] for j in kept)
            if n * bits <= m <= 256:
                stream += [(j >> b) & 1 for j in kept for b in range(bits)]
            else:
                stream += [int(j in kept) for j in range(m)]
        codes.append(np.packbits(np.array(stream, dtype=np.uint8), bitorder="little"))
    stacked = torch.stack(values).reshape(len(s), -1) if values else s.new_empty(len(s), 0)
    return stacked, torch.from_numpy(np.stack(codes))


def pack_mask(s: Tensor) -> tuple[Tensor, Tensor]:
    """Values (nonzeros,) and mask (out, ⌈in/8⌉)."""
    stored = bits_of(s) != 0
    return s[stored], torch.from_numpy(np.packbits(stored.numpy(), axis=1, bitorder="little"))


def product(x: Tensor, s: Tensor) -> Tensor:
    """x Sᵀ in float64."""
    return x.double() @ s.double().T


def assert_close(y: Tensor, x: Tensor, s: Tensor) -> None:
    """y is x Sᵀ but for the rounding of float32 sums and of the last cast: |error| ≤ ε·|x| |S|ᵀ."""
    epsilon = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}[y.dtype]
    error, scale = (y.double() - product(x, s)).abs(), product(x.abs(), s.abs())
    assert (error <= epsilon * scale).all(), float((error - epsilon * scale).max())
