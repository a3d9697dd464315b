"""Grids: against their definition written out, in float64, and brute force."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree import Grid
from hasslefree.core.grids import Quantised, Scaling
from hasslefree.core.patterns import Row, SemiStructured, Unstructured
from hasslefree.errors import GridError
from tests import oracles

GRIDS = [
    Grid(bits, group, kind == "symmetric", offset=kind == "offset")
    for bits in (2, 3, 4, 5, 6, 8)
    for group in (8, None)
    for kind in ("whole", "symmetric", "offset")
]
grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


def group_of(grid, width):
    return grid.group or width


def value_of(grid, code, scale, zero):
    return code * scale + zero if grid.offset else (code - zero) * scale


@grids
@settings(max_examples=15)
@given(st.integers(0, 999), st.sampled_from([1e-20, 1e-3, 1.0, 1e10]))
def test_the_grid_of_a_group_is_that_of_its_definition(grid, seed, size):
    """Oracle: GPTQ's rule for one group at a time; scales to the eight bits of bfloat16, or float16's least number."""
    weight = oracles.problem(3, 16, seed=seed)[0] * size
    scaling, step = grid.scaling(weight), group_of(grid, 16)
    near = {"rel": 2**-8, "abs": 2**-24 if size > 1e-9 else 0}
    for (i, g), scale in [((i, g), float(scaling.scale[i, g])) for i in range(3) for g in range(16 // step)]:
        entries = weight[i, g * step : (g + 1) * step].tolist()
        low, high = (min(entries), max(entries)) if grid.offset else (min(0.0, *entries), max(0.0, *entries))
        if grid.symmetric:
            low, high = -max(high, -low), max(high, -low)
        assert scale == pytest.approx((high - low) / grid.top, **near)
        assert scale == float(torch.tensor(scale).bfloat16())
        if grid.offset:
            assert float(scaling.zero[i, g]) == pytest.approx((low + high - grid.top * scale) / 2, **near)
            continue
        zero = (grid.top + 1) // 2 if grid.symmetric else min(max(round(-low / scale), 0), grid.top)
        assert abs(float(scaling.zero[i, g]) - zero) <= (abs(-low / scale % 1 - 0.5) < 1e-4)


@grids
@settings(max_examples=15)
@given(st.integers(0, 999))
def test_nearest_is_nearest(grid, seed):
    """Oracle: the distances to all values of the grid, in float64."""
    weight = oracles.problem(2, 16, seed=seed)[0]
    scaling = grid.scaling(weight)
    rounded, codes = scaling.nearest(weight).double(), scaling.codes(weight).long()
    step = group_of(grid, 16)
    scale, zero = (part.double().repeat_interleave(step, 1)[..., None] for part in (scaling.scale, scaling.zero))
    values = value_of(grid, torch.arange(grid.top + 1), scale, zero)
    least = (values - weight.double()[..., None]).abs().amin(-1)
    near = 1e-6 * scale[..., 0]
    assert (((rounded - weight).abs() - least).abs() <= near).all()
    of_codes = values.gather(-1, codes[..., None])[..., 0]
    assert ((rounded - of_codes).abs() <= near + 1e-6 * grid.offset * of_codes.abs()).all()


@grids
@settings(max_examples=15)
@given(st.integers(0, 999), st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
def test_codes_come_back_from_values_in_every_dtype(grid, seed, dtype):
    """Every code once in each group: also the largest, where rounding to the dtype moves the value by most."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(3, 2, generator=generator).bfloat16().float() + 2**-5
    zero = torch.full((3, 2), float(torch.randint(grid.top + 1, (1,), generator=generator)))
    zero = zero * -0.25 if grid.offset else zero
    scaling = Scaling(grid, scale.bfloat16().float(), zero)
    codes = torch.arange(grid.top + 1).repeat(3, 2)
    values = scaling.values(codes)
    wide = (part.double().repeat_interleave(grid.top + 1, 1) for part in (scaling.scale, zero))
    torch.testing.assert_close(values.double(), value_of(grid, codes, *wide), rtol=3e-7, atol=3e-7 * grid.offset)
    assert torch.equal(scaling.nearest(values), values)
    stored = Quantised.of(values, scaling, dtype)
    assert torch.equal(stored.codes, codes.to(torch.uint8))
    rounding = 0 if dtype in (torch.float32, torch.float64) else torch.finfo(dtype).eps
    torch.testing.assert_close(stored.values(), values.to(dtype), rtol=rounding, atol=0)


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if not grid.offset], ids=str)
def test_zero_is_on_every_grid_without_offsets(grid):
    weight = oracles.problem(4, 16)[0].abs() + 3  # zero is not among the entries, nor between them
    for sign in (1, -1):
        scaling = grid.scaling(weight * sign)
        assert not scaling.nearest(torch.zeros(4, 16)).any()
        step = scaling.scale.repeat_interleave(group_of(grid, 16), 1)
        reach = 1.02 if grid.bits == 2 and grid.symmetric else 0.52  # codes from −2 to 1 for −1.5 to 1.5 steps
        assert ((scaling.nearest(weight * sign) - weight * sign).abs() < reach * step + 2**-8 * weight).all()
        assert (scaling.zero >= 0).all()
        assert (scaling.zero <= grid.top).all()


