"""Budgets shared out between layers, against brute force and definitions in float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hasslefree.allocate.ladders import Ladder, greedy_allocate, hull, rank_gains
from hasslefree.core.gram import Gram

GAINS = st.lists(st.floats(0, 10), max_size=4).map(lambda gains: sorted(gains, reverse=True))


def ladders_of(gains, costs):
    return [Ladder(torch.tensor(g, dtype=torch.float64), c) for g, c in zip(gains, costs, strict=False)]


def won(ladders, taken):
    return sum(float(ladder.gains[:steps].sum()) for ladder, steps in zip(ladders, taken, strict=True))


def chosen_steps(ladders, budget):
    """The number of steps on each ladder of a list."""
    return list(greedy_allocate(dict(enumerate(ladders)), budget).values())


@given(st.lists(GAINS, min_size=1, max_size=4), st.lists(st.integers(1, 5), min_size=4, max_size=4), st.integers(0, 40))
def test_no_choice_wins_more_but_for_what_is_left_over(gains, costs, budget):
    """Oracle: all choices. Where all steps cost the same, nothing is left over that could buy one."""
    curves = ladders_of(gains, costs)
    taken = chosen_steps(curves, budget)
    spent = sum(curve.cost * steps for curve, steps in zip(curves, taken, strict=True))
    assert spent <= budget
    every = itertools.product(*(range(len(curve.gains) + 1) for curve in curves))
    fitting = [t for t in every if sum(x.cost * steps for x, steps in zip(curves, t, strict=True)) <= budget]
    best = max(won(curves, choice) for choice in fitting)
    dearest = max((float(g / x.cost) for x in curves for g in x.gains[:1]), default=0.0) * max(costs)
    assert won(curves, taken) >= best - dearest - 1e-9
    if len(set(costs[: len(curves)])) == 1:
        assert won(curves, taken) == pytest.approx(best)


POINTS = st.lists(st.tuples(st.integers(1, 20), st.floats(0, 10)), min_size=1, max_size=6)


@given(POINTS, st.floats(0.001, 5))
def test_the_hull_holds_the_best_choice_for_every_price_of_a_byte(points, price):
    """Oracle: the least of loss + price · bytes over all points."""
    best = [points[index] for index in hull(points)]
    assert [size for size, _ in best] == sorted({size for size, _ in best})
    assert [loss for _, loss in best] == sorted({loss for _, loss in best}, reverse=True)
    costs = [loss + price * size for size, loss in points]
    assert min(loss + price * size for size, loss in best) == pytest.approx(min(costs))
    rates = [(one[1] - two[1]) / (two[0] - one[0]) for one, two in itertools.pairwise(best)]
    assert rates == sorted(rates, reverse=True)


@given(st.lists(POINTS, min_size=1, max_size=3), st.integers(0, 60))
def test_points_of_several_layers_are_dealt_within_the_budget(layers, budget):
    """Oracle: all choices. What is missed is less than one step gains, the steps on the hull having different costs."""
    corners = [[points[index] for index in hull(points)] for points in layers]
    least = sum(best[0][0] for best in corners)
    curves = [
        Ladder(-torch.tensor([loss for _, loss in best]).double().diff(), torch.tensor([b for b, _ in best]).diff())
        for best in corners
    ]
    taken = chosen_steps(curves, budget - least)
    chosen = [best[steps] for best, steps in zip(corners, taken, strict=True)]
    assert sum(size for size, _ in chosen) <= max(budget, least)
    every = [choice for choice in itertools.product(*layers) if sum(size for size, _ in choice) <= budget]
    if every:
        missed = sum(loss for _, loss in chosen) - min(sum(loss for _, loss in choice) for choice in every)
        assert missed <= max((float(curve.gains.max()) for curve in curves if len(curve.gains)), default=0) + 1e-9


class OnGPU(torch.Tensor):
    """A tensor that indexes no tensor of the CPU, as one on a GPU; `cpu` gives a plain one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__ and type(args[0]) is torch.Tensor and isinstance(args[1], cls):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found.as_subclass(torch.Tensor) if func is torch.Tensor.cpu else found


def test_gains_on_a_gpu_are_climbed_as_on_a_cpu():
    """Oracle: the same curves on the CPU, and a device whose tensors cannot index those of the CPU."""
    curves = ladders_of([[5.0, 3.0, 1.0], [4.0, 2.0, 0.0]], [2, 3])
    on_gpu = [Ladder(curve.gains.as_subclass(OnGPU), curve.cost) for curve in curves]
    with pytest.raises(RuntimeError, match="indices"):
        torch.arange(3)[on_gpu[0].gains.argsort()]
    assert chosen_steps(on_gpu, 9) == chosen_steps(curves, 9) == [3, 1]


def test_a_rank_wins_what_the_best_approximation_does():
    """Oracle: the error of the truncated SVD of R H^½, for more rows than columns and fewer."""
    generator = torch.Generator().manual_seed(0)
    for out, width in ((5, 9), (9, 5)):
        x = torch.randn(40, width, generator=generator, dtype=torch.float64)
        residual, gram = torch.randn(out, width, generator=generator, dtype=torch.float64), Gram(x.T @ x / 40, 40)
        root = torch.linalg.cholesky(gram.matrix)
        u, s, vh = torch.linalg.svd(residual @ root, full_matrices=False)
        gains, total = rank_gains(residual, gram, 9)
        assert total == pytest.approx(float(gains.sum()))
        for rank in range(6):
            rest = residual - (u[:, :rank] * s[:rank]) @ vh[:rank] @ torch.linalg.inv(root)
            error = torch.einsum("oi,ij,oj->", rest, gram.matrix, rest)
            assert float(gains[rank:].sum()) == pytest.approx(float(error), abs=1e-9)


@pytest.mark.parametrize(("out", "width"), [(200, 120), (120, 200)])
def test_a_few_of_many_ranks_are_won_almost_exactly(out, width):
    """Oracle: all singular values of R H^½, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, width, generator=generator) * torch.linspace(0.1, 3, width)
    residual, gram = torch.randn(out, width, generator=generator), Gram.from_activations(x)
    exact = torch.linalg.svdvals(residual.double() @ torch.linalg.cholesky(gram.matrix.double())).square()
    gains, total = rank_gains(residual, gram, 12)
    assert gains.shape == (12,)
    assert (gains[1:] <= gains[:-1]).all()
    torch.testing.assert_close(gains, exact[:12], rtol=0.05, atol=0)
    assert total == pytest.approx(float(exact.sum()), rel=1e-4)
