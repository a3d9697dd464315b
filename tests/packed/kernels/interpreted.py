"""Triton's kernels in Triton's interpreter, on the CPU; `test_triton` runs this file with TRITON_INTERPRET=1.

Oracle: float64 on the dense matrix. The interpreter differs from a GPU in bfloat16: it computes products of tiles
wrongly, so that what goes through `tl.dot` is tested in float16, and it truncates where a GPU rounds to the nearest.
"""

import torch

from hasslefree.packed.kernels import triton
from tests.packed.kernels import reference

HALF = (torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
# Out of step with the blocks, a position across two bytes, no position bits, several blocks of values.
PATTERNS = ((2, 4, 17), (2, 4, 1), (2, 4, 130), (2, 8, 9), (1, 12, 5), (2, 66, 2), (1, 1, 7))


def inputs(tokens, width, dtype):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def decoded(x, layers, n=2, m=4, parts=None):
    """The outputs of layers (s, u, v, bias) that are stacked by rows, one by one."""
    sparse, us, vs, biases = zip(*layers, strict=True)
    packed = [reference.pack_groups(s, n, m) for s in sparse]
    values, positions = (torch.cat(tensors) for tensors in zip(*packed, strict=True))
    bias = None if biases[0] is None else torch.cat(biases)
    y = triton.decode(x, values, positions, us, torch.cat(vs), bias, n, m, parts)
    assert y.dtype == x.dtype
    return y.split([len(s) for s in sparse], 1)


def sparse_alone(s):
    return s, s.new_empty(len(s), 0), s.new_empty(0, s.shape[1]), None


def layer(out, groups, rank, dtype, seed, with_bias):
    generator = torch.Generator().manual_seed(seed)
    s = reference.sparse(out, groups, 2, 4, dtype, seed)
    u, v, bias = (torch.randn(shape, generator=generator) for shape in ((out, rank), (rank, 4 * groups), (out,)))
    return s, u.to(dtype), v.to(dtype), bias.to(dtype) if with_bias else None


def assert_close(y, x, s, u, v, bias):
    """y is the layer in float64 but for the rounding of float32 sums and of the last cast."""
    x, s, u, v = (each.double() for each in (x, s, u, v))
    shift = 0 if bias is None else bias.double()
    expected = x @ s.T + x @ v.T @ u.T + shift
    scale = x.abs() @ (s.abs() + u.abs() @ v.abs()).T + abs(shift)
    assert ((y.double() - expected).abs() <= EPSILON[y.dtype] * scale).all()


def any_pattern_and_any_number_of_tokens():
    for n, m, groups in PATTERNS:
        for dtype in (torch.float32, *HALF):
            for tokens, parts in ((1, 1), (3, 2), (16, 1)):
                if dtype == torch.bfloat16 and (n, m) == (2, 4) and groups % 2 == 0 and tokens > 1:
                    continue  # tl.dot
                s = reference.sparse(13, groups, n, m, dtype, seed=groups)
                x = inputs(tokens, s.shape[1], dtype)
                [y] = decoded(x, [sparse_alone(s)], n, m, parts)
                assert_close(y, x, *sparse_alone(s))


def layers_of_any_heights_and_ranks():
    """More parts than steps, more rows than a block, a layer without a low-rank part, with and without a bias."""
    for dtype, tokens, parts in ((torch.bfloat16, 1, 3), (torch.float16, 5, 9), (torch.float32, 2, 2)):
        layers = [layer(out, 288, rank, dtype, out, tokens != 2) for out, rank in ((70, 5), (6, 0), (9, 66))]
        x = inputs(tokens, 1152, dtype)
        for y, each in zip(decoded(x, layers, parts=parts), layers, strict=True):
            assert_close(y, x, *each)


def inputs_that_no_value_reads_may_hold_anything():
    """And those that a value reads have an effect, on the rows that read them and on their token alone."""
    s = torch.zeros(6, 160)
    s.view(6, 40, 4)[:, :, 0], s.view(6, 40, 4)[:, :, 3] = 2.0, 3.0
    s[4, 40:44] = torch.tensor([0.0, 1.0, 2.0, 0.0])
    for dtype in (torch.float32, torch.float16):
        for tokens in (1, 3):
            x = torch.ones(tokens, 160)
            x.view(tokens, 40, 4)[-1, :, 1] = float("nan")
            x.view(tokens, 40, 4)[-1, :, 2] = float("inf")
            expected = torch.full((tokens, 6), 200.0)
            expected[:, 4] = 198.0
            expected[-1, 4] = float("nan")
            for parts in (1, 2):
                [y] = decoded(x.to(dtype), [sparse_alone(s.to(dtype))], parts=parts)
                assert torch.equal(y.isnan(), expected.isnan()), y
                assert torch.equal(y.nan_to_num(), expected.nan_to_num().to(dtype)), y


def tensors_at_any_address():
    """64-bit words are read, and a view may begin anywhere; the interpreter does not mind, so the copy is checked."""
    s = reference.sparse(5, 8, 2, 4, torch.float16, seed=3)
    x = inputs(1, 33, torch.float16)[:, 1:]
    assert x.is_contiguous()
    assert x.data_ptr() % 8
    assert triton.aligned(x).data_ptr() % 8 == 0
    [y] = decoded(x, [sparse_alone(s)])
    assert_close(y, x, *sparse_alone(s))


if __name__ == "__main__":
    any_pattern_and_any_number_of_tokens()
    layers_of_any_heights_and_ranks()
    inputs_that_no_value_reads_may_hold_anything()
    tensors_at_any_address()
    print("done")
