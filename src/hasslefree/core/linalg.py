"""Factorisations of a Gram, least squares on a support, and the precision of products.

Factors of a damped Gram are computed in float64 and cast once: they are ill-conditioned and rare.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hasslefree.errors import FactorizationError, option

# Up to this size a matrix is inverted in one piece: factorisations of small ones are faster than
# products.
BLOCK = {"cpu": 384, "cuda": 2048}

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def lower_cholesky(matrix: Tensor) -> Tensor:
    """C with matrix = C Cᵀ: (n, n), lower triangular, in float64.

    C_jj² / H_jj is the share of input j that the inputs before it do not explain; a
    FactorizationError if that share is rounding error, as everything computed with C would then be.
    """
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    rounding = max(torch.finfo(matrix.dtype).eps, len(matrix) * torch.finfo(torch.float64).eps)
    if info.item() != 0 or (factor.diagonal().square() <= rounding * matrix.diagonal()).any():
        raise FactorizationError(
            f"the damped Gram matrix (XᵀX of the layer's {len(matrix)} inputs) is not positive"
            " definite: some inputs are linearly dependent; raise the damping"
            f" ({option('damping', 0.01)}), or use more calibration tokens than the layer has"
            " inputs"
        )
    return factor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, rising, and eigenvectors of a symmetric matrix (n, n); FactorizationError if
    LAPACK fails.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except LinAlgError as error:
        raise FactorizationError(
            f"an eigendecomposition failed: {error}; raise the damping ({option('damping', 0.01)})"
        ) from None
    return values, vectors


def inverse_factor(matrix: Tensor) -> Tensor:
    """The upper U with matrix⁻¹ = UᵀU, in the dtype of `matrix`: U = A⁻¹ for matrix = A Aᵀ with A
    upper.
    """
    upper = lower_cholesky(matrix.flip(0, 1)).flip(0, 1)
    identity = torch.eye(len(matrix), dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, identity, upper=True).to(matrix.dtype)


def unit_diagonal_scale(diagonal: Tensor) -> Tensor:
    """D = diag(H)^½: (in,), with 1 in the place of a zero so that it can be divided by."""
    return torch.where(diagonal > 0, diagonal, 1.0).sqrt()


def inverse_(matrix: Tensor) -> Tensor:
    """Overwrite a well-conditioned positive definite matrix (n, n) by its inverse; in float64 where
    factoring fails.
    """
    with matmul_precision(matrix.device):
        inverse = _inverse_by_blocks(matrix)
    return matrix.copy_(
        torch.cholesky_inverse(lower_cholesky(matrix)) if inverse is None else inverse
    )


def _inverse_by_blocks(matrix: Tensor) -> Tensor | None:
    """The inverse by halves, mostly products: of the upper left block, then of its Schur
    complement; or None.
    """
    if len(matrix) <= BLOCK.get(matrix.device.type, BLOCK["cpu"]):
        factor, info = torch.linalg.cholesky_ex(matrix)
        return torch.cholesky_inverse(factor) if info.item() == 0 else None
    first, rest = slice(None, len(matrix) // 2), slice(len(matrix) // 2, None)
    head = _inverse_by_blocks(matrix[first, first])
    if head is None:
        return None
    across = head @ matrix[first, rest]
    tail = _inverse_by_blocks(matrix[rest, rest] - matrix[rest, first] @ across)
    if tail is None:
        return None
    inverse = torch.empty_like(matrix)
    inverse[rest, rest] = tail
    inverse[first, rest] = (across @ tail).neg_()
    inverse[rest, first] = inverse[first, rest].T
    inverse[first, first] = torch.addmm(head, inverse[first, rest], across.T, alpha=-1)
    return inverse


def orthonormal(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns of a matrix (n, r), by a QR factorisation.

    On CUDA, where QR runs column by column, `cholesky_qr` takes its place.
    """
    if not matrix.shape[1] or matrix.device.type != "cuda":
        return torch.linalg.qr(matrix).Q
    return cholesky_qr(matrix)


