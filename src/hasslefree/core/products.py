"""Products of matrices: in which precision they run, and how narrow ones run fast."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# From so many tokens on, converting a matrix to float32 takes less than a product in bfloat16 by a
# processor that has no instructions for it.
WIDENED = 8
# A matrix is converted so many bytes at a time, which stay in the cache.
TILE_BYTES = 4 << 20
# Rows of a matrix with few inputs that are converted at a time if its product is added to another.
ADDED_ROWS = 512
# Those of x86 for products of narrow dtypes; any of them will do.
INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
# The classes of tensors whose products are not left to torch.
PLAIN = {Tensor, nn.Parameter}


def multiplies_bfloat16(device: torch.device) -> bool:
    """True if products of bfloat16 are known to be faster than those of float32: on x86 with
    instructions for them.
    """
    return device.type == "cpu" and _has_instructions(torch.bfloat16)


def multiplies_tiles() -> bool:
    """True if this processor multiplies tiles of bfloat16 (AMX), which makes dense products several
    times as fast.
    """
    return _capable("amx_bf16")


def _has_instructions(dtype: torch.dtype) -> bool:
    """True if this processor is known to have instructions for products of a narrow dtype."""
    return any(_capable(instructions) for instructions in INSTRUCTIONS[dtype])


@cache
def _capable(instructions: str) -> bool:
    """True if torch's products use these instructions; False for versions of torch that do not
    report them.
    """
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkldnn.is_available() and bool(capabilities.get(instructions))


def bfloat16_products(device: torch.device) -> AbstractContextManager[None]:
    """Round the factors of float32 products to bfloat16, and sum in float32; a no-op unless
    `multiplies_bfloat16`.
    """
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if not multiplies_bfloat16(device) or not hasattr(settings, "fp32_precision"):
        return nullcontext()
    return _setting(settings, "fp32_precision", "bf16")


def matmul_precision(device: torch.device, tf32: bool = False) -> AbstractContextManager[None]:
    """Run float32 products on CUDA in full, or in TF32, and restore torch's setting; a no-op on
    other devices.
    """
    if device.type != "cuda":
        return nullcontext()
    # The older of torch's two settings must not be touched if the user may have used the newer one.
    settings = torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):
        return _setting(settings, "fp32_precision", "tf32" if tf32 else "ieee")
    return _setting(settings, "allow_tf32", tf32)


def narrow_products(device: torch.device) -> AbstractContextManager[None]:
    """Round the factors of float32 products to the dtype that the device multiplies fastest: TF32
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
    """True if products of a narrow dtype are known to be slower than those of float32: on x86
    without instructions for them.
    """
    if dtype not in INSTRUCTIONS or device.type != "cpu":
        return False
    return _capable("avx2") and not _has_instructions(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b as `torch.nn.functional.linear` computes it.

    On an x86 processor that has no instructions for a narrow dtype, many tokens are multiplied in
    float32, in which products of narrow numbers are exact, and rounded once. A call that is traced
    or needs gradients stays torch's, and so does one within autocast.

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
    """y + x Wᵀ, in place, rounded once; as `linear`, for matrices of one dtype."""
    if not _are_many_rows(x, weight):
        return y.addmm_(x, weight.T)
    inputs = x.float()
    for rows in tiles(len(weight), ADDED_ROWS):
        y[:, rows] = torch.addmm(y[:, rows].float(), inputs, weight[rows].float().T)
    return y


def tiles(out: int, height: int) -> Iterator[slice]:
    """The rows of a matrix that are taken together, `height` at a time and at least one."""
    height = max(1, height)
    return (slice(start, min(start + height, out)) for start in range(0, out, height))


def is_traced(x: Tensor) -> bool:
    """Tell whether the call is traced: by `torch.compile`, by `torch.jit.trace`, or with a tensor
    without values.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return True
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    return tracing


def _are_many_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether x Wᵀ + b is to be computed in float32."""
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
    """Whether a product of many rows of these is to be computed in float32."""
    first = operands[0]
    # Not a tensor of another class, such as one that is quantised.
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
    """a @ b for a batch of matrices each."""
    return _batched(torch.bmm, a, b)


def _batched(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """a @ b by a function of torch's, for (…, rows, in) × (…, in, out), as in attention."""
    if a.ndim > 2 and b.ndim > 2 and a.shape[-2] >= WIDENED and _are_widened(a, b):
        return multiply(a.float(), b.float()).to(a.dtype)
    return multiply(a, b)


def _added(bias: Tensor, x: Tensor, transposed: Tensor) -> Tensor:
    """b + x Wᵀ for the transpose of W, (in, out), which is how GPT-2 stores it."""
    if x.ndim == 2 and _are_many_rows(x, transposed.T, bias):
        return linear(x, transposed.T, bias)
    return torch.addmm(bias, x, transposed)


# The products of a model that `FastProducts` computes. Those of experts, which transformers groups
# (`torch._grouped_mm`), are not among them.
FAST: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: linear,
    torch.addmm: _added,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
}


class FastProducts(TorchFunctionMode):
    """Within it, a model that is not ours multiplies as `linear` does, by the functions of `FAST`.

    It costs some microseconds for each operation of the model.
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
    """`FastProducts`, for a model in whose dtype torch multiplies slowly; else nothing."""
    if any(multiplies_slowly(each.dtype, each.device) for each in model.parameters()):
        return FastProducts()
    return nullcontext()
