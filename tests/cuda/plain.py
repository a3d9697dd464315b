"""What only a GPU can run, computed plainly on the CPU for the fake one."""

import torch

from hasslefree.packed.layouts import PackedGroups


def decoded(x, values, positions, us, v, bias, n, m):
    """What the operator `decode_cuda` computes, plainly."""
    y = x @ PackedGroups(n, m).unpack(values, positions, x.shape[1]).T
    y += x @ v.T @ torch.block_diag(*us).to(x.device).T
    return y if bias is None else y + bias
