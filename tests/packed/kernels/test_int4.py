"""The backend int4: torch's own operators, and a layer that holds its codes in their order."""

import copy
import io
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import hasslefree
from hasslefree import Grid, LowRank, Prune, SparseGPT, SparseLowRankLinear, use_backend
from hasslefree.core.factors import CodedFactors, nearest
from hasslefree.core.grids import Quantised
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import KernelError
from hasslefree.packed.kernels import arrays, codes, int4, interleaved, whole
from hasslefree.packed.kernels.backends import Case, choose
from hasslefree.packed.kernels.byte_codes import ByteCodes
from hasslefree.packed.kernels.int4 import Int4
from hasslefree.packed.layouts import PackedGroups

OFFSETS, WHOLE, SYMMETRIC = Grid(4, 64, offset=True), Grid(4, 32), Grid(4, None, symmetric=True)
SMALL_SCALES = Grid(4, 32, offset=True, scale_bits=5)
grids = pytest.mark.parametrize("grid", [OFFSETS, WHOLE, SYMMETRIC, SMALL_SCALES, Grid(6, 32, offset=True)], ids=str)
WIDTHS = [2, 3, 4, 5, 6, 8]
# Rows of 192 are divided into groups of 64, and groups of 48 into groups of 16.
KINDS = [
    {"group": 16, "offset": True, "scale_bits": 4},
    {"group": 16},
    {"group": 32, "offset": True, "scale_bits": 8},
    {"group": 32, "symmetric": True, "scale_bits": 6},
    {"group": 48, "symmetric": True},
    {"group": 64, "offset": True},
    {"group": 96},
    {"group": None, "offset": True},
]
pytestmark = pytest.mark.skipif(int4.without_cpu() is not None, reason=str(int4.without_cpu()))


def pruned(weight, pattern):
    """A matrix of this pattern, some of whose kept entries may be zeros."""
    if pattern == "dense":
        return weight
    if pattern == "structured":
        return weight * (torch.arange(weight.shape[1]) % 3 > 0)
    if pattern == "row":  # with groups that have no entries
        return weight * (weight > 0) * (torch.arange(weight.shape[1]) >= 64)
    n, m = map(int, pattern.split(":"))
    groups = weight.unflatten(1, (-1, m))
    return groups.where(groups.argsort(-1).argsort(-1) < n, 0).flatten(1)


def layer_of(
    grid=OFFSETS, out=112, width=192, rank=3, bias=True, dtype=torch.bfloat16, coded=False, pattern="dense", size=1.0
):
    """A layer, and its matrix S + u v and bias in float64, from the codes and factors that it was made of."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    weight, u, v, b = normal(out, width).float(), normal(out, rank), normal(rank, width), normal(out)
    weight = pruned(size * weight, pattern)
    scaling = grid.scaling(weight)
    quantised = Quantised.of(scaling.nearest(weight), scaling, dtype)
    factors = CodedFactors(nearest(u, dtype), nearest(v, dtype)) if coded else None
    if factors:
        u, v = factors.u.values(), factors.v.values()
    result = Decomposition(quantised.values(), LowRank(u, v), 0.0, 0.0, (), quantised=quantised, factors=factors)
    layer = SparseLowRankLinear.from_decomposition(result, b if bias else None, pattern)
    scale, zero = (t.double().repeat_interleave(width // t.shape[1], 1) for t in (scaling.scale, scaling.zero))
    codes = quantised.codes.double()
    sparse = codes * scale + zero if grid.offset else (codes - zero) * scale
    return layer.requires_grad_(False), sparse + u.double() @ v.double(), b.double() if bias else None


def close(y, expected):
    """Within bfloat16's rounding of what is summed."""
    return (y.double() - expected).norm() <= 6e-3 * expected.norm()


