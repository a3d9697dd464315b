import dataclasses
import re

import pytest
import torch

import hasslefree
from hasslefree import Gram, LowRank, Prune, Row, SemiStructured, Structured, Unstructured
from hasslefree.core.protocols import Method, Solution
from hasslefree.errors import BudgetError, FactorizationError, GridError, NonFiniteError, ShapeError
from hasslefree.solve.decompose import DATA_FREE
from hasslefree.solve.methods import METHODS, build_method
from tests import oracles
from tests.suited import suited


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_has_the_dtype_of_the_weight_and_its_error_is_measured_after_the_cast(dtype):
    weight, h = oracles.problem(16, 32)
    weight = weight.to(dtype)
    result = hasslefree.decompose(weight, Gram(h, 1), "2:4", 8, method="eora")
    assert result.sparse.dtype == result.low_rank.u.dtype == result.low_rank.v.dtype == dtype
    product = result.sparse.double() + result.low_rank.u.double() @ result.low_rank.v.double()
    scale = oracles.loss(weight, h)
    assert result.relative_error == pytest.approx(oracles.loss(weight.double() - product, h) / scale, rel=1e-3)
    if dtype in (torch.float32, torch.float64):
        assert result.relative_error == pytest.approx(result.relative_error_before_cast)
    else:
        assert result.relative_error != result.relative_error_before_cast


LOW_RANK = [name for name, method in METHODS.items() if not isinstance(method, Prune)]


@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_factors_in_eight_bits_are_what_is_measured(name, dtype):
    """Oracles: the loss of S and of the codes in float64; and factors in the dtype of the weight, not far off."""
    weight, h = oracles.problem(24, 32)
    weight = weight.to(dtype)
    changes = {"group_size": 8} if METHODS[name].grid else {}
    method = build_method(name, rounds=3 if hasattr(METHODS[name], "rounds") else None, **changes)
    given = Gram(h, 1, oracles.mean_of(h)), suited(name, SemiStructured(2, 4), 32), 4
    result = hasslefree.decompose(weight, *given, method=method, factor_bits=8)
    plain = hasslefree.decompose(weight, *given, method=method)
    u, v = (rows.codes.double() * rows.scale.double()[:, None] for rows in (result.factors.u, result.factors.v))
    assert torch.equal(result.low_rank.u, u.to(dtype))
    assert torch.equal(result.low_rank.v, v.to(dtype))
    product = result.sparse.double() + result.low_rank.u.double() @ result.low_rank.v.double()
    found = oracles.loss(weight.double() - product, h) / oracles.loss(weight, h)
    assert result.relative_error == pytest.approx(found, rel=1e-3)
    assert result.relative_error_before_cast == plain.relative_error_before_cast
    assert torch.equal(result.sparse, plain.sparse)
    assert plain.factors is None
    assert result.relative_error <= plain.relative_error + 2e-3


@pytest.mark.parametrize(
    ("bits", "rank", "error", "message"),
    [(4, 2, GridError, "factor_bits must be 8, got 4"), (8, 0, BudgetError, "with rank 0 there are none; give a rank")],
)
def test_wrong_bits_of_factors(bits, rank, error, message):
    with pytest.raises(error, match=message):
        hasslefree.decompose(torch.randn(4, 8), None, "2:4", rank, factor_bits=bits)


def test_errors():
    weight, gram = torch.randn(4, 8), Gram(torch.eye(8), 1)
    with pytest.raises(ShapeError, match="do not match: expected shapes"):
        hasslefree.decompose(weight, Gram(torch.eye(9), 1), "2:4", 1)
    with pytest.raises(NonFiniteError, match="weight contains NaN or Inf"):
        hasslefree.decompose(weight / 0, gram, "2:4", 1)
    for value in (torch.nan, torch.inf):
        with pytest.raises(NonFiniteError, match="Gram matrix .* contains NaN or Inf"):
            hasslefree.decompose(weight, Gram(torch.full((8, 8), value), 1), "2:4", 0, method="magnitude")
    with pytest.raises(FactorizationError, match="raise the damping"):
        hasslefree.decompose(weight, Gram(torch.ones(8, 8), 1), "2:4", 1, method=build_method("eora", damping=0.0))


@pytest.mark.parametrize("method", ["joint", "alps", "sparsegpt", "wanda"])
def test_a_matrix_that_is_no_second_moment_is_an_error(method):
    """A triangle of H gave alps a hundred times the error, and an input with H_jj < 0 counted as always zero."""
    weight, h = oracles.problem(8, 16)
    negative = h.clone()
    negative[3, 3] = -1
    for wrong in (h.triu(), negative):
        with pytest.raises(FactorizationError, match="is not symmetric, or .*; compute it again from the activations"):
            hasslefree.decompose(weight, Gram(wrong, 1), "2:4", 0, method=method)
    rounded = h * (1 + 1e-5 * torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))
    found = hasslefree.decompose(weight, Gram(rounded, 1), "2:4", 0, method=method)
    assert found.relative_error == pytest.approx(
        oracles.loss(weight - found.sparse, h) / oracles.loss(weight, h), rel=1e-2
    )


