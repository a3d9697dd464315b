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
from hasslefree.levers.masters import kept_parameters
from hasslefree.levers.matching import Matching, match_block, relative_distance, sink_share, split
from hasslefree.models.blocks import find_blocks
from hasslefree.models.moments import first_hidden_states
from hasslefree.models.precision import computing
from hasslefree.models.probe import block_calls
from hasslefree.models.sites import find_sites
from hasslefree.models.streaming import Weights
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from tests.oracles import on_support
from tests.tiny_models import build, segments


class Plain:
    """A block that is called with its input alone."""

    batched = False

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


def per_token(outputs, targets) -> float:
    """The mean over tokens of ‖output − target‖² / ‖target‖², in float64."""
    found, wanted = torch.cat(outputs).double(), torch.cat(targets).double()
    return float(((found - wanted).square().sum(-1) / wanted.square().sum(-1)).mean())


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
    with computing(block):
        targets = outputs_of(block, call, inputs)
    for site in find_sites(block).values():
        gram = Gram(torch.eye(site.shape[1]), 100)
        result = hasslefree.decompose(site.weight(), gram, "2:4", rank, method=method)
        site.replace(SparseLowRankLinear.from_decomposition(result, site.bias, "2:4"))
    return block, call, inputs, targets


def squared(output, target):
    """Σ‖output − target‖²: of one layer, what its Gram measures."""
    return (output - target).square().sum()


LONG = Matching(epochs=400, learning_rate=0.03, held_out=0.0, patience=400)


@pytest.mark.parametrize("pattern", ["2:4", "unstructured", "row", "structured"])
def test_one_layer_reaches_least_squares_on_its_support(pattern):
    """Oracle: the normal equations of every row, in float64."""
    block, x, y, weight, gram = one_layer(pattern)
    layer = block[0]
    best = on_support(weight, gram.matrix, layer.unpacked().detach() != 0)
    report = match_block(block, Plain(), x, y, LONG, seed=0, loss=squared)
    least = gram.loss(weight - best.float())
    assert report.before > 1.05 * least, "nothing to learn"
    assert report.after == pytest.approx(least, rel=1e-3)
    torch.testing.assert_close(layer.unpacked().double(), best, rtol=0.02, atol=0.02)


def test_s_and_its_factors_are_trained_together():
    """Oracle: with rank 1, no better S for this L, nor L for this S; and clearly better than S alone."""
    block, x, y, weight, gram = one_layer(rank=2)
    layer = block[0]
    report = match_block(block, Plain(), x, y, LONG, seed=0, loss=squared)
    sparse, low_rank = layer.unpacked().detach(), (layer.low_rank_u @ layer.low_rank_v).detach()
    refit = on_support(weight - low_rank, gram.matrix, sparse != 0)
    least = gram.loss((weight - low_rank - refit).float())
    assert report.after < 0.9 * report.before
    assert report.after == pytest.approx(least, rel=5e-3)


def test_nothing_changes_but_kept_values():
    """Supports, frozen parameters and what requires gradients are as they were; compressed layers have moved."""
    block, call, inputs, targets = compressed_block("qwen3", "oats", rank=2)
    block.extra = nn.Linear(3, 3)  # a matrix that was left dense, and its bias
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    supports = {name: layer.index.clone() for name, layer in compressed_layers(block).items()}
    wanted = [p.requires_grad for p in block.parameters()]
    report = match_block(block, call, inputs, targets, Matching(held_out=0.0), seed=0)
    assert report.after < report.before
    for name, layer in compressed_layers(block).items():
        assert torch.equal(layer.index, supports[name])
        assert layer.cached_sparse is None
    for name, parameter in block.named_parameters():
        kept = any(name.startswith(layer) for layer in compressed_layers(block))
        assert torch.equal(parameter, before[name]) != kept, name
        assert parameter.grad is None
    assert [p.requires_grad for p in block.parameters()] == wanted


def test_what_is_trained_is_every_value_factor_and_bias_of_a_compressed_layer():
    block, *_ = compressed_block("gpt2", "oats", rank=2)
    block.extra = nn.Linear(3, 3)
    names = {id(p): name for name, p in block.named_parameters()}
    found = {names[id(p)] for p in kept_parameters(block)}
    assert found == {name for name in names.values() if any(map(name.startswith, compressed_layers(block)))}
    assert {name.rpartition(".")[2] for name in found} == {"values", "low_rank_u", "low_rank_v", "bias"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "opt"])
