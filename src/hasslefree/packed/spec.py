"""The shape and storage of a compressed layer, without its values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasslefree.core.entropy import decode, words_for_rate
from hasslefree.core.factors import TensorSpecs, factor_tensors
from hasslefree.core.gram import working_dtype
from hasslefree.core.grids import Grid
from hasslefree.packed.layouts import Layout, layout_of, support_of
from hasslefree.packed.storage import pack_on_grid, unpack_codes, words_for
from hasslefree.validation import Count, Positive


@dataclass(frozen=True)
class LayerSpec:
    """Describe a compressed layer W ≈ S + u v.

    Args:
        pattern: the name of the sparsity pattern, such as "2:4". It decides how S is stored
            (`packed.layouts`).
        shape: (out, in) of the weight.
        rank: the rank of L = u v.
        nonzeros: the number of entries that S keeps, which is the number of stored values or codes.
        grid: the grid of a quantised S; None if the entries of S are floats.
        factor_bits: 8 if the factors are int8 codes; None if they have the model's dtype, and
            always None for rank 0.
    """

    pattern: str
    shape: tuple[Positive, Positive]
    rank: Count
    nonzeros: Count
    grid: Grid | None = None
    factor_bits: int | None = None

    def __post_init__(self) -> None:
        if not self.rank:
            object.__setattr__(self, "factor_bits", None)

    @property
    def layout(self) -> Layout:
        """The storage of the values or codes of S and of their positions."""
        return layout_of(self.pattern)

    @property
    def kind(self) -> str:
        """A short description of the storage, such as "2:4, int4 in groups of 64"."""
        words = [self.pattern]
        if self.grid:
            words.append(str(self.grid))
        if self.factor_bits:
            words.append(f"factors in int{self.factor_bits}")
        return ", ".join(words)

    @property
    def parameters(self) -> int:
        """The number of entries in S and both factors."""
        return self.nonzeros + self.rank * sum(self.shape)

    @property
    def trained(self) -> int:
        """The number of trainable parameters: the values of S (on a grid, the scales and offsets
        or their units) and both factors.
        """
        floats = self.rank * sum(self.shape)
        for shape, stored in self.sparse_tensors().values():
            if stored is None:
                floats += math.prod(shape)
        return floats

    @property
    def dense_parameters(self) -> int:
        """The number of entries of the original weight."""
        return math.prod(self.shape)

    def tensors(self) -> TensorSpecs:
        """The stored tensors."""
        out, width = self.shape
        return self.sparse_tensors() | factor_tensors(out, width, self.rank, self.factor_bits)

    def sparse_tensors(self) -> TensorSpecs:
        """The tensors that hold S."""
        layout = self.layout
        values, index = layout.shapes(self.shape, self.nonzeros)
        positions: TensorSpecs = {layout.index: (index, layout.index_dtype)}
        if self.grid is None:
            return {"values": (values, None)} | positions
        self.grid.check(self.shape)
        out, width = self.shape
        if self.grid.rate is not None:
            stream = words_for_rate(self.dense_parameters, self.grid.rate)
            return {
                "weight_packed": ((stream,), torch.int32),
                "weight_scale": ((out, 1), None),
                "weight_input_scale": ((width,), None),
            } | positions
        codes = (*values[:-1], words_for(values[-1], self.grid.bits))
        tensors: TensorSpecs = {"weight_packed": (codes, torch.int32)}
        return tensors | self._scale_tensors(self.grid) | positions

    def _scale_tensors(self, grid: Grid) -> TensorSpecs:
        """The scales, and the offsets or zeros, of a grid without entropy coding."""
        out, width = self.shape
        groups = grid.groups(width)
        blocks = grid.blocks(width)
        units = (out,) if blocks is None else (out, blocks)
        tensors: TensorSpecs = {}
        floats = ["weight_scale"]
        if grid.offset:
            floats.append("weight_offset")
        for name in floats:
            if grid.scale_bits is None:
                tensors[name] = ((out, groups), None)
            else:
                multiples = (out, words_for(groups, grid.scale_bits))
                tensors[name] = (units, None)
                tensors[f"{name}_packed"] = (multiples, torch.int32)
        if not grid.offset and not grid.symmetric:
            tensors["weight_zero_point"] = ((words_for(out, grid.bits), groups), torch.int32)
        return tensors

    def unpack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Unpack S (out, in). The index is not validated.

        Gradients flow to the values, or to the scales and offsets or their units.
        """
        if self.grid is not None:
            return self.values(self.codes(tensors), tensors)
        layout = self.layout
        return layout.unpack(tensors["values"], tensors[layout.index], self.shape[1])

    def codes(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The codes of S on a grid, uint8 (out, in). Pruned entries get their group's zero."""
        assert self.grid is not None
        if self.grid.rate is not None:
            return decode(tensors["weight_packed"], self.shape)
        stored = unpack_codes(tensors["weight_packed"], self.grid.bits, self._stored_shape()[-1])
        if self.nonzeros == self.dense_parameters:
            return stored.view(self.shape)
        zeros = self.zeros(tensors).to(torch.uint8)
        codes = zeros.repeat_interleave(self.shape[1] // zeros.shape[1], 1)
        return codes.masked_scatter_(self.support(tensors[self.layout.index]), stored)

    def pack(self, codes: Tensor, index: Tensor) -> Tensor:
        """The inverse of `codes`: uint8 (out, in) → the tensor `weight_packed`.

        Args:
            index: the positions of the stored codes.
        """
        assert self.grid is not None
        if self.nonzeros < self.dense_parameters:
            codes = codes.masked_select(self.support(index))
        return pack_on_grid(codes.view(self._stored_shape()), self.grid)

    def _stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored values or codes."""
        return self.layout.shapes(self.shape, self.nonzeros)[0]

    def support(self, index: Tensor) -> Tensor:
        """The mask of the stored entries, which are in row-major order: bool (out, in)."""
        return support_of(self.layout, self._stored_shape(), index, self.shape[1])

    def values(self, codes: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """S (out, in) from its codes, uint8 (out, in), with gradients as in `unpack`."""
        assert self.grid is not None
        scale = self.scales(tensors).unsqueeze(-1)
        steps = codes.view(*scale.shape[:2], -1).to(scale.dtype)
        if self.grid.offset:
            values = torch.addcmul(self.offsets(tensors).unsqueeze(-1), steps, scale)
        else:
            values = steps.sub_(self.zeros(tensors).unsqueeze(-1)) * scale
        if self.grid.rate is not None:
            values = values * tensors["weight_input_scale"].to(values.dtype)
        return values.to(tensors["weight_scale"].dtype).view(self.shape)

    def scales(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The scale of each group, (out, groups) in the working dtype, with gradients."""
        return self._multiplied(tensors, "weight_scale")

    def offsets(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The offset of each group, (out, groups) in the working dtype, with gradients."""
        offsets = self._multiplied(tensors, "weight_offset")
        if self.grid is not None and self.grid.scale_bits is not None:
            return -offsets
        return offsets

    def _multiplied(self, tensors: Mapping[str, Tensor], name: str) -> Tensor:
        """The tensor of this name, or its units multiplied by the stored multiples."""
        assert self.grid is not None
        numbers = tensors[name]
        numbers = numbers.to(working_dtype(numbers))
        bits = self.grid.scale_bits
        if bits is None:
            return numbers
        groups = self.grid.groups(self.shape[1])
        multiples = unpack_codes(tensors[f"{name}_packed"], bits, groups)
        if self.grid.signed_scales:
            bits -= 1
            multiples = multiples.short() - (1 << bits)
        steps = (numbers / (1 << bits)).view(len(numbers), -1)
        return multiples * steps.repeat_interleave(groups // steps.shape[1], 1)

    def zeros(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The integer zeros of a grid without offsets: int16 (out, groups)."""
        assert self.grid is not None
        out, width = self.shape
        if self.grid.symmetric:
            middle = (self.grid.top + 1) // 2
            like = tensors["weight_scale"]
            return like.new_full((out, self.grid.groups(width)), middle, dtype=torch.int16)
        packed = tensors["weight_zero_point"].T.contiguous()
        return unpack_codes(packed, self.grid.bits, out).T.short()

    def scale_and_low(
        self,
        codes: Tensor,
        tensors: Mapping[str, Tensor],
        rounded: bool,
    ) -> tuple[Tensor, Tensor]:
        """The scale of each group and the value of code 0: (out, groups) each, without gradients.
        On an entropy-coded grid, the scales of the inputs are left out.

        Args:
            codes: uint8 (out, in). A group whose codes all stand for the offset, or all for zero,
                gets the scale 0: any other would multiply rounding errors of terms that cancel.
            rounded: True for operators that compute in bfloat16: the scale is rounded first, so
                that an integer zero still stands for exactly 0.
        """
        assert self.grid is not None
        scale = self.scales(tensors).detach()
        groups = codes.view(*scale.shape, -1)
        if self.grid.offset:
            scale = scale.masked_fill((groups == 0).all(-1), 0)
            return scale, self.offsets(tensors).detach()
        zeros = self.zeros(tensors)
        scale = scale.masked_fill((groups == zeros.unsqueeze(-1)).all(-1), 0)
        if rounded:
            scale = scale.bfloat16().to(scale.dtype)
        return scale, -zeros * scale

    def bytes(self, dtype: torch.dtype) -> int:
        """The size of the stored tensors in a model of this dtype, in bytes."""
        total = 0
        for shape, stored in self.tensors().values():
            total += math.prod(shape) * (stored or dtype).itemsize
        return total

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """The size of the original weight in this dtype, in bytes."""
        return self.dense_parameters * dtype.itemsize

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON, without those that are None."""
        fields = vars(self) | {"shape": list(self.shape)}
        if self.grid:
            fields["grid"] = self.grid.to_dict()
        return {name: value for name, value in fields.items() if value is not None}