@pytest.mark.parametrize("shape", [(0, 8), (8, 0), (0, 0)])
@pytest.mark.parametrize("method", ["joint", "joint-grid"])
def test_a_weight_without_entries_is_an_error(shape, method):
    with pytest.raises(ShapeError, match=f"has no entries: its shape is {re.escape(str(shape))}"):
        hasslefree.decompose(torch.zeros(shape), None, "2:4", 0, method=method)


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn]
)
def test_a_weight_that_is_not_of_floats_is_an_error(dtype):
    """The imaginary part of a complex weight was dropped without a word, and a bool weight became bools again."""
    weight = torch.ones(4, 8).to(dtype)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ShapeError, match=f"weight must be of a floating dtype of at least 16 bits, got {name}"):
        hasslefree.decompose(weight, None, "2:4", 1)


def test_no_rank_is_spent_on_dead_inputs():
    """Oracle: the same problem without the dead inputs."""
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    dead = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])
    alive = torch.tensor([4, 5, 6, 7, 12, 13, 14, 15])
    weight[:, dead] *= 100
    h[dead] = 0
    h[:, dead] = 0
    for method in (METHODS["oats"], METHODS["eora"]):
        whole = hasslefree.decompose(weight, Gram(h, 1), "1:4", 3, method=method)
        # The mean of the diagonal, and with it λ, is halved by as many dead inputs as there are live ones.
        halved = dataclasses.replace(method, damping=method.damping / 2)
        part = hasslefree.decompose(weight[:, alive], Gram(h[alive][:, alive], 1), "1:4", 3, method=halved)
        assert whole.relative_error == pytest.approx(part.relative_error)
        torch.testing.assert_close(whole.product()[:, alive], part.product(), rtol=1e-6, atol=1e-8)


def test_factors_of_very_different_scale_fit_into_half_precision():
    """Inputs of scale 1e-6: the closed form puts all of it into v, beyond the largest float16."""
    weight, h = oracles.problem(16, 32)
    wide = hasslefree.decompose(weight, Gram(h * 1e-12, 1), "2:4", 4, method="eora")
    narrow = hasslefree.decompose(weight.half(), Gram(h * 1e-12, 1), "2:4", 4, method="eora")
    assert narrow.relative_error == pytest.approx(wide.relative_error, rel=0.02)
    torch.testing.assert_close(wide.low_rank.u.norm(dim=0), wide.low_rank.v.norm(dim=1))


def test_what_does_not_fit_into_the_dtype_is_an_error():
    with pytest.raises(NonFiniteError, match="values of S or L overflow float16"):
        hasslefree.decompose(
            torch.tensor([[60000.0, 60000.0]], dtype=torch.float16),
            Gram(torch.tensor([[1.0, 0.999], [0.999, 1.0]]), 1),
            "1:2",
            method="sparsegpt",
        )


def test_a_parameter_is_as_good_as_a_tensor():
    layer, x = torch.nn.Linear(16, 8), torch.randn(64, 16, requires_grad=True)
    result = hasslefree.decompose(layer.weight, Gram.from_activations(x), "2:4", 2, method="eora")
    assert not result.product().requires_grad


def test_a_result_prints_its_error_and_not_its_tensors():
    result = hasslefree.decompose(torch.randn(8, 16), Gram(torch.eye(16), 1), "2:4", 2, method="eora")
    assert "relative_error=" in repr(result)
    assert "tensor" not in repr(result)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.grid])
def test_a_weight_that_has_the_pattern_stays_as_it_is(name):
    """Oracle: S = W and L = 0 has no error at all; dead inputs count as zeros."""
    weight, h = oracles.problem(12, 16)
    weight[:, ::2] = 0
    weight[:, 5] = 3.0
    h[5], h[:, 5] = 0, 0
    gram = Gram(h, 99, oracles.mean_of(h))
    for pattern in (SemiStructured(2, 4), Unstructured(84), Row(7), Structured(7)):
        if suited(name, pattern) != pattern:
            continue
        result = hasslefree.decompose(weight, gram, pattern, method=name)
        assert result.relative_error == 0
        assert torch.equal(result.sparse, weight * (h.diagonal() > 0))
        assert result.remarks[-1] == "the pattern keeps every non-zero of the weight: S = W, L = 0"
    assert not any(
        "S = W" in r for r in hasslefree.decompose(weight, gram, suited(name, "1:4", 6), method=name).remarks
    )


