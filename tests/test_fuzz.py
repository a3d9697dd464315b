"""Every method on layers that are hard to compute with: a finite, feasible, honest result, or an error with a remedy.

100 cases, the same every time; `make nightly` draws 2,000 new ones.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import hasslefree
from hasslefree import AlternatingMinimization, Gram, Joint, SparseGPT
from hasslefree.errors import FactorizationError, HasslefreeError, NonFiniteError
from tests.fuzzing import (
    Case,
    bilinear,
    cases,
    damped,
    factors_the_gram,
    feasible,
    least_eigenvalue,
    magnitude_of_terms,
)

NIGHTLY = int(os.environ.get("HASSLEFREE_FUZZ", "0"))


@settings(max_examples=NIGHTLY or 100, derandomize=not NIGHTLY, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_a_hard_layer_has_an_honest_result_or_an_error_with_a_remedy(case):
    weight, x = case.layer()
    if (gram := gram_of(x)) is None:
        return
    before, h_before = weight.clone(), gram.matrix.clone()
    try:
        result = solve(case, weight, gram, case.factor_bits)
    except HasslefreeError as error:
        assert_refused_for_a_reason(error, case, weight, gram)
        return
    product = result.sparse.double() + result.low_rank.u.double() @ result.low_rank.v.double()
    assert result.sparse.dtype == result.low_rank.u.dtype == result.low_rank.v.dtype == weight.dtype
    assert (result.low_rank.u.shape, result.low_rank.v.shape) == ((case.out, case.rank), (case.rank, case.width))
    assert torch.isfinite(product).all()
    assert feasible(result.sparse, case.pattern)
    assert result.quantised is None or torch.equal(result.quantised.values(), result.sparse)
    assert (result.quantised is None) == (case.solver().grid is None)
    assert (result.factors is None) == (case.factor_bits is None)
    if result.factors is not None:
        assert torch.equal(result.factors.values().u, result.low_rank.u)
        assert torch.equal(result.factors.values().v, result.low_rank.v)
    assert not product[:, gram.diagonal == 0].any()
    assert_honest(result, weight, product, gram)
    assert_remarked(result, case, weight, gram)
    assert_no_worse(case, weight, gram)
    again = solve(case, weight, gram, case.factor_bits)
    assert all(torch.equal(one, other) for one, other in zip(tensors(result), tensors(again), strict=True))
    assert (result.history, result.remarks) == (again.history, again.remarks)
    assert torch.equal(weight, before)
    assert torch.equal(gram.matrix, h_before)


def solve(case: Case, weight, gram, factor_bits=None):
    options = {"method": case.solver(), "factor_bits": factor_bits, "seed": case.seed}
    return hasslefree.decompose(weight, gram, case.pattern, case.rank, **options)


def tensors(result):
    quantised = (result.quantised.values(),) if result.quantised else ()
    return result.sparse, result.low_rank.u, result.low_rank.v, *quantised


def gram_of(x):
    """The Gram, or None where the activations overflow and an error says so."""
    squares = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).max
    total = x.double().square().sum(0)
    if not torch.isfinite(x).all() or (len(x) and total.max() > squares):
        with pytest.raises(NonFiniteError, match="activations"):
            Gram.from_activations(x)
        return None
    return Gram.from_activations(x)


def assert_refused_for_a_reason(error, case, weight, gram):
    """Each refusal against what float64 says about the layer."""
    text, terms = str(error), magnitude_of_terms(weight, gram.matrix)
    apart = float((weight.double().square() @ gram.matrix.double().diagonal()).sum())
    assert ";" in text, "no remedy"
    if isinstance(error, FactorizationError):
        assert case.damping in (0.0, 1e-8)
        assert factors_the_gram(case.solver())
        assert least_eigenvalue(damped(gram, case.damping)) < 1e-5
    elif "zero, up to rounding" in text:
        assert bilinear(weight, gram.matrix) < 1e-5 * terms
    elif "the mean square of the layer's output" in text:
        assert not 1e-30 < apart < 1e31
    else:
        assert "overflow float16" in text
        assert case.dtype == "float16"


def assert_honest(result, weight, product, gram):
    """Oracle: the definition in float64; Σ|R||H||R|ᵀ is what the sums of float32 may be rounded by.

    So is the product of the factors, whose terms may be far larger than L where they cancel.
    """
    norm, residual = bilinear(weight, gram.matrix), weight.double() - product
    expected = bilinear(residual, gram.matrix)
    rounding = 1e-5 * magnitude_of_terms(residual, gram.matrix)
    rounding += (1e-10 + 1e-5 * result.relative_error) * magnitude_of_terms(weight, gram.matrix)
    terms = result.low_rank.u.double().abs() @ result.low_rank.v.double().abs()
    rounding += magnitude_of_terms(2**-21 * terms, gram.matrix)
    assert abs(result.relative_error * norm - expected) <= 1e-3 * expected + rounding


def assert_remarked(result, case, weight, gram):
    """Whatever is out of the ordinary is in the remarks."""
    text = "; ".join(result.remarks)
    dead = int((gram.diagonal == 0).sum())
    assert (f"{dead} of {case.width} inputs are always zero" in text) == (dead > 0)
    assert (f"tokens ({case.tokens})" in text) == (0 < case.tokens < case.width)
    assert ("a layer of zeros would be closer" in text) == (result.relative_error > 1)
    kept = case.pattern.kept((case.out, case.width))
    seen = weight * (gram.diagonal != 0)
    free = case.solver().grid is None
    assert ("S = W" in text) == (free and kept < weight.numel() and feasible(seen, case.pattern))
    if "S = W" in text:
        assert torch.equal(result.sparse, seen)


def assert_no_worse(case, weight, gram):
    """In the norm that the method minimises, before the cast: joint ends below a layer of zeros, and an alternation
    below its pruner alone."""
    method, full = case.solver(), weight.to(torch.promote_types(weight.dtype, torch.float32))
    matrix = damped(gram, getattr(method, "damping", 0.0))
    rounding = 1e-5 * magnitude_of_terms(full, matrix)
    found = bilinear(full.double() - solve(case, full, gram).product().double(), matrix)
    if isinstance(method, Joint):
        assert found <= 1.001 * bilinear(full, matrix) + rounding
    if isinstance(method, AlternatingMinimization) and isinstance(method.pruner, SparseGPT) and case.rank:
        alone = hasslefree.decompose(full, gram, case.pattern, 0, method=method, seed=case.seed)
        assert found <= 1.001 * bilinear(full.double() - alone.sparse.double(), matrix) + rounding
