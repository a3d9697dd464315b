"""Tensors that store the values of S, or the codes, scales and zeros of an S on a grid.

Codes and zeros are packed into int32, low bits first and without gaps, codes along the inputs and
zeros along the outputs. With 4 and 8 bits this is the packing of compressed-tensors'
pack-quantized format, and without pruning (pattern dense) the tensors are the same. Pruned entries
have no code: the codes are in the order in which the layout of the pattern stores values. Scales
and offsets that are multiples of units of a row or block are packed like codes, along the groups,
and the units replace the scales and offsets: (out,) for rows, (out, blocks) for blocks. Signed
multiples are packed with 2^(b−1) added. On an entropy-coded grid, the codes are a stream
(`core.entropy`), and rows and inputs have scales.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.entropy import encode, words_for_rate
from hasslefree.core.grids import Grid, Quantised, Scaling
from hasslefree.core.scales import Multiples
from hasslefree.packed.layouts import layout_of, pack_bits, support_of, unpack_bits

WORD = 32  # bits of an int32
# Codes packed or unpacked at a time: each takes 16 bytes of temporary memory.
CODES = 1 << 20


def pack_sparse(
    pattern: str, sparse: Tensor, quantised: Quantised | None = None
) -> tuple[dict[str, Tensor], int]:
    """Pack S.

    Args:
        pattern: the name of the pattern of S, such as "2:4".
        sparse: S (out, in).
        quantised: the codes of S, if S is on a grid.

    Returns:
        The tensors by name, and the number of stored values.

    Raises:
        PatternError: S does not have the pattern.
    """
    layout = layout_of(pattern)
    values, index = layout.pack(sparse + 0.0)  # −0.0 becomes +0.0, which is not stored
    if quantised is None:
        return {"values": values, layout.index: index}, values.numel()
    is_stored = support_of(layout, values.shape, index, sparse.shape[1])
    codes = quantised.codes.masked_select(is_stored).view(values.shape)
    tensors = {"weight_packed": pack_on_grid(codes, quantised.scaling.grid)}
    tensors |= pack_scaling(quantised.scaling)
    tensors[layout.index] = index
    return tensors, values.numel()


def pack_on_grid(codes: Tensor, grid: Grid) -> Tensor:
    """Pack codes of a grid, uint8 (…, n), into the tensor `weight_packed`."""
    if grid.rate is None:
        return pack_codes(codes, grid.bits)
    return encode(codes, words_for_rate(codes.numel(), grid.rate))


def pack_scaling(scaling: Scaling) -> dict[str, Tensor]:
    """The tensors that store the scales, and the zeros or offsets."""
    grid = scaling.grid
    if isinstance(scaling.storage, Multiples):
        tensors = pack_multiples(scaling, scaling.storage)
    else:
        tensors = {"weight_scale": scaling.scale}
        if scaling.input_scale is not None:
            tensors["weight_input_scale"] = scaling.input_scale
        if grid.offset:
            tensors["weight_offset"] = scaling.zero
    if not grid.offset and not grid.symmetric:
        zeros = scaling.zero.to(torch.uint8).T
        tensors["weight_zero_point"] = pack_codes(zeros, grid.bits).T.contiguous()
    return tensors


def pack_multiples(scaling: Scaling, units: Multiples) -> dict[str, Tensor]:
    """The tensors that store scales and offsets as multiples of units."""
    scale_unit = units.scale_unit
    offset_unit = units.offset_unit
    if scaling.grid.block is None:  # units of rows: (out,)
        scale_unit = scale_unit.squeeze(1)
        if offset_unit is not None:
            offset_unit = offset_unit.squeeze(1)
    multiples = units.scale_multiples(scaling.scale)
    if units.signed:
        multiples += 1 << units.bits - 1
    packed = pack_codes(multiples.to(torch.uint8), units.bits)
    tensors = {"weight_scale": scale_unit, "weight_scale_packed": packed}
    if offset_unit is not None:
        multiples = units.offset_multiples(scaling.zero).to(torch.uint8)
        tensors["weight_offset"] = offset_unit
        tensors["weight_offset_packed"] = pack_codes(multiples, units.bits)
    return tensors


def words_for(count: int, bits: int) -> int:
    """The number of 32-bit words that hold `count` codes."""
    return -(-count * bits // WORD)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes of 2 to 8 bits: uint8 (…, n) → int32 (…, ⌈n·bits / 32⌉), padded with zeros."""
    words = words_for(codes.shape[-1], bits)
    packed = codes.new_empty(*codes.shape[:-1], words, dtype=torch.int32)
    for rows, target in few_rows(codes, packed):
        octets = pack_bits(rows, bits)
        octets = F.pad(octets, (0, 4 * words - octets.shape[-1]))
        # Flattened first: a tensor without elements has no strides that allow the view.
        target.copy_(octets.reshape(-1).view(torch.int32).view(target.shape))
    return packed


def unpack_codes(
    packed: Tensor,
    bits: int,
    count: int,
) -> Tensor:
    """Unpack codes: int32 (…, ⌈count·bits / 32⌉) → uint8 (…, count)."""
    codes = packed.new_empty(*packed.shape[:-1], count, dtype=torch.uint8)
    for rows, target in few_rows(packed, codes):
        *shape, words = rows.shape
        octets = rows.reshape(-1).view(torch.uint8).view(*shape, 4 * words)
        target.copy_(unpack_bits(octets, bits, count))
    return codes


def few_rows(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield corresponding rows of both tensors, about CODES codes at a time."""
    if source.dim() < 2:
        yield source, target
        return
    length = max(1, source.shape[-1], target.shape[-1])
    height = max(1, CODES // length)
    yield from zip(source.split(height), target.split(height), strict=True)
