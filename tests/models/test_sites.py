"""Where weight matrices stand: a third kind needs a class and an entry in `KINDS`, and nothing else."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import hasslefree
from hasslefree import Recipe, SparseLowRankLinear
from hasslefree.checkpoint.inspect import inspect_folder
from hasslefree.models import sites
from hasslefree.models.calls import replaced
from hasslefree.models.sites import Site, find_site, find_sites, replace_module
from tests.listeners import by_layer
from tests.tiny_models import NO_TOKENIZER, build, gram_of, logits, segments, tensors_of


class Product(nn.Module):
    """A module that multiplies a parameter by itself: no layer of torch's."""

    def __init__(self, width, out):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(out, width, generator=torch.Generator().manual_seed(0)) / 5)

    def forward(self, x):
        return F.linear(x, self.matrix)


class Holder(nn.Module):
    """What takes its place."""

    def __init__(self, layer):
        super().__init__()
        self.matrix = layer

    def forward(self, x):
        return self.matrix(x)


@dataclass(frozen=True)
class ProductSite(Site):
    @classmethod
    def at(cls, root, name, module):
        if isinstance(module, Product):
            yield cls(root, f"{name}.matrix", module)

    @property
    def path(self):
        return self.name.rpartition(".")[0]

    @property
    def parameter(self):
        return self.module.matrix

    def on_input(self, see):
        return self.module.register_forward_pre_hook(lambda module, args: see(args[0]))

    def on_output(self, see):
        return self.module.register_forward_hook(lambda module, args, output: see(output))

    def on_call(self, compute):
        return replaced(self.module, "forward", compute)

    def wrapped(self, layer):
        return Holder(layer)

    def set_weight(self, weight, bias):
        self.module.matrix = nn.Parameter(weight)


class MLP(modeling_llama.LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.up_proj = Product(config.hidden_size, config.intermediate_size)


@pytest.fixture
def third_kind(monkeypatch):
    monkeypatch.setattr(modeling_llama, "LlamaMLP", MLP)
    monkeypatch.setattr(sites, "KINDS", [*sites.KINDS, ProductSite])


NAME = "model.layers.1.mlp.up_proj.matrix"


@pytest.mark.parametrize("allocate", ["uniform", "error"])
def test_a_parameter_that_a_module_multiplies_is_compressed_like_any_other(third_kind, allocate, tmp_path):
    """Oracle: the definition of the error on the dense model's weight, and the logits of the compressed model."""
    dense = build("llama")
    dense.save_pretrained(tmp_path / "dense")
    weight = dense.get_parameter(NAME).detach().clone()
    assert torch.equal(find_site(dense, NAME).weight(), weight)
    recipe = Recipe(rank=2, rounds=3, effort="fast", allocate=allocate)

    def stop(report, done, total):
        if done == 10:
            raise KeyboardInterrupt

    arguments = (tmp_path / "dense", tmp_path / "out", recipe)
    options = {"tokenizer": NO_TOKENIZER, "segments": segments()}
    with pytest.raises(KeyboardInterrupt):
        hasslefree.compress(*arguments, **options, progress=by_layer(stop))
    report = hasslefree.compress(*arguments, **options, resume=True)
    found = next(layer for layer in report.layers if layer.name == NAME)
    assert found.spec.shape == (48, 32)
    assert f"{NAME}.values" in tensors_of(tmp_path / "out")
    assert NAME in {layer.name for layer in inspect_folder(tmp_path / "out").layers}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    layer = loaded.get_submodule(NAME)
    assert isinstance(layer, SparseLowRankLinear)
    residual = (weight - layer.unpacked() - layer.low_rank_u @ layer.low_rank_v).detach()
    gram = gram_of(loaded, NAME, segments())
    assert found.relative_error == pytest.approx(gram.loss(residual) / gram.loss(weight), rel=1e-3)
    hasslefree.export(tmp_path / "out", tmp_path / "plain", "dense")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert isinstance(plain.get_submodule("model.layers.1.mlp.up_proj"), Product)
    torch.testing.assert_close(logits(plain, segments()), logits(loaded, segments()), rtol=1e-4, atol=1e-5)


def test_a_replaced_matrix_can_be_put_back():
    """Oracle: the model as it was."""
    for family in ("llama", "gpt2"):
        model, tokens = build(family), segments()
        before = logits(model, tokens)
        found = find_sites(model)
        assert {name: find_site(model, name) for name in found} == found
        with pytest.raises(KeyError):
            find_site(model, "lm_head.weight")
        for site in found.values():
            site.replace(torch.nn.Linear(site.shape[1], site.shape[0]))
        assert not torch.equal(logits(model, tokens), before)
        for site in found.values():
            replace_module(model, site.path, site.module)
        assert torch.equal(logits(model, tokens), before)
