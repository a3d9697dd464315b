"""Shrinkage of the correlations between inputs that were measured on few tokens.

The inputs are modelled as draws from a Gaussian. The prior of its covariance, in units of the
standard deviations, is an inverse Wishart distribution around I that is worth ν draws. Given n
draws with the correlations R, the posterior mean is (n R + ν I) / (n + ν): R with its correlations
shrunk by α = ν / (n + ν). ν is chosen to maximise the likelihood of R (empirical Bayes: Haff, Ann.
Stat. 8, 1980; Chen, J. R. Stat. Soc. B 41, 1979). A block of R has the same ν, so a sample of the
inputs is enough.
"""

import torch
from torch import Tensor

# Number of inputs in the sample.
INPUTS = 256
# The values of ν that are tried.
STRENGTHS = torch.logspace(0, 6, 61, dtype=torch.float64)
# Tokens of a text resemble each other: this number counts as one draw. It was measured on other
# text, with quantised layers (benchmarks/shrinkage.py).
TOKENS_A_DRAW = 4


def shrinkage(matrix: Tensor, tokens: int) -> float:
    """Return α, from 0 to 1.

    Args:
        matrix: the second moment of the inputs, (in, in). Inputs that are always zero are ignored.
        tokens: the number of tokens that were averaged; 0 if the matrix is exact.
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
    """Return the log-likelihood of n R for each of `STRENGTHS`, up to a constant.

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