@grids
@pytest.mark.parametrize(("rank", "bias"), [(3, True), (0, False), (0, True)])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_it_computes_the_matrix_of_the_codes(grid, rank, bias, tokens):
    """Oracle: float64. 112 rows are a block of 64 and 48 more in the operators' order."""
    layer, matrix, b = layer_of(grid, rank=rank, bias=bias)
    x = torch.randn(2, tokens, 192).bfloat16()
    y = layer(x)
    assert layer.kernel.prepared.operands is not None
    assert y.dtype == torch.bfloat16
    assert close(y, F.linear(x.double(), matrix, b))


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_grid_within_the_bound_of_its_terms(monkeypatch, kind, bits, numba):
    """Oracle: float64, entry by entry, as each token is one input. Few tokens, and all of them at once."""
    if not numba:
        monkeypatch.setattr(arrays, "HAS_NUMBA", False)
    grid = Grid(bits, **kind)
    layer, matrix, _ = layer_of(grid, rank=0, bias=False)
    tensors = layer.tensors()
    scale, low = (each.double() for each in layer.spec.scale_and_low(layer.spec.codes(tensors), tensors, True))
    scale, low = (each.repeat_interleave(192 // scale.shape[1], 1) for each in (scale, low))
    middle = low + 2 ** (bits - 1) * scale
    bound = middle.abs() + (8 * scale if bits == 8 else 0)
    if grid.scale_bits:
        bound += (matrix - middle).abs()
    inputs = torch.eye(192).bfloat16()
    with torch.no_grad():
        few = torch.cat([layer(part) for part in inputs.split(2)]).T
        many = layer(inputs).T
    assert layer.weight_packed is None
    for found in (few, many):  # an entry that comes out is rounded once more
        assert ((found.double() - matrix).abs() <= (bound * 1.01 + matrix.abs() * 1.01) / 256).all()


@pytest.mark.parametrize("tokens", [1, 300])
def test_symmetric_codes_of_eight_bits_have_the_same_zero(tokens):
    """Oracle: float64. An error of the zero would add up over inputs of one sign."""
    found = torch.randint(124, 133, (64, 1024), dtype=torch.uint8)
    found[0, :2] = torch.tensor([0, 247])
    scale = torch.rand(64, 1).add(0.5).bfloat16()
    operands = Int4.of(found, 8, scale, -128 * scale)
    assert torch.equal(operands.all_codes(), found)
    x = torch.rand(tokens, 1024).bfloat16()
    expected = x.double() @ ((found.double() - 128) * scale.double()).T
    assert close(operands.product(x), expected)


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize(("coded", "rank"), [(True, 3), (True, 16), (False, 3)])
def test_the_low_rank_part_of_a_token(monkeypatch, numba, coded, rank):
    monkeypatch.setattr(arrays, "HAS_NUMBA", numba and arrays.HAS_NUMBA)
    layer, matrix, b = layer_of(coded=coded, rank=rank)
    x = torch.randn(1, 192).bfloat16()
    assert close(layer(x), F.linear(x.double(), matrix, b))
    assert (layer.kernel.prepared.factors is not None) == arrays.HAS_NUMBA


@pytest.mark.parametrize("tokens", [1, 40])
def test_inputs_of_any_strides_and_several_tiles(tokens, monkeypatch):
    monkeypatch.setattr(int4, "TILE_BYTES", 2 * 192 * 64)
    layer, matrix, b = layer_of(out=208)
    x = torch.randn(tokens, 400).bfloat16()[:, ::2][:, 4:196]
    assert close(layer(x), F.linear(x.double(), matrix, b))


@pytest.mark.parametrize("pattern", ["2:4", "5:8", "row", "structured"])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("kind", [{"group": 32}, {"group": 64, "symmetric": True, "scale_bits": 6}], ids=str)
def test_a_pruned_matrix_gets_the_codes_of_its_zeros(kind, bits, pattern):
    """Oracle: float64. What is released is what was stored, to the bit. Weights are small beside the scale 1, which
    groups without entries have.
    """
    layer, matrix, b = layer_of(Grid(bits, **kind), rank=0, bias=False, pattern=pattern, size=0.02)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    for tokens in (1, 40):
        x = torch.randn(tokens, 192).bfloat16()
        assert close(layer(x), F.linear(x.double(), matrix, b))
    assert layer.weight_packed is None
    after = layer.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("group", [16, 64])
def test_only_one_copy_of_the_codes_is_held_and_whoever_asks_gets_them_in_the_file_s_order(bits, group):
    layer, _, _ = layer_of(Grid(bits, group, offset=True))
    stored, x = layer.weight_packed.clone(), torch.randn(1, 192).bfloat16()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    y = layer(x)
    assert layer.weight_packed is None
    assert layer.kernel.bytes >= stored.nbytes
    assert torch.equal(layer.tensors()["weight_packed"], stored)
    assert layer.kernel.bytes == 0
    assert torch.equal(layer(x), y)
    after = layer.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.skipif(not codes.shares_nibbles(), reason="the processor lacks AVX-512, or Numba is missing")
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (5, 32), (6, 64), (8, 32)])
def test_codes_take_their_bits_in_memory(bits, group):
    """Oracle: bits and the two numbers of a group, by hand."""
    layer, _, _ = layer_of(Grid(bits, group, offset=True))
    layer(torch.randn(1, 192).bfloat16())
    assert layer.kernel.bytes == 112 * 192 * bits // 8 + 4 * 112 * 192 // group


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("bits", [5, 6])
def test_high_bits_of_inputs_that_are_far_from_zero(bits, tokens):
    """Oracle: float64. Where the nibbles and the high bits contributed far more than their sum, rounding would show."""
    layer, matrix, _ = layer_of(Grid(bits, 32, offset=True), rank=0, bias=False)
    x = (100 + torch.randn(tokens, 192)).bfloat16()
    assert close(layer(x), x.double() @ matrix.T)


