"""Layers where memory runs out: an error that names the layer and the remedies."""

from dataclasses import dataclass, field

import pytest
import torch

import hasslefree
from hasslefree import Joint, Recipe, SemiStructured
from hasslefree.core.protocols import Method
from hasslefree.distributed import World
from hasslefree.errors import MemoryShortError
from hasslefree.pipeline import compress, layers
from hasslefree.planning.plan import LayerPlan
from tests.tiny_models import build, segments


@dataclass(frozen=True)
class Short(Method):
    """`joint` on a device that runs out of memory while it prepares, and while it solves, so many times."""

    preparing: list[int] = field(default_factory=list)
    solving: list[int] = field(default_factory=list)

    def prepare(self, gram):
        return self._after(self.preparing, Joint(rounds=2, sweeps=0).prepare, gram)

    def solve(self, weight, *rest):
        return self._after(self.solving, Joint(rounds=2, sweeps=0).solve, weight, *rest)

    def _after(self, times, call, *arguments):
        if times:
            times.pop()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(*arguments)


@pytest.mark.parametrize(
    ("kind", "message"),
    [("preparing", "factorise the Gram matrix .XᵀX of the layers' 32 inputs."), ("solving", "solve a layer of 32×32")],
)
def test_memory_that_runs_out_is_named(kind, message, tmp_path, monkeypatch):
    monkeypatch.setattr("hasslefree.recipe.resolve.build_solver", lambda recipe: Short(**{kind: [1]}))
    with pytest.raises(
        MemoryShortError, match=rf"memory on cpu to {message}; use activations='cpu', .*model\.layers\.0"
    ):
        hasslefree.compress(build("llama"), tmp_path / "out", Recipe(rank=2), segments=segments())


@pytest.mark.parametrize(("allocate", "weighted"), [("error", True), ("uniform", False)])
def test_layers_are_fitted_with_the_weights_of_their_outputs(allocate, weighted, tmp_path, monkeypatch):
    """Oracle: what the allocation measured, by the names of all layers."""
    measured, given = {}, []
    solve, find = layers.solve_layer, compress.by_sensitivity

    def remembered(*args, **settings):
        found = find(*args, **settings)
        measured.update(found.output_weights)
        return found

    def solved(weight, gram, method, *rest):
        given.append(getattr(method, "weights", None))
        return solve(weight, gram, method, *rest)

    monkeypatch.setattr(compress, "by_sensitivity", remembered)
    monkeypatch.setattr(layers, "solve_layer", solved)
    recipe = Recipe(rank=2, effort="fast", allocate=allocate)
    record = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments(6))
    names = [layer.name for layer in record.layers]
    assert (set(measured) == set(names)) == weighted
    expected = [measured[name] if weighted else None for name in names]
    assert all(one is other if other is None else one.equal(other) for one, other in zip(given, expected, strict=True))


def test_the_largest_layer_goes_to_the_least_loaded_process():
    """Oracle: by hand. One process solves q; the other one k and v, which together cost less."""
    shapes = {"k": (1024, 8192), "q": (8192, 8192), "v": (1024, 8192)}
    plans = {name: LayerPlan.of(shape, SemiStructured(2, 4), 64, torch.bfloat16) for name, shape in shapes.items()}
    costs = [plan.cost for plan in plans.values()]
    assert World(0, 2).assign(costs) == [1, 0, 1]
    assert World(0, 1).assign(costs) == [0, 0, 0]
