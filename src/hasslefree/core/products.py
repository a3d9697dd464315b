"""Matrix products: their precision, and fast products of narrow dtypes on a CPU."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# From this number of tokens on, converting a matrix to float32 takes less time than a product in
# bfloat16 on a processor without instructions for bfloat16.
WIDENED = 8
# Bytes of a matrix that are converted at a time: they stay in the cache.
TILE_BYTES = 4 << 20
# Number of rows that are converted at a time by `add_product`, for matrices with few inputs.
ADDED_ROWS = 512
# x86 instructions for products of narrow dtypes; one of them is enough.
INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
# Classes of tensors whose products `linear` computes; other classes are left to torch.
PLAIN = {Tensor, nn.Parameter}


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return True if products in bfloat16 are known to be faster than in float32: on x86 with
    instructions for bfloat16.
    """
    return device.type == "cpu" and _has_instructions(torch.bfloat16)


def multiplies_tiles() -> bool:
    """Return True if this processor multiplies tiles of bfloat16 (AMX), which makes dense products
    several times as fast.
    """
    return _capable("amx_bf16")


def _has_instructions(dtype: torch.dtype) -> bool:
    """Return True if this processor is known to have instructions for products of a dtype."""
    return any(_capable(instructions) for instructions in INSTRUCTIONS[dtype])


@cache
def _capable(instructions: str) -> bool:
    """Return True if torch uses these instructions in products; False if this version of torch does
    not report them.
    """
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkldnn.is_available() and bool(capabilities.get(instructions))


def bfloat16_products(device: torch.device) -> AbstractContextManager[None]:
    """Round the operands of float32 products to bfloat16, and sum in float32; a no-op unless
    `multiplies_bfloat16`.
    """
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if not multiplies_bfloat16(device) or not hasattr(settings, "fp32_precision"):
        return nullcontext()
    return _setting(settings, "fp32_precision", "bf16")


def matmul_precision(device: torch.device, tf32: bool = False) -> AbstractContextManager[None]:
    """Compute float32 products on CUDA in full precision, or in TF32, and restore torch's setting
    at the end; a no-op on other devices.
    """
    if device.type != "cuda":
        return nullcontext()
    # torch rejects its older setting once the user has used the newer one.
    settings = torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):
        return _setting(settings, "fp32_precision", "tf32" if tf32 else "ieee")
    return _setting(settings, "allow_tf32", tf32)


def narrow_products(device: torch.device) -> AbstractContextManager[None]:
    """Round the operands of float32 products to the dtype that the device multiplies fastest: TF32
    on CUDA, bfloat16 elsewhere.
    """
    if device.type == "cuda":
        return matmul_precision(device, tf32=True)
    return bfloat16_products(device)


@contextmanager
def _setting(
    settings: Any,
    name: str,
    value: Any,
) -> Iterator[None]:
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)


def multiplies_slowly(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if products in a narrow dtype are known to be slower than in float32: on x86
    without instructions for the dtype.
    """
    if dtype not in INSTRUCTIONS or device.type != "cpu":
        return False
    return _capable("avx2") and not _has_instructions(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b as `torch.nn.functional.linear` computes it.

    On an x86 processor without instructions for a narrow dtype, many tokens are multiplied in
    float32, where products of narrow numbers are exact, and rounded once. Calls that are traced,
    need gradients or run within autocast are left to torch.

    Args:
        x: (..., in).
        weight: W, (out, in), of the same dtype.
        bias: b, (out,), of the same dtype.
    """
    if not _are_many_rows(x, weight, bias):
        return F.linear(x, weight, bias)
    y = x.new_empty(*x.shape[:-1], len(weight))
    inputs = x.float()
    for rows in tiles(len(weight), TILE_BYTES // (4 * weight.shape[1])):
        added = None if bias is None else bias[rows].float()
        y[..., rows] = F.linear(inputs, weight[rows].float(), added)
    return y


def add_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute y + x Wᵀ in place, rounded once, as `linear` does; for matrices of one dtype."""
    if not _are_many_rows(x, weight):
        return y.addmm_(x, weight.T)
    inputs = x.float()
    for rows in tiles(len(weight), ADDED_ROWS):
        y[:, rows] = torch.addmm(y[:, rows].float(), inputs, weight[rows].float().T)
    return y


def tiles(out: int, height: int) -> Iterator[slice]:
    """Yield slices of the rows of a matrix: `height` at a time, and at least one."""
    height = max(1, height)
    return (slice(start, min(start + height, out)) for start in range(0, out, height))


def is_traced(x: Tensor) -> bool:
    """Return True if the call is traced: by `torch.compile`, by `torch.jit.trace`, or with a tensor
    that has no values.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return tracing


def _are_many_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return True if x Wᵀ + b should be computed in float32."""
    operands = [x, weight]
    if bias is not None:
        operands.append(bias)
    if not _are_widened(*operands) or weight.ndim != 2:
        return False
    out, width = weight.shape
    if bias is not None and bias.shape != (out,):
        return False
    return x.ndim > 1 and x.numel() >= WIDENED * width > 0


def _are_widened(*operands: Tensor) -> bool:
    """Return True if a product of many rows of these should be computed in float32."""
    first = operands[0]
    # Other classes of tensors, such as quantised ones, are left to torch.
    if torch.compiler.is_compiling() or not {type(each) for each in operands} <= PLAIN:
        return False
    if not multiplies_slowly(first.dtype, first.device) or torch.is_autocast_enabled("cpu"):
        return False
    for each in operands:
        if each.dtype != first.dtype or each.layout != torch.strided or each.is_nested:
            return False
    return not torch.is_grad_enabled() or not any(each.requires_grad for each in operands)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b."""
    if b.ndim == 2 and _are_many_rows(a, b.T):
        return linear(a, b.T)
    return _batched(torch.matmul, a, b)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for batches of matrices."""
    return _batched(torch.bmm, a, b)


def _batched(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """a @ b by a function of torch, for (…, rows, in) × (…, in, out), as in attention."""
    if a.ndim > 2 and b.ndim > 2 and a.shape[-2] >= WIDENED and _are_widened(a, b):
        return multiply(a.float(), b.float()).to(a.dtype)
    return multiply(a, b)


def _added(bias: Tensor, x: Tensor, transposed: Tensor) -> Tensor:
    """b + x Wᵀ for the transpose of W, (in, out), which is how GPT-2 stores it."""
    if x.ndim == 2 and _are_many_rows(x, transposed.T, bias):
        return linear(x, transposed.T, bias)
    return torch.addmm(bias, x, transposed)


# The functions that `FastProducts` replaces. Products of experts, which transformers groups
# (`torch._grouped_mm`), are left to torch.
FAST: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: linear,
    torch.addmm: _added,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
}


class FastProducts(TorchFunctionMode):
    """Within this context, any model multiplies as `linear` does, with the functions of `FAST`.

    Each operation of the model takes a few microseconds longer.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kwargs:
            return func(*args, **kwargs)
        return FAST.get(func, func)(*args)


def fast_products(model: nn.Module) -> AbstractContextManager[object]:
    """Return `FastProducts` if torch multiplies slowly in the model's dtype; otherwise a no-op."""
    if any(multiplies_slowly(each.dtype, each.device) for each in model.parameters()):
        return FastProducts()
    return nullcontext()
