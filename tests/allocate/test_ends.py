"""What embedding and head lose on a grid."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from hasslefree import Recipe
from hasslefree.allocate.ends import EndProbe
from hasslefree.allocate.sensitivity import probe_method, sensitivities
from hasslefree.distributed import World
from hasslefree.models.blocks import find_blocks
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import plan_of
from hasslefree.recipe.engines import WIDE_TYPES
from hasslefree.solve.decompose import approximation
from tests.tiny_models import build, gram_of, segments

RECIPE = Recipe(size="8bits", group_size=16, effort="fast").resolve(with_text=False)
LABELS = torch.arange(16) * 3 % 64


def rounded(weight, grid):
    """To the nearest of the 16 values of each group from its smallest to its largest entry."""
    return dataclasses.replace(grid, bits=4).scaling(weight).nearest(weight)


def divergence_of(model, tokens, changed):
    """KL(dense ‖ with a changed head) per token, in float64, from the inputs of the head."""
    inputs = []
    with model.lm_head.register_forward_pre_hook(lambda module, args: inputs.append(args[0])), torch.no_grad():
        model(input_ids=tokens)
    x = inputs[0].flatten(0, 1).double()
    before, after = (F.log_softmax(x @ weight.double().T, -1) for weight in (model.lm_head.weight.detach(), changed))
    return float((before.exp() * (before - after)).sum(-1).mean())


def divergence_of_embedding(model, tokens, change):
    """½ mean (g_tᵀ Δ_t)², with g by autograd through the whole model at once."""
    states = model.get_input_embeddings()(tokens).detach().requires_grad_()
    predicted = model(inputs_embeds=states, use_cache=False).logits
    loss = F.cross_entropy(predicted.flatten(0, 1), LABELS.repeat(len(tokens)), reduction="sum")
    [gradient] = torch.autograd.grad(loss, states)
    return float((gradient * change[tokens]).sum(-1).double().square().mean()) / 2


def watched(model, tokens, folder):
    """A probe that has watched both ends of the model on all tokens."""
    blocks = find_blocks(model)
    plan = plan_of(model, select(blocks, RECIPE), RECIPE)
    walk = Walk.open(model, blocks, Weights(model, model.device), tokens[:1], "device", folder)
    probe = EndProbe(walk, plan.ends, World(), 16)
    sensitivities(walk, plan, tokens, World(), lambda layer, plan: (None, 0.0), ends=probe)
    return probe, plan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_is_measured_where_products_are_not_in_its_dtype(dtype, tmp_path, monkeypatch):
    """As on a CPU without instructions for bfloat16. Oracle: the divergence from whole passes in float64."""
    monkeypatch.setattr("hasslefree.models.precision.multiplies_bfloat16", lambda device: False)
    model, tokens = build("llama", dtype), segments(2, 16)
    probe, _ = watched(model, tokens, tmp_path)
    expected = divergence_of(model.float(), tokens, probe.rounded["lm_head"])
    assert probe.divergence_of_head / 32 == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_what_each_grid_loses(tied, tmp_path, monkeypatch):
    """Oracle: both divergences from whole passes in float64, per unit of the errors' norms, times the error of each
    grid's sweep in H + αI, in H alone, or in I, with their correlations shrunk."""
    monkeypatch.setattr("hasslefree.models.calibrate.PROBED", 40)  # two segments of 16
    monkeypatch.setattr("hasslefree.allocate.sensitivity.sample_labels", lambda logits, _: LABELS)
    model, tokens = build("llama", tie_word_embeddings=tied), segments(4, 16)
    probe, plan = watched(model, tokens, tmp_path)
    choices = probe.choices(RECIPE)
    weights = {name: model.get_parameter(f"{name}.weight").detach() for name in choices}
    assert list(choices) == ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    identity = torch.eye(32, dtype=torch.float64)
    gram = gram_of(model, "lm_head", tokens[:2]).matrix.double()
    for name, choice in choices.items():
        nearest = rounded(weights[name], plan.ends[name].grid)
        errors = (weights[name] - nearest).double()
        norm, rate = torch.zeros_like(gram), 0.0
        if tied or name == "lm_head":
            rate = divergence_of(model, tokens[:2], nearest) / torch.trace(errors @ gram @ errors.T).item()
            norm += rate * gram
        if name == "model.embed_tokens":
            found = divergence_of_embedding(model, tokens[:2], weights[name] - nearest)
            norm += found / errors.square().sum().item() * identity
        for each in RECIPE.end_grids:
            method = probe_method(each)
            in_norm = dataclasses.replace(gram_of(model, "lm_head", tokens[:2]), matrix=norm.float())
            prepared = method.prepare(in_norm)
            swept = approximation(method, weights[name], in_norm, prepared, plan.ends[name].kept, 0, 0).sparse
            left = (weights[name] - swept).double()
            lost = torch.trace(left @ in_norm.shrunk().matrix.double() @ left.T).item()
            choice_plan = dataclasses.replace(plan.ends[name], grid=each)
            assert choice.loss(choice_plan) == pytest.approx(lost, rel=0.02), (name, each)


def test_without_a_size_both_stay_dense():
    assert Recipe(bits=4, rank=0).resolve(with_text=False).end_grids == ()
    assert Recipe(size="8bits", pattern="2:4").resolve(with_text=False).end_grids == ()
    assert Recipe(size="8bits", engine="vllm").resolve(with_text=False).end_grids == ()
    assert Recipe(size="8bits", engine="llama.cpp").resolve(with_text=False).end_grids == WIDE_TYPES
