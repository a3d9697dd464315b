"""How far correlations are trusted: against an integral, and covariances that were drawn from the prior."""

import math

import pytest
import torch

from hasslefree.core.shrinkage import STRENGTHS, log_likelihoods, shrinkage


def test_the_likelihood_of_one_input_is_an_integral():
    """Oracle: quadrature over the variance s, of a Gaussian sample whose sum of squares is n r, and the inverse Wishart
    density ν^{d/2} s^{−d/2 − 1} e^{−ν/2s} / Γ(d/2) 2^{d/2} with d = ν + 2. Where it is the same is a constant."""
    draws, variance = 7, 2.5
    found = log_likelihoods(torch.tensor([variance], dtype=torch.float64), draws)
    constants = []
    s = torch.logspace(-6, 6, 200_001, dtype=torch.float64)
    for index in (10, 14, 20):  # 10, 25 and 100 draws
        strength = STRENGTHS[index].item()
        half = (strength + 2) / 2

        density = half * math.log(strength / 2) - math.lgamma(half) - (half + 1) * s.log() - strength / (2 * s)
        density = density - draws / 2 * (2 * math.pi * s).log() - draws * variance / (2 * s)
        constants.append(found[index].item() - math.log(torch.trapezoid(density.exp(), s).item()))
    assert constants == pytest.approx([constants[0]] * 3, abs=1e-6)


@pytest.mark.parametrize("tokens", [100, 1000])
@pytest.mark.parametrize("strength", [20.0, 200.0])
def test_it_finds_how_strong_the_prior_is(strength, tokens, monkeypatch):
    """Oracle: covariances drawn from the inverse Wishart distribution of a known strength, and draws from these."""
    monkeypatch.setattr("hasslefree.core.shrinkage.TOKENS_A_DRAW", 1)
    generator = torch.Generator().manual_seed(0)
    width, logarithms = 48, []
    for _ in range(8):
        freedom = round(strength) + width + 1
        wishart = torch.randn(freedom, width, dtype=torch.float64, generator=generator) / math.sqrt(strength)
        covariance = torch.linalg.inv(wishart.T @ wishart)
        factor = torch.linalg.cholesky(covariance)
        draws = torch.randn(tokens, width, dtype=torch.float64, generator=generator) @ factor.T
        found = shrinkage(draws.T @ draws / tokens, tokens)
        logarithms.append(math.log(found / (1 - found) * tokens))
    assert sum(logarithms) / 8 == pytest.approx(math.log(strength), abs=0.35)


def test_what_is_known_or_alone_does_not_shrink():
    assert shrinkage(torch.eye(8), 0) == 0
    assert shrinkage(torch.ones(1, 1), 5) == 0


def test_units_and_dead_inputs_do_not_matter():
    x = torch.randn(40, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scales = torch.logspace(-3, 3, 24, dtype=torch.float64)
    moment = x.T @ x / 40
    dead = torch.block_diag(moment, torch.zeros(3, 3))
    assert shrinkage(dead, 40) == shrinkage(moment, 40)
    assert shrinkage(moment * torch.outer(scales, scales), 40) == pytest.approx(shrinkage(moment, 40), rel=1e-9)
