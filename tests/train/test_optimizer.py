"""What is trained of a layer on a grid: against one step of torch's own Adam on the numbers written out."""

import pytest
import torch

import hasslefree
from hasslefree import Grid
from hasslefree.core.factors import nearest
from hasslefree.core.grids import Quantised
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.models.precision import computing
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.storage import unpack_codes
from hasslefree.solve.methods.joint_on_grid import JointOnGrid
from hasslefree.train.optimizer import BlockOptimizer, norms

UNITS = torch.logspace(-1, 1, 16)
RATE = 1e-2


def layer_and_gradient(grid, pattern="dense", factor_bits=None, empty=()):
    """empty: inputs whose weights are zero."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(12, 16, generator=generator) for _ in range(2))
    weight[:, empty] = 0
    method = JointOnGrid(grid, rounds=5)
    found = hasslefree.decompose(weight, None, pattern, 2, method=method, factor_bits=factor_bits)
    return SparseLowRankLinear.from_decomposition(found, None, pattern), gradient


def step(layer, gradient, parts):
    """One step of Adam on masters, which are changed in place, for a weight that is a function of them."""
    masters = {name: master.clone().requires_grad_() for name, (master, _) in parts.items()}
    groups = [{"params": [masters[name]], "lr": RATE * typical} for name, (_, typical) in parts.items()]
    optimizer = torch.optim.Adam(groups, eps=1e-12)
    yield masters
    optimizer.step()
    yield masters


def rms(tensor):
    return float(tensor.square().mean().sqrt())


@pytest.mark.parametrize("in_half", [True, False])
@pytest.mark.parametrize("kind", [{"offset": True}, {}, {"symmetric": True}])
def test_scales_and_offsets_move_in_units_of_their_groups(kind, in_half):
    """Oracle: S = (code − middle)·scale + centre, with both times the root mean square of D in the group; and float16,
    if it held the numbers before, as llama.cpp needs."""
    grid = Grid(4, 8, **kind)
    layer, gradient = layer_and_gradient(grid)
    if not in_half:
        with torch.no_grad():
            layer.weight_scale[0, 0] *= 1 + 2**-20
            if grid.offset:
                layer.weight_offset[0, 0] *= 1 + 2**-20
    group = UNITS.view(2, 8).square().mean(1).sqrt()
    scale, dense = layer.weight_scale.detach().clone(), layer.unpacked().detach()
    offset = layer.weight_offset.detach().clone() if grid.offset else None
    steps = dense.view(12, 2, 8) / scale[..., None]
    if grid.offset:
        steps = ((dense.view(12, 2, 8) - offset[..., None]) / scale[..., None]).round() - 8
    parts = {"scale": (scale * group, rms(scale * group))}
    if grid.offset:
        parts["centre"] = ((offset + 8 * scale) * group, rms(scale * group))
    run = step(layer, gradient, parts)
    masters = next(run)
    weight = steps * (masters["scale"] / group)[..., None]
    if grid.offset:
        weight = weight + (masters["centre"] / group)[..., None]
    torch.testing.assert_close(weight.flatten(1), dense)
    (weight.flatten(1) * gradient).sum().backward()
    next(run)
    codes = layer.weight_packed.clone()
    trained = BlockOptimizer(torch.nn.Sequential(layer), {layer: UNITS}, RATE)
    (layer.unpacked() * gradient).sum().backward()
    trained.update(1.0)
    expected = (masters["scale"] / group).detach()
    precision = {"rtol": 2**-11, "atol": 2**-25} if in_half else {}
    torch.testing.assert_close(layer.weight_scale.detach(), expected, **precision)
    assert torch.equal(layer.weight_scale.half().float(), layer.weight_scale) == in_half
    assert not torch.equal(layer.weight_scale, scale)
    if grid.offset:
        expected = (masters["centre"] / group).detach() - 8 * layer.weight_scale.detach()
        torch.testing.assert_close(layer.weight_offset.detach(), expected, **precision)
        assert torch.equal(layer.weight_offset.half().float(), layer.weight_offset) == in_half
    assert torch.equal(layer.weight_packed, codes)


def test_units_of_scales_move_in_units_of_the_layer_and_leave_its_middle_codes():
    """Oracle: S = (code − 8)·k·U + (8·k·U − m·U'), where a step of U takes U' along by the slope of a regression."""
    layer, gradient = layer_and_gradient(Grid(4, 4, offset=True, scale_bits=5))
    scale, offset = layer.weight_scale.detach().clone(), layer.weight_offset.detach().clone()
    tensors = layer.tensors()
    k, m = (unpack_codes(tensors[f"weight_{name}_packed"], 5, 4).float() for name in ("scale", "offset"))
    codes = unpack_codes(tensors["weight_packed"], 4, 16).float().view(12, 4, 4)
    slope = torch.stack([8 * (k[i] @ m[i]) / (m[i] @ m[i]) for i in range(12)])
    root = UNITS.square().mean().sqrt()
    parts = {"scale": (scale * root, rms(scale * root)), "rest": ((offset - slope * scale) * root, rms(scale * root))}
    run = step(layer, gradient, parts)
    masters = next(run)
    units = [masters["scale"] / root, masters["rest"] / root + slope * masters["scale"] / root]
    weight = codes * (k * units[0][:, None] / 32)[..., None] - (m * units[1][:, None] / 32)[..., None]
    torch.testing.assert_close(weight.flatten(1), layer.unpacked().detach())
    (weight.flatten(1) * gradient).sum().backward()
    next(run)
    trained = BlockOptimizer(torch.nn.Sequential(layer), {layer: UNITS}, RATE)
    (layer.unpacked() * gradient).sum().backward()
    trained.update(1.0)
    expected = masters["scale"] / root
    torch.testing.assert_close(layer.weight_scale.detach(), expected.detach())
    torch.testing.assert_close(layer.weight_offset.detach(), (masters["rest"] / root + slope * expected).detach())
    assert not torch.equal(layer.weight_scale, scale)


@pytest.mark.parametrize("kind", [{"offset": True}, {"symmetric": True}])
def test_units_of_blocks_move_each_by_itself_in_steps_of_float16(kind):
    """Oracle: the step of a layer with the same units and a row for each block, rounded to float16."""
    grid = Grid(4, 4, scale_bits=6, block=8, **kind)
    weight, gradient = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    weight *= 1e-3
    flat = torch.ones(8)
    steps = 32 if grid.symmetric else 64
    layers = {}
    for shape in ((12, 16), (24, 8)):
        scaling = grid.scaling(weight.view(shape))
        quantised = Quantised.of(scaling.nearest(weight.view(shape)), scaling, torch.float32)
        nothing = LowRank(torch.zeros(shape[0], 0), torch.zeros(0, shape[1]))
        found = Decomposition(quantised.values(), nothing, 0.0, 0.0, (), quantised=quantised)
        layer = SparseLowRankLinear.from_decomposition(found, None, "dense")
        inputs = flat.repeat(shape[1] // 8)
        trained = BlockOptimizer(torch.nn.Sequential(layer), {layer: inputs}, 10 * RATE)
        before = layer.weight_scale.detach().clone()
        (layer.unpacked() * gradient.view(shape)).sum().backward()
        trained.update(1.0)
        assert not torch.equal(layer.weight_scale, before)
        layers[shape] = layer
    for name in ("weight_scale", "weight_offset"):
        if name == "weight_scale" or grid.offset:
            one, other = (getattr(layer, name).detach() for layer in layers.values())
            torch.testing.assert_close(one.flatten(), other.flatten())
            count = steps if name == "weight_scale" else 64
            assert torch.equal((one / count).half().float() * count, one)


def test_coded_factors_are_trained_through_their_rounding():
    """Oracle: the gradient of the rounded factors moves their masters, which are rounded anew; two steps of Adam."""
    layer, gradient = layer_and_gradient(Grid(4, 8, offset=True), factor_bits=8)
    u, v = (factor.detach() for factor in layer.factors())
    masters = [u.clone(), v * UNITS]
    optimizer = torch.optim.Adam([{"params": [m], "lr": RATE * rms(m)} for m in masters], eps=1e-12)
    trained = BlockOptimizer(torch.nn.Sequential(layer), {layer: UNITS}, RATE)
    for _ in range(2):
        rounded = [nearest(m / unit, torch.float32).values() for m, unit in zip(masters, (1, UNITS), strict=True)]
        torch.testing.assert_close(layer.factors()[0].detach(), rounded[0])
        masters[0].grad, masters[1].grad = gradient @ rounded[1].T, rounded[0].T @ gradient / UNITS
        optimizer.step()
        leaves = layer.factors()
        (leaves[0] @ leaves[1] * gradient).sum().backward()
        trained.update(1.0)
    expected = [nearest(m / unit, torch.float32) for m, unit in zip(masters, (1, UNITS), strict=True)]
    assert torch.equal(layer.low_rank_u, expected[0].codes)
    assert torch.equal(layer.low_rank_v, expected[1].codes)
    layer.wide_factors.clear()
    torch.testing.assert_close(layer.factors()[1], expected[1].values())


def test_scales_of_coded_factors_are_those_of_float16_while_the_block_is_wider():
    """Oracle: the values with which the block computes, which are those that the layer stores."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(12, 16, generator=generator) for _ in range(2))
    weight *= 0.02
    weight[3] *= 1e-3  # a scale that float16 would round
    found = hasslefree.decompose(weight.half(), None, "2:4", 2, factor_bits=8)
    layer = SparseLowRankLinear.from_decomposition(found, None, "2:4")
    block = torch.nn.Sequential(layer)
    trained = BlockOptimizer(block, {layer: torch.ones(16)}, 1e-6)
    with computing(block, unpack=False):
        u, v = layer.factors()
        ((u @ v) * gradient).sum().backward()
        trained.update(1.0)
        computed = layer.wide_factors["low_rank_u"].detach().clone()
    layer.wide_factors.clear()
    torch.testing.assert_close(layer.factors()[0].float(), computed, rtol=1e-3, atol=1e-7)
    scale = layer.low_rank_u_scale.detach()
    assert torch.equal(scale, scale.bfloat16().half())


def test_norms_are_recognised_by_their_class():
    class RMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    block = torch.nn.ModuleDict({"a": RMSNorm(), "b": torch.nn.LayerNorm(3), "c": torch.nn.Linear(3, 3)})
    assert [id(weight) for weight in norms(block)] == [id(block["a"].weight), id(block["b"].weight)]


def test_scales_of_rows_and_of_inputs_move_in_units_of_what_they_multiply():
    """Oracle: S = (code − 128)·scale·input_scale; a master of an input's scale is as large as what the input adds."""
    layer, gradient = layer_and_gradient(Grid.entropy_coded(6.0), empty=[3])
    scale, inputs = layer.weight_scale.detach().clone(), layer.weight_input_scale.detach().clone()
    codes = layer.codes(layer.tensors()).float() - 128
    assert torch.equal(codes * scale * inputs, layer.unpacked().detach())
    root = UNITS.square().mean().sqrt()
    assert not codes[:, 3].any()
    units = UNITS * codes.square().mean(0).sqrt()
    units[3] = UNITS[3]  # this scale must stay finite
    parts = {"scale": (scale * root, rms(scale * root)), "inputs": (inputs * units, rms(inputs * units))}
    run = step(layer, gradient, parts)
    masters = next(run)
    (codes * (masters["scale"] / root) * (masters["inputs"] / units) * gradient).sum().backward()
    next(run)
    stream = layer.weight_packed.clone()
    trained = BlockOptimizer(torch.nn.Sequential(layer), {layer: UNITS}, RATE)
    (layer.unpacked() * gradient).sum().backward()
    trained.update(1.0)
    torch.testing.assert_close(layer.weight_scale.detach(), (masters["scale"] / root).detach())
    torch.testing.assert_close(layer.weight_input_scale.detach(), (masters["inputs"] / units).detach())
    assert not torch.equal(layer.weight_input_scale, inputs)
    assert torch.equal(layer.weight_packed, stream)
