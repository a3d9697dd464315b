"""A method that weighs the outputs of a layer."""

import torch

import hasslefree
from hasslefree.core.gram import Gram
from hasslefree.solve.methods import METHODS
from hasslefree.solve.methods.weighted import Weighted
from tests.oracles import best_low_rank, problem


def layer():
    weight, moments = problem(24, 32)
    return weight, Gram(moments, 128)


def test_the_low_rank_part_minimises_the_weighted_objective():
    """Oracle: Eckart and Young in float64, for G^½ (W − S) H^½; S is that of the method, whose rows are independent."""
    weight, gram = layer()
    weights = torch.logspace(-2, 2, 24, dtype=torch.float64)
    method = METHODS["eora"]
    plain = hasslefree.decompose(weight, gram, "2:4", 4, method=method)
    found = hasslefree.decompose(weight, gram, "2:4", 4, method=Weighted(method, weights))
    torch.testing.assert_close(found.sparse, plain.sparse)
    left = weights.sqrt().unsqueeze(1)
    damped = gram.damped(method.damping).matrix.double()
    best = best_low_rank(left * (weight - plain.sparse).double(), damped, 4) / left
    torch.testing.assert_close(found.low_rank.product().double(), best, rtol=1e-4, atol=1e-4)


def test_a_pattern_that_counts_over_all_rows_keeps_more_of_those_that_count_more():
    weight, gram = layer()
    weights = torch.ones(24)
    weights[:12] = 100
    method = Weighted(METHODS["joint"], weights)
    found = hasslefree.decompose(weight, gram, "unstructured", 2, sparsity=0.5, method=method)
    kept = (found.sparse != 0).sum(1)
    assert kept.sum() == 24 * 32 // 2
    assert kept[:12].sum() > 1.5 * kept[12:].sum()
