"""Stacks of served layers on a GPU."""

import pytest
import torch

from hasslefree.serve.parts import Division
from hasslefree.serve.stacked import StackedLinear
from tests.serve.layers import layer_of

CASES = [(torch.float32, 40), (torch.bfloat16, 3)]


@pytest.mark.parametrize("kind", ["2:4", "2:8", "3:8", "row", "2:4, int8 factors"])
@pytest.mark.parametrize(("dtype", "tokens"), CASES)
def test_a_stack_on_a_gpu(gpu, kind, dtype, tokens):
    """Oracle: the product with both matrices in float64."""
    layers = [layer_of(kind, (32, 64), 3, seed=0), layer_of(kind, (64, 64), 2, seed=1)]
    parts = Division([32, 64], [32, 64], 64, 64, 0, 1).parts({str(i): each.entry for i, each in enumerate(layers)})
    stack = StackedLinear(parts, dtype, "cuda")
    for index, layer in enumerate(layers):
        stack.load(index, layer.tensors)
    stack.finish()
    assert stack.is_unpacked
    x = torch.randn(tokens, 64).to(dtype)
    found, expected = stack(x.cuda()).cpu().double(), x.double() @ torch.cat([layer.matrix for layer in layers]).T
    close = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=close, atol=close * float(expected.abs().max()))
