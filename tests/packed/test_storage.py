"""S on a grid as tensors: against a slow packer that writes out one bit after the other, and there and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Grid
from hasslefree.core.grids import Quantised, Scaling
from hasslefree.errors import GridError, PatternError
from hasslefree.packed.spec import LayerSpec
from hasslefree.packed.storage import pack_codes, pack_sparse, unpack_codes

PATTERNS = ["dense", "2:4", "3:8", "0:4", "row", "structured"]
patterns = pytest.mark.parametrize("pattern", PATTERNS)


def words(codes, bits):
    """The int32 of a row of codes, bit by bit from the low end, as compressed-tensors' pack-quantized has them."""
    row = [code >> k & 1 for code in codes for k in range(bits)]
    row += [0] * (-len(row) % 32)
    found = [sum(bit << k for k, bit in enumerate(row[i : i + 32])) for i in range(0, len(row), 32)]
    return [word - 2**32 if word >= 2**31 else word for word in found]


@pytest.mark.parametrize("bits", [3, 4, 8])
@settings(max_examples=25)
@given(st.integers(0, 40), st.integers(1, 3), st.integers(0, 99))
def test_codes_lie_in_words_low_bits_first(bits, n, rows, seed):
    codes = torch.randint(2**bits, (rows, n), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_codes(codes, bits)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [words(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack_codes(packed, bits, n), codes)
    assert torch.equal(pack_codes(codes[0], bits), packed[0])


def on_grid(pattern, grid, seed=0, dtype=torch.bfloat16, out=10, width=48):
    """S of a pattern on a grid, as its codes and as their values; a kept entry may be zero."""
    generator = torch.Generator().manual_seed(seed)
    groups = grid.groups(width)
    scale = (torch.rand(out, groups, generator=generator) + 0.1).bfloat16().to(dtype)
    zero = torch.randint(grid.top + 1, (out, groups), generator=generator).to(dtype)
    if grid.symmetric:
        zero = torch.full_like(zero, (grid.top + 1) // 2)
    codes = torch.randint(grid.top + 1, (out, width), generator=generator)
    n, _, m = pattern.partition(":")
    if m:
        order = torch.rand(out, width // int(m), int(m), generator=generator).argsort(-1).argsort(-1)
        kept = (order < int(n)).view(out, width)
    else:
        kept = torch.rand(out, width, generator=generator) < (2 if pattern == "dense" else 0.4)
        kept = kept[:1].expand(out, width) if pattern == "structured" else kept
    codes = torch.where(kept, codes, zero.long().repeat_interleave(width // groups, 1))
    quantised = Quantised(codes.to(torch.uint8), Scaling(grid, scale, zero))
    return quantised.values(), quantised


@patterns
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@settings(max_examples=8)
@given(st.sampled_from([16, 48, None]), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
       st.integers(0, 99))  # fmt: skip
def test_there_and_back(pattern, bits, symmetric, group, dtype, seed):
    """Oracles: S itself; and each code found by its place, from the words of the format."""
    grid = Grid(bits, group, symmetric)
    sparse, quantised = on_grid(pattern, grid, seed, dtype)
    tensors, count = pack_sparse(pattern, sparse, quantised)
    spec = LayerSpec(pattern, (10, 48), 0, count, grid)
    expected = {name: (shape, own or dtype) for name, (shape, own) in spec.tensors().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == expected
    assert spec.bytes(dtype) == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(spec.unpack(tensors), sparse)
    if pattern in ("dense", "row"):
        stored = [
            quantised.codes[i, j].item() for i in range(10) for j in range(48) if pattern == "dense" or sparse[i, j]
        ]
        rows = [stored[i * 48 : i * 48 + 48] for i in range(10)] if pattern == "dense" else [stored]
        assert tensors["weight_packed"].view(len(rows), -1).tolist() == [words(row, bits) for row in rows]
    if not symmetric:
        for g in range(grid.groups(48)):
            column = quantised.scaling.zero[:, g].int().tolist()
            assert tensors["weight_zero_point"][:, g].tolist() == words(column, bits)


BLOCKS = [{"offset": True, "block": 16}, {"symmetric": True, "block": 24}]


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [("dense", {"offset": True}), ("dense", {}), ("2:4", {}), ("row", {}), *(("dense", kind) for kind in BLOCKS)],
)
@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_small_scales_there_and_back(pattern, kind, bits, dtype):
    """Oracles: S itself; and each multiple found by its place, from the words of the format."""
    grid = Grid(3, 8, scale_bits=bits, **kind)
    weight = torch.randn(10, 48, generator=torch.Generator().manual_seed(0))
    if pattern != "dense":
        weight[:, ::2] = 0
    scaling = grid.scaling(weight)
    quantised = Quantised.of(scaling.nearest(weight), scaling, dtype)
    tensors, count = pack_sparse(pattern, quantised.values(), quantised)
    spec = LayerSpec(pattern, (10, 48), 0, count, grid)
    expected = {name: (shape, own or dtype) for name, (shape, own) in spec.tensors().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()} == expected
    assert torch.equal(spec.unpack(tensors), quantised.values())
    numbers = {"weight_scale": scaling.scale} | ({"weight_offset": -scaling.zero} if grid.offset else {})
    for name, values in numbers.items():
        units = tensors[name].float().view(10, -1)
        multiples = values / units.repeat_interleave(6 // units.shape[1], 1) * 2**bits
        if grid.symmetric:  # with a sign
            multiples = multiples / 2 + 2 ** (bits - 1)
        multiples = multiples.round().int()
        assert tensors[f"{name}_packed"].tolist() == [words(row, bits) for row in multiples.tolist()]


def test_bytes_of_a_large_layer_by_hand():
    """4096²: int4 in groups of 64: half a byte a code, two bytes a scale, half a byte a zero; 2:4 half the codes and
    four bits for each group of four."""
    entries, groups = 4096 * 4096, 4096 * 64
    dense = LayerSpec("dense", (4096, 4096), 0, entries, Grid())
    sparse = LayerSpec("2:4", (4096, 4096), 0, entries // 2, Grid(symmetric=True))
    assert dense.bytes(torch.bfloat16) == entries // 2 + groups * 2 + groups // 2
    assert sparse.bytes(torch.bfloat16) == entries // 4 + groups * 2 + entries // 8
    small = LayerSpec("dense", (4096, 4096), 0, entries, Grid(4, 32, offset=True, scale_bits=5))
    assert small.bytes(torch.bfloat16) == entries // 2 + 2 * (entries // 32 * 5 // 8 + 4096 * 2)


@patterns
def test_gradients_reach_the_scales(pattern):
    """Oracle: autograd through the values of the codes."""
    grid = Grid(4, 16)
    sparse, quantised = on_grid(pattern, grid, dtype=torch.float64)
    tensors, count = pack_sparse(pattern, sparse, quantised)
    spec = LayerSpec(pattern, (10, 48), 0, count, grid)
    scale, expected = (quantised.scaling.scale.clone().requires_grad_() for _ in range(2))
    weights = torch.randn(10, 48, dtype=torch.float64)
    (spec.unpack(tensors | {"weight_scale": scale}) * weights).sum().backward()
    (Scaling(grid, expected, quantised.scaling.zero).values(quantised.codes) * weights).sum().backward()
    torch.testing.assert_close(scale.grad, expected.grad)


def test_what_cannot_be_stored():
    with pytest.raises(GridError, match="does not divide the 96 inputs"):
        LayerSpec("dense", (4, 96), 0, 384, Grid()).tensors()
    with pytest.raises(PatternError, match="got 63"):
        LayerSpec("dense", (1, 64), 0, 63, Grid()).tensors()
