"""Processes that share the rows of a layer find what one process finds.

The oracle is one process, and for what is reported the definition of the objective in float64. The products are in
float32 or float64: in bfloat16 a last digit decides how a number is rounded, and the rounds of an ADMM amplify it.
"""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasslefree import Gram, Row, SemiStructured, Structured, Unstructured
from hasslefree.core.linalg import orthonormal
from hasslefree.core.patterns import KnownSupport, largest, of_rows
from hasslefree.core.rows import WHOLE, Rows, largest_of_rows
from hasslefree.distributed import World
from hasslefree.solve.decompose import gathered, solve_layer
from hasslefree.solve.methods import METHODS, build_method
from hasslefree.solve.methods.joint import Joint
from tests import oracles
from tests.sharing import in_processes

forked = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
HALF = SemiStructured(2, 4)
GRID = {"rounds": 3, "group_size": 8}


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes that are started: on two, products are summed otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem(out, width=32, dtype=torch.float32):
    weight, h = oracles.problem(out, width, dtype=dtype)
    return weight, Gram(h, 1000, oracles.mean_of(h))


def of_one(weight, gram, method, pattern, rank, bits=None):
    return solve_layer(weight, gram, method, method.prepare(gram), pattern, rank, 0, bits)


def of_several(size, weight, gram, method, pattern, rank, bits=None):
    """What each of the processes has at the end."""

    def work(world):
        rows = Rows(world, len(weight))
        prepared, mine = method.prepare(gram), of_rows(pattern, rows)
        return gathered(solve_layer(rows.local(weight), gram, method, prepared, mine, rank, 0, bits, rows), rows)

    return in_processes(size, work)


def assert_alike(one, several, weight, gram):
    """The same support, and the same error but for rounding, which is that of the whole layer; nothing else differs."""
    for each in several:
        assert torch.equal(each.sparse != 0, one.sparse != 0)
        assert each.relative_error == pytest.approx(one.relative_error, rel=1e-4)
        assert each.history == pytest.approx(one.history, rel=1e-3)
        assert each.remarks == one.remarks
        assert torch.equal(each.sparse, several[0].sparse)
        assert torch.equal(each.low_rank.u, several[0].low_rank.u)
        assert torch.equal(each.low_rank.v, several[0].low_rank.v)
    assert several[0].relative_error == pytest.approx(true_error(several[0], weight, gram), rel=1e-3)


def true_error(found, weight, gram):
    """By definition, in float64."""
    residual = weight.double() - found.sparse.double() - found.low_rank.to(torch.float64).product()
    return oracles.loss(residual, gram.matrix) / oracles.loss(weight, gram.matrix)


@forked
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("pattern", [HALF, Row(13), Unstructured(250), Structured(16, 4)], ids=str)
def test_joint_shares_rows_for_every_pattern(pattern, size):
    """19 rows: shares of 9 and 10, or of 6, 6 and 7."""
    weight, gram = problem(19)
    method = Joint(rounds=25, precision="float32")
    several = of_several(size, weight, gram, method, pattern, 3)
    assert_alike(of_one(weight, gram, method, pattern, 3), several, weight, gram)


@forked
@pytest.mark.parametrize(("out", "rank"), [(19, 0), (7, 6), (3, 2), (16, 16)])
@pytest.mark.parametrize("size", [2, 3])
def test_joint_shares_rows_at_every_rank(out, rank, size):
    """Also where no process has as many rows as the rank."""
    weight, gram = problem(out, dtype=torch.float64)
    method = Joint(rounds=10)
    several = of_several(size, weight, gram, method, HALF, rank)
    assert_alike(of_one(weight, gram, method, HALF, rank), several, weight, gram)


@forked
@pytest.mark.parametrize(
    ("name", "settings", "pattern", "rank"),
    [
        ("hassle-free", {"rounds": 3}, HALF, 3),
        ("hassle-free", {"rounds": 3}, Unstructured(170), 3),
        ("hassle-free", {"rounds": 5, "low_rank": "subspace", "refit": True}, HALF, 3),
        ("oats", {"rounds": 5, "low_rank": "randomized-svd"}, Row(13), 3),
        ("lq-lora", GRID, SemiStructured(1, 1), 3),
        ("caldera", GRID | {"low_rank": "subspace"}, HALF, 3),
        ("dsnot", {}, HALF, 0),
        ("sparsegpt", {}, Structured(16), 0),
    ],
    ids=str,
)
def test_other_methods_share_rows(name, settings, pattern, rank):
    weight, gram = problem(13, dtype=torch.float64)
    method = build_method(name, **settings)
    assert method.shares_rows(pattern)
    one, several = of_one(weight, gram, method, pattern, rank), of_several(3, weight, gram, method, pattern, rank)
    assert_alike(one, several, weight, gram)
    if one.quantised:
        assert torch.equal(several[0].quantised.codes, one.quantised.codes)
        assert torch.equal(several[0].quantised.values(), several[0].sparse)


@forked
@pytest.mark.parametrize("pattern", [HALF, Unstructured(170)], ids=str)
def test_three_blocks_share_rows(pattern):
    weight, gram = problem(13, dtype=torch.float64)
    method = METHODS["3basil"]
    several = of_several(2, weight, gram, method, pattern, 3)
    assert_alike(of_one(weight, gram, method, pattern, 3), several, weight, gram)


