"""x Sᵀ for a complete S in codes of four bits, by torch's own operators, which compute with
bfloat16

    S_ij = (code_ij − 8)·scale_g + centre_g     (g: one of the groups of 32, 64, 128 or 256 inputs
    of row i).

They are fast for a few tokens. For more, some rows of S at a time are unpacked into bfloat16. On a
CPU the operators read codes in an order of their own, from which we unpack: one block of rows after
the other, input by input, two rows per byte.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.core.grids import Grid
from hasslefree.packed.kernels.arrays import is_traced, workspace
from hasslefree.packed.kernels.ops import as_operator

# The groups of inputs that the operators take: those of a grid are divided into the longest of
# these.
GROUPS = (256, 128, 64, 32)
# Tokens that the operators multiply at most: from there on, unpacking is faster.
CPU_TOKENS = 24
CUDA_TOKENS = 16
# The rows that a CPU's order of codes interleaves, by the instructions that torch uses.
BLOCKS = {"AVX512": 64, "AVX2": 32}
# Rows of S in bfloat16 that stay in the second level of the cache.
TILE_BYTES = 2 << 20
# Inputs that a product takes together: the rank is filled up with zeros.
ALIGNED = 32
# The outputs and inputs of a layer are multiples of these.
MULTIPLES = {"cpu": (16, 32), "cuda": (8, 32)}


@dataclass(frozen=True)
class Int4:
    """S (out, in) as the operators take it.

    Args:
        codes: on a CPU uint8 (out, in/2), on CUDA int32.
        terms: scales and centres, (groups, out, 2) bfloat16.
        group: the inputs of a group.
    """

    codes: Tensor
    terms: Tensor
    group: int

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scale: Tensor,
        low: Tensor,
    ) -> "Int4":
        """Bring codes into the order of the operators.

        Args:
            codes: uint8 (out, in).
            scale: (out, groups).
            low: the values of code 0, (out, groups).
        """
        width = codes.shape[1]
        stored_group = width // scale.shape[1]
        group = next(length for length in GROUPS if stored_group % length == 0)
        repeats = stored_group // group
        scale = scale.float().repeat_interleave(repeats, 1).T.contiguous()
        low = low.float().repeat_interleave(repeats, 1).T.contiguous()
        terms = torch.stack([scale, low + 8 * scale], -1).bfloat16()
        if codes.device.type == "cuda":
            tiles = next(tiles for tiles in (8, 4, 2) if width % (16 * tiles) == 0)
            pairs = codes[:, ::2] << 4 | codes[:, 1::2]
            packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        return cls(packed, terms, group)

    def product(
        self,
        x: Tensor,
        u: Tensor | None = None,
        v: Tensor | None = None,
    ) -> Tensor:
        """x Sᵀ, or x Sᵀ + x vᵀ uᵀ.

        Args:
            x: (tokens, in), bfloat16.
            u: (out, r), bfloat16.
            v: (r, in), bfloat16.

        Returns:
            (tokens, out), bfloat16.
        """
        x = x.contiguous()
        if x.device.type == "cuda":
            y: Tensor = torch.ops.aten._weight_int4pack_mm(x, self.codes, self.group, self.terms)
            return add_factors(y, x, u, v)
        multiply = linear_int4 if is_traced(x) else int4_product
        return multiply(x, self.codes, self.terms, self.group, u, v)


def add_factors(
    y: Tensor,
    x: Tensor,
    u: Tensor | None,
    v: Tensor | None,
) -> Tensor:
    """y + x vᵀ uᵀ, in place; y if there are no factors."""
    if u is None or v is None:
        return y
    return y.addmm_(F.linear(x, v), u.T)


def int4_product(
    x: Tensor,
    codes: Tensor,
    terms: Tensor,
    group: int,
    u: Tensor | None = None,
    v: Tensor | None = None,
) -> Tensor:
    """`Int4.product` on a CPU, with its tensors. For many tokens S and L are one product: x' = [x,
    x vᵀ], [S, u].
    """
    if len(x) <= CPU_TOKENS:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, terms)
        return add_factors(y, x, u, v)
    tokens, width = x.shape
    out = len(codes)
    rank = 0
    if u is not None and v is not None:
        rank = len(v)
        filling = x.new_zeros(tokens, -rank % ALIGNED)
        x = torch.cat([x, F.linear(x, v), filling], 1)
    inputs = x.shape[1]
    scale, centre = terms.permute(2, 0, 1).contiguous().unsqueeze(2)
    y = x.new_empty(tokens, out)
    tiles = list(tiles_of(out, width))
    height = max(rows.stop - rows.start for rows in tiles)
    room = workspace(2 * inputs * height).view(torch.bfloat16)
    for rows in tiles:
        tile = room[: inputs * (rows.stop - rows.start)].view(inputs, -1)
        unpack_tile(codes, rows, tile[:width], middle=8)
        groups = tile[:width].view(-1, group, tile.shape[1])
        torch.addcmul(centre[..., rows], groups, scale[..., rows], out=groups)
        if u is not None:
            tile[width : width + rank] = u[rows].T
            tile[width + rank :] = 0
        torch.mm(x, tile, out=y[:, rows])
    return y


linear_int4 = as_operator("hasslefree::linear_int4", int4_product)
linear_int4.register_fake(lambda x, codes, *_: x.new_empty(len(x), len(codes)))


def codes_in_file_order(packed: Tensor) -> Tensor:
    """The codes, uint8 (out, in), of uint8 (out, in/2) in a CPU's order."""
    out = len(packed)
    width = 2 * packed.shape[1]
    codes = packed.new_empty(out, width)
    for rows in tiles_of(out, width):
        tile = packed.new_empty(width, rows.stop - rows.start)
        unpack_tile(packed, rows, tile)
        codes[rows] = tile.T
    return codes


