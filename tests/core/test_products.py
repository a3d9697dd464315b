import contextlib

import pytest
import torch
from torch.nn import functional as F

from hasslefree.core import products
from hasslefree.core.products import FastProducts, add_product, bfloat16_products, linear, matmul, matmul_precision


@pytest.fixture
def slow(monkeypatch):
    """A processor without instructions for narrow dtypes, and tiles of three rows of 40 inputs."""
    monkeypatch.setattr(products, "_capable", {"avx2": True}.get)
    monkeypatch.setattr(products, "TILE_BYTES", 3 * 4 * 40)


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
    found = add_product(y, x, weight)
    assert found is y
    assert ((found.double() - expected).abs() <= unit).all()


@pytest.mark.parametrize("multiply", products.MATMULS)
def test_products_of_attention_are_exact_ones_rounded_once(multiply, slow, monkeypatch):
    """Oracle: float64."""
    a, b = narrow_numbers(torch.bfloat16, (2, 9, 40), (2, 40, 5))
    expected, unit = rounded_once(a.double() @ b.double(), a.dtype)
    seen = []
    monkeypatch.setattr(products, "matmul", lambda *pair: seen.append(pair) or matmul(*pair))
    with FastProducts():
        found = multiply(a, b)
    assert len(seen) == 1
    assert ((found.double() - expected).abs() <= unit).all()


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


def test_a_layer_of_torchs_is_multiplied_in_float32_within_fast_products(slow, monkeypatch):
    """Oracle: `linear`, of which torch's own product may differ by rounding alone."""
    seen = []
    monkeypatch.setattr(products, "linear", lambda *operands: seen.append(operands) or linear(*operands))
    [x] = narrow_numbers(torch.bfloat16, (8, 40))
    model = torch.nn.Linear(40, 3, dtype=x.dtype)
    with FastProducts(), torch.no_grad():
        found = model(x)
    assert len(seen) == 1
    assert torch.equal(found, linear(x, model.weight.detach(), model.bias.detach()))


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
