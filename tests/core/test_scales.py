"""Scales and offsets as multiples of units: against their definition, over all multiples in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Grid
from hasslefree.core.grids import Quantised
from hasslefree.core.scales import SCALE_BITS, Multiples
from hasslefree.errors import GridError
from tests import oracles

KINDS = {"whole": {}, "symmetric": {"symmetric": True}, "offset": {"offset": True}}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
bits_of_scales = pytest.mark.parametrize("bits", SCALE_BITS)


@bits_of_scales
@pytest.mark.parametrize("blocks", [None, 5])
@settings(max_examples=20)
@given(st.integers(0, 999), st.sampled_from([1e-20, 1e-3, 1.0, 1e10]))
def test_numbers_become_the_nearest_multiples_of_units_of_their_row_or_block(bits, blocks, seed, size):
    """Oracle: every multiple of each row, in float64; and of blocks of one group, in float16's range."""
    size = size if blocks is None else 1.0
    generator = torch.Generator().manual_seed(seed)
    scale, offset = (torch.rand(2, 3, 5, generator=generator) * size).unbind()
    units = Multiples.covering(bits, scale, -offset, blocks)
    for found, wanted, unit, sign, least in (
        (units.scales(scale), scale, units.scale_unit, 1, 1),
        (units.offsets(-offset), -offset, units.offset_unit, -1, 0),
    ):
        assert torch.equal(unit, unit.bfloat16().float())
        step = unit.double().expand(3, 5) / 2**bits
        assert blocks is None or torch.equal(step, step.half().double())
        size_of_block = wanted.double().abs() if blocks else wanted.double().abs().amax(1, keepdim=True).expand(3, 5)
        near = {"rtol": 2**-8, "atol": 2**-24 * (2**bits - 1)}
        torch.testing.assert_close(step * (2**bits - 1), size_of_block, **near)
        multiples = sign * torch.arange(least, 2**bits) * step[..., None]
        nearest = (multiples - wanted.double()[..., None]).abs().amin(-1)
        found = found.double()
        assert (((found - wanted).abs() - nearest).abs() <= 1e-5 * nearest + 1e-6 * step).all()
        torch.testing.assert_close((found / step).round() * step, found, rtol=1e-6, atol=0)


@bits_of_scales
def test_scales_with_a_sign_are_every_multiple_but_zero(bits):
    """Oracle: all of them; one of them is exact, and zero becomes one step."""
    wanted = torch.tensor([[3.0, -3.0, 1.0, -0.4, 0.0]])
    units = Multiples.covering(bits, wanted, None, 1, signed=True)
    step = float(units.scale_unit) / 2 ** (bits - 1)
    held = [k * step for k in range(-(2 ** (bits - 1)), 2 ** (bits - 1)) if k]
    for number, found in zip(wanted[0].tolist(), units.scales(wanted)[0].tolist(), strict=True):
        assert min(abs(found - other) for other in held) < 1e-6
        assert abs(found - number) <= min(abs(number - other) for other in held) + 1e-6
    assert 0 < units.scales(wanted)[0, 4] <= step


