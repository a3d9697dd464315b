"""Mixtures of experts go through the whole pipeline by the interface of transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe, SparseLowRankLinear
from hasslefree.errors import ModelError
from hasslefree.exports.export import export
from hasslefree.models.experts import SplitExperts, every_expert_called, fuse_experts, split_experts
from tests.listeners import by_layer
from tests.tiny_models import MIXTURES, NO_TOKENIZER, build, logits, segments, tensors_of

mixtures = pytest.mark.parametrize("family", MIXTURES)


def made(family):
    """A mixture, the same at every call, in the eager way of transformers."""
    model = build(family)
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # also those that a fresh model leaves at zero
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def split(model):
    return [module for module in model.modules() if isinstance(module, SplitExperts)]


@mixtures
def test_experts_apart_are_those_of_transformers(family):
    """Oracle: transformers' own forward pass; and the weights, after they are fused again."""
    model = made(family)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = logits(model, segments())
    split_experts(model)
    assert split(model)
    torch.testing.assert_close(logits(model, segments()), expected, rtol=1e-5, atol=1e-6)
    with every_expert_called(model):
        torch.testing.assert_close(logits(model, segments()), expected, rtol=1e-5, atol=1e-6)
    fuse_experts(model)
    after = model.state_dict()
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name], weights[name]) for name in weights)
    torch.testing.assert_close(logits(model, segments()), expected, rtol=1e-5, atol=1e-6)


@mixtures
def test_a_mixture_is_compressed_and_loads_as_it_was_in_memory(family, tmp_path):
    """Oracle: the compressed model in memory; and its dense export, in transformers alone."""
    model = made(family)
    report = hasslefree.compress(
        model, tmp_path / "out", Recipe(pattern="2:4", rank=2, effort="fast", rounds=3), segments=segments()
    )
    names = {layer.name for layer in report.layers}
    experts = [name for name in names if ".experts." in name]
    assert len(experts) == sum(module.count * len(module.get_submodule("0")) for module in split(model))
    expected = logits(model, segments())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(isinstance(module, SparseLowRankLinear) for module in loaded.modules()) == len(names)
    torch.testing.assert_close(logits(loaded, segments()), expected, rtol=1e-5, atol=1e-6)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(again, segments()), expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ModelError, match=r"belong to experts, such as .*experts\.0\..*dense"):
        export(tmp_path / "out", tmp_path / "peft", "peft")
    export(tmp_path / "out", tmp_path / "dense", "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not split(plain)
    torch.testing.assert_close(logits(plain, segments()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.nightly), "gpt_oss"])
def test_a_mixture_that_is_streamed_and_resumed_is_compressed_as_one_in_memory(family, tmp_path):
    """Oracle: the same compression of the same model in memory, without a stop."""
    made(family).save_pretrained(tmp_path / "dense")
    recipe = Recipe(pattern="2:4", rank=2, effort="best", rounds=3, match_predictions=64)
    arguments = (tmp_path / "dense", tmp_path / "a", recipe)
    options = {"segments": segments(8), "tokenizer": NO_TOKENIZER}

    def stop(report, done, total):
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hasslefree.compress(*arguments, **options, progress=by_layer(stop))
    hasslefree.compress(*arguments, **options, resume=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    hasslefree.compress(model, tmp_path / "b", recipe, segments=segments(8))
    one, other = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_an_expert_that_no_token_reaches_is_fitted_without_inputs(tmp_path):
    """Oracle: H = I."""
    model = made("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, args, out: (*out[:2], out[2].where(out[2] != 2, 3)))
    weight = model.model.layers[0].mlp.experts.gate_up_proj[2, :24].detach().clone()
    recipe = Recipe(method="eora", rank=2, leave_dense=("*.self_attn.*",))
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    name = "model.layers.0.mlp.experts.2.gate_proj"
    layer = model.get_submodule(name)
    record = next(record for record in report.layers if record.name == name)
    residual = (weight - layer.unpacked() - layer.low_rank_u @ layer.low_rank_v).detach()
    error = residual.square().sum() / weight.square().sum()
    assert record.relative_error == pytest.approx(error.item(), rel=1e-4)
    unreached = {".experts.2." in record.name for record in report.layers if any("H = I" in r for r in record.remarks)}
    assert unreached == {True}
    count = sum(".experts.2." in record.name for record in report.layers)
    assert f"experts            {count} layers had no token of the calibration text" in report.summary()


@pytest.mark.parametrize("how", [{"sequential": "block"}, {"allocate": "error"}])
def test_allocation_and_training_take_mixtures(how, tmp_path):
    """Every expert is compressed, and the model predicts as the folder that was written does."""
    model = made("mixtral")
    report = hasslefree.compress(
        model, tmp_path / "out", Recipe(rank=2, effort="fast", rounds=3, **how), segments=segments()
    )
    assert len([layer for layer in report.layers if ".experts." in layer.name]) == 2 * 4 * 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded, segments()), logits(model, segments()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {}),
        ("aria_text", {}),
        ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}),
    ],
)
def test_an_expert_sees_the_tokens_that_are_routed_to_it(family, sizes):
    """Of 4 experts, each token chooses 2, under whichever name the configuration says so."""
    model = build(family, **sizes)
    split_experts(model)
    assert {module.chosen for module in split(model)} == {2}
