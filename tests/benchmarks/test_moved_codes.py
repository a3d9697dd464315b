"""Codes that move before the training, on a block of one layer."""

import pytest
import torch
from harness.moved_codes import MovingBlock, Rounding, codes_move_first
from torch import nn

import hasslefree
from hasslefree import Gram, Grid, Prune, RoundToNearest, SparseLowRankLinear
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.models.activations import Activations
from hasslefree.models.calls import BlockCall
from tests import oracles


@pytest.fixture
def weight():
    return oracles.problem(12, 24)[0]


@pytest.fixture
def layer(weight):
    """The weight rounded to nearest, on 2 bits."""
    method = Prune(RoundToNearest(grid=Grid(2, 8)))
    result = hasslefree.decompose(weight, Gram(torch.eye(24), 1), "dense", 0, method=method)
    return SparseLowRankLinear.from_decomposition(result, None, "dense")


def states(values):
    found = Activations(tuple(values.shape), values.dtype, values.device, "device", None)
    found.states.copy_(values)
    return found


def test_offsets_move_a_code_to_its_neighbour_and_are_stored(layer, weight):
    """Oracle: the gradient with respect to S by hand, and S as the layer unpacks it."""
    before = layer.unpacked()
    rounding = Rounding.of(layer, weight)
    assert torch.equal(rounding.weight(), before)
    outer = torch.randn(12, 24)
    [gradient] = torch.autograd.grad((rounding.weight() * outer).sum(), rounding.offsets)
    torch.testing.assert_close(gradient, outer * rounding.steps)
    rounding.step(-torch.ones(12, 24), 0.7)
    assert (rounding.offsets == 0.5).all()
    moved = rounding.weight()
    share = rounding.store()
    torch.testing.assert_close(layer.unpacked(), moved)
    changed = ((moved - before) / rounding.steps).round()
    assert set(changed.unique().tolist()) == {0.0, 1.0}
    assert share == pytest.approx(changed.mean().item())


def learnt(layer, weight, wanted_of):
    """What a block says of learning from 40 segments of independent inputs x, and the errors before and after."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 32, 24, generator=generator)
    wanted = wanted_of(x)
    block = nn.ModuleDict({"proj": layer})
    block.forward = layer.forward
    before = (layer(x) - wanted).square().sum()
    moving = MovingBlock(block, BlockCall({}), [Rounding.of(layer, weight)], states(x), states(wanted))
    said = moving.learn(100, generator)
    return said, before, (layer(x) - wanted).square().sum()


def test_codes_that_explain_the_outputs_are_found(layer, weight):
    """Oracle: the outputs are those of other codes, each at most one away."""
    rounding = Rounding.of(layer, weight)
    other = (rounding.codes + torch.randint(-1, 2, (12, 24))).clamp(0, 3)
    target = rounding.base + rounding.steps * (other - rounding.codes)
    said, before, after = learnt(layer, target, lambda x: x @ target.T)
    assert "of the codes moved" in said
    assert after < 0.01 * before


def test_codes_stay_where_nothing_can_be_learnt(layer, weight):
    codes = layer.unpacked()
    said, before, after = learnt(layer, weight, lambda x: x @ codes.T)
    assert "not moved" in said
    assert before == after
    assert torch.equal(layer.unpacked(), codes)


@pytest.mark.nightly
def test_a_run_trains_the_moved_codes(tmp_path):
    """Oracle: the divergence from which the same training begins without them, on text that neither has seen."""
    recipe = hasslefree.Recipe(
        calibration=str(CALIBRATION),
        samples=16,
        seqlen=128,
        bits=2,
        group_size=16,
        scale_bits=4,
        rank=0,
        match_predictions=16_384,
        check=False,
    )
    plain = hasslefree.compress(MODEL, tmp_path / "plain", recipe)
    with codes_move_first(str(MODEL), 20):
        moved = hasslefree.compress(MODEL, tmp_path / "moved", recipe)
    assert moved.predictions["before"] < 0.9 * plain.predictions["before"]
    assert moved.predictions["after"] < plain.predictions["after"]
