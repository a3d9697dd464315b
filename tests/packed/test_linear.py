"""The layer: what it computes, and that copies, casts, state dicts and compilation keep it whole."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional as F

import hasslefree
from hasslefree import Gram, Grid, JointOnGrid, Prune, SparseGPT, SparseLowRankLinear, use_backend
from hasslefree.core.factors import CodedFactors, nearest
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import ArgumentError, KernelError, PatternError, ShapeError, UnknownNameError
from hasslefree.packed import spec
from hasslefree.packed.kernels import whole
from hasslefree.packed.layouts import pack_bits
from hasslefree.packed.linear import unpacked_once
from tests import oracles

PATTERNS = ["2:4", "2:8", "3:8", "2:3", "unstructured", "row", "structured"]
patterns = pytest.mark.parametrize("pattern", PATTERNS)


def parts(pattern, rank=2, dtype=torch.float32, width=24):
    """S (10, width) of a pattern, with −0.0 in the place of its zeros; the factors; a bias."""
    generator = torch.Generator().manual_seed(0)
    sparse, u, v, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in [(10, width), (10, rank), (rank, width), (10,)]
    )
    kept = torch.zeros(10, width, dtype=torch.bool)
    n, _, m = pattern.partition(":")
    if m:
        kept.view(10, -1, int(m))[..., : int(n)] = True
    else:
        kept[:, ::3] = True
    return torch.where(kept, sparse, -0.0), u, v, bias


def layer_of(pattern, rank=2, dtype=torch.float32, with_bias=True, width=24):
    sparse, u, v, bias = parts(pattern, rank, dtype, width)
    result = Decomposition(sparse, LowRank(u, v), 0.0, 0.0, ())
    return SparseLowRankLinear.from_decomposition(result, bias if with_bias else None, pattern)


@patterns
@pytest.mark.parametrize(("rank", "with_bias"), [(0, True), (2, False)])
def test_it_computes_s_plus_the_low_rank_part(pattern, rank, with_bias):
    """Oracle: the dense matrix in float64."""
    sparse, u, v, bias = parts(pattern, rank)
    layer, x = layer_of(pattern, rank, with_bias=with_bias), torch.randn(3, 5, 24)
    dense = sparse.double() + u.double() @ v.double()
    expected = F.linear(x.double(), dense, bias.double() if with_bias else None)
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.unpacked(), sparse)
    assert layer.values.numel() == sparse.count_nonzero(), "a zero of the other sign was stored"


def test_what_does_not_have_the_pattern_is_refused():
    sparse, u, v, _ = parts("3:8")
    with pytest.raises(PatternError, match="row 0, inputs 0 to 3, has 3 non-zeros, but pattern 2:4 allows 2"):
        SparseLowRankLinear.from_decomposition(Decomposition(sparse, LowRank(u, v), 0.0, 0.0, ()), None, "2:4")


def test_s_is_unpacked_once_where_that_is_asked_for():
    """Oracle: the layer outside; gradients flow, nothing is kept for them meanwhile, nor S after an error."""
    layer, x, kept = layer_of("2:4"), torch.randn(3, 24), []
    expected = torch.autograd.grad(layer(x).sum(), layer.values)[0]
    layer.use("dense")
    y = layer(x)
    keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(1) or tensor, lambda tensor: tensor)

    def fail():
        with keep, unpacked_once(torch.nn.Sequential(layer)):
            copy_of_s = layer.unpacked_copy
            with torch.no_grad():
                assert torch.equal(layer(x), y)
            assert layer.unpacked_copy is copy_of_s
            assert not copy_of_s.requires_grad
            assert not kept
            assert torch.equal(torch.autograd.grad(layer(x).sum(), layer.values)[0], expected)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert layer.unpacked_copy is None
    for backend in ("unpacked", "numba"):
        layer.use(backend)
        with pytest.raises(KernelError, match="no gradients"):
            layer(x)


def test_factors_alone_are_trained_for_a_few_tokens():
    """Oracle: the dense backend, which a gradient of the values would choose."""
    layer, x = layer_of("2:4"), torch.randn(3, 24)
    layer(x).sum().backward()
    expected = layer.low_rank_u.grad.clone(), layer.low_rank_v.grad.clone()
    layer.zero_grad()
    layer.values.requires_grad_(False)
    layer(x).sum().backward()
    torch.testing.assert_close((layer.low_rank_u.grad, layer.low_rank_v.grad), expected)


@patterns
@pytest.mark.parametrize(
    ("dtype", "tokens", "width"),
    [(torch.float32, 1, 24), (torch.float32, 40, 192), (torch.bfloat16, 3, 192), (torch.bfloat16, 40, 24)],
)
def test_every_backend_of_a_cpu_computes_the_same(pattern, tokens, dtype, width):
    """Oracle: float64, give or take what is rounded: S x, V x, U V x, their sum, the result; and float32 sums."""
    layer, x = layer_of(pattern, dtype=dtype, width=width), torch.randn(tokens, width).to(dtype)
    sparse, u, v, bias = (part.double() for part in parts(pattern, dtype=dtype, width=width))
    by_s, inner = x.double() @ sparse.T, x.double() @ v.T
    expected = by_s + inner @ u.T + bias
    passed = by_s.abs() + inner.abs() @ u.abs().T + (inner @ u.T).abs() + (expected - bias).abs() + expected.abs()
    sums = x.double().abs() @ (sparse.abs().T + v.abs().T @ u.abs().T)
    bound = torch.finfo(dtype).eps / 2 * passed + width * torch.finfo(torch.float32).eps * sums
    for backend in ["unpacked", "dense", None] + (["numba"] if pattern != "structured" else []):
        layer.use(backend)
        with torch.no_grad():
            excess = (layer(x).double() - expected).abs() / bound
        assert excess.max() <= 1, f"{backend}: {excess.max():.2f} of what rounding may do"
    assert f"backend={'dense' if pattern == 'structured' else 'numba'}" in repr(layer)


def test_a_backend_is_set_for_all_layers_or_for_none():
    model = torch.nn.Sequential(layer_of("2:4"), layer_of("structured"))
    use_backend(model, "unpacked")
    assert all(layer.unpacked_copy is not None and "backend=unpacked" in repr(layer) for layer in model)
    with pytest.raises(KernelError, match="structured"):
        use_backend(model, "numba")
    with pytest.raises(KernelError, match="not possible"):
        model[0].use("int4")
    assert all(layer.backend == "unpacked" and layer.unpacked_copy is not None for layer in model), (
        "a refusal changed a layer"
    )
    with pytest.raises(UnknownNameError, match="Did you mean 'numba'"):
        use_backend(model, "nunba")
    use_backend(model, None)
    assert all(layer.unpacked_copy is None for layer in model)
    with pytest.raises(UnknownNameError, match="Did you mean 'numba'"):
        use_backend(torch.nn.Linear(2, 2), "nunba")


QUANTISED = ["dense", "2:4", "3:8", "row", "structured"]


def quantised_layer(pattern, dtype=torch.float32, symmetric=False):
    """A layer (12, 24) of gptq, with a low-rank part and a bias, and its decomposition."""
    weight, h = oracles.problem(12, 24)
    method = Prune(SparseGPT(grid=Grid(4, 8, symmetric)))
    sparsity = 0.5 if pattern in ("row", "structured") else None
    result = hasslefree.decompose(weight.to(dtype), Gram(h, 1), pattern, 0, sparsity=sparsity, method=method)
    result = dataclasses.replace(result, low_rank=LowRank(torch.randn(12, 2).to(dtype), torch.randn(2, 24).to(dtype)))
    return SparseLowRankLinear.from_decomposition(result, torch.ones(12).to(dtype), pattern), result


@pytest.mark.parametrize("pattern", QUANTISED)
@pytest.mark.parametrize(("dtype", "symmetric"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_layer_on_a_grid_computes_what_its_decomposition_says(pattern, dtype, symmetric):
    """Oracles: S of the decomposition, bit for bit; the dense matrix in float64; the bytes of the tensors."""
    layer, result = quantised_layer(pattern, dtype, symmetric)
    assert torch.equal(layer.unpacked(), result.sparse)
    x = torch.randn(3, 5, 24).to(dtype)
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    expected = F.linear(x.double(), result.product().double()) + 1
    torch.testing.assert_close(layer(x).double(), expected, **tight)
    with torch.no_grad():
        for backend in (None, "unpacked", "dense"):
            layer.use(backend)
            torch.testing.assert_close(layer(x).double(), expected, **tight)
    assert f"{pattern}, int4 in groups of 8" in repr(layer)
    assert not hasattr(layer, "values")
    assert {n for n, _ in layer.named_parameters()} == {"weight_scale", "low_rank_u", "low_rank_v", "bias"}
    assert layer.stored_bytes == sum(t.nbytes for n, t in layer.state_dict().items() if n != "bias")


def coded_layer(pattern, dtype=torch.float32, with_bias=True, width=24):
    """A layer (10, width) with factors in eight bits, and its decomposition."""
    sparse, u, v, bias = parts(pattern, dtype=dtype, width=width)
    factors = CodedFactors(nearest(u.double(), dtype), nearest(v.double(), dtype))
    result = Decomposition(sparse, factors.values(), 0.0, 0.0, (), factors=factors)
    return SparseLowRankLinear.from_decomposition(result, bias if with_bias else None, pattern), result


@pytest.mark.parametrize(
    ("pattern", "dtype"), [(pattern, [torch.float32, torch.bfloat16][i % 2]) for i, pattern in enumerate(PATTERNS)]
)
def test_a_layer_with_coded_factors_computes_what_its_decomposition_says(pattern, dtype):
    """Oracles: the dense matrix in float64, from the codes; the bytes of the tensors."""
    layer, result = coded_layer(pattern, dtype)
    x, (u, v) = torch.randn(3, 5, 24).to(dtype), (result.factors.u, result.factors.v)
    low_rank = (u.codes.double() * u.scale.double()[:, None]) @ (v.codes.double() * v.scale.double()[:, None])
    bias = layer.bias.double()
    expected = F.linear(x.double(), result.sparse.double() + low_rank, bias)
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.1}
    torch.testing.assert_close(layer(x).double(), expected, **tight)
    with torch.no_grad():
        torch.testing.assert_close(layer(x).double(), expected, **tight)
    assert "factors in int8" in repr(layer)
    assert {n for n, _ in layer.named_parameters()} == {"values", "low_rank_u_scale", "low_rank_v_scale", "bias"}
    sizes = {name: tensor.nbytes for name, tensor in layer.state_dict().items() if name.startswith("low_rank")}
    assert sum(sizes.values()) == 2 * (10 + 24) + (10 + 2) * dtype.itemsize
    assert layer.stored_bytes == sum(sizes.values()) + layer.values.nbytes + layer.index.nbytes


ANY_LAYER = [
    *((layer_of, pattern) for pattern in PATTERNS),
    *((quantised_layer, pattern) for pattern in QUANTISED),
    *((coded_layer, pattern) for pattern in PATTERNS),
]


def built(make, pattern):
    layer = make(pattern)
    return layer[0] if isinstance(layer, tuple) else layer


@pytest.mark.parametrize(("make", "pattern"), ANY_LAYER)
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_within_autocast(make, pattern, tokens, dtype):
    """Oracle: the layer without autocast. Products may be in bfloat16, and no part may be lost."""
    layer = built(make, pattern)
    x = torch.randn(tokens, 24).bfloat16().to(layer.weight.dtype)
    with torch.no_grad():
        expected = layer(x)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x.to(dtype))
    torch.testing.assert_close(y.to(expected.dtype), expected, rtol=0.02, atol=0.1)


@pytest.mark.parametrize(("make", "pattern"), ANY_LAYER)
def test_state_dicts_casts_and_copies(make, pattern):
    """Oracle: each tensor by itself; indices and codes are not cast."""
    layer, x = built(make, pattern), torch.eye(24)
    fresh = SparseLowRankLinear(layer.spec, True)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(x), layer(x))
    before = copy.deepcopy(layer.state_dict())
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        other = copy.deepcopy(layer).to(dtype)
        for name, tensor in other.state_dict().items():
            expected = before[name].to(dtype) if before[name].is_floating_point() else before[name]
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor, expected)
        assert torch.equal(other.unpacked(), layer.unpacked().to(dtype))
        assert other(x.to(dtype)).dtype == dtype
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())
    assert all(tensor.is_meta for tensor in layer.to("meta").state_dict().values())


# A compilation takes seconds; codes of factors do not depend on how S is stored.
COMPILED = [*ANY_LAYER[: -len(PATTERNS)], (coded_layer, "2:4")]


@pytest.mark.parametrize(
    ("make", "pattern"),
    [case if case[1] == "2:4" else pytest.param(*case, marks=pytest.mark.nightly) for case in COMPILED],
)
def test_it_compiles_without_a_graph_break_and_gradients_are_the_same(make, pattern):
    """Oracle: the layer as it is, with and without gradients."""
    torch.compiler.reset()
    layer, x = built(make, pattern), torch.randn(4, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    gradients = []
    for module in (compiled, layer):
        layer.zero_grad()
        y = module(x)
        y.square().sum().backward()
        gradients.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    assert all(gradient.abs().sum() > 0 for gradient in gradients[1])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


def entropy_coded_layer(_=None):
    weight, x = torch.randn(12, 24), torch.randn(60, 24)
    result = hasslefree.decompose(
        weight, Gram.from_activations(x), "dense", 0, method=JointOnGrid(Grid.entropy_coded(4.0))
    )
    return SparseLowRankLinear.from_decomposition(result, None, "dense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_that_a_kernel_has_are_not_coded_again(dtype, monkeypatch):
    """After other scales, and in calls with gradients. Oracle: a copy that was never called."""
    layer, x = entropy_coded_layer().to(dtype), torch.randn(4, 24).to(dtype)
    fresh = copy.deepcopy(layer)
    with torch.no_grad():
        layer(x)  # the kernel takes the codes
    with monkeypatch.context() as patched:
        patched.setattr(spec, "pack_on_grid", lambda *_: pytest.fail("coded again"))
        patched.setattr(spec, "decode", lambda *_: pytest.fail("decoded again"))
        for factor in (1, 2):
            with torch.no_grad():
                layer.weight_scale.mul_(factor)
                y = layer(x)
            assert layer._buffers["weight_packed"] is None
            trained = layer(x)
            trained.sum().backward()
            torch.testing.assert_close(y, trained.detach(), rtol=0.02, atol=0.02)
    with torch.no_grad():
        fresh.weight_scale.mul_(2)
        torch.testing.assert_close(y, fresh(x), rtol=0, atol=0)
    assert torch.equal(layer.state_dict()["weight_packed"], fresh.state_dict()["weight_packed"])


def test_an_unpacked_layer_keeps_no_decoded_codes():
    layer = entropy_coded_layer()
    layer.unpacked()
    layer.use("unpacked")
    assert layer.held_bytes == 12 * 24 * 4
    with torch.no_grad():
        expected = layer(torch.eye(24))
    layer.use("dense")
    torch.testing.assert_close(layer(torch.eye(24)), expected)


@pytest.mark.parametrize("called_first", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_an_entropy_coded_layer_compiles_once_it_is_decoded(called_first, trained):
    """Oracle: the layer as it is. A kernel has its codes after a call without gradients."""
    torch.compiler.reset()
    layer, x = entropy_coded_layer(), torch.randn(4, 24)
    layer.unpacked()
    expected = layer(x).detach()
    if called_first:
        with torch.no_grad():
            layer(x)
        assert layer._buffers["weight_packed"] is None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(trained):
        y = compiled(x)
    torch.testing.assert_close(y.detach(), expected)
    if trained:
        y.square().sum().backward()
        found = layer.weight_scale.grad.clone()
        layer.zero_grad()
        layer(x).square().sum().backward()
        torch.testing.assert_close(found, layer.weight_scale.grad)


def test_a_compiled_layer_has_its_new_scales_once_its_backend_is_chosen_again():
    """Oracle: the layer as it is."""
    torch.compiler.reset()
    layer, x = quantised_layer("dense")[0], torch.randn(4, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        layer(x)
        compiled(x)
        layer.weight_scale.data.mul_(2)
        use_backend(layer, None)
        expected = layer(x)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(expected, copy.deepcopy(layer)(x))


@pytest.mark.parametrize("make", [layer_of, quantised_layer, entropy_coded_layer])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_trace_is_the_layer(make):
    """Oracle: the layer, on other inputs than the traced ones."""
    layer = built(make, "2:4")
    with torch.no_grad():
        layer(torch.randn(2, 24))
        traced = torch.jit.trace(layer, (torch.randn(2, 24),))
        x = torch.randn(2, 24)
        torch.testing.assert_close(traced(x), layer(x))


def test_another_state_dict_has_other_codes_in_inference_mode():
    """Oracle: the layer that the state dict is of. Inference tensors have no version."""
    one, other, x = entropy_coded_layer(), entropy_coded_layer(), torch.randn(3, 24)
    state = other.state_dict()
    with torch.inference_mode():
        layer = SparseLowRankLinear(one.spec, False)
        layer.load_state_dict(one.state_dict())
        layer.use("dense")
        layer(x)
        layer.load_state_dict(state)
        torch.testing.assert_close(layer(x), other(x))


@patterns
def test_gradients_of_coded_factors(pattern):
    """Oracle: autograd through the dense matrix."""
    layer, result = coded_layer(pattern)
    x = torch.randn(4, 24)
    layer(x).square().sum().backward()
    u, v = (rows.codes.float() for rows in (result.factors.u, result.factors.v))
    scales = [rows.scale.clone().requires_grad_() for rows in (result.factors.u, result.factors.v)]
    dense = result.sparse + (u * scales[0][:, None]) @ (v * scales[1][:, None])
    F.linear(x, dense, layer.bias.detach()).square().sum().backward()
    for scale, expected in zip((layer.low_rank_u_scale, layer.low_rank_v_scale), scales, strict=True):
        torch.testing.assert_close(scale.grad, expected.grad, rtol=1e-4, atol=1e-4)


def changed_in_place(layer):
    layer.values.data.mul_(2)  # as an optimizer may


def loaded_anew(layer):
    layer.load_state_dict(
        {name: 2 * each if each.is_floating_point() else each for name, each in layer.state_dict().items()}
    )


def moved_and_back(layer):
    layer.double().to(torch.float32)


def assigned(layer):
    layer.low_rank_v.data = layer.low_rank_v.data + 1


def assigned_transposed(layer):
    layer.values.data = layer.values.data.T.contiguous().T


def with_other_positions(layer):
    """The two values of a group of 2:8 move to its end."""
    groups = torch.full((layer.index.shape[0], 2 * layer.in_features // 8), 6, dtype=torch.uint8)
    groups[:, 1::2] = 7
    layer.index.copy_(pack_bits(groups, 3))


def with_another_mask(layer):
    """The first row gets the entries of the second."""
    kept = layer.support()
    kept[0] |= kept[1].roll(1)
    kept[1] = False
    layer.index.copy_(pack_bits(kept, 1))


CHANGES = [changed_in_place, loaded_anew, moved_and_back, assigned, assigned_transposed]


MOVES = [("2:8", with_other_positions), ("unstructured", with_another_mask)]


@pytest.mark.parametrize(("pattern", "change"), [*itertools.product(["2:4", "2:8", "3:8"], CHANGES), *MOVES])
def test_a_layer_that_changed_multiplies_what_it_is_now(pattern, change):
    """Oracle: float64 on the dense matrix. For a few tokens the arrays of a layer are kept from call to call."""
    layer, x = layer_of(pattern, width=128), torch.randn(2, 128)  # more than the vectors of a register
    with torch.no_grad():
        layer(x)
        change(layer)
        y = layer(x)  # before S is unpacked, for which the arrays are given up
        u, v = layer.factors()
        dense = layer.unpacked().double() + u.double() @ v.double()
        expected = F.linear(x.double(), dense, layer.bias.double())
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", ["2:4", "2:8", "3:8", "unstructured"])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("with_bias", [True, False])
def test_coded_factors_for_a_few_tokens(pattern, tokens, with_bias):
    """Oracle: float64 on the dense matrix from the codes, before and after the scales change."""
    layer, result = coded_layer(pattern, torch.bfloat16, with_bias, width=64)
    x = torch.randn(tokens, 64, dtype=torch.bfloat16)
    for _ in range(2):
        u, v = layer.factors()
        dense = result.sparse.double() + u.double() @ v.double()
        expected = x.double() @ dense.T
        if with_bias:
            expected += layer.bias.double()
        with torch.no_grad():
            y = layer(x)
            assert layer.kernel.prepared.factors is not None  # the kernel has computed it
            layer.low_rank_u_scale.mul_(2)
        torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=0.15)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1 << 19), (torch.bfloat16, 0)])
def test_coded_factors_that_torch_multiplies(dtype, most, monkeypatch):
    """Oracle: float64 on the dense matrix from the codes. S is multiplied by the kernel all the same."""
    monkeypatch.setattr(whole, "MAX_FACTORS", most)
    layer, result = coded_layer("2:8", dtype, width=64)
    x = torch.randn(2, 64, dtype=dtype)
    u, v = layer.factors()
    expected = F.linear(x.double(), result.sparse.double() + u.double() @ v.double(), layer.bias.double())
    with torch.no_grad():
        y = layer(x)
    assert layer.kernel.prepared.factors is None
    assert layer.kernel.prepared.sparse is not None
    torch.testing.assert_close(y.double(), expected, rtol=0.02, atol=0.05)


def test_arrays_that_another_thread_releases(monkeypatch):
    """Oracle: the same call alone. Here the release comes between the products with S and with L."""
    layer, _ = coded_layer("2:8", torch.bfloat16, width=64)
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    product = whole.LayerArrays.product

    def product_and_release(arrays, inputs):
        layer.kernel.release(layer)
        return product(arrays, inputs)

    with torch.no_grad():
        expected = layer(x)
        monkeypatch.setattr(whole.LayerArrays, "product", product_and_release)
        assert torch.equal(layer(x), expected)


def test_an_index_in_the_place_of_another():
    """Oracle: the product with S unpacked. Torch may give the memory of the first index to the second."""
    layer, x = layer_of("2:8", width=1024), torch.randn(1, 1024)
    first = layer.index.clone()
    with_other_positions(layer)
    second = layer.index.clone()
    u, v = layer.factors()
    with torch.no_grad():
        found = [
            torch.func.functional_call(layer, {"positions": index.clone()}, (x,)) for index in [first, second] * 10
        ]
        for turn, index in enumerate((first, second)):
            layer.index.copy_(index)
            expected = F.linear(x, layer.unpacked() + u @ v, layer.bias)
            for y in found[turn::2]:
                torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf_come_out(dtype):
    layer, x = layer_of("2:4", dtype=dtype, width=128), torch.ones(2, 128, dtype=dtype)
    x[0, 0], x[1, 0] = torch.nan, torch.inf
    with torch.no_grad():
        y = layer(x)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()


@pytest.mark.parametrize("shape", [(24,), (0, 24), (2, 3, 24)])
def test_any_leading_dimensions(shape):
    """Oracle: the dense layer."""
    layer, x = layer_of("2:4"), torch.randn(shape)
    sparse, u, v, bias = parts("2:4")
    torch.testing.assert_close(layer(x), F.linear(x, sparse + u @ v, bias))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, sparse + u @ v, bias))


def test_inputs_of_another_width_are_an_error():
    """The kernels read without asking how long a row is."""
    for pattern, width, tokens in itertools.product(PATTERNS, (16, 18, 20, 48), (2, 40)):
        with torch.no_grad(), pytest.raises(ShapeError, match=f"the layer has 24 inputs, got {width}"):
            layer_of(pattern, rank=0)(torch.randn(tokens, width))


def test_a_copy_of_a_layer_has_arrays_of_its_own():
    layer, x = layer_of("2:4"), torch.randn(2, 24)
    with torch.no_grad():
        expected = layer(x)
        twin = copy.deepcopy(layer)
        assert twin.kernel.prepared.sparse is None, "a copy, or a file, holds its tensors twice"
        layer.values.zero_()
        assert torch.equal(twin(x), expected)


@pytest.mark.parametrize(("model", "backend"), [(None, "dense"), (torch.nn.Identity(), 3)])
def test_the_backend_of_what_is_no_model_or_no_name(model, backend):
    with pytest.raises(ArgumentError, match="(model|backend) must be"):
        hasslefree.use_backend(model, backend)


def test_codes_of_another_stream_are_not_those_of_the_one_before():
    """Also if it lies at the same address, as after a state dict is assigned."""
    layers = []
    for seed in (0, 1):
        weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))
        method = JointOnGrid(Grid.entropy_coded(4.0))
        found = hasslefree.decompose(weight, pattern="dense", rank=0, method=method)
        layers.append(SparseLowRankLinear.from_decomposition(found, None, "dense"))
    one = copy.deepcopy(layers[0])
    memory = one.weight_packed.numpy().copy()
    for layer in layers:
        memory[:] = layer.weight_packed.numpy()
        tensors = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
        one.load_state_dict(tensors | {"weight_packed": torch.from_numpy(memory)}, assign=True)
        assert torch.equal(one.unpacked(), layer.unpacked())
    assert one.decoded[0].data_ptr() == memory.ctypes.data
