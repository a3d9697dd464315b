"""The tensors that hold S: values and their positions, or for a quantised S codes, scales, zeros
and positions.

Codes and zeros are packed in int32, low bits first and without a gap, codes along the inputs, zeros
along the outputs: with 4 and 8 bits as in the pack-quantized layout of compressed-tensors, whose
tensors these are without pruning (pattern dense). Pruned entries have no code: the codes are in the
order in which the layout of the pattern stores values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.gram import working_dtype
from hasslefree.core.grids import Grid, Quantised
from hasslefree.errors import PatternError
from hasslefree.packed.layouts import Layout, layout_of

WORD = 32  # bits of an int32


@dataclass(frozen=True)
class Storage:
    """How S is stored.

    Args:
        layout: how values, or codes, and their positions are stored.
        grid: of a quantised S; None if the entries are floats.
    """

    layout: Layout
    grid: Grid | None = None

    @classmethod
    def of(cls, pattern: str, grid: Grid | None = None) -> "Storage":
        """The storage of a pattern's name, such as "2:4"."""
        return cls(layout_of(pattern), grid)

    def dtypes(self) -> dict[str, torch.dtype | None]:
        """Map the names of the tensors to their dtypes; None is the model's dtype."""
        dtypes: dict[str, torch.dtype | None] = {}
        if self.grid is None:
            dtypes["values"] = None
        else:
            dtypes["weight_packed"] = torch.int32
            dtypes["weight_scale"] = None
            if self.grid.offset:
                dtypes["weight_offset"] = None
            elif not self.grid.symmetric:
                dtypes["weight_zero_point"] = torch.int32
        dtypes[self.layout.index] = self.layout.index_dtype
        return dtypes

    def shapes(
        self,
        out: int,
        width: int,
        nonzeros: int,
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors of S (out, width), which has this number of stored values or
        codes.
        """
        shapes = self.layout.shapes(out, width, nonzeros)
        if self.grid is None:
            return shapes
        self.grid.check((out, width))
        *rows, values = shapes.pop("values")
        groups = self.grid.groups(width)
        bits = self.grid.bits
        quantised = {
            "weight_packed": (*rows, words_for(values, bits)),
            "weight_scale": (out, groups),
            "weight_offset": (out, groups),
            "weight_zero_point": (words_for(out, bits), groups),
        }
        return {name: (quantised | shapes)[name] for name in self.dtypes()}

    def pack(
        self, sparse: Tensor, quantised: Quantised | None = None
    ) -> tuple[dict[str, Tensor], int]:
        """Pack S.

        Args:
            sparse: S (out, in).
            quantised: its codes, if the storage has a grid.

        Returns:
            The tensors by name, and the number of stored values.

        Raises:
            PatternError: S does not have the pattern, or the codes are missing.
        """
        values, index = self.layout.pack(sparse + 0.0)  # −0.0 becomes +0.0, which is not stored
        if self.grid is None:
            return {"values": values, self.layout.index: index}, values.numel()
        if quantised is None or quantised.scaling.grid != self.grid:
            raise PatternError(
                f"this layer stores S as integers ({self.grid}), and only floats were given; pass"
                " the integers with quantised=, or a storage whose grid is None"
            )
        ones = torch.ones_like(values, dtype=torch.uint8)
        is_stored = self.layout.unpack(ones, index, sparse.shape[1]).bool()
        codes = quantised.codes.masked_select(is_stored).view(values.shape)
        tensors = {
            "weight_packed": pack_codes(codes, self.grid.bits),
            "weight_scale": quantised.scaling.scale,
        }
        if self.grid.offset:
            tensors["weight_offset"] = quantised.scaling.zero
        elif not self.grid.symmetric:
            zeros = quantised.scaling.zero.to(torch.uint8).T.contiguous()
            tensors["weight_zero_point"] = pack_codes(zeros, self.grid.bits).T.contiguous()
        tensors[self.layout.index] = index
        return tensors, values.numel()

    def unpack(
        self,
        tensors: Mapping[str, Tensor],
        width: int,
        nonzeros: int,
    ) -> Tensor:
        """Unpack S (out, width). The index is not validated.

        Gradients flow to the values, or to the scales and offsets.
        """
        index = tensors[self.layout.index]
        if self.grid is None:
            return self.layout.unpack(tensors["values"], index, width)
        scale = tensors["weight_scale"].unsqueeze(-1)
        out, groups, _ = scale.shape
        stored = self.layout.shapes(out, width, nonzeros)["values"]
        codes = unpack_codes(tensors["weight_packed"], self.grid.bits, stored[-1])
        if self.grid.offset:  # every entry has a code
            wide = working_dtype(scale)
            offset = tensors["weight_offset"].to(wide).unsqueeze(-1)
            steps = codes.view(out, groups, -1).to(wide)
            values = torch.addcmul(offset, steps, scale.to(wide))
            return values.to(scale.dtype).view(out, width)
        steps = self.layout.unpack(codes.short() + 1, index, width)  # 0: not stored
        steps = steps.view(out, groups, -1)
        zeros = self.zeros(tensors).unsqueeze(-1)
        steps = torch.where(steps > 0, steps - 1 - zeros, 0)
        return (steps.to(scale.dtype) * scale).view(out, width)

    def lowest(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The values of code 0: (out, groups), offsets as they are stored, and otherwise exact in
        float32.
        """
        if self.grid is not None and self.grid.offset:
            return tensors["weight_offset"].detach()
        return -self.zeros(tensors) * tensors["weight_scale"].detach().float()

    def zeros(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The whole zeros of a grid without offsets: (out, groups) int16."""
        assert self.grid is not None
        scale = tensors["weight_scale"]
        if self.grid.symmetric:
            return torch.full_like(scale, (self.grid.top + 1) / 2, dtype=torch.int16)
        packed = tensors["weight_zero_point"].T.contiguous()
        return unpack_codes(packed, self.grid.bits, len(scale)).T.short()


def words_for(count: int, bits: int) -> int:
    """The words of 32 bits that hold a number of codes."""
    return -(-count * bits // WORD)


def codes_of_word(bits: int) -> int:
    """How many codes are packed together: those of a byte, or of as many bytes as a code has
    bits.
    """
    if 8 % bits:
        return 8
    return 8 // bits


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes of 2 to 8 bits, uint8 (…, n) → int32 (…, ⌈n·bits / 32⌉), low bits first, the rest of a
    row zeros.
    """
    together = codes_of_word(bits)
    count = codes.shape[-1]
    fields = F.pad(codes, (0, -count % together)).unflatten(-1, (-1, together))
    if 8 % bits:
        shifts = bits * torch.arange(8, device=codes.device)
        words = (fields.long() << shifts).sum(-1)
        octets = words.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    else:
        shifts = bits * torch.arange(together, dtype=torch.uint8, device=codes.device)
        octets = (fields << shifts).sum(-1, dtype=torch.uint8)
    words_of_row = words_for(count, bits)
    octets = F.pad(octets, (0, 4 * words_of_row - octets.shape[-1]))
    # Flat: a tensor without elements has no strides that fit.
    return octets.reshape(-1).view(torch.int32).view(*octets.shape[:-1], words_of_row)


def unpack_codes(
    packed: Tensor,
    bits: int,
    count: int,
) -> Tensor:
    """The codes, uint8 (…, count), of int32 (…, ⌈count·bits / 32⌉)."""
    *rows, words_of_row = packed.shape
    octets = packed.reshape(-1).view(torch.uint8).view(*rows, 4 * words_of_row)
    mask = (1 << bits) - 1
    if 8 % bits:
        octets = F.pad(octets, (0, -octets.shape[-1] % bits)).unflatten(-1, (-1, bits))
        words = F.pad(octets, (0, 8 - bits)).contiguous().view(torch.int64)
        codes = words >> bits * torch.arange(8, device=packed.device) & mask
    else:
        together = codes_of_word(bits)
        shifts = bits * torch.arange(together, dtype=torch.uint8, device=packed.device)
        codes = octets.unsqueeze(-1) >> shifts & mask
    return codes.to(torch.uint8).flatten(-2)[..., :count]
