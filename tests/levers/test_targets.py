"""Dense targets against least squares in float64 on the activations themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasslefree
from hasslefree import Gram
from hasslefree.core.patterns import SemiStructured
from hasslefree.errors import ShapeError
from hasslefree.levers.targets import corrected, drift_correction
from hasslefree.solve.decompose import solve_layer
from hasslefree.solve.methods import build_method


def streams(seed: int = 0, tokens: int = 90, width: int = 12, out: int = 8):
    """Inputs in the compressed and in the dense model, and a weight: float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(width, width, generator=generator, dtype=torch.float64)
    moved = x + 0.3 * torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    return moved, x, torch.randn(out, width, generator=generator, dtype=torch.float64)


def moments(moved, x):
    return Gram.from_activations(moved), moved.T @ (x - moved) / len(x)


@given(seed=st.integers(0, 50), share=st.floats(0, 1), damping=st.sampled_from([0.0, 0.01, 1.0]))
@settings(max_examples=30, deadline=None)
def test_the_target_is_the_ridge_solution(seed, share, damping):
    """Oracle: least squares on stacked rows: ‖X̂ W̃ᵀ − X_a Wᵀ‖² / tokens + λ‖W̃ − W‖²."""
    moved, x, weight = streams(seed)
    gram, drift = moments(moved, x)
    penalty = (damping * gram.diagonal.mean()).sqrt() * torch.eye(len(drift), dtype=torch.float64)
    left = torch.cat([moved / len(x) ** 0.5, penalty])
    right = torch.cat([((1 - share) * moved + share * x) @ weight.T / len(x) ** 0.5, penalty @ weight.T])
    expected = torch.linalg.lstsq(left, right).solution.T
    torch.testing.assert_close(corrected(weight, drift_correction(gram, drift, share, damping)), expected)


def test_it_is_the_formula_of_the_design():
    """Oracle: W((1−a)H + aC + λI)ᵀ(H + λI)⁻¹ with an explicit inverse."""
    moved, x, weight = streams()
    gram, drift = moments(moved, x)
    h, c = moved.T @ moved / len(x), moved.T @ x / len(x)
    ridge = 0.01 * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    expected = weight @ (0.3 * h + 0.7 * c + ridge).T @ torch.linalg.inv(h + ridge)
    torch.testing.assert_close(corrected(weight, drift_correction(gram, drift, 0.7, 0.01)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_share_and_no_drift_leave_the_weight_exactly_as_it_is(dtype):
    moved, x, weight = streams()
    gram, drift = moments(moved.float(), x.float())
    weight = weight.to(dtype)
    for correction in (drift_correction(gram, drift, 0.0, 0.01), drift_correction(gram, 0 * drift, 1.0, 0.01)):
        assert torch.equal(corrected(weight, correction), weight.float())


def test_the_loss_against_the_target_orders_as_the_distance_to_the_dense_output():
    """Oracle: the distance itself, on the activations: it differs from the loss by a constant (a = 1, λ = 0)."""
    moved, x, weight = streams()
    gram, drift = moments(moved, x)
    target = corrected(weight, drift_correction(gram, drift, 1.0, 0.0))
    differences = []
    for seed in range(3):
        found = weight + torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        distance = (moved @ found.T - x @ weight.T).square().sum() / len(x)
        differences.append(float(distance) - gram.loss(target - found))
    assert differences[0] > 0
    assert differences == pytest.approx([differences[0]] * 3)


def test_an_input_that_is_always_zero_gets_nothing():
    moved, x, _ = streams()
    moved[:, 3] = 0.0
    gram, drift = moments(moved, x)
    correction = drift_correction(gram, drift, 1.0, 0.01)
    assert torch.equal(correction[:, 3], torch.zeros(len(drift), dtype=torch.float64))
    assert torch.isfinite(correction).all()


def test_shapes_must_agree():
    with pytest.raises(ShapeError, match=r"\(4, 4\), got \(4, 3\)"):
        drift_correction(Gram(torch.eye(4), 9), torch.zeros(4, 3), 0.5, 0.01)


@pytest.mark.parametrize("kept", [2, 4])
def test_a_layer_is_solved_for_its_target(kept):
    """Oracle: the decomposition of the target as a weight; and it is closer to the dense output than without."""
    moved, x, weight = streams()
    gram, drift = moments(moved, x)
    pattern, method = SemiStructured(kept, 4), build_method("joint")
    target = corrected(weight, drift_correction(gram, drift, 1.0, 0.01))

    def solved(target: torch.Tensor | None) -> hasslefree.Decomposition:
        return solve_layer(weight, gram, method, method.prepare(gram), pattern, 1, 0, target)

    found, plain = solved(target), solved(None)
    expected = hasslefree.decompose(target, gram, f"{kept}:4", 1)
    assert torch.equal(found.product(), expected.product())
    assert found.relative_error == expected.relative_error

    def distance(result: hasslefree.Decomposition) -> float:
        return float((moved @ result.product().T - x @ weight.T).square().sum())

    assert distance(found) < distance(plain)
