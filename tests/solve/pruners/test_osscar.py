import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasslefree
from hasslefree import OSSCAR, Gram, Recipe, Structured, Unstructured
from hasslefree.errors import PatternError
from hasslefree.models.blocks import find_blocks
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import make_plan
from tests import oracles
from tests.tiny_models import build, segments


def prune(pruner, weight, h, pattern):
    return pruner.prune(weight, pruner.prepare(Gram(h, 1)), pattern).sparse


def mask_of(kept, shape, unit):
    mask = torch.zeros(shape, dtype=torch.bool)
    for k in kept:
        mask[:, k * unit : (k + 1) * unit] = True
    return mask


def exhaustive(weight, h, count, unit):
    """The least loss over all choices of channels, each with its least squares."""
    choices = itertools.combinations(range(weight.shape[1] // unit), count // unit)
    masks = [mask_of(kept, weight.shape, unit) for kept in choices]
    return min(oracles.loss(weight - oracles.on_support(weight, h, mask), h) for mask in masks)


@pytest.mark.parametrize(("width", "count", "unit"), [(8, 4, 1), (12, 6, 1), (12, 3, 1), (12, 6, 2), (12, 6, 3)])
def test_within_a_hundredth_of_the_best_of_all_choices(width, count, unit):
    """Oracle: every choice of channels, with the normal equations in float64."""
    for seed in range(3):
        weight, h = oracles.problem(3, width, seed=seed, dtype=torch.float64)
        found = prune(OSSCAR(), weight, h, Structured(count, unit))
        best = exhaustive(weight, h, count, unit)
        assert best * (1 - 1e-9) <= oracles.loss(weight - found, h) <= 1.01 * best


@settings(max_examples=25)
@given(st.sampled_from([(1, 7), (2, 6), (3, 9), (4, 8)]), st.sampled_from([1, 3, 256]), st.integers(0, 999))
def test_the_values_are_the_least_squares_on_the_channels(units, steps, seed):
    """Oracle: the normal equations; and in whole units, whatever the number of steps."""
    unit, count = units
    weight, h = oracles.problem(9, 24, seed=seed, dtype=torch.float64)
    found = prune(OSSCAR(steps), weight, h, Structured(count // unit * unit, unit))
    kept = (found != 0).any(0)
    assert kept.view(-1, unit).all(1).sum() == count // unit == kept.sum() // unit
    torch.testing.assert_close(found, oracles.on_support(weight, h, kept.expand(9, 24)), rtol=1e-5, atol=1e-6)


def plan_of(**fields):
    resolved = Recipe(**fields).resolve(with_text=False)
    return make_plan(select(find_blocks(build("llama")), resolved), resolved).blocks[0]


@pytest.mark.parametrize("method", [{"method": "osscar"}, {"method": "osscar", "refit": True}, {"method": "losparse"},
                                    {"method": "hassle-free", "pruner": "osscar"}], ids=str)  # fmt: skip
def test_heads_stay_whole_wherever_the_pruner_is(method):
    """4 heads of 8 share 2 keys: 16 inputs of o_proj go together, no others do. Other pruners know no heads."""
    units = {
        name: layer.kept.unit for name, layer in plan_of(pattern="structured", sparsity=0.5, rank=0, **method).items()
    }
    assert units.pop("self_attn.o_proj") == 16
    assert set(units.values()) == {1}
    other = plan_of(pattern="structured", sparsity=0.5, method="wanda", refit=True)
    assert other["self_attn.o_proj"].kept.unit == 1


def test_what_it_cannot_do_is_an_error():
    weight, h = oracles.problem(4, 8)
    for pattern in ("2:4", Unstructured(9)):
        with pytest.raises(PatternError, match="OSSCAR removes whole input channels and needs pattern structured, got"):
            hasslefree.decompose(weight, Gram(h, 99), pattern, method="osscar")
    with pytest.raises(PatternError, match="OSSCAR removes whole.*model.layers.0.self_attn"):
        hasslefree.compress(build("llama"), "nowhere", Recipe(method="osscar"), segments=segments())
    with pytest.raises(PatternError, match="4 of 8 input channels: both .* multiples of unit=3"):
        hasslefree.decompose(weight, Gram(h, 99), Structured(4, 3), method="osscar")