def cholesky_qr(matrix: Tensor) -> Tensor:
    """An orthonormal basis of the columns of a matrix (n, r), by three Cholesky factorisations of
    the columns' products (CholeskyQR3: Fukaya et al., arXiv 1809.11085).

    Each product, (r, r), is shifted by its rounding; the last shifts only columns in the span of
    others.
    """
    shift = 4 * matrix.shape[1] * torch.finfo(matrix.dtype).eps
    with matmul_precision(matrix.device):
        for last in (False, False, True):
            products = matrix.T @ matrix
            squares = products.diagonal().clone()
            scale = 1 / unit_diagonal_scale(squares)
            matrix = matrix * scale
            products *= torch.outer(scale, scale)
            products.diagonal().add_(shift * (squares < 0.5) if last else shift)
            factor = torch.linalg.cholesky_ex(products).L
            matrix = torch.linalg.solve_triangular(factor.T, matrix, upper=True, left=False)
    return matrix


def masked_cg(
    matrix: Tensor,
    target: Tensor,
    start: Tensor,
    mask: Tensor,
    steps: int,
    tolerance: float = 0,
    narrow: bool = False,
) -> Tensor:
    """S on a support with tr((T − S) H (T − S)ᵀ) small, by conjugate gradients on every row,
    Jacobi-preconditioned.

    No step raises the loss. Where H is singular, no step is taken along a direction d with d H dᵀ
    at the level of rounding.

    Args:
        matrix: H, (in, in), positive semi-definite with a positive diagonal.
        target: T, (out, in). start: the initial S, zero off the support `mask`, bool (out, in).
        tolerance: stop when in every row g diag(H)⁻¹ gᵀ ≤ tolerance²·Σ t²·H_jj, with g the gradient
            on the support.
        narrow: compute the products of directions with H as `narrow_products`, but not the first
            one, of the residual.
    """
    sparse = start.clone()
    inverse_diagonal = 1 / matrix.diagonal()
    rounding = 4 * torch.finfo(matrix.dtype).eps * matrix.diagonal()
    gradient = torch.sub(target, sparse).mm(matrix).mul_(mask)  # of −loss / 2
    direction = gradient * inverse_diagonal
    energy = torch.linalg.vecdot(gradient, direction).unsqueeze(1)
    enough = (
        target.square().mv(matrix.diagonal()).mul_(tolerance**2).unsqueeze(1) if tolerance else None
    )
    for step in range(steps):
        if enough is not None and (energy <= enough).all():
            break
        image = direction.square()
        least = image.mv(rounding).unsqueeze(1)
        with narrow_products(matrix.device) if narrow else nullcontext():
            torch.mm(direction, matrix, out=image).mul_(mask)
        curvature = torch.linalg.vecdot(direction, image).unsqueeze(1)
        length = torch.where(curvature > least, energy / curvature, 0.0)
        sparse.addcmul_(direction, length)
        if step == steps - 1:
            break
        gradient.addcmul_(image, length, value=-1)
        preconditioned = torch.mul(gradient, inverse_diagonal, out=image)
        before, energy = energy, torch.linalg.vecdot(gradient, preconditioned).unsqueeze(1)
        direction.mul_(torch.where(before > 0, energy / before, 0.0)).add_(preconditioned)
    return sparse


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are known to be faster than float32's: on x86 with instructions
    for them.
    """
    return device.type == "cpu" and any(map(_capable, ("avx512_bf16", "amx_bf16")))


@cache
def multiplies_tiles() -> bool:
    """Whether this processor multiplies tiles of bfloat16 (AMX): dense products are then several
    times as fast.
    """
    return _capable("amx_bf16")


def _capable(instructions: str) -> bool:
    """Whether torch's products use these instructions; False for versions of torch that do not
    report them.
    """
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return torch.backends.mkldnn.is_available() and bool(capabilities.get(instructions))


@contextmanager
def bfloat16_products(device: torch.device) -> Iterator[None]:
    """Round the factors of float32 products to bfloat16 where `multiplies_bfloat16`, and sum in
    float32.
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
    # The older of torch's two settings must not be touched where the user may have used the newer
    # one.
    settings = torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):
        return _setting(settings, "fp32_precision", "tf32" if tf32 else "ieee")
    return _setting(settings, "allow_tf32", tf32)


def narrow_products(device: torch.device) -> AbstractContextManager[None]:
    """Round the factors of float32 products to what the device multiplies fastest: TF32 on CUDA, or
    bfloat16.
    """
    return (
        matmul_precision(device, tf32=True) if device.type == "cuda" else bfloat16_products(device)
    )


@contextmanager
def _setting(settings: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(settings, name)
    setattr(settings, name, value)
    try:
        yield
    finally:
        setattr(settings, name, before)
