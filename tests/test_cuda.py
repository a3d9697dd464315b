"""The same on a GPU, where there is one: the CPU is the oracle."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Gram, Joint, Prune, Recipe
from hasslefree.methods import METHODS, build_method
from tests import oracles
from tests.tiny_models import build, logits, segments

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("name", METHODS)
def test_methods_reach_the_error_that_they_reach_on_the_cpu(name):
    """Rounding may tip a choice here and there; the error must not notice."""
    weight, h = oracles.problem(64, 96)
    alone = isinstance(METHODS[name], Prune)
    rounds = getattr(METHODS[name], "rounds", None)
    method = build_method(name, rounds=rounds and min(rounds, 5))
    here, there = (
        hasslefree.decompose(weight.to(d), Gram(h.to(d), 1), "2:4", 0 if alone else 8, method=method)
        for d in ("cpu", "cuda")
    )
    assert there.sparse.device.type == "cuda"
    assert there.relative_error == pytest.approx(here.relative_error, rel=0.02)
    again = hasslefree.decompose(weight.cuda(), Gram(h.cuda(), 1), "2:4", 0 if alone else 8, method=method)
    assert torch.equal(there.product(), again.product())


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_narrow_products_in_the_rounds_land_on_the_same_objective(precision):
    """Oracle: the same in float32."""
    for seed in range(4):
        weight, h = oracles.problem(256, 256, seed=seed)
        weight, gram = weight.cuda(), Gram(h.cuda(), 1)
        methods = Joint(precision="float32"), Joint(precision=precision)
        plain, fast = (hasslefree.decompose(weight, gram, "2:4", 16, method=method) for method in methods)
        assert fast.relative_error == pytest.approx(plain.relative_error, rel=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_the_gpu_goes_through_the_pipeline(dtype, tmp_path):
    model, tokens = build("llama", dtype).cuda(), segments().cuda()
    report = hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=tokens)
    assert report.device.startswith("cuda")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").cuda()
    assert torch.equal(logits(loaded, tokens), logits(model, tokens))
