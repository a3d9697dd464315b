"""Every family goes through the whole pipeline without code of its own."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe, SparseLowRankLinear
from hasslefree.distributed import ALONE
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calibrate import gather, groups_by_input, run_block, tensors_read
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from tests import oracles
from tests.tiny_models import FAMILIES, build, gram_of, logits, segments, tensors_of

families = pytest.mark.parametrize("family", [*FAMILIES, "falcon"])


@families
def test_streamed_grams_are_those_of_the_whole_model(family):
    """Oracle: hooks on every linear layer during ordinary forward passes of the whole model."""
    model, tokens = build(family), segments()
    blocks = find_blocks(model)
    walk = Walk.open(model, blocks, Weights(model, model.device), tokens[:1])
    calls, hidden = walk.calls, walk.entering(tokens)
    for index, block in enumerate(blocks.modules):
        groups = groups_by_input(tensors_read(block, calls[index], hidden[0], find_sites(block)))
        assert sorted(name for group in groups for name in group) == sorted(find_sites(block))
        grams = gather(block, blocks.prefix(index), calls[index], hidden, groups, ALONE)
        for group, gram in zip(groups, grams, strict=True):
            for name in group:
                expected = gram_of(model, f"{blocks.prefix(index)}.{name}", tokens)
                assert gram.tokens == tokens.numel()
                torch.testing.assert_close(gram.matrix, expected.matrix, rtol=1e-4, atol=1e-6)
                torch.testing.assert_close(gram.mean, expected.mean, rtol=1e-4, atol=1e-6)
        run_block(block, calls[index], hidden)


@families
def test_a_compressed_model_reloads_and_its_record_is_true(family, tmp_path):
    """Oracle: hooks on the finished model. What enters a layer depends on the layers before it alone, so that the Gram
    it was compressed with is the one that it sees at the end."""
    dense, model, tokens = build(family), build(family), segments()
    sites = find_sites(dense)
    report = hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=tokens)
    assert len(report.layers) == sum(isinstance(m, SparseLowRankLinear) for m in model.modules()) >= 8
    assert not find_sites(model.get_submodule(find_blocks(dense).name)), "a linear layer of a block stayed dense"
    for found in report.layers:
        layer, weight = model.get_submodule(found.name), sites[found.name].weight()
        assert found.spec.shape == sites[found.name].shape
        assert found.spec.nonzeros == found.spec.dense_parameters // 2
        h = gram_of(model, found.name, tokens).matrix
        residual = (weight - layer.unpacked() - layer.low_rank_u @ layer.low_rank_v).detach()
        expected = oracles.loss(residual, h) / oracles.loss(weight, h)
        assert found.relative_error == pytest.approx(expected, rel=1e-3), found.name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded, tokens), logits(model, tokens))
    assert not torch.allclose(logits(dense, tokens), logits(model, tokens))
    generated = loaded.generate(tokens[:1], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape == (1, tokens.shape[1] + 3)


@families
def test_full_density_changes_nothing(family, tmp_path):
    """4:4 keeps every weight: the compressed model is the model, biases included."""
    model, tokens = build(family), segments()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    before = logits(model, tokens)
    hasslefree.compress(model, tmp_path / "out", Recipe(pattern="4:4", method="sparsegpt"), segments=tokens)
    torch.testing.assert_close(logits(model, tokens), before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(loaded, tokens), logits(model, tokens))


def test_tied_weights_stay_tied(tmp_path):
    for family, tied in [("llama", True), ("llama", False), ("gpt2", True)]:
        model = build(family, tie_word_embeddings=tied)
        folder = tmp_path / f"{family}-{tied}"
        hasslefree.compress(model, folder, Recipe(method="wanda"), segments=segments())
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        same = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
        assert same == tied
        assert torch.equal(logits(loaded, segments()), logits(model, segments()))
        assert ("lm_head.weight" in tensors_of(folder)) == (not tied)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype, tmp_path):
    model = build("llama", dtype)
    report = hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    tensors = tensors_of(tmp_path / "out")
    assert {t.dtype for n, t in tensors.items() if not n.endswith(".positions")} == {dtype}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert torch.equal(logits(loaded, segments()), logits(model, segments()))
    cast_costs = [layer.relative_error != layer.relative_error_before_cast for layer in report.layers]
    assert all(cast_costs) == (dtype in (torch.bfloat16, torch.float16))


def test_small_matrices_and_routers_stay_dense_by_themselves_and_are_listed(tmp_path):
    model = build("mixtral")
    for layer in model.model.layers:
        layer.mlp.mark = torch.nn.Parameter(torch.zeros(2, 4))
        layer.mlp.weigh = torch.nn.Linear(32, 1)
    recipe = Recipe(rank=2, method="eora")
    report = hasslefree.compress(model, tmp_path / "out", recipe, segments=segments())
    left = {f"model.layers.{i}.mlp.{name}" for i in (0, 1) for name in ("mark", "gate.weight", "weigh")}
    assert set(report.dense) == left
    assert len([layer for layer in report.layers if ".experts." in layer.name]) == 2 * 4 * 3
    content = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert set(content["dense"]) == left
    assert r"model.layers.\*.mlp.gate.weight (2)" in (tmp_path / "out" / "README.md").read_text()


def test_the_blocks_are_the_largest_outermost_list():
    def linears(count, width):
        return torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(width, width)) for _ in range(count))

    model = torch.nn.Module()
    model.small = linears(5, 4)
    model.layers = linears(2, 16)
    for block in model.layers:
        block.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))
    model.tail = linears(3, 8)
    blocks = find_blocks(model)
    assert (blocks.name, len(blocks.modules)) == ("model.layers".removeprefix("model."), 2)
