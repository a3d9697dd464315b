"""The tensors that hold S: values and their positions, or for a quantised S codes, scales, zeros
and positions.

Codes and zeros are packed in int32, low bits first and without a gap, codes along the inputs, zeros
along the outputs: of 4 and 8 bits as in the pack-quantized layout of compressed-tensors, whose
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


@dataclass(frozen=True)
class Storage:
    """How S of one pattern is stored. grid: of a quantised S, or None."""

    layout: Layout
    grid: Grid | None = None

    @classmethod
    def of(cls, pattern: str, grid: Grid | None = None) -> "Storage":
        return cls(layout_of(pattern), grid)

    def dtypes(self) -> dict[str, torch.dtype | None]:
        """The tensors by name, with their dtypes; None for the model's."""
        index = {self.layout.index: self.layout.index_dtype}
        if self.grid is None:
            return {"values": None, **index}
        zeros: dict[str, torch.dtype | None] = (
            {} if self.grid.symmetric else {"weight_zero_point": torch.int32}
        )
        zeros = {"weight_offset": None} if self.grid.offset else zeros
        return {"weight_packed": torch.int32, "weight_scale": None, **zeros, **index}

    def shapes(self, out: int, width: int, nonzeros: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors. nonzeros: the number of stored values or codes."""
        shapes = self.layout.shapes(out, width, nonzeros)
        if self.grid is None:
            return shapes
        self.grid.check((out, width))
        values, groups, bits = shapes.pop("values"), self.grid.groups(width), self.grid.bits
        words = {
            "weight_packed": (*values[:-1], -(-values[-1] * bits // 32)),
            "weight_scale": (out, groups),
        }
        zeros = {} if self.grid.symmetric else {"weight_zero_point": (-(-out * bits // 32), groups)}
        zeros = {"weight_offset": (out, groups)} if self.grid.offset else zeros
        return {**words, **zeros, **shapes}

    def pack(
        self, sparse: Tensor, quantised: Quantised | None = None
    ) -> tuple[dict[str, Tensor], int]:
        """The tensors of S (out, in), whose codes on a grid are in `quantised`; and how many values
        are stored.
        """
        values, index = self.layout.pack(sparse + 0.0)  # −0.0 becomes +0.0, which is not stored
        if self.grid is None:
            return {"values": values, self.layout.index: index}, values.numel()
        if quantised is None or quantised.scaling.grid != self.grid:
            raise PatternError(
                f"this layer stores S as integers ({self.grid}), and only floats were given; pass"
                " the integers with quantised=, or a storage whose grid is None"
            )
        placed = self.layout.unpack(
            torch.ones_like(values, dtype=torch.uint8), index, sparse.shape[1]
        ).bool()
        codes = quantised.codes.masked_select(placed).view(values.shape)
        tensors = {
            "weight_packed": pack_codes(codes, self.grid.bits),
            "weight_scale": quantised.scaling.scale,
        }
        if self.grid.offset:
            tensors["weight_offset"] = quantised.scaling.zero
        elif not self.grid.symmetric:
            zeros = quantised.scaling.zero.to(torch.uint8)
            tensors["weight_zero_point"] = pack_codes(
                zeros.T.contiguous(), self.grid.bits
            ).T.contiguous()
        return {**tensors, self.layout.index: index}, values.numel()

    def unpack(self, tensors: Mapping[str, Tensor], width: int, nonzeros: int) -> Tensor:
        """S: (out, in). Gradients flow to the values, or to the scales and offsets. The index is
        not validated.
        """
        index = tensors[self.layout.index]
        if self.grid is None:
            return self.layout.unpack(tensors["values"], index, width)
        scale = tensors["weight_scale"]
        out, groups = scale.shape
        shape = self.layout.shapes(out, width, nonzeros)["values"]
        codes = unpack_codes(tensors["weight_packed"], self.grid.bits, shape[-1])
        if self.grid.offset:  # every entry has a code
            kind = working_dtype(scale)
            offset = tensors["weight_offset"].to(kind).unsqueeze(-1)
            steps = codes.view(out, groups, -1).to(kind)
            return (
                torch.addcmul(offset, steps, scale.to(kind).unsqueeze(-1))
                .to(scale.dtype)
                .view(out, width)
            )
        steps = self.layout.unpack(codes.short() + 1, index, width).view(
            out, groups, -1
        )  # 0: not stored
        steps = torch.where(steps > 0, steps - 1 - self.zeros(tensors).unsqueeze(-1), 0)
        return (steps.to(scale.dtype) * scale.unsqueeze(-1)).view(out, width)

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


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes of 2 to 8 bits, uint8 (…, n) → int32 (…, ⌈n·bits / 32⌉), low bits first, the rest of a
    row zeros.
    """
    together = codes_of_word(bits)
    fields = F.pad(codes, (0, -codes.shape[-1] % together)).unflatten(-1, (-1, together))
    if 8 % bits:
        words = (fields.long() << bits * torch.arange(8, device=codes.device)).sum(-1)
        octets = words.unsqueeze(-1).view(torch.uint8)[..., :bits].flatten(-2)
    else:
        shifts = bits * torch.arange(together, dtype=torch.uint8, device=codes.device)
        octets = (fields << shifts).sum(-1, dtype=torch.uint8)
    count = -(-codes.shape[-1] * bits // 32) * 4
    octets = F.pad(octets, (0, count - octets.shape[-1]))
    # Flat: a tensor without elements has no strides that fit.
    return octets.reshape(-1).view(torch.int32).view(*octets.shape[:-1], count // 4)


def unpack_codes(packed: Tensor, bits: int, count: int) -> Tensor:
    """The codes, uint8 (…, count), of int32 (…, ⌈count·bits / 32⌉)."""
    octets = packed.reshape(-1).view(torch.uint8).view(*packed.shape[:-1], 4 * packed.shape[-1])
    together, mask = codes_of_word(bits), (1 << bits) - 1
    if 8 % bits:
        octets = F.pad(octets, (0, -octets.shape[-1] % bits)).unflatten(-1, (-1, bits))
        words = F.pad(octets, (0, 8 - bits)).contiguous().view(torch.int64)
        codes = words >> bits * torch.arange(8, device=packed.device) & mask
    else:
        shifts = bits * torch.arange(together, dtype=torch.uint8, device=packed.device)
        codes = octets.unsqueeze(-1) >> shifts & mask
    return codes.to(torch.uint8).flatten(-2)[..., :count]


def codes_of_word(bits: int) -> int:
    """How many codes are packed together: those of a byte, or of as many bytes as a code has
    bits.
    """
    return 8 if 8 % bits else 8 // bits