def test_copies_casts_and_pickles_of_a_layer_that_was_used():
    layer, matrix, b = layer_of()
    x = torch.randn(1, 192).bfloat16()
    y, file = layer(x), io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    layer(x)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), y)
        assert other.weight_packed is None
        assert torch.equal(other.tensors()["weight_packed"], layer.tensors()["weight_packed"])
    layer(x)
    wide = copy.deepcopy(layer).float()
    assert close(wide(x.float()), F.linear(x.double(), matrix, b))
    assert layer.to("meta").weight_packed.device.type == "meta"


def test_values_that_change_after_a_call_count():
    layer, _, _ = layer_of(bias=False)
    x = torch.randn(1, 192).bfloat16()
    y = layer(x)
    with torch.no_grad():
        layer.weight_scale.mul_(2)
        layer.weight_offset.mul_(2)
        layer.low_rank_u.mul_(2)
    assert close(layer(x), 2 * y.double())
    fresh, expected, _ = layer_of(bias=False)
    layer.load_state_dict(fresh.state_dict())
    assert close(layer(x), x.double() @ expected.T)
    layer.load_state_dict({"weight_packed": torch.zeros_like(fresh.weight_packed)}, strict=False)
    assert not close(layer(x), x.double() @ expected.T)


def test_scales_that_are_replaced_twice_count():
    """The second may be where the first was, as new as that one was."""
    for size in range(1, 65):
        layer, _, _ = layer_of(WHOLE, bias=False, rank=0, out=16 * size)
        x = torch.randn(1, 192).bfloat16()
        y = layer(x)
        for _ in range(2):
            layer.weight_scale.data = layer.weight_scale.data * 2
        assert close(layer(x), 4 * y.double())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_of_equal_entries_beside_others(bits):
    """Oracle: S itself. Such a group has no scale that would matter."""
    weight = 0.02 * torch.randn(64, 64)
    weight[:, :32] = 0.01
    found = hasslefree.decompose(
        weight.bfloat16(), None, "dense", 0, method=Prune(SparseGPT(grid=Grid(bits, 32, offset=True)))
    )
    layer = SparseLowRankLinear.from_decomposition(found, None, "dense")
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    x[:, :32] = 1
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, found.sparse), rtol=0.02, atol=0)


@pytest.mark.parametrize("names", [("weight_packed",), ("weight_packed", "weight_scale", "weight_zero_point")])
def test_tensors_that_stand_for_a_call_leave_the_layer_as_it_was(names):
    """Oracle: a layer that has these tensors; and the layer before the call."""
    layer, expected, _ = layer_of(WHOLE, bias=False, rank=0)
    other, others, _ = layer_of(WHOLE, bias=False, rank=0, size=2.0)
    if len(names) == 1:
        other.load_state_dict(layer.state_dict() | {"weight_packed": layer.state_dict()["weight_packed"].flip(0)})
        others = other.unpacked().double()
    x = torch.randn(1, 192).bfloat16()
    with torch.no_grad():
        layer(x)
        stand_ins = {name: tensor.clone() for name, tensor in other.state_dict().items() if name in names}
        y = torch.func.functional_call(layer, stand_ins, (x,))
        assert close(y, x.double() @ others.T)
        assert close(layer(x), x.double() @ expected.T)
    assert layer.state_dict()["weight_packed"] is not None


def test_zeros_that_change_in_place_count():
    """Oracle: the dense backend."""
    layer, _, _ = layer_of(WHOLE)
    x = torch.randn(1, 192).bfloat16()
    layer(x)
    layer.weight_zero_point.zero_()
    y = layer(x)
    layer.use("dense")
    assert close(y, layer(x).double())


def test_another_backend_counts_from_the_next_call_on():
    """Oracle: the dense backend; and how each holds the codes, in nibbles or in bytes."""
    layer, matrix, b = layer_of()
    x = torch.randn(1, 192).bfloat16()
    for backend, kind in (("int4", int4.Int4), ("numba", ByteCodes), (None, int4.Int4)):
        layer.use(backend)
        with torch.no_grad():
            assert close(layer(x), F.linear(x.double(), matrix, b))
        assert isinstance(layer.kernel.prepared.operands, kind)


