"""What every method in the table keeps to, and every pruner with every low-rank solver."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasslefree
from hasslefree import (
    OSSCAR,
    AlternatingMinimization,
    Gram,
    Grid,
    Joint,
    JointOnGrid,
    PrincipalComponentPursuit,
    Prune,
    Row,
    SemiStructured,
    Structured,
    Unstructured,
)  # fmt: skip
from hasslefree.errors import BudgetError, GridError
from hasslefree.solve.low_rank import LOW_RANK_SOLVERS
from hasslefree.solve.methods import METHODS, build_method
from hasslefree.solve.pruners import PRUNERS
from tests import oracles
from tests.oracles import MANY
from tests.suited import suited

PATTERNS = [SemiStructured(2, 4), SemiStructured(3, 8), Unstructured(80), Row(7), Structured(6)]
methods = pytest.mark.parametrize("name", METHODS)
QUANTISED = [name for name, method in METHODS.items() if method.grid]


def groups_of(part):
    """Groups that go into few inputs, where the method or pruner has a grid."""
    return 8 if part.grid else None


def gram_of(h):
    """A Gram with all that any method asks for."""
    return Gram(h, MANY, oracles.mean_of(h))


def short(name):
    """The method with few rounds, and the rank that it takes."""
    method = METHODS[name]
    rounds = min(method.rounds, 4) if hasattr(method, "rounds") else None
    return build_method(name, rounds=rounds, group_size=groups_of(method)), 0 if isinstance(method, Prune) else 3


@methods
@settings(max_examples=8)
@given(st.sampled_from(PATTERNS), st.integers(0, 99))
def test_feasible_honest_and_the_same_every_time(name, pattern, seed):
    method, rank = short(name)
    weight, h = oracles.problem(12, 16, seed=seed)
    pattern = suited(name, pattern)
    before, h_before = weight.clone(), h.clone()
    result = hasslefree.decompose(weight, gram_of(h), pattern, rank, method=method)
    assert result.sparse.count_nonzero() <= pattern.kept((12, 16))
    assert result.low_rank.u.shape == (12, rank)
    assert result.low_rank.v.shape == (rank, 16)
    expected = oracles.loss(weight - result.product(), h) / oracles.loss(weight, h)
    assert result.relative_error == pytest.approx(expected, rel=1e-3)
    assert torch.equal(weight, before)
    assert torch.equal(h, h_before)
    again = hasslefree.decompose(weight, gram_of(h), pattern, rank, method=method)
    assert torch.equal(result.product(), again.product())


@methods
def test_dead_inputs_get_no_weight(name):
    """H_jj = 0: whatever S and L do there is never seen, so it must be nothing."""
    method, rank = short(name)
    weight, h = oracles.problem(12, 16)
    dead = torch.tensor([0, 5, 6, 7, 15])
    h[dead] = 0
    h[:, dead] = 0
    result = hasslefree.decompose(weight, gram_of(h), suited(name, "2:4"), rank, method=method)
    assert torch.isfinite(result.product()).all()
    assert not result.sparse[:, dead].any()
    assert not result.low_rank.v[:, dead].any()
    assert result.relative_error < 1


@methods
def test_a_layer_that_is_never_used_becomes_nothing(name):
    method, rank = short(name)
    weight = torch.randn(8, 16)
    result = hasslefree.decompose(weight, gram_of(torch.zeros(16, 16)), suited(name, "2:4"), rank, method=method)
    assert not result.product().any()
    assert result.relative_error == 0


@pytest.mark.parametrize("name", [name for name in METHODS if name not in QUANTISED])
def test_full_density_is_the_identity(name):
    weight, h = oracles.problem(12, 16)
    for rank in {0, short(name)[1]}:
        result = hasslefree.decompose(
            weight, gram_of(h), Structured(16) if suited(name, "4:4") != "4:4" else "4:4", rank, method=name
        )
        assert torch.equal(result.product(), weight)
        assert result.low_rank.rank == rank


# Every pruner with two solvers, and every solver with two pruners at least.
SOLVERS = [*LOW_RANK_SOLVERS]
PAIRS = [(pruner, SOLVERS[(i + j) % len(SOLVERS)]) for j in (0, 1) for i, pruner in enumerate(PRUNERS)]


@pytest.mark.parametrize(("pruner", "solver"), PAIRS)
def test_pruners_compose_with_solvers(pruner, solver):
    weight, h = oracles.problem(24, 32)
    size, pattern = groups_of(PRUNERS[pruner]), suited(pruner, "2:4", 32)
    method = build_method("hassle-free", pruner=pruner, low_rank=solver, rounds=6, group_size=size)
    alone = hasslefree.decompose(weight, gram_of(h), pattern, 0, method=build_method(pruner, group_size=size))
    result = hasslefree.decompose(weight, gram_of(h), pattern, 6, method=method)
    assert len(result.history) == 6
    assert result.relative_error < alone.relative_error


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if isinstance(method, Prune)])
def test_a_pruner_alone_refuses_a_rank(name):
    with pytest.raises(BudgetError, match="no low-rank part, so rank must be 0, got 2"):
        hasslefree.decompose(torch.randn(4, 8), Gram(torch.eye(8), 1), "2:4", 2, method=name)


@pytest.mark.parametrize(
    ("kind", "field", "value", "message"),
    [
        (AlternatingMinimization, "rounds", 0, "rounds must be at least 1, got 0"),
        (PrincipalComponentPursuit, "searches", 0, "searches must be at least 1, got 0"),
        (PrincipalComponentPursuit, "rounds", 0, "rounds must be at least 1, got 0"),
        (PrincipalComponentPursuit, "growth", 1.0, "growth must be above 1, got 1"),
        (Joint, "rounds", 0, "rounds must be at least 1"),
        (Joint, "growth", 1.0, "growth must be above 1"),
        (Joint, "precision", "float16", "must be 'auto', 'float32', 'tf32' or 'bfloat16', got 'float16'"),
        (JointOnGrid, "turns", 0, "turns must be at least 1"),
        (OSSCAR, "steps", 0, "must be at least 1"),
    ],
)
def test_impossible_hyper_parameters_are_refused(kind, field, value, message):
    with pytest.raises(BudgetError, match=message):
        kind(**{field: value})


@pytest.mark.parametrize("name", ["joint", "3basil", "eora"])
def test_without_s_the_low_rank_part_is_the_best_one(name):
    """Oracle: the Eckart–Young bound of W in the damped norm."""
    weight, h = oracles.problem(12, 16)
    damped = gram_of(h).damped(0.01).matrix
    result = hasslefree.decompose(weight, gram_of(h), "0:4", 3, method=name)
    assert not result.sparse.any()
    bound = oracles.eckart_young_bound(weight, damped, 3)
    assert oracles.loss(weight - result.product(), damped) == pytest.approx(bound, rel=1e-3)


DTYPES = [torch.float32, torch.bfloat16, torch.float64]


# Every method with every pattern and every dtype, and every pattern with every dtype.
@pytest.mark.parametrize(
    ("name", "pattern", "dtype"),
    [
        (name, pattern, DTYPES[(i + j) % 3])
        for i, name in enumerate(QUANTISED)
        for j, pattern in enumerate(["1:1", "2:4", "3:8"])
    ],
)
def test_codes_are_those_of_s(name, pattern, dtype):
    """Oracle: the sparse matrix of the result; and the grid's own words for what a code may be."""
    method, rank = short(name)
    weight, h = oracles.problem(12, 16, dtype=dtype)
    result = hasslefree.decompose(weight, Gram(h.float(), 1), pattern, rank, method=method)
    codes, scaling = result.quantised.codes, result.quantised.scaling
    assert torch.equal(result.quantised.values(), result.sparse)
    assert (codes.dtype, scaling.scale.dtype, scaling.zero.dtype) == (torch.uint8, dtype, dtype)
    assert codes.amax() <= 15
    assert scaling.scale.shape == scaling.zero.shape == (12, 2)
    assert torch.equal(scaling.scale.bfloat16().to(dtype), scaling.scale)


