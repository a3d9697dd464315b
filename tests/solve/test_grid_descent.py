"""Coordinate descent on a grid: against brute force, least squares in float64 and the loss itself."""

import itertools

import pytest
import torch

from hasslefree import Gram, Grid
from hasslefree.core.grids import Levels, Scaling
from hasslefree.core.patterns import KnownSupport, SemiStructured
from hasslefree.core.protocols import Pruned
from hasslefree.solve.grid_descent import Group, descend
from hasslefree.solve.pruners.sparsegpt import SparseGPT
from tests import oracles

KINDS = {"whole": {}, "symmetric": {"symmetric": True}, "offset": {"offset": True}}
kinds = pytest.mark.parametrize("kind", KINDS)


def everything(matrix):
    return torch.ones_like(matrix, dtype=torch.bool)


def swept(grid, support=None, out=6, width=32, seed=0):
    """A target, H, and what GPTQ's sweep makes of them, in float64."""
    target, h = oracles.problem(out, width, seed=seed, dtype=torch.float64)
    gram = Gram(h, 1).damped(0.01)
    pattern = KnownSupport(everything(target) if support is None else support)
    pruner = SparseGPT(grid=grid)
    return target, gram.matrix, pruner.prune(target, pruner.prepare(gram), pattern)


def whole_group(start, part, scale, zero, target, h):
    """All inputs of a layer as one group, with values (in, out)."""
    storage = start.scaling.storage
    return Group(
        Levels(start.scaling.grid, scale, zero), storage, part, torch.ones_like(part), h @ (target.T - part), h
    )


@kinds
@pytest.mark.parametrize("group", [8, None])
@pytest.mark.parametrize("bits", [2, 4])
def test_every_pass_lowers_the_loss_and_stays_on_the_grid(kind, group, bits):
    target, h, start = swept(Grid(bits, group, **KINDS[kind]))
    losses = [oracles.loss(target - start.sparse, h)]
    for passes in (1, 2, 4):
        found = descend(target, start, h, everything(target), passes)
        losses.append(oracles.loss(target - found.sparse, h))
        torch.testing.assert_close(found.scaling.nearest(found.sparse), found.sparse, rtol=1e-12, atol=1e-12)
        codes = found.scaling.codes(found.sparse)
        torch.testing.assert_close(found.scaling.values(codes), found.sparse, rtol=1e-12, atol=1e-12)
        assert torch.equal(found.scaling.scale, found.scaling.scale.bfloat16().double())
    assert losses[1] < 0.97 * losses[0]
    assert losses[3] <= losses[2] <= losses[1]


@pytest.mark.parametrize("kind", ["symmetric", "offset"])
def test_numbers_stay_multiples_of_the_units_of_their_block(kind):
    """Oracle: the definition, block by block; the loss falls as on other grids."""
    target, h, start = swept(Grid(3, 8, scale_bits=6, block=16, **KINDS[kind]))
    found = descend(target, start, h, everything(target), 3)
    assert oracles.loss(target - found.sparse, h) < 0.97 * oracles.loss(target - start.sparse, h)
    units, bits = found.scaling.storage, 5 if kind == "symmetric" else 6
    for g in range(4):
        k = found.scaling.scale[:, g] / units.scale_unit[:, g // 2] * 2**bits
        torch.testing.assert_close(k, k.round(), rtol=0, atol=1e-9)
        assert k.abs().min() >= 1
        if kind == "offset":
            m = -found.scaling.zero[:, g] / units.offset_unit[:, g // 2] * 2**bits
            torch.testing.assert_close(m, m.round(), rtol=0, atol=1e-9)
    assert (found.scaling.scale < 0).any() == (kind == "symmetric")


@kinds
def test_a_single_change_of_a_code_cannot_help_any_more(kind):
    """Oracle: every other code of every entry, one at a time."""
    grid = Grid(2, 8, **KINDS[kind])
    target, h, start = swept(grid, out=2, width=8)
    found = descend(target, start, h, everything(target), 50)
    codes, least = found.scaling.codes(found.sparse).long(), oracles.loss(target - found.sparse, h)
    for i, j, code in itertools.product(range(2), range(8), range(4)):
        tried = codes.clone()
        tried[i, j] = code
        assert oracles.loss(target - found.scaling.values(tried), h) >= least * (1 - 1e-9)


@pytest.mark.parametrize("kind", ["whole", "offset"])
def test_a_group_gets_the_scale_and_the_offset_of_least_squares(kind):
    """Oracle: torch.linalg.lstsq on a square root of H, row by row; scales keep the eight bits of bfloat16."""
    target, h, start = swept(Grid(4, 8, **KINDS[kind]), width=8)
    grid = start.scaling.grid
    scale, zero = start.scaling.scale[:, 0] * 1.1, start.scaling.zero[:, 0].clone()
    codes = start.scaling.codes(start.sparse).double()
    part = Levels(grid, scale[:, None], zero[:, None]).values(codes.clone()).T.contiguous()
    group = whole_group(start, part, scale, zero, target, h)
    group.rescale()
    root = torch.linalg.cholesky(h).T
    for i in range(len(target)):
        steps = codes[i] if grid.offset else codes[i] - zero[i]
        basis = torch.stack([steps, torch.ones(8)], 1) if grid.offset else steps[:, None]
        best = torch.linalg.lstsq(root @ basis.double(), (root @ target[i])[:, None]).solution.flatten()
        assert float(scale[i]) == pytest.approx(float(best[0]), rel=2**-8)
        if grid.offset:
            assert float(zero[i]) == pytest.approx(float(best[1]), rel=2**-8, abs=1e-3)
    torch.testing.assert_close(group.slope, h @ (target.T - part))


def test_a_support_is_kept():
    support = SemiStructured(2, 4).mask(oracles.problem(6, 32)[0].square())
    target, h, start = swept(Grid(4, 8), support)
    found = descend(target, start, h, support, 3)
    assert not found.sparse[~support].any()
    assert oracles.loss(target - found.sparse, h) < oracles.loss(target - start.sparse, h)


def test_a_group_of_zeros_changes_nothing():
    grid = Grid(4, 8)
    zeros = Pruned(torch.zeros(2, 8), Scaling(grid, torch.ones(2, 1), torch.zeros(2, 1)))
    found = descend(torch.zeros(2, 8), zeros, torch.eye(8), everything(zeros.sparse), 2)
    assert not found.sparse.any()
    assert found.scaling.scale.isfinite().all()


@kinds
def test_a_pass_takes_the_best_code_of_each_input_in_turn(kind):
    """Oracle: the loss of each row with each of the codes, one input after the other."""
    target, h, start = swept(Grid(3, 8, **KINDS[kind]), out=3, width=8)
    part, scaling = start.sparse.T.clone(), start.scaling
    whole_group(start, part, scaling.scale[:, 0], scaling.zero[:, 0], target, h).recode(slice(0, 8))
    codes = scaling.codes(start.sparse).long()
    for i, j in itertools.product(range(3), range(8)):
        tried = [codes.index_put((torch.tensor(i), torch.tensor(j)), torch.tensor(code)) for code in range(8)]
        codes = min(tried, key=lambda each: oracles.loss(target - scaling.values(each), h))
    torch.testing.assert_close(part.T, scaling.values(codes))
