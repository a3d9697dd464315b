"""Fused layers and the shares of ranks: their products add up to those of the whole matrices in float64."""

import pytest
import torch

from hasslefree.errors import CheckpointError, ServeError
from hasslefree.serve.fused import FusedLinear
from hasslefree.serve.parts import Division
from tests.serve.layers import KINDS, dense, layer_of

WIDTH = 64


class PlainKernel:
    """A stand-in for vLLM's kernel, which is not installed: S in float32, from the codes that it is given."""

    def __init__(self, *_):
        self.is_finished = False

    def load(self, codes, scale, zero):
        steps = codes.float() - zero.float().repeat_interleave(codes.shape[1] // zero.shape[1], 1)
        self.sparse = steps * scale.float().repeat_interleave(codes.shape[1] // scale.shape[1], 1)

    def finish(self):
        self.is_finished = True

    def product(self, x):
        assert self.is_finished
        return (x.float() @ self.sparse.T).to(x.dtype)


def fused(layers, division, dtype=torch.float32, **options):
    """A fused layer with all tensors loaded, part by part."""
    entries = {f"layer{i}": layer.entry for i, layer in enumerate(layers)}
    stack = FusedLinear(division.parts(entries), dtype, **options)
    for part, layer in zip(stack.parts, layers, strict=True):
        for leaf, tensor in layer.tensors.items():
            stack.add(leaf, tensor, part.slices.start)
    stack.finish()
    return stack


def by_outputs(layers, rank=0, ranks=1, dtype=torch.float32, **options):
    """Of a column-parallel layer, such as gate and up."""
    sizes = [len(layer.matrix) for layer in layers]
    local = [size // ranks for size in sizes]
    return fused(layers, Division(sizes, local, WIDTH, WIDTH, rank, ranks), dtype, **options)


def by_inputs(layer, rank, ranks, dtype=torch.float32, **options):
    """Of a row-parallel layer, such as down."""
    sizes = [len(layer.matrix)]
    return fused([layer], Division(sizes, sizes, WIDTH, WIDTH // ranks, rank, ranks), dtype, **options)


def assert_close(found, expected):
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kinds", [*((kind, kind) for kind in KINDS), (None, "2:4"), ("row", None), ("2:4", "row")])
@pytest.mark.parametrize("ranks", [1, 4])
def test_shares_of_the_outputs_are_rows_of_the_product(kinds, ranks):
    """Oracle: the product with both matrices in float64. The ranks of the layers differ, and one may be 0 or dense."""
    shapes = (16, WIDTH), (32, WIDTH)
    layers = [layer_of(kind, shape, 3 if shape[0] == 16 else 0, seed) if kind else dense(shape, seed)
              for seed, (kind, shape) in enumerate(zip(kinds, shapes, strict=True))]  # fmt: skip
    x = torch.randn(7, WIDTH)
    found = [by_outputs(layers, rank, ranks)(x).split([16 // ranks, 32 // ranks], 1) for rank in range(ranks)]
    for layer, shares in zip(layers, zip(*found, strict=True), strict=True):
        assert_close(torch.cat(shares, 1), x.double() @ layer.matrix.T)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_shares_of_the_inputs_add_up_to_the_product(kind, ranks):
    """Oracle: the product with the whole matrix in float64. Eight ranks cut through the groups of 1:16."""
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
        found = fused(layers, division)(x).split(division.local_sizes, 1)
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
        found = fused([layer], Division(sizes, local, WIDTH, WIDTH, rank, ranks))(x).split(local, 1)
        for part, whole in zip(found, expected, strict=True):
            assert_close(part, whole.chunk(ranks, 1)[rank])


@pytest.mark.parametrize("kind", ["2:4, int8 factors", "dense, int4", "2:4, int8"])
def test_codes_are_rounded_to_the_dtype_of_the_stack_and_not_of_the_file(kind):
    """Oracle: the float64 product. Scales have eight significant bits, so that bfloat16 holds them."""
    layer, x = layer_of(kind, (16, WIDTH), 3), torch.randn(3, WIDTH)
    scales = {leaf: each.bfloat16() for leaf, each in layer.tensors.items() if leaf.endswith("_scale")}
    assert all(torch.equal(each.float(), layer.tensors[leaf]) for leaf, each in scales.items())
    layer.tensors |= scales
    assert_close(by_outputs([layer])(x), x.double() @ layer.matrix.T)


def test_without_a_kernel_the_sum_is_one_dense_weight_in_the_dtype_of_the_layer():
    """Oracle: S + u v in float64, rounded once; nothing else is in memory."""
    layers = [layer_of("2:4", (16, WIDTH), 3), dense((8, WIDTH))]
    [weight] = by_outputs(layers, dtype=torch.bfloat16).parameters()
    rounded = [{leaf: t.bfloat16().float() for leaf, t in layer.tensors.items()} for layer in layers]
    factors = rounded[0]["low_rank_u"].double() @ rounded[0]["low_rank_v"].double()
    sparse = layers[0].entry.spec.unpack(rounded[0] | {"positions": layers[0].tensors["positions"]})
    expected = torch.cat([sparse.double() + factors, rounded[1]["weight"].double()])
    assert weight.dtype == torch.bfloat16
    torch.testing.assert_close(weight.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("kind", ["dense, int4", "dense, rows"])
@pytest.mark.parametrize(("ranks", "tokens"), [(1, 1), (2, 3)])
def test_codes_that_a_kernel_reads_stay_packed(kind, ranks, tokens):
    """Oracle: the float64 product, by outputs and by inputs. A layer may have no low-rank part."""
    layers, x = [layer_of(kind, (32, WIDTH), 3), layer_of(kind, (64, WIDTH), 0, seed=1)], torch.randn(tokens, WIDTH)
    width = WIDTH // ranks
    total = 0
    for rank in range(ranks):
        stack = by_outputs(layers, rank, ranks, kernel_for=PlainKernel)
        assert not any(parameter.numel() >= 32 * WIDTH for parameter in stack.parameters()), "S is unpacked"
        shards = [(x.double() @ layer.matrix.T).chunk(ranks, 1)[rank] for layer in layers]
        assert_close(stack(x), torch.cat(shards, 1))
        total += by_inputs(layers[0], rank, ranks, kernel_for=PlainKernel)(x[:, rank * width :][:, :width])
    assert_close(total, x.double() @ layers[0].matrix.T)


@pytest.mark.parametrize("kind", ["2:4", "2:4, int8", "row"])
def test_no_kernel_is_asked_for_what_is_not_complete(kind):
    assert by_outputs([layer_of(kind, (32, WIDTH), 3)], kernel_for=lambda *_: pytest.fail("asked")).kernel is None


def test_parts_on_different_grids_have_no_kernel():
    layers = [layer_of("dense, int4", (16, WIDTH), 3), layer_of("dense, rows", (16, WIDTH), 3)]
    assert by_outputs(layers, kernel_for=PlainKernel).kernel is None


def test_shapes_that_do_not_add_up_are_refused():
    layers = {"q": layer_of("2:4", (16, WIDTH), 2).entry, "k": layer_of("2:4", (8, WIDTH), 2).entry}
    for sizes, width in [([16, 16], WIDTH), ([16], WIDTH), ([16, 8, 8], WIDTH), ([16, 8], 32)]:
        with pytest.raises(ServeError, match=r"q \[16, 64\], k \[8, 64\].*--to dense"):
            Division(sizes, sizes, width, width, 0, 1).parts(layers)


@pytest.mark.parametrize("kind", ["2:4", "row", "structured"])
def test_damaged_tensors_are_refused_by_name(kind):
    for damage, message in [
        (lambda t, index: t | {index: t[index] ^ 1}, "damaged"),
        (lambda t, index: t | {"low_rank_u": t["low_rank_u"][1:]}, r"low_rank_u has the shape .*15, 2.*16, 2"),
        (lambda t, index: t | {index: t[index].float()}, "layer0.*float32"),
        (lambda t, index: t | {"extra": t[index]}, "layer0.extra"),
        (lambda t, index: {leaf: each for leaf, each in t.items() if leaf != index}, "lack tensors of layer0"),
    ]:
        layer = layer_of(kind, (16, WIDTH), 2)
        layer.tensors = damage(layer.tensors, layer.entry.spec.layout.index)
        with pytest.raises((CheckpointError, ServeError), match=message):
            by_outputs([layer])


def test_tensors_may_come_in_any_order_and_their_memory_may_be_used_again():
    """Oracle: the float64 product. Slices have vLLM's names."""
    layers = [layer_of("2:4", (16, WIDTH), 2, seed=seed) for seed in range(3)]
    parts = Division([16] * 3, [16] * 3, WIDTH, WIDTH, 0, 1).parts(
        {f"l{i}": each.entry for i, each in enumerate(layers)}
    )
    stack = FusedLinear(parts, torch.float32)
    for leaf in ("low_rank_v", "values", "low_rank_u", "positions"):
        for name, layer in reversed(list(zip("qkv", layers, strict=True))):
            memory = layer.tensors[leaf].clone()
            stack.add(leaf, memory, name)
            memory.zero_()
    stack.finish()
    x = torch.randn(3, WIDTH)
    assert_close(stack(x), torch.cat([x.double() @ layer.matrix.T for layer in layers], 1))
