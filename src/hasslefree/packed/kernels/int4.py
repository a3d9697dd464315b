"""x Sᵀ for a complete S in codes of four bits, by torch's own operators, which compute with
bfloat16

    S_ij = (code_ij − 8)·scale_g + centre_g     (g: one of the groups of 32, 64, 128 or 256 inputs
    of row i).

They are fast for a few tokens; for more, S is unpacked into bfloat16, a tile at a time. On a CPU
the operators read codes in an order of their own, from which we unpack: a block of rows after the
other, input by input, two rows a byte.
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
# Tokens that the operators multiply, at most: from there on, unpacking is faster.
MOST_TOKENS = 24
# The rows that a CPU's order of codes interleaves, by the instructions that torch uses.
BLOCKS = {"AVX512": 64, "AVX2": 32}
# The same on CUDA.
CUDA_TOKENS = 16
# A tile of S in bfloat16 that stays in the second level of the cache.
TILE_BYTES = 2 << 20
# Inputs that a product takes together: the rank is filled up with zeros.
ALIGNED = 32


@dataclass(frozen=True)
class Int4:
    """S (out, in) as the operators take it, in groups of `group` inputs.

    codes: on a CPU uint8 (out, in/2), on CUDA int32. terms: scales and centres, (groups, out, 2)
    bfloat16.
    """

    codes: Tensor
    terms: Tensor
    group: int

    @classmethod
    def of(cls, codes: Tensor, scale: Tensor, low: Tensor) -> "Int4":
        """Of codes, uint8 (out, in), scales (out, groups) and the values of code 0 (out,
        groups).
        """
        width, given = codes.shape[1], scale.shape[1]
        group = next(length for length in GROUPS if width // given % length == 0)
        scale, low = (
            t.float().repeat_interleave(width // given // group, 1).T.contiguous()
            for t in (scale, low)
        )
        terms = torch.stack([scale, low + 8 * scale], -1).bfloat16()
        if codes.device.type == "cuda":
            tiles = next(tiles for tiles in (8, 4, 2) if width % (16 * tiles) == 0)
            packed = torch.ops.aten._convert_weight_to_int4pack(
                codes[:, ::2] << 4 | codes[:, 1::2], tiles
            )
        else:
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        return cls(packed, terms, group)

    def product(self, x: Tensor, u: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        """x Sᵀ, or x Sᵀ + x vᵀ uᵀ: (tokens, in) → (tokens, out), bfloat16. u: (out, r), v: (r,
        in).
        """
        x = x.contiguous()
        if x.device.type == "cuda":
            y: Tensor = torch.ops.aten._weight_int4pack_mm(x, self.codes, self.group, self.terms)
            return y if u is None or v is None else y.addmm_(F.linear(x, v), u.T)
        multiply = linear_int4 if is_traced(x) else int4_product
        return multiply(x, self.codes, self.terms, self.group, u, v)


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
    if len(x) <= MOST_TOKENS:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, terms)
        return y if u is None or v is None else y.addmm_(F.linear(x, v), u.T)
    (tokens, width), out, rank = x.shape, len(codes), 0
    if u is not None and v is not None:
        rank, missing = len(v), -len(v) % ALIGNED
        x = torch.cat([x, F.linear(x, v), x.new_zeros(tokens, missing)], 1)
    scale, centre = terms.permute(2, 0, 1).contiguous().unsqueeze(2)
    y, tiles = x.new_empty(tokens, out), list(tiles_of(out, width))
    room = workspace(2 * x.shape[1] * max(rows.stop - rows.start for rows in tiles)).view(
        torch.bfloat16
    )
    for rows in tiles:
        tile = room[: x.shape[1] * (rows.stop - rows.start)].view(x.shape[1], -1)
        spread(codes, rows, tile[:width], middle=8)
        groups = tile[:width].view(-1, group, tile.shape[1])
        torch.addcmul(centre[..., rows], groups, scale[..., rows], out=groups)
        if u is not None:
            tile[width : width + rank] = u[rows].T
            tile[width + rank :] = 0
        torch.mm(x, tile, out=y[:, rows])
    return y


linear_int4 = as_operator("hasslefree::linear_int4", int4_product)
linear_int4.register_fake(lambda x, codes, *_: x.new_empty(len(x), len(codes)))


def plain(packed: Tensor) -> Tensor:
    """The codes, uint8 (out, in), of uint8 (out, in/2) in a CPU's order."""
    out, width = len(packed), 2 * packed.shape[1]
    codes = packed.new_empty(out, width)
    for rows in tiles_of(out, width):
        tile = packed.new_empty(width, rows.stop - rows.start)
        spread(packed, rows, tile)
        codes[rows] = tile.T
    return codes


