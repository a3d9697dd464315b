"""Fused layers and the shares of ranks: their products add up to those of the whole matrices in float64."""

import itertools

import pytest
import torch

from hasslefree.errors import CheckpointError, ServeError
from hasslefree.packed.kernels import int4
from hasslefree.serve.parts import Division
from hasslefree.serve.stacked import LoadBuffer, StackedLinear
from tests.serve.layers import KINDS, dense, layer_of

WIDTH = 64


def stack_of(layers, division, dtype=torch.float32):
    """A stack with all tensors loaded, part by part."""
    stack = StackedLinear(division.parts({f"layer{i}": layer.entry for i, layer in enumerate(layers)}), dtype)
    buffer = LoadBuffer(stack)
    for part, layer in zip(stack.parts, layers, strict=True):
        for leaf, tensor in layer.tensors.items():
            buffer.add(leaf, tensor, part.slices.start)
    stack.finish()
    return stack


def by_outputs(layers, rank=0, ranks=1, dtype=torch.float32):
    """Of a column-parallel layer, such as gate and up."""
    sizes = [len(layer.matrix) for layer in layers]
    return stack_of(layers, Division(sizes, [size // ranks for size in sizes], WIDTH, WIDTH, rank, ranks), dtype)


def by_inputs(layer, rank, ranks, dtype=torch.float32):
    """Of a row-parallel layer, such as down."""
    sizes = [len(layer.matrix)]
    return stack_of([layer], Division(sizes, sizes, WIDTH, WIDTH // ranks, rank, ranks), dtype)


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 7])
def test_shares_of_the_outputs_are_rows_of_the_product(kind, ranks, tokens):
    """Oracle: the product with both matrices in float64. The ranks of the layers differ, and one may be 0."""
    layers = [layer_of(kind, (16, WIDTH), 3, seed=0), layer_of(kind, (32, WIDTH), 0, seed=1)]
    x = torch.randn(tokens, WIDTH)
    found = [by_outputs(layers, rank, ranks)(x).split([16 // ranks, 32 // ranks], 1) for rank in range(ranks)]
    for layer, shares in zip(layers, zip(*found, strict=True), strict=True):
        assert_close(torch.cat(shares, 1), x.double() @ layer.matrix.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_of_the_inputs_add_up_to_the_product(kind, ranks):
    """Oracle: the product with the whole matrix in float64."""
    layer, x = layer_of(kind, (24, WIDTH), 5), torch.randn(2, 3, WIDTH)
    shares = x.chunk(ranks, -1)
    assert_close(sum(by_inputs(layer, rank, ranks)(shares[rank]) for rank in range(ranks)), x.double() @ layer.matrix.T)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_key_heads_fewer_than_ranks_are_held_by_several(ranks):
    """Oracle: rows of the float64 product, of head h // (heads / key heads) for the query head h."""
    head, heads, keys = 8, 4, 2
    layers = [layer_of("2:4", (count * head, WIDTH), r, seed=r) for count, r in ((heads, 4), (keys, 2), (keys, 0))]
    sizes, local = [heads * head, keys * head, keys * head], max(1, keys // ranks) * head
    x = torch.randn(3, WIDTH)
    for rank in range(ranks):
        division = Division(sizes, [heads // ranks * head, local, local], WIDTH, WIDTH, rank, ranks)
        found = stack_of(layers, division)(x).split(division.local_sizes, 1)
        first = rank * (heads // ranks)  # the first query head of this rank
        key = first // (heads // keys)
        for part, layer, start in zip(found, layers, (first, key, key), strict=True):
            assert_close(part, (x.double() @ layer.matrix.T)[:, start * head :][:, : part.shape[1]])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_layer_that_is_fused_in_the_folder(ranks):
    """As Phi-3's: one matrix of q, k and v. Oracle: rows of the float64 product."""
    layer, x, sizes = layer_of("2:4", (32, WIDTH), 3), torch.randn(3, WIDTH), [16, 8, 8]
    expected = (x.double() @ layer.matrix.T).split(sizes, 1)
    for rank in range(ranks):
        local = [size // ranks for size in sizes]
        found = stack_of([layer], Division(sizes, local, WIDTH, WIDTH, rank, ranks))(x).split(local, 1)
        for part, whole in zip(found, expected, strict=True):
            assert_close(part, whole.chunk(ranks, 1)[rank])


@pytest.mark.parametrize("kinds", list(itertools.permutations(["dense", "2:4", "row"], 2)))
def test_layers_of_different_kinds_are_fused(kinds):
    """Oracle: the float64 product."""
    layers = [dense((16, WIDTH)) if kind == "dense" else layer_of(kind, (16, WIDTH), 2) for kind in kinds]
    x = torch.randn(3, WIDTH)
    for rank in range(2):
        expected = [(x.double() @ layer.matrix.T).chunk(2, 1)[rank] for layer in layers]
        assert_close(by_outputs(layers, rank, 2)(x), torch.cat(expected, 1))


@pytest.mark.parametrize("kind", ["2:4, int8 factors", "dense, int4", "2:4, int8"])
def test_codes_are_rounded_to_the_dtype_of_the_stack_and_not_of_the_file(kind):
    """Oracle: the float64 product. Scales have eight significant bits, so that bfloat16 holds them."""
    layer, x = layer_of(kind, (16, WIDTH), 3), torch.randn(3, WIDTH)
    scales = {leaf: each.bfloat16() for leaf, each in layer.tensors.items() if leaf.endswith("_scale")}
    assert all(torch.equal(each.float(), layer.tensors[leaf]) for leaf, each in scales.items())
    layer.tensors |= scales
    assert_close(by_outputs([layer])(x), x.double() @ layer.matrix.T)


def test_n_m_stays_packed_and_takes_the_bytes_of_the_files():
    """Oracle: the sizes of the tensors in the folder."""
    layers = [layer_of("2:4", (16, WIDTH), 3), layer_of("2:4", (16, WIDTH), 1)]
    stored = sum(tensor.nbytes for layer in layers for tensor in layer.tensors.values())
    assert sum(tensor.nbytes for tensor in by_outputs(layers).parameters()) == stored
    halves = [sum(p.nbytes for p in by_inputs(layers[0], rank, 2).parameters()) for rank in range(2)]
    whole = {name: tensor.nbytes for name, tensor in layers[0].tensors.items()}
    assert halves == [(sum(whole.values()) + whole["low_rank_u"]) // 2] * 2


@pytest.mark.skipif(int4.without_cpu() is not None, reason=str(int4.without_cpu()))
@pytest.mark.parametrize("kind", ["dense, offsets", "dense, rows"])
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1), (1, 40), (2, 3)])
def test_four_bits_in_bfloat16_stay_packed(kind, ranks, tokens):
    """Oracle: the float64 product. In bfloat16 a part of S and of the product is rounded to eight bits."""
    layers, x = [layer_of(kind, (32, WIDTH), 3), layer_of(kind, (64, WIDTH), 0, seed=1)], torch.randn(tokens, WIDTH)
    x = x.bfloat16()
    for rank in range(ranks):
        stack = by_outputs(layers, rank, ranks, torch.bfloat16)
        assert not stack.is_unpacked
        assert not any(parameter.numel() >= 32 * WIDTH for parameter in stack.parameters()), "S is unpacked"
        shares = [(x.double() @ layer.matrix.T).chunk(ranks, 1)[rank] for layer in layers]
        found, expected = stack(x).double(), torch.cat(shares, 1)
        assert (found - expected).norm() < 1e-2 * expected.norm()
    width = WIDTH // ranks
    found = sum(by_inputs(layers[0], rank, ranks, torch.bfloat16)(x[:, rank * width :][:, :width]).double()
                for rank in range(ranks))  # fmt: skip
    expected = x.double() @ layers[0].matrix.T
    assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 2, 40])
@pytest.mark.parametrize(("kind", "dtype"), [("2:4", torch.float32), ("dense, offsets", torch.bfloat16)])
def test_it_compiles_to_one_graph_for_any_number_of_tokens(tokens, kind, dtype):
    """Oracle: the layer as it is."""
    torch.compiler.reset()
    stack = by_outputs([layer_of(kind, (16, WIDTH), 3), layer_of(kind, (32, WIDTH), 2)], dtype=dtype)
    compiled = torch.compile(stack, fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(tokens, WIDTH).to(dtype)
    torch.testing.assert_close(compiled(x), stack(x))


def test_the_operator_is_sound():
    """Oracle: torch's own checks of an operator: its schema, its fake, and tracing with dynamic shapes."""
    stack = by_outputs([layer_of("2:4", (16, WIDTH), 3), layer_of("2:4", (8, WIDTH), 2)])
    packed = (stack.values, stack.positions, 2, 4, stack.low_rank_u, stack.low_rank_v, stack.outs, stack.ranks)
    arguments = tuple(each.data if isinstance(each, torch.nn.Parameter) else each for each in packed)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(
        torch.ops.hasslefree.stacked_linear.default, (torch.randn(3, WIDTH), *arguments), test_utils=checks
    )


def test_a_split_that_cuts_a_group_is_refused():
    layer = layer_of("1:16", (8, WIDTH), 2)
    with pytest.raises(
        ServeError,
        match=r"layer0 .* a multiple of 16 inputs per process, .* split into 8 per process.*tensor_parallel_size",
    ):
        by_inputs(layer, 0, 8)


def test_shapes_that_do_not_add_up_are_refused():
    layers = {"q": layer_of("2:4", (16, WIDTH), 2).entry, "k": layer_of("2:4", (8, WIDTH), 2).entry}
    for sizes, width in [([16, 16], WIDTH), ([16], WIDTH), ([16, 8, 8], WIDTH), ([16, 8], 32)]:
        with pytest.raises(ServeError, match=r"q \[16, 64\], k \[8, 64\].*--to dense"):
            Division(sizes, sizes, width, width, 0, 1).parts(layers)


@pytest.mark.parametrize("kind", ["2:4", "row", "structured"])
def test_damaged_tensors_are_refused_by_name(kind):
    for damage, message in [
        (lambda t, index: t | {index: t[index] ^ 1}, "damaged"),
        (
            lambda t, index: t | {"low_rank_u": t["low_rank_u"][1:]},
            r"low_rank_u has the shape .*15, 2.*16, 2",
        ),
        (lambda t, index: t | {index: t[index].float()}, "layer0.*float32"),
        (lambda t, index: t | {"extra": t[index]}, "layer0.extra"),
        (lambda t, index: {leaf: each for leaf, each in t.items() if leaf != index}, "lack tensors of layer0"),
    ]:
        layer = layer_of(kind, (16, WIDTH), 2)
        layer.tensors = damage(layer.tensors, layer.entry.spec.storage.layout.index)
        with pytest.raises((CheckpointError, ServeError), match=message):
            by_outputs([layer])


def test_tensors_may_come_in_any_order_and_their_memory_may_be_used_again():
    """Oracle: the float64 product. Slices have vLLM's names."""
    layers = [layer_of("2:4", (16, WIDTH), 2, seed=seed) for seed in range(3)]
    parts = Division([16] * 3, [16] * 3, WIDTH, WIDTH, 0, 1).parts(
        {f"l{i}": each.entry for i, each in enumerate(layers)}
    )
    stack = StackedLinear(parts, torch.float32)
    buffer = LoadBuffer(stack)
    for leaf in ("low_rank_v", "values", "low_rank_u", "positions"):
        for name, layer in reversed(list(zip("qkv", layers, strict=True))):
            memory = layer.tensors[leaf].clone()
            buffer.add(leaf, memory, name)
            memory.zero_()
    stack.finish()
    x = torch.randn(3, WIDTH)
    assert_close(stack(x), torch.cat([x.double() @ layer.matrix.T for layer in layers], 1))
