"""Layers that share a grid. Oracle: every combination of their plans, by brute force."""

import itertools
import random

import pytest
import torch

from hasslefree import Grid
from hasslefree.allocate.allocation import allocated
from hasslefree.allocate.options import GridOptions, LayerChoice, best_combinations, joined
from hasslefree.core.patterns import SemiStructured
from hasslefree.planning.plan import LayerPlan

GRIDS = [Grid(bits, 32) for bits in (2, 3, 4)]
RANKS = (0, 8, 16)
SHAPES = {"q": (64, 64), "k": (32, 64), "o": (64, 96)}


def choice_of(name, unit, seed):
    """A matrix whose losses fall with the bits and the ranks, at random."""
    numbers = random.Random(seed)
    dense = SemiStructured(1, 1)
    plans = [LayerPlan.of(SHAPES[name], dense, rank, torch.bfloat16, grid) for grid in GRIDS for rank in RANKS]
    losses, most = {}, 1.0
    for grid in GRIDS:
        shares = sorted((numbers.random() for _ in RANKS[1:]), reverse=True)
        by_rank = torch.ones(RANKS[-1] + 1, dtype=torch.float64)
        by_rank[list(RANKS)] = most * torch.tensor([1.0, *shares], dtype=torch.float64)
        losses[grid] = by_rank
        most *= numbers.uniform(0.1, 0.6)
    return LayerChoice(GridOptions(plans, losses), numbers.uniform(0.1, 2), unit)


def combinations(choices):
    """Every choice of a plan for each matrix in which those of one unit have one grid: its bytes and its loss."""
    found = []
    for plans in itertools.product(*(choice.options.plans for choice in choices.values())):
        grids = {}
        for choice, plan in zip(choices.values(), plans, strict=True):
            grids.setdefault(choice.unit, set()).add(plan.grid)
        if all(len(each) == 1 for each in grids.values()):
            lost = sum(choice.loss(plan) for choice, plan in zip(choices.values(), plans, strict=True))
            found.append((sum(plan.size for plan in plans), lost))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_combinations_of_a_unit_are_the_best_for_every_price(seed):
    choices = {name: choice_of(name, "qk", seed + place) for place, name in enumerate("qk")}
    priced = {name: [(plan, choice.loss(plan)) for plan in choice.options.plans] for name, choice in choices.items()}
    best = best_combinations(priced)
    found = []
    for plans in zip(*best.values(), strict=True):
        assert len({plan.grid for plan in plans}) == 1
        lost = sum(choices[name].loss(plan) for name, plan in zip(best, plans, strict=True))
        found.append((sum(plan.size for plan in plans), lost))
    assert [size for size, _ in found] == sorted({size for size, _ in found})
    for price in torch.logspace(-7, 0, 60).tolist():
        costs = [lost + price * size for size, lost in combinations(choices)]
        assert min(lost + price * size for size, lost in found) == pytest.approx(min(costs), rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_a_budget_is_spent_as_well_as_by_brute_force(seed):
    """In the bytes of the combination that is the best at some price, the allocation loses as little as that one."""
    units = {"q": "qk", "k": "qk", "o": "o"}
    choices = {name: choice_of(name, unit, 10 * seed + place) for place, (name, unit) in enumerate(units.items())}
    everything = combinations(choices)
    best = set()
    for price in torch.logspace(-7, 0, 60).tolist():
        best.add(min(everything, key=lambda found: found[1] + price * found[0]))
    assert len(best) > 3
    for room, least in best:
        plan = allocated([{}, joined(choices)], room)
        [layers] = plan.blocks
        assert list(layers) == list(choices)
        assert layers["q"].grid == layers["k"].grid
        assert plan.size <= room
        lost = sum(choices[name].loss(layer) for name, layer in layers.items())
        assert lost == pytest.approx(least, rel=1e-12)