@forked
def test_factors_in_eight_bits_are_those_of_the_whole_layer():
    """Oracle: one process, up to codes that a last digit rounds otherwise; the codes themselves; and the objective."""
    weight, gram = problem(19, dtype=torch.float64)
    method = Joint(rounds=5)
    one, several = of_one(weight, gram, method, HALF, 3, 8), of_several(2, weight, gram, method, HALF, 3, 8)
    for each in several:
        assert each.relative_error == pytest.approx(one.relative_error, rel=1e-2)
        assert each.factors.u.codes.shape == (19, 3)
        assert torch.equal(each.factors.values().u, each.low_rank.u)
        assert torch.equal(each.factors.v.codes, several[0].factors.v.codes)
        assert each.relative_error == pytest.approx(true_error(each, weight, gram), rel=1e-6)


@forked
def test_the_same_processes_find_the_same_bits():
    """Determinism, with inputs that are always zero and a layer in bfloat16."""
    weight, gram = problem(19)
    gram.matrix[5], gram.matrix[:, 5] = 0.0, 0.0
    found = [of_several(3, weight.bfloat16(), gram, Joint(rounds=15), Unstructured(250), 3)[0] for _ in range(2)]
    assert torch.equal(found[0].sparse, found[1].sparse)
    assert torch.equal(found[0].low_rank.u, found[1].low_rank.u)
    assert found[0].relative_error == found[1].relative_error
    assert not found[0].sparse[:, 5].any()
    assert found[0].sparse.count_nonzero() <= 250


@forked
def test_what_the_pattern_keeps_whole_is_kept():
    """A weight that has the pattern already; the process with the last rows alone knows otherwise of another."""
    weight, gram = problem(12)
    has = weight * HALF.mask(weight.square())
    assert torch.equal(of_several(2, has, gram, Joint(), HALF, 2)[0].sparse, has)
    has[-1], has[0] = weight[-1], 0.0  # as many non-zeros as before
    assert of_several(2, has, gram, Joint(rounds=5), HALF, 2)[1].relative_error > 0


@given(
    scores=st.lists(st.sampled_from([-2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38]), min_size=1, max_size=60),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_radix_select_is_the_sorted_choice(scores, share, dtype):
    """Oracle: a stable sort of Python's, from the largest, ties from the left."""
    score, count = torch.tensor(scores, dtype=dtype), round(share * len(scores))
    kept = sorted(range(len(scores)), key=lambda i: -score[i].item())[:count]
    expected = torch.zeros(len(scores), dtype=torch.bool)
    expected[kept] = True
    assert torch.equal(largest_of_rows(score.view(1, -1), count, WHOLE).view(-1), expected)


@forked
def test_ties_go_to_the_first_rows_over_all_processes():
    """Oracle: the choice of one process. Nearly all scores are alike."""
    score = torch.randint(3, (11, 8), generator=torch.Generator().manual_seed(0)).float()

    def work(world):
        rows = Rows(world, len(score))
        return [largest_of_rows(rows.local(score), count, rows) for count in range(0, 89, 8)]

    several = in_processes(3, work)
    for count, *masks in zip(range(0, 89, 8), *several, strict=True):
        assert torch.equal(torch.cat(masks).flatten(), largest(score.flatten(), count))


@forked
@pytest.mark.parametrize("spanned", [False, True])
def test_a_basis_is_orthonormal_over_all_rows(spanned):
    """Oracle: the identity, and the columns; of columns that others span, what is left is no longer than one."""
    matrix = torch.randn(10, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-6, 1.0, 1e6, 1.0])
    if spanned:
        matrix[:, 1], matrix[:, 3] = 2 * matrix[:, 0], 0.0

    def work(world):
        rows = Rows(world, len(matrix))
        return rows.gather(orthonormal(rows.local(matrix), rows))

    basis = in_processes(3, work)[0].double()
    products = basis.T @ basis
    assert torch.linalg.matrix_norm(products, 2) < 1 + 1e-5
    others = products[::2, ::2] if spanned else products
    torch.testing.assert_close(others, torch.eye(len(others), dtype=torch.float64), atol=1e-6, rtol=0)
    wide = matrix.double() / matrix.double().norm(dim=0).clamp_min(1e-30)
    torch.testing.assert_close(basis @ (basis.T @ wide), wide, atol=1e-5, rtol=0)


@given(out=st.integers(1, 40), size=st.integers(1, 8))
def test_every_row_is_in_one_share_and_shares_are_even(out, size):
    shares = [Rows(World(rank, size), out).local(torch.arange(out)) for rank in range(size)]
    assert torch.cat(shares).tolist() == list(range(out))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_methods_say_what_they_can_share():
    """Oracle: the table of docs/howto/extend.md, by hand."""
    cannot = {"oats", "eora", "godec", "losparse", "pcp", "loftq", "caldera", "joint-grid", "alps", "osscar"}
    assert {name for name, method in METHODS.items() if not method.shares_rows(HALF)} == cannot
    assert not METHODS["dsnot"].shares_rows(Structured(8))
    assert not METHODS["gptq"].shares_rows(Unstructured(8))
    assert METHODS["sparsegpt"].shares_rows(Unstructured(8))


def test_patterns_that_count_over_the_matrix_know_their_rows():
    rows = Rows(World(1, 2), 10)
    assert of_rows(Unstructured(7), rows).rows is rows
    assert of_rows(Structured(8, 4), rows).restricted(0, 8, 16).rows is rows
    known = KnownSupport(torch.ones(2, 2, dtype=torch.bool))
    for pattern in (HALF, Row(3), known):
        assert of_rows(pattern, rows) is pattern
