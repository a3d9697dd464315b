import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasslefree
from hasslefree import Recipe
from hasslefree.allocate import owl
from hasslefree.allocate.owl import outlier_share, owl_ratios
from hasslefree.distributed import World
from hasslefree.errors import BudgetError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.experts import split_experts
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import make_plan
from tests import oracles
from tests.tiny_models import build, segments


@settings(max_examples=30)
@given(st.integers(0, 999), st.integers(1, 3))
def test_the_share_is_a_count_entry_by_entry(seed, count):
    """Oracle: arXiv 2310.05175, equation 1, with the norms of the inputs themselves."""
    layers, entries = [], []
    for k in range(count):
        weight, _ = oracles.problem(3 + k, 8, seed=seed + k)
        x = torch.randn(20, 8, generator=torch.Generator().manual_seed(seed + k)) * torch.arange(1, 9) ** 2
        layers.append((weight, (x.T @ x / 20).diagonal()))
        norms = [math.sqrt(sum(float(v) ** 2 for v in column)) for column in x.T]
        entries += [abs(float(weight[i, j])) * norms[j] for i in range(len(weight)) for j in range(8)]
    mean = sum(entries) / len(entries)
    assert outlier_share(layers) == sum(e > 5 * mean for e in entries) / len(entries)


shares = st.lists(st.floats(0, 0.2), min_size=1, max_size=12)


@given(shares, st.floats(0.2, 0.8), st.integers(0, 99))
def test_the_average_is_kept_and_more_outliers_save_less(shares, ratio, seed):
    """Oracle: the rule of the paper, with its λ: a linear map onto [0, 2λ] of what is kept, shifted to the mean."""
    weights = torch.randint(1, 9, (len(shares),), generator=torch.Generator().manual_seed(seed)).tolist()
    found = owl_ratios(shares, ratio, weights)
    assert sum(r * w for r, w in zip(found, weights, strict=True)) / sum(weights) == pytest.approx(ratio, abs=1e-9)
    for one, other in zip(shares, found, strict=True):
        assert all(mine >= other - 1e-12 for share, mine in zip(shares, found, strict=True) if share < one)
    if max(shares) > min(shares):
        kept = [2 * 0.08 * (share - min(shares)) / (max(shares) - min(shares)) for share in shares]
        middle = sum(k * w for k, w in zip(kept, weights, strict=True)) / sum(weights)
        assert found == pytest.approx([1 - (k - middle + 1 - ratio) for k in kept], abs=1e-9)
    else:
        assert found == (ratio,) * len(shares)


@pytest.mark.parametrize(("ratio", "shares"), [(0.95, [0.0, 0.1, 0.1]), (0.02, [0.0, 0.0, 0.1]), (1.0, [0.1, 0.2])])
def test_what_cannot_be_saved_is_an_error(ratio, shares):
    with pytest.raises(BudgetError, match="which must be between 0 and 1; choose another ratio or sparsity"):
        owl_ratios(shares, ratio, [1] * len(shares))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_inputs_are_those_of_the_dense_model_in_one_pass(family, monkeypatch):
    """Oracle: hooks in the model as transformers runs it."""
    model = build(family)
    split_experts(model)
    resolved = Recipe(rank=2).resolve(with_text=False)
    plan = make_plan(select(find_blocks(model), resolved), resolved)
    inputs = defaultdict(list)

    def keep(name):
        return lambda _, args: inputs[name].append(args[0].reshape(-1, args[0].shape[-1]))

    names = {name for index, plans in enumerate(plan.blocks) for name in (f"model.layers.{index}.{n}" for n in plans)}
    watching = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    with torch.no_grad():
        model(segments())
    for handle in watching:
        handle.remove()
    walk = Walk.open(model, find_blocks(model), Weights(model, model.device), segments()[:1])
    hidden = walk.entering(segments())
    monkeypatch.setattr("hasslefree.models.walk.run_block", lambda *_: pytest.fail("run again"))
    for visit in walk.visits(hidden):
        layers = []
        monkeypatch.setattr(owl, "outlier_share", layers.extend)
        plans = plan.blocks[visit.index]
        owl.block_outliers(visit, plans, hidden, World())
        for name, (weight, diagonal) in zip(plans, layers, strict=True):
            whole = f"{visit.prefix}.{name}"
            assert torch.equal(weight, model.get_submodule(whole).weight)
            expected = torch.cat(inputs[whole]).double().square().mean(0)
            torch.testing.assert_close(diagonal, expected, rtol=1e-4, atol=1e-8)


def test_a_block_that_stays_dense_is_left_out(tmp_path):
    """Oracle: the sparsity asked for, of the only other block."""
    recipe = Recipe(
        pattern="row", sparsity=0.5, rank=0, method="wanda", allocate="owl", leave_dense=("model.layers.0.*",)
    )
    record = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    assert {layer.name.split(".")[2] for layer in record.layers} == {"1"}
    for layer in record.layers:
        assert layer.spec.nonzeros == layer.spec.dense_parameters // 2
