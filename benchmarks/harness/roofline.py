"""Seconds that a run on a fake GPU would take on one H100: each operation takes as long as its bytes or its FLOPs do.

Nothing is measured here. The rates are what the better libraries reach (Nvidia's figures are a third higher); those of
factorisations are guesses within a factor of two, and said to be so in the kind of work.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from harness.fake_cuda import CudaTensor

# One H100 (SXM): bytes a second from memory, FLOPs a second by dtype, seconds of the smallest kernel.
BANDWIDTH = 2.8e12
RATES = {"float64": 50e12, "float32": 50e12, "tf32": 330e12, "bfloat16": 620e12, "float16": 620e12}
LAUNCH = 4e-6
# From and to the memory of the CPU: pinned, and pageable.
LINK = {True: 50e9, False: 12e9}
# FLOPs of factorisations of (n, n), as multiples of n³, and the rate at n = 4,096, which grows with n up to `MOST`.
FACTORISATIONS = {
    "linalg_cholesky_ex": (1 / 3, 3e12),
    "cholesky_inverse": (2 / 3, 15e12),
    "cholesky_solve": (2, 15e12),
    "linalg_solve_triangular": (1, 15e12),
    "_linalg_eigh": (9, 0.6e12),
    "_linalg_svd": (20, 0.3e12),
}
MOST = 20e12
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv", "linear"}
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "_local_scalar_dense", "equal"}

# The kind of work, by the first of these files that any running function is in.
KINDS = {
    "levers/train.py": "prediction matching",
    "levers/gradients.py": "prediction matching",
    "run/training.py": "prediction matching",
    "levers/": "allocation",
    "solve/": "solving",
    "packed/": "packing and writing",
    "folder/": "packing and writing",
    "run/preflight.py": "first look",
}
# And by that of the innermost function, where it is none of those.
INNERMOST = {"core/gram.py": "Grams", "models/moments.py": "Grams"}


@dataclass
class Roofline:
    """What listens to a fake GPU.

    Args:
        seconds: by kind of work and by kind of operation. launches: of kernels.
    """

    seconds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    launches: int = 0

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        name = func.__name__.split(".")[0]
        if func.is_view or name in FREE:
            return
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        outs = [each for each in tree_flatten(out)[0] if isinstance(each, Tensor)]
        kind, took = operation(name, args, tensors, outs)
        self.launches += 1
        self.seconds[work()][kind] += max(took, LAUNCH)

    def total(self) -> Counter[str]:
        """Seconds by kind of work."""
        return Counter({kind: sum(parts.values()) for kind, parts in self.seconds.items()})


def operation(name: str, args: tuple[Any, ...], tensors: list[Tensor], outs: list[Tensor]) -> tuple[str, float]:
    """The kind of an operation, and its seconds."""
    on_gpu = [isinstance(each, CudaTensor) for each in [*tensors, *outs]]
    if name in ("_to_copy", "copy_") and not all(on_gpu):
        return "copies from and to the CPU", max(each.nbytes for each in outs) / LINK[False]
    moved = sum(traffic(each) for each in {id(each): each for each in [*tensors, *outs]}.values()) / BANDWIDTH
    if name in PRODUCTS:
        flops, dtype = product(name, args)
        return f"products, {dtype}", max(flops / RATES[dtype], moved)
    if "attention" in name:
        batch, heads, length, width = args[0].shape
        backward = 2.5 if "backward" in name else 1.0
        flops = 2 * batch * heads * length * length * width * backward  # half of the positions, two products
        return "attention", max(flops / RATES["bfloat16"], moved)
    if name == "linalg_qr":
        rows, columns = args[0].shape[-2:]
        return "factorisations", 2e-3 * columns / 64 * math.sqrt(rows / 4096)
    if name in FACTORISATIONS:
        share, rate = FACTORISATIONS[name]
        *batch, _, n = tensors[0].shape
        many = math.prod(batch)
        return "factorisations", many * share * n**3 / min(rate * n / 4096, MOST)
    return ("sorting", 6 * moved) if name in ("sort", "topk", "argsort") else ("element by element", moved)


def product(name: str, args: tuple[Any, ...]) -> tuple[int, str]:
    """FLOPs of a product, and what it is computed in."""
    one, other = args[1:3] if name in ("addmm", "addmm_", "baddbmm", "addmv") else args[:2]
    columns = other.shape[0] if name == "linear" else (other.shape[-1] if other.ndim > 1 else 1)
    dtype = str(one.dtype).removeprefix("torch.")
    if dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = "tf32"
    return 2 * one.numel() * columns, dtype


def traffic(tensor: Tensor) -> int:
    """Bytes that are read or written of a tensor: whole sectors of 32 bytes, what is expanded once."""
    if not tensor.numel():
        return 0
    steps = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride and size > 1]
    numbers = math.prod(size for size, _ in steps)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    apart = min((stride for _, stride in steps), default=1)
    return min(numbers * min(apart, max(32 // tensor.itemsize, 1)), span) * tensor.itemsize


def work() -> str:
    """The kind of work that is being done."""
    paths: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        _, inside, path = frame.f_code.co_filename.partition("/src/hasslefree/")
        if inside:
            paths.append(path)
        frame = frame.f_back
    for start, kind in KINDS.items():
        if any(path.startswith(start) for path in paths):
            return kind
    return INNERMOST.get(paths[0], "forward passes") if paths else "forward passes"