def tiles_of(out: int, width: int) -> Iterator[slice]:
    """The rows of S in tiles: whole blocks of a CPU's order, and the rest."""
    block = BLOCKS[torch.backends.cpu.get_cpu_capability()]
    whole, height = out - out % block, max(1, TILE_BYTES // (2 * width * block)) * block
    yield from (slice(start, min(start + height, whole)) for start in range(0, whole, height))
    if whole < out:
        yield slice(whole, out)


def spread(codes: Tensor, rows: slice, tile: Tensor, middle: int = 0) -> None:
    """Write the codes of rows, in a CPU's order, less `middle`, into a tile (in, rows) of any
    dtype.
    """
    (width, count), block = tile.shape, BLOCKS[torch.backends.cpu.get_cpu_capability()]
    if count % block:  # neighbouring rows share a byte
        halves = tile.view(width, 1, -1, 2).permute(1, 3, 0, 2)
    else:  # the rows of the first and the second half of a block
        halves = tile.view(width, -1, 2, block // 2).permute(1, 2, 0, 3)
    octets = codes[rows].reshape(len(halves), width, -1)
    halves[:, 0] = (octets & 15).view(torch.int8).sub_(middle)
    halves[:, 1] = (octets >> 4).view(torch.int8).sub_(middle)


def obstacle(device: str, dtype: torch.dtype, grid: Grid, shape: tuple[int, int]) -> str | None:
    """Why the operators cannot multiply a complete S on this grid, or None."""
    out, width = shape
    if grid.bits != 4:
        return f"torch's operators take codes of 4 bits, and these have {grid.bits}"
    if dtype != torch.bfloat16:
        return (
            "torch's operators for codes of 4 bits are fast with bfloat16 only, and the layer has"
            f" {dtype}"
        )
    if (grid.group or width) % GROUPS[-1]:
        return (
            "torch's operators take groups of a multiple of 32 inputs, and these have"
            f" {grid.group or width}"
        )
    together = {"cpu": (16, 32), "cuda": (8, 32)}.get(device)
    if together is None:
        return f"torch's operators run on a CPU and on CUDA, and the layer is on {device}"
    if out % together[0] or width % together[1]:
        return (
            f"on {device}, torch's operators take a multiple of {together[0]} outputs, and the"
            f" layer has {out}"
        )
    return without_cuda() if device == "cuda" else without_cpu()


@functools.cache
def without_cuda() -> str | None:
    if not hasattr(torch.ops.aten, "_weight_int4pack_mm") or torch.version.hip:
        return "this build of torch has no operators for codes of 4 bits on this GPU"
    if torch.cuda.get_device_capability() < (8, 0):
        return "torch's operators for codes of 4 bits need a GPU of compute capability 8.0 or newer"
    return None


@functools.cache
def without_cpu() -> str | None:
    """Why they cannot be used on this processor, or None: what they do with codes is tried once."""
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
    if not torch.equal(plain(Int4.of(codes, *torch.ones(2, 80, 1)).codes), codes):
        return (
            f"torch {torch.__version__} orders codes of 4 bits in a way that is not known here;"
            " update hasslefree"
        )
    return None
