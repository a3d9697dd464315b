"""Products of matrices: in which precision they run, and how narrow ones run fast."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# From so many tokens on, converting a matrix to float32 takes less than a product in bfloat16 by a
# processor that has no instructions for it.
WIDENED = 8
# A matrix is converted so many bytes at a time, which stay in the cache.
TILE_BYTES = 4 << 20
# Those of x86 for products of narrow dtypes; any of them will do.
INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}
MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)


def multiplies_bfloat16(device: torch.device) -> bool:
    """True if products of bfloat16 are known to be faster than those of float32: on x86 with
    instructions for them.
    """
    return device.type == "cpu" and _has_instructions(torch.bfloat16)


@cache
def multiplies_tiles() -> bool:
    """True if this processor multiplies tiles of bfloat16 (AMX), which makes dense products several
    times as fast.
    """
    return _capable("amx_bf16")


def _has_instructions(dtype: torch.dtype) -> bool:
    """True if this processor is known to have instructions for products of a narrow dtype."""
    return any(_capable(instructions) for instructions in INSTRUCTIONS[dtype])


def _capable(instructions: str) -> bool:
    """True if torch's products use these instructions; False for versions of torch that do not
    report them.
    """
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkldnn.is_available() and bool(capabilities.get(instructions))


@contextmanager
def bfloat16_products(device: torch.device) -> Iterator[None]:
    """Round the factors of float32 products to bfloat16, and sum in float32; a no-op unless
    `multiplies_bfloat16`.
    """
    settings = getattr(torch.backends.mkldnn, "matmul", None)
    if not multiplies_bfloat16(device) or not hasattr(settings, "fp32_precision"):
        yield
        return
    with _setting(settings, "fp32_precision", "bf16"):
        yield


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
    or needs gradients stays torch's.

    Args:
        x: (..., in).
        weight: W, (out, in), of the same dtype.
        bias: b, (out,), of the same dtype.
    """
    if not _is_widened(x, weight):
        return F.linear(x, weight, bias)
    out, width = weight.shape
    y = x.new_empty(*x.shape[:-1], out)
    inputs = x.float()
    height = max(1, TILE_BYTES // (4 * width))
    for start in range(0, out, height):
        rows = slice(start, start + height)
        added = None if bias is None else bias[rows].float()
        y[..., rows] = F.linear(inputs, weight[rows].float(), added)
    return y


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; many rows of a narrow dtype as in `linear`."""
    slow = a.dtype == b.dtype and multiplies_slowly(a.dtype, a.device)
    if not slow or a.ndim < 2 or a.shape[-2] < WIDENED:
        return torch.matmul(a, b)
    return torch.matmul(a.float(), b.float()).to(a.dtype)


def add_product(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y + x Wᵀ, in place, rounded once; as `linear`, for matrices of one dtype."""
    if not _is_widened(x, weight):
        return y.addmm_(x, weight.T)
    return y.copy_(torch.addmm(y.float(), x.float(), weight.T.float()))


def is_traced(x: Tensor) -> bool:
    """Tell whether the call is traced, by `torch.compile` or with a tensor without values."""
    return torch.compiler.is_compiling() or type(x) is not Tensor


def _is_widened(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is to be computed in float32."""
    if is_traced(x):
        return False
    if not x.numel() >= WIDENED * weight.shape[1] > 0 or x.dtype != weight.dtype:
        return False
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return False
    return multiplies_slowly(x.dtype, x.device)


class FastProducts(TorchFunctionMode):
    """Within it, every `linear` and `matmul` of torch's is as fast as `linear` here.

    For models that are not ours; it costs some microseconds for each of their operations.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func is F.linear:
            return linear(*args, **options)
        if func in MATMULS and not options:
            return matmul(*args)
        return func(*args, **options)
