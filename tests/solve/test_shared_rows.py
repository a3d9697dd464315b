"""Processes that share the rows of a layer find what one process finds.

The oracle is one process, and for what is reported the definition of the objective in float64. The products are in
float32 or float64: in bfloat16 a last digit decides how a number is rounded, and the rounds of an ADMM amplify it.
"""

import sys
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasslefree import Gram, Row, SemiStructured, Structured, Unstructured
from hasslefree.core.linalg import orthonormal
from hasslefree.core.patterns import KnownSupport, Pattern, largest, of_rows
from hasslefree.core.protocols import Method
from hasslefree.core.rows import WHOLE, Rows, largest_of_rows
from hasslefree.distributed import World
from hasslefree.solve.admm import SupportPenalty
from hasslefree.solve.decompose import gathered, solve_layer
from hasslefree.solve.methods import METHODS, build_method
from hasslefree.solve.methods.joint import Joint
from hasslefree.solve.methods.three_block import ThreeBlock
from tests import oracles
from tests.sharing import in_processes

forked = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked")
HALF = SemiStructured(2, 4)


@pytest.fixture(autouse=True)
def one_thread():
    """As in the processes that are started: on two, products are summed otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def problem(out, width=32, dtype=torch.float64):
    weight, h = oracles.problem(out, width, dtype=dtype)
    return weight, Gram(h, 1000, oracles.mean_of(h))


@dataclass(frozen=True)
class Case:
    """A layer of `out` rows that `size` processes share."""

    size: int
    out: int
    method: Method
    pattern: Pattern
    rank: int
    dtype: torch.dtype = torch.float64
    bits: int | None = None

    def solve(self, rows=WHOLE):
        """What one process has at the end."""
        weight, gram = problem(self.out, dtype=self.dtype)
        prepared, pattern = self.method.prepare(gram), of_rows(self.pattern, rows)
        local = rows.local(weight)
        result = solve_layer(local, gram, self.method, prepared, pattern, self.rank, 0, self.bits, rows)
        return gathered(result, rows)


def joint(**changes):
    return Joint(rounds=25, precision="float32", **changes)


def named(name, **changes):
    return build_method(name, rounds=None if name in ("dsnot", "sparsegpt") else 3, **changes)


SHORT = ThreeBlock(SupportPenalty(0.1, every=10, most=100, growth=(1.1, 1.05, 1.02), settled=100))
# 19 rows are shares of 9 and 10, or of 6, 6 and 7. With 7 and 3, no process has as many rows as the rank.
CASES = {
    "joint 2:4": Case(3, 19, joint(), HALF, 3, torch.float32),
    "joint row": Case(2, 19, joint(), Row(13), 3, torch.float32),
    "joint unstructured": Case(3, 19, joint(), Unstructured(250), 3, torch.float32),
    "joint structured": Case(2, 19, joint(), Structured(16, 4), 3, torch.float32),
    "joint without L": Case(2, 19, joint(), HALF, 0),
    "joint few rows": Case(2, 7, joint(), HALF, 6),
    "joint one row each": Case(3, 3, joint(), HALF, 2),
    "joint full rank": Case(3, 16, joint(), HALF, 16),
    "joint bits": Case(2, 19, Joint(rounds=5), HALF, 3, bits=8),
    "3basil": Case(2, 13, SHORT, HALF, 3),
    "3basil unstructured": Case(3, 13, SHORT, Unstructured(170), 3),
    "hassle-free": Case(3, 13, named("hassle-free"), HALF, 3),
    "hassle-free unstructured": Case(3, 13, named("hassle-free"), Unstructured(170), 3),
    "subspace, refit": Case(3, 13, named("hassle-free", low_rank="subspace", refit=True), HALF, 3),
    "randomized-svd": Case(3, 13, named("oats", low_rank="randomized-svd"), Row(13), 3),
    "lq-lora": Case(3, 13, named("lq-lora", group_size=8), SemiStructured(1, 1), 3),
    "caldera": Case(3, 13, named("caldera", low_rank="subspace", group_size=8), HALF, 3),
    "dsnot": Case(3, 13, named("dsnot"), HALF, 0),
    "sparsegpt": Case(3, 13, named("sparsegpt"), Structured(16), 0),
}


@cache
def of_several(size):
    """The results of all cases of this size, of each of the processes."""

    def work(world):
        return {name: case.solve(Rows(world, case.out)) for name, case in CASES.items() if case.size == size}

    return in_processes(size, work)


def true_error(found, weight, gram):
    """By definition, in float64."""
    residual = weight.double() - found.sparse.double() - found.low_rank.to(torch.float64).product()
    return oracles.loss(residual, gram.matrix) / oracles.loss(weight, gram.matrix)


@forked
@pytest.mark.parametrize("name", CASES)
def test_processes_find_what_one_process_finds(name):
    """The same support, and the same error but for rounding, which is that of the whole layer; nothing else differs."""
    case = CASES[name]
    assert case.method.shares_rows(case.pattern)
    one, several = case.solve(), [results[name] for results in of_several(case.size)]
    # A last digit decides how codes are rounded.
    rounding = 1e-2 if case.bits else 1e-4
    for result in several:
        assert torch.equal(result.sparse != 0, one.sparse != 0)
        assert result.relative_error == pytest.approx(one.relative_error, rel=rounding)
        assert result.history == pytest.approx(one.history, rel=1e-3)
        assert result.remarks == one.remarks
        assert torch.equal(result.sparse, several[0].sparse)
        assert torch.equal(result.low_rank.u, several[0].low_rank.u)
        assert torch.equal(result.low_rank.v, several[0].low_rank.v)
        if one.quantised:
            assert torch.equal(result.quantised.codes, one.quantised.codes)
            assert torch.equal(result.quantised.values(), result.sparse)
        if case.bits:
            assert result.factors.u.codes.shape == (case.out, case.rank)
            assert torch.equal(result.factors.values().u, result.low_rank.u)
            assert torch.equal(result.factors.v.codes, several[0].factors.v.codes)
    expected = true_error(several[0], *problem(case.out, dtype=case.dtype))
    assert several[0].relative_error == pytest.approx(expected, rel=1e-3)


@forked
def test_the_same_processes_find_the_same_bits_and_keep_what_the_pattern_keeps():
    """Determinism, with inputs that are always zero and a layer in bfloat16. A weight that has the pattern already."""
    weight, gram = problem(19, dtype=torch.float32)
    gram.matrix[5], gram.matrix[:, 5] = 0.0, 0.0
    feasible = weight * HALF.mask(weight.square()) * gram.alive
    # As many non-zeros as before, but the process with the last rows alone has a row without the pattern.
    other = feasible.clone()
    other[-1], other[0] = weight[-1], 0.0

    def work(world):
        rows = Rows(world, 19)

        def run(weight, pattern):
            method = Joint(rounds=15)
            prepared, pattern = method.prepare(gram), of_rows(pattern, rows)
            return gathered(solve_layer(rows.local(weight), gram, method, prepared, pattern, 3, 0, None, rows), rows)

        narrow = [run(weight.bfloat16(), Unstructured(250)) for _ in range(2)]
        return *narrow, run(feasible, HALF), run(other, HALF)

    for one, two, kept, changed in in_processes(3, work):
        assert torch.equal(one.sparse, two.sparse)
        assert torch.equal(one.low_rank.u, two.low_rank.u)
        assert one.relative_error == two.relative_error
        assert not one.sparse[:, 5].any()
        assert one.sparse.count_nonzero() <= 250
        assert torch.equal(kept.sparse, feasible)
        assert changed.relative_error > 0


@given(
    scores=st.lists(st.sampled_from([-2.5, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1.0000001, 3e38]), min_size=1, max_size=60),
    share=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_largest_by_bisection_are_the_sorted_choice(scores, share, dtype):
    """Oracle: a stable sort of Python's, from the largest, ties from the left."""
    score, count = torch.tensor(scores, dtype=dtype), round(share * len(scores))
    kept = sorted(range(len(scores)), key=lambda i: -score[i].item())[:count]
    expected = torch.zeros(len(scores), dtype=torch.bool)
    expected[kept] = True
    assert torch.equal(largest_of_rows(score.view(1, -1), count, WHOLE).view(-1), expected)


