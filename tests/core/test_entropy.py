"""Entropy coding of codes: against the length that their probabilities allow, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasslefree.core import coder, entropy
from hasslefree.errors import GridError


def gaussian(out: int, width: int, deviation: float, seed: int = 0) -> torch.Tensor:
    """Codes of rounded Gaussian numbers, whose rows and columns differ in their deviation by up to 4 and 16."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 ** torch.linspace(-1, 1, out).view(-1, 1)
    columns = 2 ** torch.linspace(-2, 2, width)
    steps = deviation * rows * columns * torch.randn(out, width, generator=generator)
    return (steps.round() + 128).clamp(0, 255).to(torch.uint8)


def decoded(stream: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return entropy.decode(stream, tuple(codes.shape))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([0.0, 0.01, 0.5, 4.0, 30.0, 1000.0]), st.integers(0, 99))
def test_codes_come_back(out, width, deviation, seed):
    codes = gaussian(out, width, deviation, seed)
    stream = entropy.encode(codes)
    assert stream.dtype == torch.int32
    assert torch.equal(decoded(stream, codes), codes)
    longer = entropy.encode(codes, len(stream) + 7)
    assert len(longer) == len(stream) + 7
    assert torch.equal(decoded(longer, codes), codes)


def test_every_code_has_a_place():
    """Also those that the deviation of their row and column makes improbable."""
    codes = torch.full((64, 256), 128, dtype=torch.uint8)
    codes[0] = torch.arange(256)
    assert torch.equal(decoded(entropy.encode(codes), codes), codes)


def test_parts_of_a_matrix_are_coded_one_after_the_other(monkeypatch):
    codes = gaussian(50, 24, 3.0)
    whole = entropy.measured(codes.numpy())
    monkeypatch.setattr(entropy, "CHUNK", 24 * 8)
    assert torch.equal(decoded(entropy.encode(codes), codes), codes)
    for numbers, before in zip(entropy.measured(codes.numpy()), whole, strict=True):
        assert numbers.values.tolist() == before.values.tolist()


@pytest.mark.parametrize("deviation", [0.3, 1.0, 5.0])
def test_the_length_is_that_of_the_probabilities(deviation):
    """Oracle: −log₂ of the Gaussian mass of each code, one by one, with deviations from the codes themselves.

    Rows and columns take at most 5 bits each, and deviations in steps of an eighth of an octave 0.005 bits a code.
    """
    codes = gaussian(96, 128, deviation)
    steps = codes.double() - 128
    columns = steps.square().mean(0).sqrt().clamp_min(0.125)
    rows = (steps / columns).square().mean(1).sqrt()
    total = 0.0
    for i in range(96):
        for j in range(128):
            scale = math.sqrt(2) * max(float(rows[i] * columns[j]), 0.125)
            step = float(steps[i, j])
            mass = (math.erf((step + 0.5) / scale) - math.erf((step - 0.5) / scale)) / 2
            total -= math.log2(max(mass, 2.0**-20))
    length = 32 * len(entropy.encode(codes))
    assert total * 0.995 < length < total + 0.005 * codes.numel() + 5 * (96 + 128) + 96


def test_probabilities_sum_to_1_and_are_those_of_the_deviation():
    """Oracle: the rounded numbers of many draws."""
    draws = np.random.default_rng(0).normal(size=400_000)
    for index in (24, 40):  # deviations of 1 and 4
        steps = np.rint(draws * 2 ** (index / 8 - 3))
        codes = torch.from_numpy((steps + 128).astype(np.uint8)).view(-1, 400)
        counts = np.unique(steps, return_counts=True)[1] / steps.size
        bits = 32 * len(entropy.encode(codes)) / codes.numel()
        assert bits == pytest.approx(-(counts * np.log2(counts)).sum(), abs=0.02)


def test_a_stream_that_is_too_short_is_refused():
    codes = gaussian(32, 32, 3.0)
    needed = len(entropy.encode(codes))
    with pytest.raises(GridError, match=rf"take {32 * needed} bits, and there is room for {32 * needed - 32}; give"):
        entropy.encode(codes, needed - 1)


def test_a_stream_without_a_state_is_refused():
    with pytest.raises(GridError, match="the entropy-coded codes of a layer of 8 × 8 are damaged"):
        entropy.decode(torch.zeros(40, dtype=torch.int32), (8, 8))


@pytest.mark.parametrize("numba", [True, False])
def test_a_damaged_stream_is_refused(numba, monkeypatch):
    """A bit of any word that is not the last one's, and a missing word."""
    monkeypatch.setattr(coder, "HAS_NUMBA", numba and coder.HAS_NUMBA)
    codes = gaussian(16, 24, 3.0)
    stream = entropy.encode(codes, len(entropy.encode(codes)) + 2)
    for at in range(len(stream) - 1):
        wrong = stream.clone()
        wrong[at] ^= 1 << 9
        with pytest.raises(GridError, match="are damaged: .* stack does not end where it began; copy or download"):
            decoded(wrong, codes)
    with pytest.raises(GridError, match="are damaged"):
        decoded(torch.cat([stream[:9], stream[10:]]), codes)
