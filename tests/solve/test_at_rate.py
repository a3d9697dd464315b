"""S on an entropy-coded grid: against a slow sweep in float64, and what the theory of rates says."""

import pytest
import torch

from hasslefree import Gram, Grid, JointOnGrid, Prune, RoundToNearest, SparseGPT, decompose
from hasslefree.core.entropy import encode, words_for_rate
from hasslefree.core.patterns import KnownSupport, Unstructured
from hasslefree.errors import GridError, HasslefreeError
from hasslefree.solve import at_rate
from hasslefree.solve.methods import joint_on_grid
from tests import oracles

METHODS = {"gptq": Prune(SparseGPT()), "rtn": Prune(RoundToNearest(), damping=0.0), "joint-grid": JointOnGrid()}


def solved(method, rate, weight, h, rank=0):
    if isinstance(method, Prune):
        pruner = method.pruner.__class__(grid=Grid.entropy_coded(rate))
        method = Prune(pruner, damping=method.damping)
    else:
        method = JointOnGrid(Grid.entropy_coded(rate), turns=2)
    return decompose(weight, Gram(h, 1), "dense", rank, method=method)


@pytest.mark.parametrize("rate", [1.5, 3.0, 5.5])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_codes_take_the_bits_of_the_grid(method, rate):
    weight, h = oracles.problem(256, 128)
    found = solved(method, rate, weight, h)
    room = words_for_rate(weight.numel(), rate)
    assert 0.99 * room < len(encode(found.quantised.codes)) <= room
    assert torch.equal(found.quantised.values(), found.sparse)


def test_the_sweep_is_that_of_optimal_brain_surgeon():
    """Oracle: an explicit inverse of the remaining Hessian at every column, in float64, with the scales found."""
    weight, h = oracles.problem(48, 32)
    found = solved(METHODS["gptq"], 3.0, weight, h)
    scaling = found.quantised.scaling
    damped = h.double() + 0.01 * h.double().diagonal().mean() * torch.eye(32)
    w = weight.double().clone()
    codes = torch.empty_like(w)
    for j in range(32):
        inverse = torch.linalg.inv(damped[j:, j:])
        step = scaling.scale[:, 0].double() * scaling.input_scale[j].double()
        codes[:, j] = (w[:, j] / step).round()
        error = w[:, j] - codes[:, j] * step
        w[:, j:] -= (error / inverse[0, 0]).outer(inverse[0])
    same = (codes + 128 == found.quantised.codes.double()).double().mean()
    assert same > 0.995, "float32 may round a tie the other way, and later columns follow"


def test_steps_are_as_wide_as_the_sweep_s_errors_are_cheap():
    """Oracle: the loss with one step for all inputs is larger by the arithmetic over the geometric mean of 1/U²."""
    weight, h = oracles.problem(512, 64)
    pruner = SparseGPT(grid=Grid.entropy_coded(5.0))
    gram = Gram(h, 1).damped(0.01)
    factor = pruner.prepare(gram)
    pattern = KnownSupport(torch.ones(512, 64, dtype=torch.bool))

    def swept(rows, scaling):
        return pruner._swept(weight[rows], factor, pattern, scaling)

    costs = factor.diagonal().double().square().reciprocal()
    expected = float(costs.mean() / costs.log().mean().exp())
    assert expected > 1.5
    losses = []
    for widths in (factor.diagonal(), torch.ones(64)):
        found = at_rate.at_rate(pruner.grid, weight, widths, swept)
        losses.append(oracles.loss(weight - found.values(), gram.matrix))
    assert losses[1] / losses[0] == pytest.approx(expected, rel=0.1)