def test_a_call_with_gradients_unpacks_and_agrees():
    layer, matrix, b = layer_of()
    x = torch.randn(1, 192).bfloat16()
    with torch.no_grad():
        layer(x)
    layer.weight_scale.requires_grad_(True)
    y = layer(x)
    y.sum().backward()
    assert layer.weight_scale.grad is not None
    assert close(y, F.linear(x.double(), matrix, b))
    with torch.inference_mode():
        assert close(layer(x), F.linear(x.double(), matrix, b))


def test_it_compiles_into_one_graph():
    layer, matrix, b = layer_of()
    layer(torch.randn(1, 192).bfloat16())
    graphs = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for tokens in (5, 40, 41):
        x = torch.randn(tokens, 192).bfloat16()
        with torch.no_grad():
            assert close(compiled(x), F.linear(x.double(), matrix, b))
    assert layer.kernel.prepared.operands is not None
    assert graphs.frame_count == 1, "a graph was compiled for each number of tokens"


@pytest.mark.parametrize(("bits", "group"), [(5, 32), (8, 32), (3, 16)])
def test_no_tokens(bits, group):
    layer, *_ = layer_of(Grid(bits, group))
    assert layer(torch.empty(2, 0, 192).bfloat16()).shape == (2, 0, 112)


def test_a_state_dict_that_was_taken_in_inference_mode():
    """Oracle: the codes before. What is made in this mode can only be changed in it."""
    layer, matrix, b = layer_of()
    state, x = copy.deepcopy(layer.state_dict()), torch.randn(2, 192).bfloat16()
    with torch.inference_mode():
        layer(x)
        assert all(map(torch.equal, layer.state_dict().values(), state.values()))
    layer.load_state_dict(state)
    assert close(layer(x), F.linear(x.double(), matrix, b))


def case(**changes):
    fields = {"device": "cpu", "dtype": torch.bfloat16, "layout": PackedGroups(1, 1), "grad": False}
    return Case(**{**fields, "grid": OFFSETS, "shape": (64, 128), **changes})


@pytest.mark.parametrize(
    ("changes", "rule", "reason"),
    [
        ({"dtype": torch.float32}, "numba", "fast with bfloat16 only"),
        (
            {"grid": Grid(4, 24)},
            "numba",
            "a multiple of 16 inputs, and these have 24; leave out the backend, or use dense or unpacked",
        ),
        ({"shape": (60, 128), "device": "cuda"}, "dense", "multiples of 8 outputs and 32 inputs, and the layer has 60"),
        (
            {"shape": (64, 144), "grid": Grid(4, 16), "device": "cuda"},
            "dense",
            "32 inputs, and the layer has 64 and 144",
        ),
        ({"shape": (72, 128)}, "numba", "multiples of 16 outputs and 16 inputs, and the layer has 72"),
        ({"grid": None}, "numba", "quantised codes, and S is stored as floats"),
        ({"grad": True}, "dense", "no gradients"),
        ({"device": "mps"}, "dense", "on a CPU and on CUDA"),
    ],
)
def test_where_it_is_not_possible_the_rule_is_slower_and_the_wish_an_error(monkeypatch, changes, rule, reason):
    monkeypatch.setattr("hasslefree.packed.kernels.backends.HAS_NUMBA", True)
    assert choose(case()) == choose(case(), "int4") == "int4"
    assert choose(case(**changes)) == rule
    with pytest.raises(KernelError, match=reason):
        choose(case(**changes), "int4")


def test_a_processor_without_the_operators_is_named_once_and_the_result_the_same(monkeypatch, caplog):
    layer, matrix, b = layer_of()
    asked = []
    monkeypatch.setattr(int4, "without_cpu", lambda: asked.append(True) or "it needs AVX2")
    monkeypatch.setattr("hasslefree.packed.kernels.backends.HAS_NUMBA", False)
    whole.log_slower.cache_clear()
    x = torch.randn(1, 192).bfloat16()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            asked.clear()
            assert close(layer(x), F.linear(x.double(), matrix, b))
    assert len(asked) == 1, "after the first call, only the product with S unpacked asks for its backend"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "S is unpacked at every call, which is slow (Numba is not installed; pip install"
    )
    with pytest.raises(KernelError, match="needs AVX2"):
        use_backend(layer, "int4")


def test_a_processor_or_torch_with_other_instructions_or_another_order(monkeypatch):
    ask = int4.without_cpu.__wrapped__
    with monkeypatch.context() as other:
        other.setattr(interleaved, "BLOCKS", dict.fromkeys(interleaved.BLOCKS, 16))
        assert "in a way that is not known here; update hasslefree" in ask()
    monkeypatch.setattr(interleaved, "CAPABILITY", "NEON")
    assert "AVX2 or AVX-512, and torch uses NEON" in ask()
