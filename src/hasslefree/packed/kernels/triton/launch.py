"""A layer x Sᵀ + (x vᵀ) uᵀ + b in two launches; each further layer that is stacked on it takes one more.

The first launch multiplies what reads x. Each program takes some rows of S or v, and one part of the inputs, and
writes its float32 sums for all tokens to a buffer (parts, tokens, columns); the columns are the rows of S, then those
of v. The second launch adds the parts, u times the sums of v, and the bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hasslefree.packed.kernels.triton.tiles import dot_sums, factor_dot, factor_sums, gathered_sums, selected_sums

MOST_TOKENS = 16
# Programs for each processor of the GPU: where a layer has fewer blocks of rows, its rows are split.
PROGRAMS = 8
# Rows of a program of the second launch.
SUM_ROWS = 16
NUMBERS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Tile:
    """What a program of the first launch multiplies at a time.

    Args:
        kernel: "select", "dot" or "gather". rows: of S or v. step: of a row of S, bytes of positions, or with "gather"
            kept values. columns: of a row of v. tokens: a power of two, at least as many as x has. least: the inputs
            of a part of a row, at least.
    """

    kernel: str
    rows: int
    step: int
    columns: int
    tokens: int
    least: int

    @classmethod
    def of(cls, x: Tensor, n: int, m: int) -> Tile:
        """For inputs (tokens, in) and S with the pattern N:M."""
        tokens, width = x.shape
        if (n, m) == (2, 4) and x.itemsize == 2 and width % 8 == 0:
            if tokens == 1:
                return cls("select", rows=4, step=128, columns=512, tokens=1, least=1024)
            # Rows of S at addresses that are not multiples of 16 are loaded in more, and shorter, pieces.
            return cls("dot", 32 if width % 128 else 64, step=16, columns=128, tokens=MOST_TOKENS, least=512)
        wide = triton.next_power_of_2(tokens)
        values = max(512 // wide, 16)
        return cls("gather", rows=8, step=values, columns=values, tokens=wide, least=1024)


@triton.jit
def multiply(
    x, values, positions, v, sums, out, rank, width, kept, row_bytes, tokens, columns,
    KERNEL: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The first launch: a grid of blocks of rows, of S and then of v, by parts.

    x: (tokens, in), or with "gather" (in, TOKENS); values: (out, kept); positions: (out, row_bytes); v: (rank, width);
    sums: (parts, tokens, columns).
    """
    block, blocks = tl.program_id(0), tl.cdiv(out, ROWS)
    sums += tl.program_id(1) * tokens * columns
    if block >= blocks:
        row = (block - blocks) * ROWS + tl.arange(0, ROWS)
        rows = tl.minimum(row, rank - 1).to(tl.int64)[:, None]
        begin, end = _share(width, COLUMNS)
        if KERNEL == "dot":
            total = factor_dot(x, v, rows, begin, end, width, tokens, ROWS, COLUMNS, TOKENS)
        else:
            total = factor_sums(x, v, rows, begin, end, width, ROWS, COLUMNS, TOKENS)
        _store(sums + out, total, row, rank, tokens, columns, TOKENS)
    else:
        row = block * ROWS + tl.arange(0, ROWS)
        rows = tl.minimum(row, out - 1).to(tl.int64)[:, None]
        if KERNEL == "gather":
            begin, end = _share(kept, STEP)
            total = gathered_sums(
                x, values, positions, rows, begin, end, kept, row_bytes, N, M, BITS, ROWS, STEP, TOKENS
            )
            _store(sums, total, row, out, tokens, columns, TOKENS)
        else:
            begin, end = _share(row_bytes, STEP)
            words = values.to(tl.pointer_type(tl.int64))
            # The tensor cores multiply every input by the zeros of S as well: where a sum is not finite, an input that
            # S does not use may be the reason, and the selected inputs alone are multiplied.
            finite = 0
            if KERNEL == "dot":
                total = dot_sums(x, words, positions, rows, begin, end, row_bytes, tokens, ROWS, STEP, TOKENS, DTYPE)
                finite = tl.min((tl.abs(total) < float("inf")).to(tl.int32))
                if finite != 0:
                    _store(sums, total, row, out, tokens, columns, TOKENS)
            if finite == 0:
                inputs = x.to(tl.pointer_type(tl.int64))
                for token in range(tokens):
                    selected = selected_sums(
                        inputs + token * (2 * row_bytes), words, positions, rows, begin, end, row_bytes, ROWS, STEP,
                        DTYPE,
                    )  # fmt: skip
                    tl.store(sums + token * columns + row, selected, mask=row < out)


@triton.jit
def _store(sums, total, row, out, tokens, columns, TOKENS: tl.constexpr):
    token = tl.arange(0, TOKENS)[None, :]
    tl.store(sums + token * columns + row[:, None], total, mask=(row[:, None] < out) & (token < tokens))


