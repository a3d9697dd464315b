"""The sensitivity of a whole model to the pruning of one layer."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

import hasslefree
from hasslefree import Recipe
from hasslefree.allocate.sensitivity import sample_labels, sensitivities
from hasslefree.core.patterns import SemiStructured
from hasslefree.distributed import World
from hasslefree.errors import ModelError, NonFiniteError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calibrate import probes
from hasslefree.models.calls import hooks
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from hasslefree.planning.selection import select
from hasslefree.planning.uniform import make_plan
from hasslefree.solve.decompose import approximation
from hasslefree.solve.methods.joint import QUICK_PRUNING
from tests.oracles import MANY
from tests.tiny_models import build, logits, segments

RECIPE = Recipe(rank=2, allocate="error").resolve(with_text=False)


def plan_of(model):
    return make_plan(select(find_blocks(model), RECIPE), RECIPE)


def walk_of(model, tokens, folder, storage="device"):
    return Walk.open(model, find_blocks(model), Weights(model, model.device), tokens[:1], storage, folder)


def pruned(layer, plan):
    sparse = layer.changed(plan.kept, None)
    return (sparse, layer.output_weights()), layer.divergence(sparse)


def look(model, tokens, folder, storage="device"):
    return sensitivities(walk_of(model, tokens, folder, storage), plan_of(model), tokens, World(), pruned)


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "opt", "gpt_neox", "phi3"])
def test_it_is_the_mean_square_of_what_moves_the_labels_likelihood(family, place, tmp_path, monkeypatch):
    """Oracle: ½ mean (g_tᵀ ΔW x_t)², with g by autograd through the whole model at once, token by token in float64."""
    monkeypatch.setattr("hasslefree.models.calibrate.PROBED", 40)  # two segments of 16
    labels = torch.arange(16) * 3 % 64
    monkeypatch.setattr(
        "hasslefree.allocate.sensitivity.sample_labels", lambda logits, generator: labels[: len(logits)]
    )
    model, tokens = build(family), segments(4, 16)
    found = look(model, tokens, tmp_path, place)
    blocks = find_blocks(model)
    assert sum(map(len, found)) == sum(map(len, plan_of(model).blocks)) > 7
    sites = {f"{blocks.prefix(i)}.{n}": s for i, b in enumerate(blocks.modules) for n, s in find_sites(b).items()}
    x, y = {}, {}
    handles = [site.on_input(lambda rows, name=name: x.setdefault(name, rows)) for name, site in sites.items()]
    handles += [site.on_output(lambda rows, name=name: y.setdefault(name, rows)) for name, site in sites.items()]
    with hooks(handles):
        predicted = model(input_ids=tokens[:2], use_cache=False).logits
    loss = F.cross_entropy(predicted.flatten(0, 1), labels.repeat(2), reduction="sum")
    gradients = dict(zip(y, torch.autograd.grad(loss, list(y.values())), strict=True))
    for index, layers in enumerate(found):
        for name, ((sparse, weights), sensitivity) in layers.items():
            full = f"{blocks.prefix(index)}.{name}"
            squares = gradients[full].flatten(0, -2).double().square().mean(0)
            torch.testing.assert_close(weights.double(), (squares / squares.mean()).clamp_min(1e-3), rtol=1e-3, atol=0)
            change = (sites[full].weight() - sparse).double()
            rows = zip(gradients[full].flatten(0, -2).double(), x[full].flatten(0, -2).double(), strict=True)
            squares = [float(g @ change @ each) ** 2 for g, each in rows]
            assert sensitivity == pytest.approx(sum(squares) / 32 / 2, rel=1e-3), full


def test_calls_of_a_layer_are_paired_with_their_own_gradients(tmp_path, monkeypatch):
    """Oracle: the gradient of the weight, by autograd through the whole model. A block calls o_proj twice."""
    labels = torch.arange(16) * 3 % 64
    monkeypatch.setattr(
        "hasslefree.allocate.sensitivity.sample_labels", lambda logits, generator: labels[: len(logits)]
    )
    model, tokens = build("llama"), segments(2, 16)
    block = model.model.layers[1]
    mlp, twice = block.mlp.forward, block.self_attn.o_proj
    block.mlp.forward = lambda x: mlp(x) + twice(x)
    walk = walk_of(model, tokens, tmp_path)

    def of_weight(layer, plan):
        return layer.gradients.T @ layer.inputs, 0.0

    found, _ = sensitivities(walk, plan_of(model), tokens, World(), of_weight)[1]["self_attn.o_proj"]
    predicted = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(predicted.flatten(0, 1), labels.repeat(2), reduction="sum")
    torch.testing.assert_close(found, *torch.autograd.grad(loss, twice.weight), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_is_close_to_the_divergence_of_a_model_with_that_layer_pruned(family, tmp_path):
    """Oracle: that model, run whole, in float64: within a factor of three, and seldom in another order."""
    model, tokens = build(family), segments(16, 16)
    wanted = F.log_softmax(logits(model, tokens).double(), -1)
    blocks, pairs = find_blocks(model), []
    for index, layers in enumerate(look(model, tokens, tmp_path)):
        for name, ((sparse, _), sensitivity) in layers.items():
            changed = copy.deepcopy(model)
            linear = changed.get_submodule(f"{blocks.prefix(index)}.{name}")
            with torch.no_grad():
                linear.weight.copy_(sparse.T if isinstance(linear, Conv1D) else sparse)
            here = F.log_softmax(logits(changed, tokens).double(), -1)
            pairs.append((sensitivity, float((wanted.exp() * (wanted - here)).sum(-1).mean())))
    assert all(1 / 3 < estimate / exact < 3 for estimate, exact in pairs)
    ordered = [(one[0] < other[0]) == (one[1] < other[1]) for one, other in itertools.combinations(pairs, 2)]
    assert sum(ordered) > 0.8 * len(ordered)


@pytest.mark.parametrize("pattern", ["2:4", "3:8"])
def test_a_layer_is_pruned_nearly_as_well_as_by_the_whole_method(pattern):
    """Oracle: `joint` with all its rounds and the polish; pruning by magnitude is far behind both."""
    x = torch.randn(400, 24, generator=torch.Generator().manual_seed(0)) @ torch.randn(24, 96).tril(8)
    weight, x = torch.randn(64, 96), x + 2 * torch.randn(400, 96)
    gram = hasslefree.Gram(x.T @ x / len(x), MANY)
    n, m = map(int, pattern.split(":"))
    parsed = SemiStructured(n, m)
    found = approximation(QUICK_PRUNING, weight, gram, QUICK_PRUNING.prepare(gram), parsed, 0, 0).sparse
    assert torch.equal(found != 0, parsed.mask(found.abs()))
    whole, magnitude = (hasslefree.decompose(weight, gram, pattern, 0, method=name) for name in ("joint", "magnitude"))
    error = gram.loss(weight - found) / gram.loss(weight)
    assert error < 1.2 * whole.relative_error < 1.5 * whole.relative_error < magnitude.relative_error


def test_labels_are_drawn_by_their_probability():
    """Oracle: the softmax. A logit of −∞ is never drawn."""
    logits = torch.tensor([1.0, -torch.inf, 2.0, 0.0]).expand(20000, 4)
    labels = sample_labels(logits, torch.Generator().manual_seed(0))
    shares = labels.bincount(minlength=4) / len(labels)
    torch.testing.assert_close(shares, F.softmax(logits[0], -1), atol=0.01, rtol=0)
    assert shares[1] == 0


@given(samples=st.integers(1, 12), seqlen=st.sampled_from([16, 1000, 4096, 9000]))
def test_the_first_segments_are_probes(samples, seqlen):
    """Oracle: 4,096 tokens, or one segment if that is longer."""
    count = probes(samples, seqlen)
    assert 1 <= count <= samples
    assert count == samples or count * seqlen <= 4096 < (count + 1) * seqlen or (count == 1 and seqlen > 4096)


def test_predictions_without_a_finite_gradient_are_refused(tmp_path):
    model = build("llama")
    walk = walk_of(model, segments(), tmp_path)
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(NonFiniteError, match=r"gradient of the model's predictions contains NaN.*allocate='uniform'"):
        sensitivities(walk, plan_of(model), segments(), World(), pruned)


def test_a_model_whose_head_needs_the_blocks_is_refused(tmp_path):
    model = build("llama")
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: seen.append(output))
    model.lm_head.register_forward_pre_hook(lambda module, args: seen.clear() if seen else seen.pop())
    walk = walk_of(model, segments(), tmp_path)
    seen.clear()
    remedy = "allocate='uniform' and match_predictions=0"
    with pytest.raises(ModelError, match=rf"LlamaForCausalLM cannot be run on its own.*{remedy}"):
        sensitivities(walk, plan_of(model), segments(), World(), pruned)


def test_too_little_memory_for_the_head_is_no_head_that_needs_the_blocks(tmp_path):
    model = build("llama")
    walk = walk_of(model, segments(), tmp_path)

    def short(module, args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.lm_head.register_forward_pre_hook(short)
    with pytest.raises(torch.OutOfMemoryError):
        sensitivities(walk, plan_of(model), segments(), World(), pruned)


def test_a_model_without_a_head_is_compressed_where_nothing_asks_for_its_predictions(tmp_path):
    with pytest.raises(ModelError, match="has no output head"):
        hasslefree.compress(
            build("llama").model, tmp_path / "out", Recipe(rank=2, allocate="error"), segments=segments()
        )
    recipe = Recipe(rank=2, effort="fast")
    hasslefree.compress(build("llama").model, tmp_path / "out", recipe, segments=segments())
