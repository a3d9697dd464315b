"""Bits in bytes, from the low end: bit k of a row is bit k % 8 of its byte k // 8; a row is padded to whole bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack_bits(bits: Tensor) -> Tensor:
    """0s and 1s (rows, n) → uint8 (rows, ⌈n / 8⌉)."""
    rows, n = bits.shape
    octets = F.pad(bits.to(torch.uint8), (0, -n % 8)).view(rows, -(-n // 8), 8)
    return (octets << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """uint8 (rows, n) → bool (rows, 8n), by looking up whole bytes."""
    table = every_byte(packed) >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return look_up(table.bool(), packed)


def every_byte(like: Tensor) -> Tensor:
    """0 … 255, uint8 (256, 1), on the device of `like`."""
    return torch.arange(256, dtype=torch.uint8, device=like.device)[:, None]


def look_up(table: Tensor, packed: Tensor) -> Tensor:
    """Each byte's row of a table (256, k): uint8 (rows, n) → (rows, n · k)."""
    rows, n = packed.shape
    return table.index_select(0, packed.flatten().int()).view(rows, n * table.shape[1])
