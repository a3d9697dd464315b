import contextlib
import operator
from collections import Counter

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hasslefree.core import products
from hasslefree.core.products import (
    FastProducts,
    add_product,
    bfloat16_products,
    fast_products,
    linear,
    matmul_precision,
)
from hasslefree.models.blocks import find_blocks
from hasslefree.models.walk import Walk
from hasslefree.models.weights import Weights
from tests.tiny_models import build, segments


@pytest.fixture
def slow(monkeypatch):
    """A processor without instructions for narrow dtypes, and tiles of three rows of 40 inputs."""
    monkeypatch.setattr(products, "_capable", {"avx2": True}.get)
    monkeypatch.setattr(products, "TILE_BYTES", 3 * 4 * 40)
    monkeypatch.setattr(products, "ADDED_ROWS", 3)


class Watched(TorchDispatchMode):
    """Counts the products that torch computes, by dtype."""

    def __init__(self):
        super().__init__()
        self.dtypes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.dtypes[args[-1].dtype] += 1
        return func(*args, **(kwargs or {}))


def narrow_numbers(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def rounded_once(exact, dtype):
    """What a product in float64 rounds to, and how far a sum in float32 may be off: one unit in the last place."""
    return exact.to(dtype).double(), torch.finfo(dtype).eps * exact.abs().clamp_min(1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [(1,), (7,), (8,), (2, 5)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_narrow_product_is_the_exact_one_rounded_once(dtype, tokens, has_bias, slow):
    """Oracle: float64. Ten rows are more than three tiles."""
    x, weight, bias = narrow_numbers(dtype, (*tokens, 40), (10, 40), (10,))
    bias = bias if has_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    expected, unit = rounded_once(exact, dtype)
    found = linear(x, weight, bias)
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= unit).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_product_is_added_in_place_and_rounded_once(dtype, slow):
    """Oracle: float64."""
    y, x, weight = narrow_numbers(dtype, (9, 10), (9, 40), (10, 40))
    expected, unit = rounded_once(y.double() + x.double() @ weight.double().T, dtype)
    with Watched() as watched:
        found = add_product(y, x, weight)
    assert watched.dtypes == {torch.float32: 4}
    assert found is y
    assert ((found.double() - expected).abs() <= unit).all()


def sizes_of(multiply):
    """The shapes of the operands of a function of torch's."""
    if multiply is F.linear:
        return (9, 40), (5, 40), (5,)
    if multiply is torch.addmm:
        return (5,), (9, 40), (40, 5)
    return (2, 9, 40), (2, 40, 5)


@pytest.mark.parametrize("multiply", [F.linear, torch.addmm, torch.matmul, torch.bmm, operator.matmul])
def test_products_of_a_model_are_exact_ones_rounded_once(multiply, slow):
    """Oracle: float64."""
    operands = narrow_numbers(torch.bfloat16, *sizes_of(multiply))
    expected, unit = rounded_once(multiply(*(each.double() for each in operands)), torch.bfloat16)
    with FastProducts(), Watched() as watched:
        found = multiply(*operands)
    assert watched.dtypes.keys() == {torch.float32}
    assert ((found.double() - expected).abs() <= unit).all()


def test_a_product_with_one_matrix_is_computed_a_few_rows_at_a_time(slow):
    [a, b] = narrow_numbers(torch.bfloat16, (2, 9, 40), (5, 40))
    with FastProducts(), Watched() as watched:
        found = a @ b.T
    assert watched.dtypes == {torch.float32: 2}
    assert torch.equal(found, linear(a, b))


class Quantised(torch.Tensor):
    """As a class of tensors that multiplies by itself."""


LEFT_TO_TORCH = {
    "few rows": lambda x, w: F.linear(x[:7], w),
    "one row of weights": lambda x, w: F.linear(x, w[0]),
    "a keyword": lambda x, w: F.linear(input=x, weight=w),
    "a bias of one number": lambda x, w: F.linear(x, w, w[0, 0]),
    "another class": lambda x, w: F.linear(x, w.as_subclass(Quantised)),
    "a parameter that is trained": lambda x, w: F.linear(x, torch.nn.Parameter(w)).detach(),
    "a bias that is trained": lambda x, w: F.linear(x, w, torch.nn.Parameter(w[:, 0].clone())).detach(),
    "few rows of attention": lambda x, w: x[None, :7] @ w.T[None],
    "sparse weights": lambda x, w: F.linear(x, w.to_sparse()),
    "sparse inputs": lambda x, w: x.to_sparse() @ w.T,
    "inputs of several lengths": lambda x, w: F.linear(torch.nested.nested_tensor([x, x[:8]]), w).unbind()[0],
}


@pytest.mark.parametrize("case", LEFT_TO_TORCH)
def test_other_products_are_torch_s(case, slow):
    """Oracle: torch."""
    x, weight = narrow_numbers(torch.bfloat16, (9, 40), (10, 40))
    expected = LEFT_TO_TORCH[case](x, weight)
    with FastProducts():
        assert torch.equal(LEFT_TO_TORCH[case](x, weight), expected)
    with Watched() as watched, FastProducts():
        LEFT_TO_TORCH[case](x, weight)
    assert torch.float32 not in watched.dtypes


def test_autocast_and_operands_of_several_dtypes_are_torch_s(slow):
    x, weight = narrow_numbers(torch.bfloat16, (9, 40), (10, 40))
    with FastProducts(), torch.autocast("cpu", torch.float16):
        assert F.linear(x, weight).dtype == torch.float16
    with FastProducts(), pytest.raises(RuntimeError, match="dtype"):
        F.linear(x, weight.half())


def test_a_traced_product_is_torch_s(slow):
    x, weight = narrow_numbers(torch.bfloat16, (9, 40), (10, 40))
    code = []

    def backend(graph, _):
        code.append(graph.code)
        return graph.forward

    with FastProducts():
        torch.compile(lambda x: x @ weight.T, backend=backend, fullgraph=True)(x)
    [found] = code
    assert "matmul" in found
    assert "float" not in found


def test_many_narrow_tokens_are_multiplied_in_float32_where_that_is_faster(slow, monkeypatch):
    called, of_torch = [], F.linear

    def watched(x, weight, bias=None):
        if x.dtype == torch.float32:
            called.append(tuple(weight.shape))
        return of_torch(x, weight, bias)

    monkeypatch.setattr(F, "linear", watched)
    x, weight = narrow_numbers(torch.bfloat16, (8, 40), (4, 40))
    linear(x[:7], weight)
    assert not called
    linear(x, weight)
    assert called == [(3, 40), (1, 40)]
    called.clear()
    with torch.enable_grad():
        linear(x, weight.requires_grad_())
    assert not called
    for capable in ({"avx2": True, "avx512_bf16": True}, {}):  # on other processors, it was not measured
        monkeypatch.setattr(products, "_capable", capable.get)
        linear(x, weight.detach())
        assert not called


def test_products_are_fast_within_models_of_a_slow_dtype_alone(slow, monkeypatch):
    narrow = torch.nn.Linear(40, 3, dtype=torch.bfloat16)
    assert isinstance(fast_products(narrow), FastProducts)
    assert not isinstance(fast_products(torch.nn.Linear(40, 3)), FastProducts)
    monkeypatch.setattr(products, "_capable", {"avx2": True, "avx512_bf16": True}.get)
    assert not isinstance(fast_products(narrow), FastProducts)


def test_the_check_of_a_narrow_model_multiplies_in_float32(slow):
    """Oracle: the products that torch computes. In bfloat16, they take several times as long here."""
    model = build("llama", torch.bfloat16)
    with Watched() as watched:
        Walk.open(model, find_blocks(model), Weights(model, model.device), segments(1))
    assert watched.dtypes.keys() == {torch.float32}


def test_no_outputs_and_no_inputs_are_no_error(slow):
    x = torch.zeros(8, 0, dtype=torch.bfloat16)
    assert torch.equal(linear(x, torch.zeros(3, 0, dtype=x.dtype)), torch.zeros(8, 3, dtype=x.dtype))
    assert linear(torch.zeros(8, 4, dtype=x.dtype), torch.zeros(0, 4, dtype=x.dtype)).shape == (8, 0)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("before", ["none", "ieee", "tf32"])
def test_the_precision_of_products_is_put_back_even_after_an_error(before, tf32):
    """Through torch's newer setting where it has one: touching the older after the newer is an error of torch's."""
    settings = torch.backends.cuda.matmul
    original, inside = settings.fp32_precision, None
    settings.fp32_precision = before
    try:
        with contextlib.suppress(ZeroDivisionError), matmul_precision(torch.device("cuda"), tf32):
            inside = settings.fp32_precision
            _ = 1 / 0
        assert inside == ("tf32" if tf32 else "ieee")
        assert settings.fp32_precision == before
    finally:
        settings.fp32_precision = original


def test_products_of_bfloat16_numbers_are_exact_but_for_their_sums():
    """Oracle: float64. Other numbers are each rounded to eight bits first, or not at all, as oneDNN chooses."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((256, 96), (96, 256)))
    with bfloat16_products(a.device):
        rough, exact = a @ b, a.bfloat16().float() @ b.bfloat16().float()
    rounded = a.bfloat16().double() @ b.bfloat16().double()
    torch.testing.assert_close(exact.double(), rounded, rtol=0, atol=1e-4)
    full = a.double() @ b.double()
    narrow = products.multiplies_bfloat16(a.device) and (rough - full).abs().max() > 1e-4
    torch.testing.assert_close(rough.double(), rounded if narrow else full, rtol=0, atol=1e-4)
    after = a @ b
    torch.testing.assert_close(after.double(), full, rtol=0, atol=1e-4)
