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
from hasslefree.core.cost import Cost
from hasslefree.core.protocols import LowRankSolver, Method, Pruner
from hasslefree.solve.admm import SupportPenalty
from hasslefree.solve.methods import METHODS
from tests import oracles


class OwnPruner(Pruner):
    def prepare(self, gram): ...

    def prune(self, target, prepared, pattern): ...


class OwnSolver(LowRankSolver):
    def prepare(self, gram): ...

    def fit(self, target, prepared, start, round): ...


class OwnMethod(Method):
    def prepare(self, gram): ...

    def solve(self, weight, prepared, pattern, rank, generator): ...


def test_the_bytes_of_a_cost_by_hand():
    """Oracle: matrices (2, 3) and (3, 3) of float32, 8 · (2 + 3) · 7 numbers at rank 7, and four cached matrices."""
    cost = Cost(squares=2, arrays=10, cached=4)
    assert cost.bytes(2, 3, 0) == 4 * (2 * 9 + 10 * 6 + 4 * 9)
    assert cost.bytes(2, 3, 7) - cost.bytes(2, 3, 0) == 4 * 8 * 5 * 7
    wide = [cost.bytes(1, 2**14, 0, device) - 4 * (2 * 2**28 + 10 * 2**14) for device in ("cpu", "cuda", "xpu")]
    assert wide == [1 << 27, 1 << 31, 1 << 27]


def test_plug_ins_that_state_no_cost_count_as_the_most_expensive():
    most = OwnMethod().cost
    for method in (*METHODS.values(), AlternatingMinimization(OwnPruner(), OwnSolver(), rounds=1), Prune(OwnPruner())):
        cost = method.cost
        assert cost.flops <= most.flops, method
        if not isinstance(method, Joint | JointOnGrid):  # which cache more
            assert cost.bytes(4096, 4096, 64) <= most.bytes(4096, 4096, 64), method
    assert Prune(OwnPruner()).cost.flops == METHODS["alps"].cost.flops
    assert most.unstated == ("OwnMethod",)
    assert AlternatingMinimization(OwnPruner(), OwnSolver()).cost.unstated == ("OwnPruner", "OwnSolver")
    assert not any(method.cost.unstated for method in METHODS.values())


@pytest.mark.parametrize(("out", "width", "rank"), [(96, 64, 1), (64, 64, 0)])
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
def test_flops_are_at_least_nearly_those_of_the_products_that_run(method, out, width, rank):
    """Oracle: torch's count of the products; it does not see factorisations and SparseGPT's single columns."""
    weight, h = oracles.problem(out, width)
    rank = 0 if isinstance(method, Prune) else rank
    with FlopCounterMode(display=False) as counter:
        prepared = method.prepare(Gram(h, 999))
        method.solve(weight, prepared, SemiStructured(2, 4), rank, torch.Generator().manual_seed(0))
    assert counter.get_total_flops() <= 1.5 * method.cost.flops * out * width**2
