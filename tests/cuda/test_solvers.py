"""Solvers on a GPU: the CPU is the oracle. And what no round may do there: wait, or compute in float64."""

import dataclasses

import pytest
import torch

import hasslefree
from hasslefree import Gram, Joint, Prune, ThreeBlock
from hasslefree.solve.methods import METHODS, build_method, joint
from tests import oracles
from tests.cuda.fake_cuda import fake_cuda
from tests.cuda.watch import watched
from tests.suited import suited

# How often the CPU may wait for the GPU in each round more: an alternation reads the objective of every round to keep
# the best; `joint` looks twenty times, however many its rounds are; PCP reads two numbers in each of eight searches.
WAITS = {"joint": 0, "joint-grid": 0, "pcp": 16}
# A swap of channels follows from the one before, in float64: these methods are not for a GPU.
SWAPPING = ("osscar", "losparse")
ROUNDS = [name for name in METHODS if getattr(METHODS[name], "rounds", None) and name not in SWAPPING]


# A fake GPU takes its time for each operation.
FEWER = {
    "3basil": {"penalty": dataclasses.replace(ThreeBlock().penalty, most=50)},
    "joint-grid": {"turns": 2, "ranges": 3},
}


def solved(name, rounds=None):
    """A method on a layer that it can take, on the GPU and on the CPU."""
    weight, h = oracles.problem(32, 64)
    alone = isinstance(METHODS[name], Prune)
    least = getattr(METHODS[name], "rounds", None)
    rounds = rounds or (25 if "joint" in name else least and min(least, 2))
    method = dataclasses.replace(build_method(name, rounds=rounds), **FEWER.get(name, {}))
    gram, rank, pattern = Gram(h, 1, oracles.mean_of(h)), 0 if alone else 8, suited(name, "2:4", 64)
    return lambda device: hasslefree.decompose(
        weight.to(device), gram.to(weight.to(device)), pattern, rank, method=method
    )


@pytest.mark.parametrize("name", METHODS)
def test_methods_reach_the_error_that_they_reach_on_the_cpu(name, gpu, monkeypatch):
    """Rounding may tip a choice here and there; the error must not notice. `joint` makes choices in every round.

    What narrow products tip is for the next test: here the fake GPU and the CPU compute in float32.
    """
    monkeypatch.setattr(joint.products, "multiplies_bfloat16", lambda device: False)  # as on other CPUs
    monkeypatch.setattr("tests.cuda.fake_cuda.as_tf32", lambda value: value)
    solve = solved(name)
    here, there = solve("cpu"), solve("cuda")
    assert there.sparse.device.type == "cuda"
    assert there.relative_error == pytest.approx(here.relative_error, rel=0.1 if "joint" in name else 0.02)
    if gpu is None:  # the fake GPU computes on the CPU, where the contract of the methods says the same
        assert torch.equal(there.product(), solve("cuda").product())


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_narrow_products_in_the_rounds_land_on_the_same_objective(precision, gpu):
    """Oracle: the same in float32, in the mean of eight problems."""
    if gpu and precision == "tf32":
        pytest.skip("the fake GPU computes in float32")
    ratios = []
    for seed in range(8):
        weight, h = oracles.problem(128, 128, seed=seed)
        weight, gram = weight.cuda(), Gram(h.cuda(), 1)
        methods = Joint(precision="float32"), Joint(precision=precision)
        plain, fast = (hasslefree.decompose(weight, gram, "2:4", 8, method=method) for method in methods)
        ratios.append(fast.relative_error / plain.relative_error)
    assert sum(ratios) / 8 == pytest.approx(1, abs=4e-2)


def counted(name, rounds):
    """The waits of a method with so many rounds, and its large float64 tensors."""
    with fake_cuda() as gpu, watched(gpu) as watch:
        solved(name, rounds)("cuda")
    return watch


# These alternate as hassle-free does.
SIMILAR = ("caldera", "eora")


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in ROUNDS if name not in SIMILAR),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in SIMILAR),
    ],
)
def test_more_rounds_wait_for_the_gpu_no_more_than_is_stated(name):
    fewer, added = (22, 4) if "joint" in name else (2, 2)
    few, many = (counted(name, rounds) for rounds in (fewer, fewer + added))
    more = many.waits - few.waits
    del more["core/linalg.py:_inverse_by_blocks"]  # one where ρ grows, which is at a look
    assert sum(more.values()) < added * (WAITS.get(name, 1) + 0.5), more
    assert many.doubles == few.doubles


@pytest.mark.parametrize("name", [name for name in METHODS if name not in (*ROUNDS, *SWAPPING)])
def test_float64_is_for_what_depends_on_the_gram_alone(name):
    doubles = counted(name, None).doubles
    assert all(times <= 3 for times in doubles.values()), doubles
