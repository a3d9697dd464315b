"""Which layers processes share, and what the plan makes of it."""

import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasslefree
from hasslefree import Recipe, SemiStructured
from hasslefree.distributed import World
from hasslefree.pipeline.layers import assign_layers, shared_layers, undivided
from hasslefree.planning.plan import LayerPlan
from hasslefree.solve.methods import METHODS
from tests.tiny_models import build, segments

JOINT = METHODS["joint"]
# Llama-3-70B: the groups of layers with one input.
GROUPS = [
    {"q": (8192, 8192), "k": (1024, 8192), "v": (1024, 8192)},
    {"o": (8192, 8192)},
    {"gate": (28672, 8192), "up": (28672, 8192)},
    {"down": (8192, 28672)},
]


def plans_of(shapes):
    pattern = SemiStructured(2, 4)
    return {name: LayerPlan.of(shape, pattern, 64, torch.bfloat16) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("processes", "shared"),
    [(1, []), (2, [{"q"}, {"o"}, set(), {"down"}]), (8, [set("qkv"), {"o"}, {"gate", "up"}, {"down"}])],
)
def test_layers_that_would_leave_processes_idle_are_shared(processes, shared):
    """Oracle: by hand. Two processes solve gate and up side by side, and k and v; eight share every layer."""
    found = [shared_layers(JOINT, plans_of(group), processes) for group in GROUPS]
    assert found == (shared or [set()] * 4)


def test_experts_are_assigned_and_small_layers_are_whole():
    """Oracle: by hand. A layer with fewer rows than processes is not shared, nor one whose method cannot."""
    experts = plans_of({f"{i}.gate": (768, 2048) for i in range(128)})
    assert not shared_layers(JOINT, experts, 8)
    assert not shared_layers(JOINT, plans_of({"tiny": (7, 64)}), 8)
    assert shared_layers(JOINT, plans_of({"tiny": (8, 64)}), 8) == {"tiny"}
    assert not shared_layers(METHODS["eora"], plans_of({"down": (8192, 28672)}), 8)


@given(costs=st.lists(st.integers(1, 10**6), min_size=1, max_size=12), size=st.integers(1, 9))
def test_what_is_assigned_is_no_larger_than_an_even_part(costs, size):
    """Oracle: the definition of an even part, for what is left when the larger jobs are shared."""
    shared = World(0, size).too_large(costs)
    left = [cost for cost, large in zip(costs, shared, strict=True) if not large]
    assert not left or max(left) * size <= sum(left)
    taken = [cost for cost, large in zip(costs, shared, strict=True) if large]
    assert not taken or not left or min(taken) > max(left)


def test_a_layer_that_is_not_shared_has_one_rank():
    plans = plans_of({"q": (8192, 8192), "k": (1024, 8192), "v": (1024, 8192)})
    assert assign_layers(plans, frozenset("q"), 2) == {"q": None, "k": 0, "v": 1}


def test_a_method_that_cannot_share_says_so(caplog, tmp_path, monkeypatch):
    plan = [plans_of(GROUPS[3])]
    assert undivided(JOINT, plan, 8) is None
    assert undivided(METHODS["eora"], plan, 1) is None
    remark = undivided(METHODS["eora"], plan, 8)
    assert remark.startswith(
        "AlternatingMinimization cannot split a layer of pattern 2:4 between processes: each layer is solved"
    )
    monkeypatch.setattr("hasslefree.pipeline.compress.undivided", lambda method, plan, size: f"{size} cannot share")
    with caplog.at_level(logging.INFO, logger="hasslefree"):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(method="wanda"), segments=segments())
    assert "1 cannot share" in caplog.text
