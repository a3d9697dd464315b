"""Block matching: it reaches what least squares reaches, and never makes a block worse."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hasslefree
from hasslefree import Gram
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import CalibrationError, NonFiniteError
from hasslefree.levers.matching import Matching, kept_parameters, match_block, split
from hasslefree.models.blocks import find_blocks
from hasslefree.models.calls import block_calls
from hasslefree.models.moments import first_hidden_states
from hasslefree.models.sites import find_sites
from hasslefree.models.streaming import Weights
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from tests.oracles import on_support
from tests.tiny_models import build, segments


class Plain:
    """A block that is called with its input alone."""

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)


def one_layer(pattern: str = "2:4", rank: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A block of one layer, magnitude-pruned; segments that enter it, and the dense layer's outputs."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.eye(16) + 0.3 * torch.randn(16, 16, generator=generator)
    weight = torch.randn(12, 16, generator=generator)
    x = [torch.randn(1, 32, 16, generator=generator) @ mixing for _ in range(8)]
    gram = Gram.from_activations(torch.cat(x))
    sparsity = None if ":" in pattern else 0.5
    found = hasslefree.decompose(weight, gram, pattern, rank, sparsity=sparsity, method="oats" if rank else "magnitude")
    found = dataclasses.replace(found, sparse=found.sparse.to(dtype), low_rank=found.low_rank.to(dtype))
    block = nn.Sequential(SparseLowRankLinear.from_decomposition(found, None, pattern))
    return block, [s.to(dtype) for s in x], [F.linear(s, weight).to(dtype) for s in x], weight, gram


def outputs_of(block, call, inputs):
    with torch.no_grad():
        return [call.run(block, states) for states in inputs]


def compressed_block(family: str, method: str = "wanda", rank: int = 0, dtype: torch.dtype = torch.float32):
    """The first block of a tiny model with its layers replaced, its call, and the dense inputs and outputs."""
    model = build(family, dtype)
    blocks, tokens = find_blocks(model), segments(samples=6)
    call = block_calls(model, blocks, tokens[:1], Weights(model, model.device))[0]
    hidden = first_hidden_states(model, blocks, tokens)
    inputs, block = [hidden[i] for i in range(len(hidden))], blocks.modules[0]
    targets = outputs_of(block, call, inputs)
    for site in find_sites(block).values():
        gram = Gram(torch.eye(site.shape[1]), 100)
        result = hasslefree.decompose(site.weight(), gram, "2:4", rank, method=method)
        site.replace(SparseLowRankLinear.from_decomposition(result, site.bias, "2:4"))
    return block, call, inputs, targets


LONG = Matching(epochs=400, learning_rate=0.03, held_out=0.0, patience=400)


@pytest.mark.parametrize("pattern", ["2:4", "unstructured", "row", "structured"])
def test_one_layer_reaches_least_squares_on_its_support(pattern):
    """Oracle: the normal equations of every row, in float64."""
    block, x, y, weight, gram = one_layer(pattern)
    layer = block[0]
    best = on_support(weight, gram.matrix, layer.unpacked().detach() != 0)
    report = match_block(block, Plain(), x, y, LONG, seed=0)
    least = gram.relative_error(weight - best.float(), weight)
    assert report.before > 1.05 * least, "nothing to learn"
    assert report.after == pytest.approx(least, rel=1e-3)
    torch.testing.assert_close(layer.unpacked().double(), best, rtol=0.02, atol=0.02)


def test_s_and_its_factors_are_trained_together():
    """Oracle: with rank 1, no better S for this L, nor L for this S; and clearly better than S alone."""
    block, x, y, weight, gram = one_layer(rank=2)
    layer = block[0]
    report = match_block(block, Plain(), x, y, LONG, seed=0)
    sparse, low_rank = layer.unpacked().detach(), (layer.low_rank_u @ layer.low_rank_v).detach()
    refit = on_support(weight - low_rank, gram.matrix, sparse != 0)
    least = gram.relative_error((weight - low_rank - refit).float(), weight)
    assert report.after < 0.9 * report.before
    assert report.after == pytest.approx(least, rel=5e-3)


def test_nothing_changes_but_kept_values():
    """The support, frozen parameters and what requires gradients are as they were; all kept values have moved."""
    block, call, inputs, targets = compressed_block("qwen3", "oats", rank=2)
    block.extra = nn.Linear(3, 3)  # a matrix that was left dense, and its bias
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    supports = {name: layer.index.clone() for name, layer in compressed_layers(block).items()}
    wanted = [p.requires_grad for p in block.parameters()]
    report = match_block(block, call, inputs, targets, Matching(held_out=0.0), seed=0)
    assert report.after < report.before
    for name, layer in compressed_layers(block).items():
        assert torch.equal(layer.index, supports[name])
        assert layer.held is None
    for name, parameter in block.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("extra"), name
        assert parameter.grad is None
    assert [p.requires_grad for p in block.parameters()] == wanted


def test_what_is_kept_is_every_value_factor_and_vector():
    block, *_ = compressed_block("gpt2", "oats", rank=2)
    block.extra = nn.Linear(3, 3)
    names = {id(p): name for name, p in block.named_parameters()}
    found = {names[id(p)] for p in kept_parameters(block)}
    assert found == set(names.values()) - {"extra.weight"}
    assert any(name.endswith("values") for name in found)
    assert any(name.startswith("ln_1") for name in found)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "opt"])
@pytest.mark.parametrize(("method", "rank"), [("wanda", 0), ("oats", 2)])
def test_every_family_gets_better_on_segments_it_was_not_trained_on(family, method, rank):
    """Oracle: the outputs, run anew, on the segments that judge."""
    block, call, inputs, targets = compressed_block(family, method, rank)
    judging = split(len(inputs), 1 / 3, torch.Generator().manual_seed(3))[1]

    def error() -> float:
        outputs = [outputs_of(block, call, [inputs[i]])[0].double() for i in judging]
        rest = sum((o - targets[i].double()).square().sum() for o, i in zip(outputs, judging, strict=True))
        return float(rest / sum(targets[i].double().square().sum() for i in judging))

    before = error()
    report = match_block(block, call, inputs, targets, Matching(held_out=1 / 3), seed=3)
    assert report.before == pytest.approx(before, rel=1e-4)
    assert report.after == pytest.approx(error(), rel=1e-4)
    assert report.after == min(report.before, *report.history)
    assert report.after < report.before
    assert report.best_epoch == 1 + report.history.index(report.after)


@pytest.mark.parametrize("rate", [1e3, float("inf"), float("nan")])
def test_a_rate_that_ruins_the_block_leaves_it_as_it_was(rate):
    block, call, inputs, targets = compressed_block("llama", "oats", rank=2)
    before = {name: p.clone() for name, p in block.state_dict().items()}
    report = match_block(block, call, inputs, targets, Matching(learning_rate=rate), seed=0)
    assert report.best_epoch == 0
    assert report.after == report.before
    assert all(torch.equal(p, before[name]) for name, p in block.state_dict().items())


def test_it_retreats_from_a_rate_that_is_too_large():
    """Oracle: the same block at the rate that is left after the retreats."""
    block, call, inputs, targets = compressed_block("llama", "oats", rank=2)
    report = match_block(block, call, inputs, targets, Matching(learning_rate=81.0, retreats=9, held_out=0.0), seed=0)
    assert report.after < report.before
    assert report.learning_rate < 27.0
    other, *_ = compressed_block("llama", "oats", rank=2)
    same = Matching(learning_rate=report.learning_rate, retreats=0, held_out=0.0)
    again = match_block(other, call, inputs, targets, same, seed=0)
    assert again.history == report.history
    assert all(torch.equal(p, q) for p, q in zip(block.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_gather_steps_that_a_narrow_dtype_would_lose(dtype):
    """Oracle: with steps below half a unit in the last place of most values, the block still learns."""
    block, x, y, *_ = one_layer(rank=2, dtype=dtype)
    rate = torch.finfo(dtype).eps / 16
    steps = Matching(epochs=200, learning_rate=rate, held_out=0.0, patience=200, warm_up=0.0, decay=1.0)
    report = match_block(block, Plain(), x, y, steps, seed=0)
    assert all(p.dtype == dtype for p in block.parameters())
    assert report.after < 0.9 * report.before


def test_in_a_narrow_dtype_it_is_judged_after_the_cast():
    """Oracle: the outputs of the block as it is handed back."""
    block, call, inputs, targets = compressed_block("llama", "oats", rank=2, dtype=torch.bfloat16)
    report = match_block(block, call, inputs, targets, Matching(held_out=0.0), seed=0)
    outputs = outputs_of(block, call, inputs)
    rest = sum((o.double() - t.double()).square().sum() for o, t in zip(outputs, targets, strict=True))
    assert report.after == pytest.approx(float(rest / sum(t.double().square().sum() for t in targets)), rel=1e-4)
    assert report.after < report.before


def test_same_seed_same_bits():
    found = []
    for seed in (0, 0, 1):
        block, call, inputs, targets = compressed_block("llama", "oats", rank=2)
        report = match_block(block, call, inputs, targets, Matching(), seed)
        found.append((report.history, torch.cat([p.detach().flatten() for p in block.parameters()])))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][0] != found[2][0]


def test_the_gradients_of_a_step_are_those_of_autograd():
    """Oracle: one step of plain SGD-sized Adam, with S unpacked by autograd at every call, on a batch of segments."""
    one, x, y, *_ = one_layer(rank=2)
    other, *_ = one_layer(rank=2)
    steps = Matching(epochs=1, batch=8, learning_rate=1e-3, relative=False, warm_up=0, decay=1.0, held_out=0.0)
    match_block(one, Plain(), x, y, steps, seed=0)
    layer = other[0]
    with torch.no_grad():
        balanced = LowRank(layer.low_rank_u, layer.low_rank_v).balanced()
        layer.low_rank_u.copy_(balanced.u)
        layer.low_rank_v.copy_(balanced.v)
    optimizer = torch.optim.Adam(other.parameters(), lr=1e-3)
    sum((other(s) - t).square().sum() for s, t in zip(x, y, strict=True)).backward()
    optimizer.step()
    for found, expected in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


@given(count=st.integers(1, 40), held_out=st.sampled_from([0.0, 0.1, 0.125, 0.5, 0.9]), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_the_split_parts_the_segments(count, held_out, seed):
    generator = torch.Generator().manual_seed(seed)
    try:
        training, judging = split(count, held_out, generator)
    except CalibrationError:
        assert held_out * count > count - 1
        return
    assert training == sorted(set(training))
    assert training
    if held_out == 0.0:
        assert training == judging == list(range(count))
    else:
        assert sorted(training + judging) == list(range(count))
        assert held_out * count <= len(judging) < held_out * count + 1 - 1e-9


def test_the_learning_rate_rises_and_falls_to_its_share():
    """Oracle: the corners, and a cosine half way."""
    plan = Matching(warm_up=0.1, decay=0.2)
    rates = [plan.rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(1.0, abs=1e-3)
    assert rates[54] == pytest.approx(0.6)
    assert rates[99] == pytest.approx(0.2)
    assert rates[:9] == sorted(rates[:9])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_an_output_that_is_not_finite_is_refused():
    block, x, y, *_ = one_layer()
    with torch.no_grad():
        block[0].values[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or Inf"):
        match_block(block, Plain(), x, y, Matching(), seed=0)


def test_a_layer_with_nothing_in_it_is_left_alone():
    sparse, low_rank = torch.zeros(12, 16), LowRank(torch.zeros(12, 2), torch.zeros(2, 16))
    empty = SparseLowRankLinear.from_decomposition(Decomposition(sparse, low_rank, 1, 1, ()), None, "unstructured")
    block, x, y, *_ = one_layer()
    block.append(nn.Tanh()).append(nn.Linear(12, 16)).append(empty)
    targets = [torch.ones_like(t) for t in y]
    report = match_block(block, Plain(), x, targets, Matching(), seed=0)
    assert report.after == report.before == 1.0