def test_a_weight_that_has_the_pattern_is_rounded_all_the_same():
    """S = W is not on the grid."""
    weight, h = oracles.problem(12, 16)
    weight = weight * SemiStructured(2, 4).mask(weight.square())
    result = hasslefree.decompose(weight, Gram(h, 1), "2:4", method=short("gptq")[0])
    assert not torch.equal(result.sparse, weight)
    assert torch.equal(result.quantised.values(), result.sparse)
    assert not result.sparse[:, ~weight.any(0)].any()


def test_groups_and_patterns_are_checked_before_the_work():
    with pytest.raises(GridError, match="the 48 inputs of the layer; use group_size=16"):
        hasslefree.decompose(torch.randn(4, 48), Gram(torch.eye(48), 1), "1:1", 0, method="gptq")
    method = build_method("rtn", group_size=8)
    with pytest.raises(GridError, match="not a multiple of 5"):
        hasslefree.decompose(torch.randn(4, 40), Gram(torch.eye(40), 1), "2:5", 0, method=method)


def test_a_grid_is_set_part_by_part():
    method = build_method("caldera", bits=8, group_size=0, symmetric=True)
    assert method.pruner.grid == method.grid == Grid(8, None, True)
    assert build_method("caldera", symmetric=True).pruner.grid == Grid(4, 64, True)
    assert build_method("hassle-free", pruner="gptq", group_size=32).pruner.grid == Grid(group=32)
    with pytest.raises(
        GridError, match="'joint' does not quantise S: leave out bits, .*method loftq, .*joint-grid, rtn, gptq, or"
    ):
        build_method("joint", bits=4)
    with pytest.raises(GridError, match="bits must be one of 2, 3, 4, 5, 6, 8, got 7"):
        build_method("gptq", bits=7)
    with pytest.raises(BudgetError, match="SparseGPT only prunes .*rank must be 0, got 2; use .* such as caldera"):
        METHODS["gptq"].check(2)
