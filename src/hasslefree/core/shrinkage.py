"""How far the correlations between inputs, as some tokens show them, are to be trusted.

The inputs are taken as draws from a Gaussian, and their covariance, in units of their standard
deviations, as a draw from an inverse Wishart distribution around I, which is worth ν draws. The
mean of the covariance given n draws with the correlations R is then (n R + ν I) / (n + ν), that is,
R with its correlations shrunk by α = ν / (n + ν). ν is the one with which the R that was seen is
most likely (empirical Bayes: Haff, Ann. Stat. 8, 1980; Chen, J. R. Stat. Soc. B 41, 1979). A block
of R has the same ν, so that some inputs stand for all.
"""

import torch
from torch import Tensor

# Inputs that stand for all.
INPUTS = 256
# The values of ν among which the likeliest is found.
STRENGTHS = torch.logspace(0, 6, 61, dtype=torch.float64)
# Tokens of a text resemble each other: so many count as one draw, as layers that were rounded show
# on other text (benchmarks/shrinkage.py).
TOKENS_A_DRAW = 4


def shrinkage(matrix: Tensor, tokens: int) -> float:
    """α, from 0 to 1.

    Args:
        matrix: the second moment of the inputs, (in, in). Inputs that are always zero do not count.
        tokens: those that it is the mean of; 0 if it is known.
    """
    alive = matrix.diagonal().nonzero().flatten()
    width = len(alive)
    if not tokens or width < 2:
        return 0.0
    chosen = alive[torch.linspace(0, width - 1, min(width, INPUTS)).long().to(alive.device)]
    block = matrix[chosen][:, chosen].cpu().double()
    scale = block.diagonal().rsqrt()
    correlations = block * torch.outer(scale, scale)
    likelihoods = log_likelihoods(torch.linalg.eigvalsh(correlations).clamp_min(0), tokens)
    strength = TOKENS_A_DRAW * STRENGTHS[likelihoods.argmax()].item()
    return strength / (tokens + strength)


def log_likelihoods(eigenvalues: Tensor, draws: int) -> Tensor:
    """The logarithm of the likelihood of n R for each of `STRENGTHS`, but for a constant.

    With Ψ = ν I and d = ν + m + 1 degrees of freedom, it is

        d/2 log|Ψ| − (d + n)/2 log|Ψ + n R| + log Γ_m((d + n)/2) − log Γ_m(d/2)

    Args:
        eigenvalues: of R, (m,), float64.
        draws: n.
    """
    width = len(eigenvalues)
    freedom = STRENGTHS + width + 1
    prior = width * STRENGTHS.log()
    posterior = (STRENGTHS.unsqueeze(1) + draws * eigenvalues).log().sum(1)
    gammas = torch.mvlgamma((freedom + draws) / 2, width) - torch.mvlgamma(freedom / 2, width)
    return freedom / 2 * prior - (freedom + draws) / 2 * posterior + gammas