def codes_of_rows(packed: Tensor, rows: Tensor) -> Tensor:
    """The codes of some rows, uint8 (rows, in), of uint8 (out, in/2) in a CPU's order."""
    out, octets = packed.shape
    block = rows_of_block()
    whole = out - out % block
    in_block = rows < whole
    # The rows from `whole` on are one block, in which neighbouring rows share a byte.
    first = torch.where(in_block, rows - rows % block, whole)
    half = torch.where(in_block, block // 2, (out - whole) // 2)
    row = rows - first
    column = torch.where(in_block, row % (block // 2), row // 2)
    is_high = torch.where(in_block, row // (block // 2), row % 2)
    start = first * octets + column
    inputs = torch.arange(2 * octets, device=packed.device)
    codes = packed.flatten()[start.unsqueeze(1) + half.unsqueeze(1) * inputs]
    return codes >> (4 * is_high).to(torch.uint8).unsqueeze(1) & 15


def rows_of_block() -> int:
    """The rows that a CPU's order of codes interleaves."""
    return BLOCKS[torch.backends.cpu.get_cpu_capability()]


def tiles_of(out: int, width: int) -> Iterator[slice]:
    """Divide the rows of S into tiles: whole blocks of a CPU's order, and the rest."""
    block = rows_of_block()
    whole = out - out % block
    height = max(1, TILE_BYTES // (2 * width * block)) * block
    for start in range(0, whole, height):
        yield slice(start, min(start + height, whole))
    if whole < out:
        yield slice(whole, out)


def unpack_tile(
    codes: Tensor,
    rows: slice,
    tile: Tensor,
    middle: int = 0,
) -> None:
    """Write the codes of some rows, less `middle`, into a tile (in, rows) of any dtype.

    codes: uint8 (out, in/2), in a CPU's order.
    """
    width, count = tile.shape
    block = rows_of_block()
    if count % block:  # neighbouring rows share a byte
        halves = tile.view(width, 1, -1, 2).permute(1, 3, 0, 2)
    else:  # the rows of the first and the second half of a block
        halves = tile.view(width, -1, 2, block // 2).permute(1, 2, 0, 3)
    octets = codes[rows].reshape(len(halves), width, -1)
    halves[:, 0] = (octets & 15).view(torch.int8).sub_(middle)
    halves[:, 1] = (octets >> 4).view(torch.int8).sub_(middle)


def obstacle(
    device: str,
    dtype: torch.dtype,
    grid: Grid,
    shape: tuple[int, int],
) -> str | None:
    """Say why the operators cannot multiply a complete S (out, in) on this grid; None if they
    can.
    """
    out, width = shape
    if grid.bits != 4:
        return f"torch's operators take codes of 4 bits, and these have {grid.bits}"
    if dtype != torch.bfloat16:
        return (
            "torch's operators for codes of 4 bits are fast with bfloat16 only, and the layer has"
            f" {dtype}"
        )
    group = grid.group or width
    if group % GROUPS[-1]:
        return f"torch's operators take groups of a multiple of 32 inputs, and these have {group}"
    if device not in MULTIPLES:
        return f"torch's operators run on a CPU and on CUDA, and the layer is on {device}"
    outputs, inputs = MULTIPLES[device]
    if out % outputs or width % inputs:
        return (
            f"on {device}, torch's operators take a multiple of {outputs} outputs, and the layer"
            f" has {out}"
        )
    if device == "cuda":
        return without_cuda()
    return without_cpu()


@functools.cache
def without_cuda() -> str | None:
    """Say why the operators cannot be used on this GPU; None if they can."""
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm") or torch.version.hip:
        return "this build of torch has no operators for codes of 4 bits on this GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "torch's operators for codes of 4 bits need a GPU of compute capability 8.0 or newer"
    return None


@functools.cache
def without_cpu() -> str | None:
    """Say why the operators cannot be used on this processor; None if they can. Their order of
    codes is tried once.
    """
    name = torch.backends.cpu.get_cpu_capability()
    if name not in BLOCKS:
        return (
            "torch's operators for codes of 4 bits need a processor with AVX2 or AVX-512, and"
            f" torch uses {name}"
        )
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu"):
        return (
            f"torch {torch.__version__} has no operators for codes of 4 bits on a CPU; update torch"
        )
    codes = (torch.arange(80 * 32).view(80, 32) * 7 // 5 % 16).to(torch.uint8)
    packed = Int4.of(codes, torch.ones(80, 1), torch.ones(80, 1)).codes
    if not torch.equal(codes_in_file_order(packed), codes):
        return (
            f"torch {torch.__version__} orders codes of 4 bits in a way that is not known here;"
            " update hasslefree"
        )
    return None