@kinds
@bits_of_scales
@pytest.mark.parametrize("block", [None, 16])
@settings(max_examples=10)
@given(st.integers(0, 99), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
def test_codes_come_back_from_values_in_every_dtype(kind, bits, block, seed, dtype):
    """Oracle: (code − zero)·k·unit / 2^b, or code·k·unit / 2^b − m·unit' / 2^b, in float64."""
    grid = Grid(4, 8, scale_bits=bits, block=block, **kind)
    weight = oracles.problem(3, 32, seed=seed)[0]
    weight[0] = 0
    scaling = grid.scaling(weight)
    values = scaling.nearest(weight)
    assert torch.equal(scaling.nearest(values), values)
    stored = Quantised.of(values, scaling, dtype)
    units, codes = stored.scaling.storage, stored.codes.double().unflatten(1, (4, 8))
    times = 4 if block is None else 2
    scale_bits = bits - 1 if block and grid.symmetric else bits
    scale = units.scale_multiples(scaling.scale) / 2**scale_bits
    scale = scale * units.scale_unit.double().repeat_interleave(times, 1)
    expected = (codes - scaling.zero.double()[..., None]) * scale[..., None]
    if grid.offset:
        zero = units.offset_multiples(scaling.zero) / 2**bits
        zero = zero * units.offset_unit.double().repeat_interleave(times, 1)
        expected = codes * scale[..., None] - zero[..., None]
    torch.testing.assert_close(values.double(), expected.flatten(1), rtol=3e-7, atol=1e-6)
    assert torch.equal(stored.values(), values.to(dtype))
    assert stored.values().dtype == dtype


@kinds
@pytest.mark.parametrize("form", [{}, {"scale_bits": 5}, {"scale_bits": 6, "block": 32}], ids=str)
@pytest.mark.parametrize("size", [3e-4, 1e-6, 1e-9])
def test_small_rows_of_a_matrix_have_scales_that_float16_holds(kind, form, size):
    """Oracle: conversion to float16 and back. Near zero, the 256 codes are multiples of float16's least number."""
    grid = Grid(8, 16, **kind, **form)
    weight = oracles.problem(4, 64)[0]
    weight[1] *= size / weight[1].abs().max()
    scaling = grid.scaling(weight)
    quantised = Quantised.of(scaling.nearest(weight), scaling, torch.float16)
    numbers = scaling.storage.scale_unit if form else scaling.scale
    assert torch.equal(numbers.half().float(), numbers)
    error = (quantised.values().double() - weight.double())[1].abs().max()
    assert error <= size / 5 + 128 * 2**-24


def test_a_matrix_of_small_numbers_alone_keeps_its_precision():
    """Float16 would make zeros of them. Oracle: half a step of the grid."""
    weight = oracles.problem(4, 64)[0]
    weight *= 1e-9 / weight.abs().max()
    error = (Grid(8, 16, offset=True).scaling(weight).nearest(weight) - weight).abs().max()
    assert error <= 1e-9 / 255 * 1.02


def test_a_sign_of_the_scale_lets_the_codes_reach_further():
    """Oracle: the same grid without it, whose codes cover the largest entry and its opposite: 7/8 of the step."""
    weight = oracles.problem(32, 256)[0]
    errors = [
        (grid.scaling(weight).nearest(weight) - weight).square().sum()
        for grid in (Grid(3, 16, symmetric=True, scale_bits=8, block=256), Grid(3, 16, symmetric=True, scale_bits=8))
    ]
    assert errors[0] < 0.85 * errors[1]


def test_small_groups_with_few_bits_of_scale_fit_better_in_the_same_bytes():
    """3 bits in groups of 16 with scales of 4 bits take what groups of 64 with floats take: 3.5 bits per weight."""
    weight = oracles.problem(32, 256)[0]
    errors = [
        (grid.scaling(weight).nearest(weight) - weight).square().sum()
        for grid in (Grid(3, 16, offset=True, scale_bits=4), Grid(3, 64, offset=True))
    ]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Grid(scale_bits=7),
            "scale_bits must be one of 3, 4, 5, 6, 8, got 7; use scale_bits=6 or scale_bits=8",
        ),
        (lambda: Grid(group=64, scale_bits=4, block=96), "a block of 96 inputs needs scale_bits, and groups that div"),
        (lambda: Grid(block=64), "a block of 64 inputs needs scale_bits"),
        (lambda: Grid(group=16, scale_bits=4, block=32).check((1, 48)), "blocks of 32 do not divide the 48 inputs"),
        (lambda: Grid(group=None, scale_bits=4), "one scale per row; use groups .group_size=32., or leave out"),
        (
            lambda: Quantised.of(tiny := torch.full((1, 8), 1e-9), Grid(4, 4, scale_bits=4).scaling(tiny), torch.half),
            "overflows or underflows float16; use another dtype",
        ),
    ],
)
def test_what_scales_cannot_be(make, message):
    with pytest.raises(GridError, match=message):
        make()
