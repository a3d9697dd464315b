"""Factors in eight bits: against rounding written out by number, least squares and the bound of nearest planes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasslefree
from hasslefree import Gram, LowRank
from hasslefree.core.factors import factor_tensors, hartley, nearest, quantised, swept
from hasslefree.packed.spec import LayerSpec
from tests import oracles

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
sizes = st.sampled_from([1e-12, 1e-3, 1.0, 1e4])


def drawn(rows, columns, seed, size=1.0):
    """A matrix in float64 whose rows differ much in size."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return size * matrix * 4.0 ** torch.randint(-2, 3, (rows, 1), generator=generator)


def problem(out, width, rank, seed, dtype=torch.float64):
    """W, S, H and an L of which W − S is an approximation."""
    weight, h = oracles.problem(out, width, seed=seed, dtype=dtype)
    sparse = weight * (torch.arange(width) % 3 == seed % 3)
    u, s, v = torch.linalg.svd(weight - sparse, full_matrices=False)
    return weight, sparse, h, LowRank(u[:, :rank] * s[:rank], v[:rank])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25)
@given(st.integers(0, 999), sizes, st.integers(1, 5), st.integers(1, 9))
def test_the_codes_of_a_row_are_those_of_its_definition(dtype, seed, size, rows, columns):
    """Oracle: the scale and each code in Python's own numbers; half a step, and the rounding to the dtype."""
    matrix = drawn(rows, columns, seed, min(size, 100) if dtype == torch.float16 else size)
    coded = nearest(matrix, dtype)
    assert (coded.codes.dtype, coded.scale.dtype, coded.values().dtype) == (torch.int8, dtype, dtype)
    for i, row in enumerate(matrix.tolist()):
        largest, scale = max(map(abs, row)), float(coded.scale[i])
        assert scale == float(torch.tensor(scale, dtype=torch.float64).bfloat16()), "more than eight bits"
        least = 2.0**-17 if dtype == torch.float16 else 0.0
        assert scale == pytest.approx(max(largest / 127, least), rel=2**-8)
        for code, entry, value in zip(coded.codes[i].tolist(), row, coded.values()[i].tolist(), strict=True):
            assert code == max(-127, min(127, round(entry / scale)))
            assert abs(value - entry) <= 0.51 * scale + float(torch.finfo(dtype).eps) * abs(entry)


@settings(max_examples=15)
@given(st.integers(0, 999), st.integers(-8, 8), st.integers(-8, 8), st.integers(-8, 8))
def test_factors_follow_the_scales_of_weight_inputs_and_their_own(seed, of_weight, of_h, between):
    """Oracle: the factors of the problem as it was; 4ᵏ W has 2ᵏ of it in each factor."""
    weight, sparse, h, low_rank = problem(10, 8, 3, seed)
    one = quantised(low_rank, weight, sparse, Gram(h, 1), torch.float64)
    changed = LowRank(low_rank.u * 4.0 ** (of_weight + between), low_rank.v * 4.0**-between)
    larger = [part * 4.0**of_weight for part in (weight, sparse)]
    other = quantised(changed, *larger, Gram(h * 2.0**of_h, 1), torch.float64)
    for mine, its in ((one.u, other.u), (one.v, other.v)):
        assert torch.equal(mine.codes, its.codes)
        assert torch.equal(mine.scale * 2.0**of_weight, its.scale)


@settings(max_examples=25)
@given(st.integers(0, 999), st.integers(1, 6))
def test_the_sweep_keeps_to_the_bound_of_nearest_planes(seed, rank):
    """Oracle: Σ s²·C_kk²/4 for each row, of Babai's nearest plane (1986), where no code is at its end; and rounding
    to nearest, everywhere. In float64."""
    u, basis = drawn(6, rank, seed), drawn(rank, rank + 2, seed + 1)
    norm = basis @ basis.T
    found, plain = swept(u, norm, torch.float64), nearest(u, torch.float64)
    apart, apart_plain = (
        torch.stack([row @ norm @ row for row in u - coded.values()]) for coded in (found, plain)
    )  # fmt: skip
    assert torch.equal(found.scale, plain.scale)
    assert (apart <= apart_plain * (1 + 1e-9)).all()
    assert int(found.codes.min()) >= -127
    bound = found.scale.square() / 4 * torch.linalg.cholesky(norm).diagonal().square().sum()
    inside = found.codes.abs().amax(1) < 127
    assert (apart <= bound * (1 + 1e-9))[inside].all()