@forked
def test_ties_go_to_the_first_rows_and_a_basis_is_orthonormal_over_all_processes():
    """Oracles: the choice of one process, where nearly all scores are alike; and for the basis the identity, and its
    columns; of columns that others span, what is left is no longer than one."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(3, (11, 8), generator=generator).float()
    free = torch.randn(10, 4, generator=generator) * torch.tensor([1e-6, 1.0, 1e6, 1.0])
    spanned = free.clone()
    spanned[:, 1], spanned[:, 3] = 2 * free[:, 0], 0.0

    def work(world):
        rows, tall = Rows(world, len(score)), Rows(world, len(free))
        masks = [largest_of_rows(rows.local(score), count, rows) for count in range(0, 89, 8)]
        return masks, *(tall.gather(orthonormal(tall.local(matrix), tall)) for matrix in (free, spanned))

    several = in_processes(3, work)
    for count, *masks in zip(range(0, 89, 8), *(masks for masks, *_ in several), strict=True):
        assert torch.equal(torch.cat(masks).flatten(), largest(score.flatten(), count))
    for matrix, basis, step in zip((free, spanned), several[0][1:], (1, 2), strict=True):
        products = basis.double().T @ basis.double()
        assert torch.linalg.matrix_norm(products, 2) < 1 + 1e-5
        identity = torch.eye(4 // step, dtype=torch.float64)
        torch.testing.assert_close(products[::step, ::step], identity, atol=1e-6, rtol=0)
        wide = matrix.double() / matrix.double().norm(dim=0).clamp_min(1e-30)
        torch.testing.assert_close(basis.double() @ (basis.double().T @ wide), wide, atol=1e-5, rtol=0)


@given(out=st.integers(1, 40), size=st.integers(1, 8))
def test_every_row_is_in_one_share_and_shares_are_even(out, size):
    shares = [Rows(World(rank, size), out).local(torch.arange(out)) for rank in range(size)]
    assert torch.cat(shares).tolist() == list(range(out))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_methods_say_what_they_can_share():
    """Oracle: the table of docs/howto/extend.md, by hand."""
    cannot = {"oats", "eora", "godec", "losparse", "loftq", "caldera", "joint-grid", "alps", "osscar"}
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
