"""What only a GPU can run, computed plainly on the CPU for the fake one."""

import torch

from hasslefree.packed.layouts import PackedGroups


def decoded(x, values, positions, us, vs, biases, n, m):
    """What the operator `decode_cuda` computes, plainly."""
    outputs = []
    for value, index, u, v, bias in zip(values, positions, us, vs, biases, strict=True):
        y = x @ PackedGroups(n, m).unpack(value, index, x.shape[1]).T + x @ v.T @ u.T
        outputs.append(y if bias is None else y + bias)
    return torch.cat([y.flatten() for y in outputs])