@grids
def test_a_group_of_zeros_stays_one(grid):
    weight = torch.zeros(2, 16)
    assert not grid.scaling(weight).nearest(weight).any()
    assert grid.scaling(torch.full((2, 16), 1e-45)).nearest(torch.zeros(2, 16)).isfinite().all()


@grids
@settings(max_examples=3)
@given(st.integers(0, 99))
def test_the_search_takes_the_best_of_its_ranges(grid, seed):
    """Oracle: every range by itself, its end points written out; an outlier makes the narrower ones worth it."""
    weight = oracles.problem(3, 16, seed=seed, dtype=torch.float64)[0]
    weight[0, 3] = 9.0
    parts = weight.unflatten(1, (grid.groups(16), -1))
    equal = torch.ones(parts.shape[-1], dtype=torch.float64)
    found = (grid.search(parts, 40, equal).nearest(parts) - parts).square()
    best = torch.full(parts.shape[:2], torch.inf, dtype=torch.float64)
    for step in range(40):
        high, low = parts.amax(-1), parts.amin(-1)
        if not grid.offset:
            high, low = high.clamp_min(0), low.clamp_max(0)
        if grid.symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scale = ((high - low) * (1 - step / 50) / grid.top).bfloat16().double()
        zero = torch.full_like(scale, (grid.top + 1) // 2)
        if not grid.symmetric:
            zero = (-low * (1 - step / 50) / scale).round().clamp(0, grid.top)
        candidates = (torch.arange(grid.top + 1) - zero[..., None]) * scale[..., None]
        if grid.offset:
            offset = ((low + high - grid.top * scale) / 2).bfloat16().double()
            candidates = torch.arange(grid.top + 1) * scale[..., None] + offset[..., None]
        distances = (parts[..., None] - candidates[:, :, None]).square().amin(-1)
        best = torch.minimum(best, distances.sum(-1))
    torch.testing.assert_close(found.sum(-1), best)
    assert found.sum() <= (grid.scaling(weight).nearest(weight) - weight).square().sum()


def half(weight):
    return Quantised.of(weight, Grid(group=None).scaling(weight), torch.float16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(bits=7), "bits must be one of 2, 3, 4, 5, 6, 8, got 7; use bits=6 or bits=8"),
        (lambda: Grid(symmetric=True, offset=True), "a symmetric grid has no offset"),
        (
            lambda: Grid(group=8, offset=True).check((4, 32), SemiStructured(2, 4)),
            "pattern 2:4 prunes entries, and a grid with offsets need not have the value zero",
        ),
        (
            lambda: Grid(group=8, offset=True).check((4, 32), Unstructured(128)),
            "pattern unstructured .*prunes entries, and a grid with offsets need not have the value zero",
        ),
        (lambda: Grid.entropy_coded(4).check((4, 32), Row(32)), "prunes entries, and an entropy-coded grid keeps"),
        (lambda: Grid(group=0), "group must be at least 1, got 0"),
        (lambda: Grid(bits="x"), "bits must be a valid integer"),
        (
            lambda: Grid().scaling(torch.ones(2, 96)),
            "does not divide the 96 inputs of the layer; use group_size=32, or group_size=0",
        ),
        (lambda: Grid().check((4, 33)), "the 33 inputs of the layer; use group_size=0 for one scale per row"),
        (lambda: half(torch.full((1, 8), 1e-9)), "overflows or underflows float16; use another dtype"),
    ],
)
def test_wrong_grids(make, message):
    with pytest.raises(GridError, match=message):
        make()
    Grid(group=None).check((4, 33))