@triton.jit
def add_up(
    sums, u, bias, y, out, rank, length, first, inner, outs, parts, tokens, columns,
    ROWS: tl.constexpr, RANKS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The second launch, for one layer of a stack: a grid of blocks of rows.

    sums: (parts, tokens, columns), with the layer's rows of S from column `first` on, and those of its v from `inner`.
    u: (out, rank); bias: (length,), where the length is out, or 0 without a bias; y: (tokens, outs).
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    exists = (row < out) & (token < tokens)
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    total += tl.load(bias + row, mask=row < length, other=0.0).to(tl.float32)
    for part in range(parts):
        total += tl.load(sums + (part * tokens + token) * columns + first + row, mask=exists, other=0.0)
    for start in range(0, rank, RANKS):
        k = start + tl.arange(0, RANKS)
        at = token * columns + inner + k[:, None]
        used = (k[:, None] < rank) & (token < tokens)
        hidden = tl.zeros((RANKS, TOKENS), tl.float32)
        for part in range(parts):
            hidden += tl.load(sums + part * tokens * columns + at, mask=used, other=0.0)
        inside = (row < out) & (k[None, :] < rank)
        factor = tl.load(u + row.to(tl.int64) * rank + k[None, :], mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(factor[:, :, None] * hidden[None, :, :], axis=1)
    tl.store(y + token * outs + first + row, total, mask=exists)


@triton.jit
def _share(length, STEP: tl.constexpr):
    """Begin and end of this program's part of a row, in whole steps; the last parts may be short, or empty."""
    share = tl.cdiv(tl.cdiv(length, tl.num_programs(1)), STEP) * STEP
    begin = tl.minimum(tl.program_id(1) * share, length)
    return begin, tl.minimum(begin + share, length)


def decode(
    x: Tensor,
    values: Tensor,
    positions: Tensor,
    us: Sequence[Tensor],
    v: Tensor,
    bias: Tensor | None,
    n: int,
    m: int,
    parts: int | None = None,
) -> Tensor:
    """x Sᵀ + (x vᵀ) uᵀ + b of one layer, or of several that are stacked by rows.

    Args:
        x: (tokens, in), at most 16 tokens. values: (out, in/M·N), in x's dtype. positions: (out, bytes), uint8.
        us: (out, r) of each layer, in x's dtype; r may be 0. v: (Σ r, in), in x's dtype. bias: (out,), in x's dtype.
        parts: how many programs share a row; by default as many as keep the GPU busy.

    Returns:
        (tokens, out), in x's dtype. Sums are float32.
    """
    (tokens, width), out, rank = x.shape, len(values), len(v)
    y = x.new_empty(tokens, out)
    if not y.numel():
        return y
    tile, columns = Tile.of(x, n, m), out + rank
    blocks = triton.cdiv(out, tile.rows) + triton.cdiv(rank, tile.rows)
    parts = parts or _parts(blocks, width // tile.least, x.device)
    sums = torch.empty(parts, tokens, columns, dtype=torch.float32, device=x.device)
    inputs = aligned(x) if tile.kernel != "gather" else _transposed(x, tile.tokens)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        multiply[blocks, parts](
            inputs, aligned(values), positions.contiguous(), v.contiguous(), sums, out, rank,
            width, values.shape[1], positions.shape[1], tokens, columns, **multiply_constants(x, n, m),
        )  # fmt: skip
        first, inner = 0, out
        for u in us:
            end = first + len(u)
            shift, length = (x, 0) if bias is None else (bias[first:end].contiguous(), len(u))
            add_up[triton.cdiv(len(u), SUM_ROWS),](
                sums, u.contiguous(), shift, y, len(u), u.shape[1], length, first, inner, out, parts, tokens, columns,
                **add_constants(x, n, m),
            )  # fmt: skip
            first, inner = end, inner + u.shape[1]
    return y


def multiply_constants(x: Tensor, n: int, m: int) -> dict[str, Any]:
    """What `multiply` is compiled for, for inputs (tokens, in) and S with the pattern N:M."""
    tile = Tile.of(x, n, m)
    return {
        "KERNEL": tile.kernel, "N": n, "M": m, "BITS": (m - 1).bit_length(), "DTYPE": NUMBERS[x.dtype],
        "ROWS": tile.rows, "STEP": tile.step, "COLUMNS": tile.columns, "TOKENS": tile.tokens,
    }  # fmt: skip


def add_constants(x: Tensor, n: int, m: int) -> dict[str, Any]:
    """What `add_up` is compiled for."""
    tokens = Tile.of(x, n, m).tokens
    return {"ROWS": SUM_ROWS, "RANKS": max(32 // tokens, 16), "TOKENS": tokens}


def _parts(blocks: int, most: int, device: torch.device) -> int:
    """How many programs share a row, at most `most`, but at least 1."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(-(-processors * PROGRAMS // blocks), most))


def _transposed(x: Tensor, tokens: int) -> Tensor:
    """(in, tokens), with zeros for the tokens that x does not have: those of one input are loaded at once."""
    wide = x.new_zeros(x.shape[1], tokens)
    wide[:, : len(x)] = x.T
    return wide


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, and at an address from which 64-bit words can be read."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 8 else tensor