def test_a_bit_quarters_the_error():
    weight, h = oracles.problem(256, 128)
    errors = [solved(METHODS["gptq"], rate, weight, h).relative_error for rate in (3.0, 4.0, 5.0)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


def test_fewer_bits_than_codes_of_one_length_at_the_same_error():
    """The reason for it: half the error of groups of 32 with scales of 5 bits, in as many bits."""
    weight, h = oracles.problem(256, 128)
    fixed = decompose(
        weight, Gram(h, 1), "dense", 0, method=JointOnGrid(Grid(4, 32, offset=True, scale_bits=5))
    ).relative_error
    assert solved(METHODS["joint-grid"], 4.3125, weight, h).relative_error < 0.5 * fixed


def test_a_low_rank_part_lowers_the_error():
    weight, h = oracles.problem(128, 64)
    alone = solved(METHODS["joint-grid"], 2.0, weight, h)
    beside = solved(METHODS["joint-grid"], 2.0, weight, h, rank=8)
    assert beside.relative_error < alone.relative_error
    assert len(encode(beside.quantised.codes)) <= words_for_rate(weight.numel(), 2.0)


@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_degenerate_weights(rate):
    """Zeros, a constant, an input that is always zero, and a row that is far larger than the others."""
    _, h = oracles.problem(16, 32)
    dead = h.clone()
    dead[3] = dead[:, 3] = 0
    large = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    large[5] *= 1000
    few = torch.zeros(16, 32)
    few[:, 7] = torch.randn(16, generator=torch.Generator().manual_seed(1))
    uneven = large * torch.logspace(-6, 6, 32)
    cases = [
        (torch.zeros(16, 32), h),
        (torch.ones(16, 32), h),
        (large, dead),
        (torch.ones(1, 32), h),
        (few, h),
        (uneven, h),
    ]
    for weight, second in cases:
        found = solved(METHODS["gptq"], rate, weight, second)
        assert found.sparse.isfinite().all()
        assert len(encode(found.quantised.codes)) <= words_for_rate(weight.numel(), rate)
        assert not found.sparse[:, 3].any() or second is h


@pytest.mark.parametrize("relative", [False, True])
def test_no_scale_of_a_row_vanishes(relative):
    """One input is far larger than the others, whose steps would be below the least number of float16."""
    weight, h = oracles.problem(32, 64)
    weight *= 1e-7
    weight[:, 0] = 0.01
    weight[:8] /= 30
    method = JointOnGrid(Grid.entropy_coded(6.0), turns=2, relative=relative)
    found = decompose(weight, Gram(h, 1), "dense", 0, method=method)
    assert found.sparse.any(1).all()
    assert found.relative_error < 1e-3


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Grid.entropy_coded(7.5), "must be from 1 to 7 bits per weight, got 7.5"),
        (lambda: Grid.entropy_coded(3.0).scaling(torch.ones(8, 8)), "depend on the codes; use hasslefree.decompose"),
        (lambda: Grid(4, 64, rate=3.0), "has symmetric codes of eight bits in rows; use Grid.entropy_coded"),
        (
            lambda: decompose(torch.ones(8, 8), None, "2:4", 0, method=Prune(SparseGPT(grid=Grid.entropy_coded(3.0)))),
            "pattern 2:4 prunes entries, and an entropy-coded grid keeps every one; use pattern='dense'",
        ),
    ],
)
def test_what_it_cannot_be_is_said(call, sentence):
    with pytest.raises(HasslefreeError, match=sentence):
        call()
    assert issubclass(GridError, HasslefreeError)


def test_relative_steps_are_in_proportion_to_the_rows():
    """Oracle: the root mean squares, up to the eight bits of a scale; a row far shorter counts as a sixty-fourth."""
    weight, h = oracles.problem(24, 64)
    weight *= torch.logspace(-1, 1, 24)[:, None]
    weight[3] = 0
    pruner = SparseGPT(grid=Grid.entropy_coded(4.0), relative=True)
    found = pruner.prune(weight, pruner.prepare(Gram(h, 1).damped(0.01)), KnownSupport(torch.ones_like(weight).bool()))
    expected = weight.square().mean(1).sqrt()
    expected[3] = weight.square().mean().sqrt() / 64
    ratio = found.scaling.scale[:, 0] / expected
    torch.testing.assert_close(ratio, ratio[:1].expand(24), rtol=2**-7, atol=0)
    assert not found.sparse[3].any()


@pytest.mark.parametrize("relative", [False, True])
def test_rows_that_are_decided_some_at_a_time_share_the_scales_and_the_bits(relative, monkeypatch):
    """Oracle: all rows at once. The parts that `by_rows` gives add up to it."""
    weight, h = oracles.problem(150, 64)
    weight *= torch.logspace(-1, 1, 150)[:, None]
    method = JointOnGrid(Grid.entropy_coded(3.0), relative=relative)
    prepared = method.prepare(Gram(h, 1))
    whole = SparseGPT(grid=method.grid, relative=relative).at_rate(weight, prepared.for_sweep)
    assert list(method.by_rows(weight, prepared)) == [(slice(0, 150), method)]
    monkeypatch.setattr(at_rate, "ROWS", 64)
    monkeypatch.setattr(joint_on_grid, "ROWS", 64)
    codes, scales = [], []
    for rows, part in method.by_rows(weight, prepared):
        start = part.start(weight[rows], 0, 0)
        solution = part.solve(weight[rows], prepared, Unstructured(weight[rows].numel()), start)
        assert torch.equal(solution.scaling.input_scale, part.scaling.input_scale)
        codes.append(solution.scaling.codes(solution.sparse))
        scales.append(solution.scaling.scale)
    found = torch.cat(codes)
    assert [len(part) for part in codes] == [64, 64, 22]
    assert len(encode(found)) <= words_for_rate(weight.numel(), 3.0)
    torch.testing.assert_close(torch.cat(scales), whole.scaling.scale, rtol=2**-7, atol=0)
    assert (found == whole.codes).double().mean() > 0.99, "float32 may round a tie the other way"
