import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from hasslefree import (
    Adam,
    AlternatingMinimization,
    Gram,
    Joint,
    JointOnGrid,
    Prune,
    SemiStructured,
    SparseGPT,
    ThreeBlock,
    Wanda,
)
from hasslefree.core.cost import workspace as bytes_beside
from hasslefree.core.protocols import LowRankSolver, Method, Pruner
from hasslefree.solve.admm import SupportPenalty
from hasslefree.solve.methods import METHODS
from tests import oracles

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (64, 4096)]


def flops(method, out, width, rank):
    return method.cost(out, width, rank).flops


def workspace(method, out, width, rank):
    return bytes_beside(method.cost(out, width, rank), out, width, rank)


class OwnPruner(Pruner):
    def prune(self, target, prepared, pattern): ...


class OwnSolver(LowRankSolver):
    def fit(self, target, prepared, start, round, rows): ...


class OwnMethod(Method):
    def solve(self, weight, prepared, pattern, rank, generator, rows): ...


@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_plug_ins_that_state_no_cost_count_as_the_most_expensive(out, width):
    for count in (workspace, flops):
        most = count(OwnMethod(), out, width, 64)
        for method in (*METHODS.values(), AlternatingMinimization(OwnPruner(), OwnSolver()), Prune(OwnPruner())):
            rank = 0 if isinstance(method, Prune) else 64
            if count is workspace and not isinstance(method, Joint | JointOnGrid):
                assert count(method, out, width, rank) <= most, method
        assert count(Prune(OwnPruner()), out, width, 0) == count(METHODS["alps"], out, width, 0)
        assert count(AlternatingMinimization(low_rank=OwnSolver()), out, width, 8) == count(
            AlternatingMinimization(low_rank=METHODS["eora"].low_rank), out, width, 8
        )
    assert OwnMethod().cost(out, width, 8).unstated == ("OwnMethod",)
    own = AlternatingMinimization(OwnPruner(), OwnSolver())
    assert own.cost(out, width, 8).unstated == ("OwnPruner", "OwnSolver")
    assert not any(method.cost(out, width, 0).unstated for method in METHODS.values())


@pytest.mark.parametrize("rank", [0, 8, 64])
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_more_of_anything_costs_no_less(out, width, rank):
    for method in METHODS.values():
        r = 0 if isinstance(method, Prune) else rank
        for count in (flops, workspace):
            here = count(method, out, width, r)
            assert isinstance(here, int)
            assert here <= min(count(method, out + 64, width, r), count(method, out, width + 64, r))


@pytest.mark.parametrize(("out", "width", "rank"), [(96, 64, 4), (64, 96, 4), (64, 64, 0)])
@pytest.mark.parametrize(
    "method",
    [
        Joint(rounds=40, precision="float32"),
        AlternatingMinimization(low_rank=Adam(steps=20), rounds=6),
        AlternatingMinimization(pruner=Wanda(), low_rank=METHODS["eora"].low_rank, rounds=6),
        ThreeBlock(SupportPenalty(0.1, every=10, most=40, growth=(1.1, 1.05, 1.02), settled=100)),
        Prune(SparseGPT()),
    ],
    ids=lambda method: type(method).__name__,
)
def test_flops_are_those_of_the_products_that_run_and_of_the_factorisations(method, out, width, rank):
    """Oracle: torch's count of the products; it does not see factorisations and SparseGPT's single columns."""
    weight, h = oracles.problem(out, width)
    rank = 0 if isinstance(method, Prune) else rank
    with FlopCounterMode(display=False) as counter:
        prepared = method.prepare(Gram(h, 999))
        method.solve(weight, prepared, SemiStructured(2, 4), rank, torch.Generator().manual_seed(0))
    assert counter.get_total_flops() <= 1.1 * flops(method, out, width, rank)
