"""Slow float64 definitions that the solvers are compared with. Nothing here is shared with the code under test."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

# Tokens of a Gram whose correlations are all trusted.
MANY = 10**12


def problem(out: int, width: int, tokens: int = 0, seed: int = 0, dtype: torch.dtype = torch.float32):
    """A weight (out, width) and the second moment of correlated inputs with a power-law spectrum and outliers."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    spectrum = torch.arange(1, width + 1, dtype=torch.float64) ** -0.5
    x = torch.randn(tokens or 4 * width, width, generator=generator, dtype=torch.float64) * spectrum @ mixing
    x[:, ::7] *= 5
    weight = torch.randn(out, width, generator=generator, dtype=torch.float64)
    return weight.to(dtype), (x.T @ x / len(x)).to(dtype)


def mean_of(h: Tensor) -> Tensor:
    """A mean that inputs with the second moment h may have: H − μμᵀ ⪰ H/2, all inputs pulling one way."""
    total = h.double().sum(1)
    return (total * (0.5 / total.sum().clamp_min(1e-300)).sqrt()).to(h.dtype)


def loss(residual: Tensor, h: Tensor) -> float:
    """tr(R H Rᵀ), term by term."""
    r, h = residual.double(), h.double()
    return sum(float(row @ h @ row) for row in r)


def best_support(row: Tensor, weights: Tensor, kept: int) -> float:
    """The least Σ weights·(row − s)² over all supports of `kept` entries, by trying every one."""
    row, weights = row.double(), weights.double()
    energies = (row.square() * weights).tolist()
    return min(
        sum(e for i, e in enumerate(energies) if i not in support)
        for support in itertools.combinations(range(len(energies)), kept)
    )


def obs_semi_structured(weight: Tensor, h: Tensor, n: int, m: int) -> Tensor:
    """SparseGPT's sweep for N:M with an explicit inverse of the remaining Hessian at every column."""
    w, h = weight.double().clone(), h.double()
    width = w.shape[1]
    pivot = [float(torch.linalg.inv(h[j:, j:])[0, 0]) for j in range(width)]
    keep = torch.zeros_like(w, dtype=torch.bool)
    for j in range(width):
        if j % m == 0:
            for i in range(len(w)):
                scores = [float(w[i, j + k]) ** 2 / pivot[j + k] for k in range(m)]
                for k in sorted(range(m), key=lambda k: -scores[k])[:n]:
                    keep[i, j + k] = True
        inverse = torch.linalg.inv(h[j:, j:])
        for i in range(len(w)):
            if not keep[i, j]:
                w[i, j:] -= w[i, j] / inverse[0, 0] * inverse[0]
                w[i, j] = 0.0
    return w


def rounded(entries: list[float], bits: int, symmetric: bool, of: list[float]) -> list[float]:
    """Entries rounded to GPTQ's grid for the entries `of`, one number at a time; the scale has bfloat16's bits."""
    low, high, top = min(0.0, *of), max(0.0, *of), 2**bits - 1
    if symmetric:
        low, high = -max(high, -low), max(high, -low)
    scale = float(torch.tensor((high - low) / top, dtype=torch.float64).bfloat16()) or 1.0
    zero = (top + 1) // 2 if symmetric else min(max(round(-low / scale), 0), top)
    return [(min(max(round(entry / scale) + zero, 0), top) - zero) * scale for entry in entries]


def obs_quantised(weight: Tensor, h: Tensor, bits: int, group: int, symmetric: bool, n: int = 1, m: int = 1) -> Tensor:
    """GPTQ's sweep, with N:M pruning in it, with an explicit inverse of the remaining Hessian at every column.

    The grid of a group is fitted at its first column: to the row as it is then, or, where N < M, to what the sweep
    without rounding would leave of the group.
    """
    h, found = h.double(), []
    inverses = [torch.linalg.inv(h[j:, j:]) for j in range(len(h))]

    def sweep(row: Tensor, start: int, stop: int, of: list[float] | None, rounding: bool) -> Tensor:
        row, keep = row.clone(), set()
        for j in range(start, stop):
            if j % m == 0:
                scores = {k: float(row[k]) ** 2 / float(inverses[k][0, 0]) for k in range(j, j + m)}
                keep = set(sorted(scores, key=lambda k: -scores[k])[:n])
            if rounding and j % group == 0:
                of = (row if n == m else sweep(row, j, j + group, None, False))[j : j + group].tolist()
            decided = float(row[j]) if j in keep else 0.0
            if rounding:
                decided = rounded([decided], bits, symmetric, of)[0]
            row[j:] -= (row[j] - decided) / inverses[j][0, 0] * inverses[j][0]
            row[j] = decided
        return row

    for row in weight.double():
        found.append(sweep(row, 0, len(row), None, True))
    return torch.stack(found)


def eckart_young_bound(target: Tensor, h: Tensor, rank: int) -> float:
    """The least tr((T − L) H (T − L)ᵀ) over rank(L) ≤ r: the tail of the spectrum of T H Tᵀ."""
    t, h = target.double(), h.double()
    return float(torch.linalg.eigvalsh(t @ h @ t.T)[: len(t) - rank].clamp_min(0).sum())


