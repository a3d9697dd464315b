"""The sensitivity of a whole model to the pruning of one layer."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError, NonFiniteError
from hasslefree.levers.sensitivity import sensitivities
from hasslefree.models.blocks import find_blocks
from hasslefree.models.distributed import World
from hasslefree.models.moments import probes
from hasslefree.models.streaming import Weights
from hasslefree.recipe.plan import make_plan
from hasslefree.run.blockwise import look_over
from tests.tiny_models import build, logits, segments

RECIPE = Recipe(rank=2, allocate="error").resolve(with_text=False)


def plan_of(model):
    return make_plan(find_blocks(model), RECIPE)


def walk_of(model, tokens, folder, storage="device"):
    options = {"storage": storage, "folder": folder}
    return look_over(model, find_blocks(model), Weights(model, model.device), plan_of(model), tokens[:1], options)[0]


def look(model, tokens, folder, storage="device"):
    walk = walk_of(model, tokens, folder, storage)
    return sensitivities(walk, plan_of(model), tokens, World(), lambda weight, sparse, *rest: sparse)


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt", "gpt_neox", "phi3"])
def test_it_is_the_divergence_of_a_model_with_that_layer_pruned(family, place, tmp_path, monkeypatch):
    """Oracle: that model, run whole on the first segments, in float64."""
    monkeypatch.setattr("hasslefree.models.moments.PROBED", 40)  # two segments of 16
    model, tokens = build(family), segments(4, 16)
    wanted = F.log_softmax(logits(model, tokens[:2]).double(), -1)
    found = look(model, tokens, tmp_path, place)
    blocks = find_blocks(model)
    assert sum(map(len, found)) == sum(map(len, plan_of(model))) > 7
    for index, layers in enumerate(found):
        for name, (sparse, sensitivity) in layers.items():
            changed = copy.deepcopy(model)
            linear = changed.get_submodule(f"{blocks.prefix(index)}.{name}")
            with torch.no_grad():
                linear.weight.copy_(sparse.T if isinstance(linear, Conv1D) else sparse)
            here = F.log_softmax(logits(changed, tokens[:2]).double(), -1)
            expected = (wanted.exp() * (wanted - here)).sum(-1).mean()
            assert sensitivity == pytest.approx(float(expected), rel=1e-3), name
    assert torch.equal(F.log_softmax(logits(model, tokens[:2]).double(), -1), wanted)  # the model is as it was


@given(samples=st.integers(1, 12), seqlen=st.sampled_from([16, 1000, 4096, 9000]))
def test_the_first_segments_are_probes(samples, seqlen):
    """Oracle: 4,096 tokens, or one segment if that is longer."""
    count = probes(samples, seqlen)
    assert 1 <= count <= samples
    assert count == samples or count * seqlen <= 4096 < (count + 1) * seqlen or (count == 1 and seqlen > 4096)


def test_a_layer_that_ruins_the_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("hasslefree.levers.sensitivity.divergence", lambda found, wanted: float("nan"))
    with pytest.raises(NonFiniteError, match=r"with model.layers.0.self_attn.q_proj pruned .*allocate='uniform'"):
        look(build("llama"), segments(), tmp_path)


def test_a_model_whose_head_needs_the_blocks_is_refused(tmp_path):
    model = build("llama")
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.clear() if seen else seen.pop())
    walk = walk_of(model, segments(), tmp_path)
    seen.clear()
    with pytest.raises(ModelError, match=r"LlamaForCausalLM does not run without the blocks.*allocate='uniform'"):
        sensitivities(walk, plan_of(model), segments(), World(), lambda *seen: None)


def test_a_model_without_a_head_is_compressed_by_a_uniform_plan_alone(tmp_path):
    with pytest.raises(ModelError, match="has no output head"):
        hasslefree.compress(build("llama").model, tmp_path / "out", Recipe(rank=2), segments=segments())
    recipe = Recipe(rank=2, allocate="uniform")
    hasslefree.compress(build("llama").model, tmp_path / "out", recipe, segments=segments())