@pytest.mark.parametrize(("method", "rank"), [("wanda", 0), ("oats", 2)])
def test_every_family_gets_better_on_segments_it_was_not_trained_on(family, method, rank):
    """Oracle: the outputs, run anew, on the segments that judge."""
    block, call, inputs, targets = compressed_block(family, method, rank)
    judging = split(len(inputs), 1 / 3, torch.Generator().manual_seed(3))[1]

    def error() -> float:
        outputs = [outputs_of(block, call, [inputs[i]])[0] for i in judging]
        return per_token(outputs, [targets[i] for i in judging])

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
    with computing(block):
        outputs = outputs_of(block, call, inputs)
    assert report.after == pytest.approx(per_token(outputs, targets), rel=1e-4)
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


def test_a_step_is_that_of_adam_in_units_of_the_inputs():
    """Oracle: S D, v D and u as dense matrices, D the root mean square of each input, and one step of torch's Adam."""
    one, x, y, *_ = one_layer(rank=2)
    other, *_ = one_layer(rank=2)
    x = [states * torch.logspace(-1, 1, 16) for states in x]
    steps = Matching(epochs=1, batch=8, learning_rate=1e-3, relative=False, warm_up=0, decay=1.0, held_out=0.0)
    match_block(one, Plain(), x, y, steps, seed=0)
    layer = other[0]
    squares = torch.cat(x).square().mean((0, 1))
    units = (squares / squares.mean()).sqrt()
    mask, scaled = layer.unpacked() != 0, layer.unpacked().detach() * units
    balanced = LowRank(layer.low_rank_u.detach(), layer.low_rank_v.detach() * units).balanced()
    masters = [part.clone().requires_grad_() for part in (scaled, balanced.u, balanced.v)]
    optimizer = torch.optim.Adam(masters, lr=1e-3, eps=1e-12)
    weight = masters[0] * mask / units + masters[1] @ masters[2] / units
    sum(
        ((F.linear(s, weight) - t).square().sum(-1) / t.square().sum(-1)).sum() for s, t in zip(x, y, strict=True)
    ).backward()
    optimizer.step()
    torch.testing.assert_close(one[0].unpacked(), masters[0] * mask / units)
    torch.testing.assert_close(one[0].low_rank_u, masters[1])
    torch.testing.assert_close(one[0].low_rank_v, masters[2] / units)


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


def test_the_loss_of_a_token_is_over_its_own_energy():
    """Oracle: its definition, token by token. A token with a norm of 24,000 counts as much as one of 1, and one without
    a norm as one of a hundredth of the median energy."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2, 5, 8, generator=generator) * torch.tensor([24000.0, 1, 1, 1, 0])[:, None]
    output, channels = target + torch.randn(2, 5, 8, generator=generator), torch.rand(8, generator=generator)
    energies = target.double().square().sum(-1).flatten().tolist()
    floor = 0.01 * sorted(energies)[(len(energies) - 1) // 2]
    for weights in (None, channels):
        squares = (output - target).double().square() * (1 if weights is None else weights.double())
        pairs = zip(squares.sum(-1).flatten().tolist(), energies, strict=True)
        expected = sum(apart / max(energy, floor) for apart, energy in pairs)
        assert float(relative_distance(output, target, weights)) == pytest.approx(expected, rel=1e-5)


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


def test_sinks_are_tokens_of_far_larger_norm():
    states = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    assert sink_share(states) == 0
    states[0, :3] *= 1000
    assert sink_share(states) == 0.03
    states[:, :30] = 1000
    assert sink_share(states) == 0.6


def test_more_sinks_than_other_tokens_are_remarked(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("hasslefree.run.blockwise.sink_share", lambda states: 0.75)
    recipe = hasslefree.Recipe(rank=2, method="eora", match_blocks=True)
    report = hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    assert all(block["remark"].startswith("75% of the tokens have hidden states") for block in report.matching)
    assert "model.layers.1: 75% of the tokens" in caplog.text