def test_a_tiny_entry_of_a_weight_that_has_the_pattern_stays():
    """Its square is zero in float32."""
    weight = torch.tensor([[1.0, 0.0, 1e-25, 0.0]])
    assert torch.equal(hasslefree.decompose(weight, None, "2:4", 0).sparse, weight)


def test_a_layer_whose_inputs_cancel_has_no_error_that_could_be_measured():
    gram = Gram.from_activations(torch.ones(50, 4))
    weight = torch.tensor([[1.0, -1.0, 0.3, -0.3]])
    with pytest.raises(NonFiniteError, match="output is zero, up to rounding.*keep the layer dense"):
        hasslefree.decompose(weight, gram, "2:4")
    assert hasslefree.decompose(weight + 1e-2, gram, "2:4", method="joint").relative_error < 1e9


def test_layers_near_the_limits_of_float32_are_refused_and_float64_takes_them():
    weight, h = oracles.problem(12, 16, dtype=torch.float64)
    expected = hasslefree.decompose(weight, Gram(h, 99), "2:4", 2).relative_error
    for scale in (1e-40, 1e34):
        with pytest.raises(NonFiniteError, match="too (small|large) for float32.*float64"):
            hasslefree.decompose(weight.float(), Gram(h * scale, 99), "2:4", 2)
        found = hasslefree.decompose(weight, Gram(h * scale, 99), "2:4", 2).relative_error
        assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(NonFiniteError, match="Gram matrix .* overflows float32"):
        hasslefree.decompose(weight.float(), Gram(h * 1e60, 99), "2:4", 2)


@dataclasses.dataclass(frozen=True)
class Broken(Method):
    """A method of a user's that does what it is told instead of its work."""

    answer: object

    def prepare(self, gram):
        return None

    def solve(self, weight, prepared, pattern, start):
        return self.answer(weight)


def test_what_goes_wrong_in_a_method_is_an_error_with_a_remedy():
    weight, h = oracles.problem(4, 8)
    singular = Broken(lambda weight: torch.linalg.cholesky(torch.zeros(2, 2)))
    with pytest.raises(FactorizationError, match="raise the damping"):
        hasslefree.decompose(weight, Gram(h, 99), "2:4", method=singular)
    nothing = LowRank(torch.zeros(4, 0), torch.zeros(0, 8))
    with pytest.raises(NonFiniteError, match="NaN or Inf appeared while the layer was solved; raise the damping"):
        hasslefree.decompose(
            weight, Gram(h, 99), "2:4", method=Broken(lambda weight: Solution(weight / 0, nothing, ()))
        )


def test_remarks_are_for_what_is_out_of_the_ordinary():
    weight, h = oracles.problem(16, 32)
    gram = Gram(h, 128)
    assert hasslefree.decompose(weight.bfloat16(), gram, "2:4", 4).remarks == ()
    assert "tokens (20)" in hasslefree.decompose(weight, Gram(h, 20), "2:4", 4).remarks[0]
    # A part of S that bfloat16 does not hold and L takes back: nothing before the cast.
    large = Broken(
        lambda weight: Solution(weight + 1000, LowRank(-1000 * torch.ones(16, 1), torch.ones(1, 32)), ("x",))
    )
    cast, zeros = hasslefree.decompose(weight.bfloat16(), gram, "2:4", 1, method=large).remarks
    assert cast.startswith("the cast to bfloat16 raised the relative error from ")
    assert "a layer of zeros would be closer" in zeros
    ours = Broken(lambda weight: Solution(weight, LowRank(torch.zeros(16, 0), torch.zeros(0, 32)), (), ("so it was",)))
    assert hasslefree.decompose(weight, gram, "2:4", method=ours).remarks == ("so it was",)


def test_without_a_gram_the_norm_is_the_weight_s_own_and_a_remark_says_so():
    weight, h = oracles.problem(12, 16)
    for method in (name for name, built in METHODS.items() if not built.grid):
        rank = 0 if hasattr(METHODS[method], "pruner") and not hasattr(METHODS[method], "rounds") else 3
        free = hasslefree.decompose(weight, pattern=suited(method, "2:4"), rank=rank, method=method)
        assert free.remarks[0] == DATA_FREE
        expected = (weight - free.product()).square().sum() / weight.square().sum()
        assert free.relative_error == pytest.approx(float(expected), rel=1e-4)
    given = hasslefree.decompose(weight, Gram(torch.eye(16), 16), "2:4", 3)
    assert torch.equal(given.product(), hasslefree.decompose(weight, None, "2:4", 3).product())
    assert given.remarks == ()
    for method in ("godec", "pcp"):  # blind to H
        one, other = (hasslefree.decompose(weight, gram, "2:4", 3, method=method) for gram in (None, Gram(h, 64)))
        assert torch.equal(one.product(), other.product())
    for shape in ((), (3,), (2, 3, 4)):
        with pytest.raises(ShapeError, match="do not match"):
            hasslefree.decompose(torch.zeros(shape))
