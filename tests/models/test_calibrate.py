from dataclasses import dataclass

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import hasslefree
from hasslefree import Recipe
from hasslefree.distributed import ALONE
from hasslefree.models import calibrate
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import PANEL, MomentSums, gather, with_batching
from hasslefree.models.calls import BlockCall
from tests import oracles
from tests.tiny_models import build, gram_of, segments


def test_the_gram_of_bfloat16_inputs_is_that_of_their_values():
    """Oracle: float64. More inputs than a panel, of very different size, and a last segment that is shorter."""
    generator = torch.Generator().manual_seed(0)
    width = PANEL["cpu"] + 40
    rows = (torch.randn(600, width, generator=generator) * torch.logspace(-3, 3, width)).bfloat16()
    sums = MomentSums(256)
    sums.take(rows[:512])
    sums.take(rows[512:])
    gram = sums.gram(ALONE)
    exact = rows.double().T @ rows.double() / 600
    norms = exact.diagonal().sqrt()
    assert gram.tokens == 600
    assert gram.matrix.dtype == torch.float32
    assert ((gram.matrix.double() - exact) / torch.outer(norms, norms)).abs().max() < 1e-6
    torch.testing.assert_close(gram.mean.double(), rows.double().mean(0), rtol=1e-5, atol=1e-6)


def test_a_torch_without_wide_products_of_bfloat16_sums_in_float32(monkeypatch):
    """Oracle: float64."""
    monkeypatch.setattr(calibrate, "WIDE_PRODUCTS", False)
    rows = torch.randn(600, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    total = torch.zeros(8, 8)
    calibrate._add_square(total, rows)
    torch.testing.assert_close(total.double(), rows.double().T @ rows.double(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("column", "offset"), [(0, 0.0), (0, 9.0), (3, 9.0)])
def test_a_block_takes_batches_where_segments_do_not_change_each_other(column, offset, tmp_path):
    """Oracle: a block that adds to a hidden state, or to the column beside them, what depends on the batch."""
    hidden = Activations((2, 5, 4), torch.float32, torch.device("cpu"), "device", tmp_path)
    for index in range(2):
        hidden[index] = torch.ones(5, 4)

    @dataclass(frozen=True)
    class Call:
        batched: bool = False

        def hidden(self, states):
            return states[..., :3]

        def run(self, block, states):
            output = states.clone()
            output[..., column] += offset * (len(states) if self.batched else 1)
            return output

    assert with_batching(torch.nn.Linear(4, 4), Call(), hidden).batched == (offset == 0)


class TwiceMLP(modeling_llama.LlamaMLP):
    """A module that calls one layer twice, as the routers of Gemma 3n do."""

    def forward(self, x):
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner) + self.down_proj(3 * inner.flip(-1))


@pytest.mark.parametrize("sequential", ["layer", "block"])
@pytest.mark.parametrize("samples", [1, 4])
def test_a_layer_that_is_called_twice_is_fitted_to_the_inputs_of_both_calls(sequential, samples, monkeypatch, tmp_path):
    """Oracle: hooks on whole forward passes of the finished model, whose inputs of this layer do not depend on it."""
    monkeypatch.setattr(modeling_llama, "LlamaMLP", TwiceMLP)
    dense, model, tokens = build("llama"), build("llama"), segments(samples)
    recipe = Recipe(rank=2, method="eora", sequential=sequential, leave_dense=("*gate*", "*up*", "*attn*", "*.0.*"))
    [record] = hasslefree.compress(model, tmp_path / "out", recipe, segments=tokens).layers
    layer, weight = model.get_submodule(record.name), dense.get_submodule(record.name).weight
    gram = gram_of(model, record.name, tokens).matrix
    residual = (weight - layer.unpacked() - layer.low_rank_u @ layer.low_rank_v).detach()
    expected = oracles.loss(residual, gram) / oracles.loss(weight.detach(), gram)
    assert record.relative_error == pytest.approx(expected, rel=1e-3)


class Routed(nn.Module):
    """Three experts, each of which is called if the first entry of a token is its number."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = x[..., 0] == number
            if rows.any():
                out[rows] = expert(x[rows])
        return out


@pytest.mark.parametrize("routes", [[(0, 1, 2), (0, 0, 1), (0, 1, 2), (1, 0, 1), (2, 2, 1)], [(0, 1, 1), (0, 1, 2)]])
def test_segments_that_do_not_reach_an_expert_hide_none_of_its_tokens(routes, tmp_path):
    """Oracle: the number of tokens of each expert. Without any, H = I of no tokens."""
    numbers = torch.tensor(routes)
    hidden = Activations((*numbers.shape, 4), torch.float32, torch.device("cpu"), "device", tmp_path)
    x = torch.randn(*numbers.shape, 4)
    x[..., 0] = numbers
    hidden[:] = x
    groups = [[f"experts.{number}"] for number in range(3)]
    grams = gather(Routed(), "", BlockCall({}), hidden, groups, ALONE)
    assert [gram.tokens for gram in grams] == [int((numbers == number).sum()) for number in range(3)]
