"""The same on a GPU, where there is one: the CPU is the oracle."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Gram, Joint, Prune, Recipe
from hasslefree.packed.layouts import layout_of
from hasslefree.solve.methods import METHODS, build_method
from tests import oracles
from tests.suited import suited
from tests.tiny_models import build, logits, segments

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("name", METHODS)
def test_methods_reach_the_error_that_they_reach_on_the_cpu(name):
    """Rounding may tip a choice here and there; the error must not notice."""
    weight, h = oracles.problem(64, 96)
    alone = isinstance(METHODS[name], Prune)
    rounds = getattr(METHODS[name], "rounds", None)
    method = build_method(name, rounds=rounds and min(rounds, 5))
    gram, rank = Gram(h, 1, oracles.mean_of(h)), 0 if alone else 8
    pattern = suited(name, "2:4", 96)
    here, there = (
        hasslefree.decompose(weight.to(d), gram.to(weight.to(d)), pattern, rank, method=method) for d in ("cpu", "cuda")
    )
    assert there.sparse.device.type == "cuda"
    assert there.relative_error == pytest.approx(here.relative_error, rel=0.02)
    again = hasslefree.decompose(weight.cuda(), gram.to(weight.cuda()), pattern, rank, method=method)
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


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_on_the_gpu_goes_through_the_pipeline(dtype, bits, tmp_path):
    model, tokens = build("llama", dtype).cuda(), segments().cuda()
    recipe = Recipe(rank=2, method="eora", factor_bits=bits)
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=tokens)
    assert report.device.startswith("cuda")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").cuda()
    assert torch.equal(logits(loaded, tokens), logits(model, tokens))


@pytest.mark.parametrize("pattern", ["2:4", "2:8", "3:8", "2:5", "row", "structured"])
def test_packing_gives_the_same_bytes_and_the_same_matrix(pattern):
    n, _, m = pattern.partition(":")
    sparse = torch.zeros(33, 120, dtype=torch.bfloat16)
    sparse.view(33, -1, int(m or 3))[..., : int(n) if m else 1] = -1.5
    layout = layout_of(pattern)
    here, there = layout.pack(sparse), layout.pack(sparse.cuda())
    assert all(torch.equal(one, other.cpu()) for one, other in zip(here, there, strict=True))
    assert torch.equal(layout.unpack(*there, 120).cpu(), sparse)
    layout.validate(there[1], 120, there[0].numel())
