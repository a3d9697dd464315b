"""The precision in which blocks run: hidden states in float32, products in the narrow dtype if that
is faster.

The hidden states of attention sinks are a hundred times larger than those of other tokens, and
bfloat16 rounds them by 1/256 of their size: a comparison of the outputs of two blocks would compare
rounding errors. Therefore hidden states between blocks, sums and norms are float32. On processors
with instructions for the model's dtype, products are in that dtype (`torch.autocast`).
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from hasslefree.core.gram import working_dtype
from hasslefree.core.products import multiplies_bfloat16
from hasslefree.models.calls import replaced
from hasslefree.packed.linear import SparseLowRankLinear, unpacked_once


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """Return the dtype of products on a device, for a model of this dtype; None if products are in
    the dtype of the hidden states.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    fast = device.type == "cuda" or (dtype == torch.bfloat16 and multiplies_bfloat16(device))
    if fast:
        return dtype
    return None


@contextmanager
def computing(
    block: nn.Module, modules: Iterable[nn.Module] | None = None, unpack: bool = True
) -> Iterator[None]:
    """Let a block run on hidden states in float32, with S of its compressed layers unpacked once
    for all calls.

    Within the context, tensors that no product reads are float32; if products are not in the
    block's dtype, all tensors are. Afterwards, they have their own dtype again and their current
    values; an unchanged tensor keeps its bits.

    Args:
        modules: modules that run; None for all modules of the block.
        unpack: False if S may change within the context; S is then unpacked at every call.
    """
    running = list(block.modules() if modules is None else modules)
    # No list, which would keep weights of replaced layers in memory.
    parameters = (p for module in running for p in module.parameters(recurse=False))
    matrix = max(parameters, key=nn.Parameter.numel)
    products = product_dtype(matrix.dtype, matrix.device)
    narrow = torch.autocast(
        matrix.device.type, products, enabled=products is not None, cache_enabled=False
    )
    unpacked = unpacked_once(block) if unpack else nullcontext()
    with unpacked, widened(running, keep=products), narrow:
        yield


@contextmanager
def only_trained(block: nn.Module, trained: Sequence[Tensor]) -> Iterator[None]:
    """Restrict gradients to the parameters `trained` of a block."""
    chosen = {id(p) for p in trained}
    with ExitStack() as changes:
        for parameter in block.parameters():
            changes.callback(setattr, parameter, "grad", None)
            changes.enter_context(replaced(parameter, "requires_grad", id(parameter) in chosen))
        yield


def as_multiplied(x: Tensor) -> Tensor:
    """Within `computing`, return inputs of a layer in the dtype in which they are multiplied."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


@contextmanager
def solving(device: torch.device) -> Iterator[None]:
    """Compute products in their factors' dtype, without gradients, even within `computing`."""
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        yield


@contextmanager
def widened(modules: Iterable[nn.Module], keep: torch.dtype | None) -> Iterator[None]:
    """Convert floating-point tensors of modules to at least float32, and back at the end. keep:
    dtype in which matrices may stay.
    """
    stored: dict[Tensor, Tensor] = {}  # values of each tensor; modules may share a tensor
    for module in modules:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if isinstance(module, SparseLowRankLinear) and module.unpacked_copy is not None:
            tensors.append(module.unpacked_copy)
        for tensor in tensors:
            is_kept = tensor.ndim >= 2 and tensor.dtype == keep
            if tensor.is_floating_point() and tensor.dtype != working_dtype(tensor) and not is_kept:
                stored[tensor] = tensor.data
    try:
        for tensor in stored:
            tensor.data = tensor.data.to(working_dtype(tensor))
        yield
    finally:
        for tensor, before in stored.items():
            before.copy_(tensor.data)
            tensor.data = before