def adam_by_autograd(
    target: Tensor, h: Tensor, u: Tensor, v: Tensor, steps: int, learning_rate: float, scale: Tensor
) -> Tensor:
    """The paper's Algorithm 1 with the objective written out and differentiated by autograd; returns u v."""
    t, h = target.double() * scale.double(), h.double() / torch.outer(scale.double(), scale.double())
    u = u.double().clone().requires_grad_()
    v = (v.double() * scale.double()).clone().requires_grad_()
    optimizer = torch.optim.Adam([u, v], lr=learning_rate)
    for _ in range(steps):
        optimizer.zero_grad()
        r = t - u @ v
        torch.trace(r @ h @ r.T).backward()
        optimizer.step()
    return (u @ v / scale.double()).detach()


def on_support(weight: Tensor, h: Tensor, mask: Tensor) -> Tensor:
    """The S on a support that minimises tr((W − S) H (W − S)ᵀ): the normal equations, row by row."""
    w, h, sparse = weight.double(), h.double(), torch.zeros_like(weight, dtype=torch.float64)
    for i, kept in enumerate(mask):
        if kept.any():
            sparse[i, kept] = torch.linalg.solve(h[kept][:, kept], (h @ w[i])[kept])
    return sparse


def best_low_rank(target: Tensor, h: Tensor, rank: int) -> Tensor:
    """The best L of a rank in the norm of H, by the leading eigenvectors of T H Tᵀ."""
    t, h = target.double(), h.double()
    basis = torch.linalg.eigh(t @ h @ t.T).eigenvectors[:, len(t) - rank :]
    return basis @ basis.T @ t


def support_admm(
    weight: Tensor, h: Tensor, keep, rank: int, rho: float, every: int, most: int, growth, settled: int
) -> tuple[Tensor, Tensor]:
    """ALPS (rank 0) and 3BASiL as their papers state them, with an unscaled dual V and explicit inverses: Z and L.

    keep: the support of the largest entries of a matrix. Everything in the units where H has a unit diagonal.
    """
    d = h.double().diagonal().sqrt()
    h, w = h.double() / torch.outer(d, d), weight.double() * d
    first = w * keep(w)
    sparse, dual, low_rank = first, torch.zeros_like(w), torch.zeros_like(w)
    support, kept, grown = first != 0, int((first != 0).sum()), False
    for t in range(1, most + 1):
        right = (w - low_rank) @ h - dual + rho * sparse
        dense = torch.linalg.solve(h + rho * torch.eye(len(h), dtype=h.dtype), right.T).T
        sparse = (dense + dual / rho) * keep(dense + dual / rho)
        dual = dual + rho * (dense - sparse)
        if rank:
            low_rank = best_low_rank(w - dense, h, rank)
        if t % every == 0:
            changed = int(((sparse != 0) ^ (support)).sum())
            support = sparse != 0
            if changed / kept > 0.1:
                rho, grown = rho * growth[0], True
            elif changed / kept > 0.005:
                rho, grown = rho * growth[1], True
            elif changed and grown:
                rho *= growth[2]
            elif changed:
                rho, sparse, dual = rho / 5, first, torch.zeros_like(w)
            elif grown:
                break
            else:
                rho /= 5
            if t > settled and changed / kept < 0.0003:
                break
    return dense / d, low_rank / d


def joint_admm(
    weight: Tensor, h: Tensor, keep, low_rank_step, rho: float, first: Tensor, rounds: int
) -> tuple[Tensor, Tensor, int]:
    """The rounds of `joint` with Z, S and the dual Y apart, and linear systems solved, not kernels.

    After every twentieth part of the rounds, but the last, ρ grows by 1.4 if 0.3·(1 − rounds done / 95 % of them)
    of the kept entries or more left the support in the last round.

    Args:
        low_rank_step: (T, K, round) → L. first: Z + Y at first. The problem is taken as it is: scale it before.

    Returns:
        S, L, and how often ρ grew.
    """
    w, h = weight.double(), h.double()
    sparse = first * keep(first)
    dual, low_rank = first - sparse, torch.zeros_like(w)
    grown = 0
    for t in range(rounds):
        shifted = h + rho * torch.eye(len(h), dtype=h.dtype)
        low_rank = low_rank_step(w - sparse + dual, torch.linalg.solve(shifted, h), t)
        # The minimum over Z of tr((W−Z−L) H (W−Z−L)ᵀ) + ρ‖Z − S + Y‖²: (W − L) H + ρ(S − Y) = Z (H + ρI).
        dense = torch.linalg.solve(shifted, ((w - low_rank) @ h + rho * (sparse - dual)).T).T
        kept, left = keep(dense + dual), (sparse != 0) & ~keep(dense + dual)
        sparse = (dense + dual) * kept
        dual = dual + dense - sparse
        look = (t + 1) * 20 // rounds > t * 20 // rounds
        if look and t + 1 < rounds and left.sum() >= 0.3 * max(1 - (t + 1) / (0.95 * rounds), 0) * kept.sum():
            rho, dual, grown = rho * 1.4, dual / 1.4, grown + 1
    return sparse, low_rank, grown