@settings(max_examples=25)
@given(st.integers(0, 999), st.sampled_from([(12, 10, 1), (12, 10, 4), (6, 16, 5), (20, 9, 6)]))
def test_no_more_is_lost_than_by_the_best_u_for_that_v_and_half_a_step(seed, shape):
    """Oracle: least squares in float64 for u given the v that was stored, with H = F Fᵀ; Pythagoras for the rest."""
    weight, sparse, h, low_rank = problem(*shape, seed)
    coded = quantised(low_rank, weight, sparse, Gram(h, 1), torch.float64)
    root, v, target = torch.linalg.cholesky(h), coded.v.values(), weight - sparse
    best = torch.linalg.lstsq((v @ root).T, (target @ root).T).solution.T
    least = oracles.loss(target - best @ v, h)
    floor = torch.linalg.cholesky(v @ h @ v.T).diagonal().square().sum()
    ends = coded.u.codes.abs().amax(1) == 127  # there nearest planes is not all: rounding to nearest bounds it
    widths = torch.where(ends, v.shape[0] * torch.linalg.eigvalsh(v @ h @ v.T)[-1], floor)
    bound = least + float((coded.u.scale.square() / 4 * widths).sum())
    assert oracles.loss(target - coded.values().product(), h) <= bound * (1 + 1e-4)


@settings(max_examples=25)
@given(st.integers(0, 999), st.sampled_from(DTYPES), st.sets(st.integers(0, 3)), st.booleans())
def test_what_is_nothing_stays_nothing(seed, dtype, vanished, silent):
    """Components, rows and inputs of zeros, all of them, and a Gram that says nothing."""
    weight, sparse, h, low_rank = problem(9, 12, 4, seed, torch.float32)
    low_rank.u[:, list(vanished)] = 0
    low_rank.v[:, 5], h[5], h[:, 5] = 0, 0, 0
    weight[3], sparse[3], low_rank.u[3] = 0, 0, 0
    coded = quantised(low_rank, weight, sparse, Gram(h * (not silent), 1), dtype)
    for rows in (coded.u, coded.v):
        assert int(rows.codes.abs().max()) <= 127
        assert int(rows.codes.min()) >= -127
        assert (rows.scale > 0).all()
        assert torch.isfinite(rows.values()).all()
    assert not coded.v.codes[:, 5].any()
    assert not coded.u.codes[3].any()
    if len(vanished) == 4:
        assert not coded.values().product().any()


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1e-2), (torch.bfloat16, 1e-4)])
def test_a_rank_above_that_of_the_weight_costs_nothing(dtype, size):
    """Equal rows, so that seven of eight components are zero. Oracle: factors in the dtype of the weight."""
    generator = torch.Generator().manual_seed(0)
    weight = (0.02 * torch.randn(1, 32, generator=generator)).expand(64, 32).to(dtype)
    gram = Gram.from_activations(size * torch.randn(256, 32, generator=generator))
    coded = hasslefree.decompose(weight, gram, "2:4", 8, method="eora", factor_bits=8)
    plain = hasslefree.decompose(weight, gram, "2:4", 8, method="eora")
    assert coded.relative_error <= plain.relative_error + 1e-3


@pytest.mark.parametrize("rank", [1, 2, 5, 8, 33])
def test_the_mixing_is_hartleys_and_its_own_inverse(rank):
    """Oracle: Re − Im of the discrete Fourier transform."""
    mixing = hartley(rank, torch.device("cpu"))
    transform = torch.fft.fft(torch.eye(rank, dtype=torch.float64)) / math.sqrt(rank)
    torch.testing.assert_close(mixing, transform.real - transform.imag)
    torch.testing.assert_close(mixing @ mixing, torch.eye(rank, dtype=torch.float64))


def test_bytes_by_hand():
    """4096 × 11008, rank 64: a byte an entry, two for the scale of each of 4096 + 64 rows; two an entry without."""
    entries = 64 * (4096 + 11008)

    def taken(rank, bits):
        spec = LayerSpec("structured", (4096, 11008), rank, 0, factor_bits=bits)
        return spec.bytes(torch.bfloat16)

    assert taken(64, 8) == entries + 2 * (4096 + 64)
    assert taken(64, None) == 2 * entries
    assert taken(0, 8) == 0
    assert factor_tensors(4, 6, 0, 8) == {}
