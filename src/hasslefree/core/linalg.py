"""Factorisations of a Gram, and least squares on a support.

Damped Gram matrices are ill-conditioned and few: their factors are computed in float64 and cast
once.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from hasslefree.core.products import matmul_precision, narrow_products
from hasslefree.errors import FactorizationError, option

# Matrices up to this size are inverted in one piece: for small ones, a factorisation is faster than
# products.
BLOCK = {"cpu": 384, "cuda": 2048}
# Number of rows of a triangular factor that are rotated together.
ROTATED = 64

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]


def lower_cholesky(matrix: Tensor) -> Tensor:
    """Return C with matrix = C Cᵀ: (n, n), lower triangular, in float64.

    C_jj² / H_jj is the share of input j that the inputs before it do not explain.

    Raises:
        FactorizationError: such a share is at the level of rounding errors, and so would be the
            results computed with C.
    """
    factor, info = torch.linalg.cholesky_ex(matrix.double())
    rounding = max(torch.finfo(matrix.dtype).eps, len(matrix) * torch.finfo(torch.float64).eps)
    unexplained = factor.diagonal().square()
    if info.item() != 0 or (unexplained <= rounding * matrix.diagonal()).any():
        raise FactorizationError(
            f"the damped Gram matrix (XᵀX of the layer's {len(matrix)} inputs) is not positive"
            " definite: some inputs are linearly dependent; raise the damping"
            f" ({option('damping', 0.01)}), or use more calibration tokens than the layer has"
            " inputs"
        )
    return factor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues in ascending order, and the eigenvectors, of a symmetric matrix (n,
    n); FactorizationError if LAPACK fails.
    """
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except LinAlgError as error:
        raise FactorizationError(
            f"an eigendecomposition failed: {error}; raise the damping ({option('damping', 0.01)})"
        ) from None
    return values, vectors


def inverse_factor(matrix: Tensor) -> Tensor:
    """Return the upper U with matrix⁻¹ = UᵀU, in the dtype of `matrix`: U = A⁻¹ for matrix = A Aᵀ
    with A upper.
    """
    upper = lower_cholesky(matrix.flip(0, 1)).flip(0, 1)
    return inverse_of_upper(upper).to(matrix.dtype)


def inverse_of_upper(matrix: Tensor) -> Tensor:
    """Invert an upper triangular matrix (n, n) by halves. `solve_triangular` alone would compute
    the zeros too.
    """
    if _is_one_block(matrix):
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve_triangular(matrix, identity, upper=True)
    half = len(matrix) // 2
    first = slice(None, half)
    rest = slice(half, None)
    inverse = torch.zeros_like(matrix)
    inverse[first, first] = inverse_of_upper(matrix[first, first])
    inverse[rest, rest] = inverse_of_upper(matrix[rest, rest])
    across = matrix[first, rest] @ inverse[rest, rest]
    across = torch.linalg.solve_triangular(matrix[first, first], across, upper=True)
    inverse[first, rest] = across.neg_()
    return inverse


def with_rows(factor: Tensor, rows: Tensor) -> Tensor:
    """Return the upper U with UᵀU = AᵀA + BᵀB, up to the signs of its rows, by orthogonal steps on
    blocks of rows, in O(n² r) (Golub & Van Loan, section 6.5).

    Args:
        factor: A, (n, n), upper.
        rows: B, (r, n).
    """
    updated = torch.zeros_like(factor)
    rest = rows
    with matmul_precision(factor.device):
        for start in range(0, len(factor), ROTATED):
            here = slice(start, start + ROTATED)
            stacked = torch.cat([factor[here, start:], rest])
            size = len(stacked) - len(rows)
            rotation = torch.linalg.qr(stacked[:, :size], mode="complete").Q
            rotated = rotation.T @ stacked
            updated[here, start:] = rotated[:size]
            rest = rotated[size:, size:]
    return updated.triu_()


def unit_diagonal_scale(diagonal: Tensor) -> Tensor:
    """Return D = diag(H)^½, (in,), with 1 in place of zeros, to divide by."""
    return torch.where(diagonal > 0, diagonal, 1.0).sqrt()


def _is_one_block(matrix: Tensor) -> bool:
    """Return True if a matrix is inverted in one piece."""
    return len(matrix) <= BLOCK.get(matrix.device.type, BLOCK["cpu"])


def inverse_(matrix: Tensor) -> Tensor:
    """Overwrite a well-conditioned positive definite matrix (n, n) with its inverse. If a
    factorisation fails, the inverse is computed in float64.
    """
    try:
        with matmul_precision(matrix.device):
            inverse = _inverse_by_blocks(matrix)
    except LinAlgError:
        inverse = torch.cholesky_inverse(lower_cholesky(matrix))
    return matrix.copy_(inverse)


def _inverse_by_blocks(matrix: Tensor) -> Tensor:
    """Invert by halves, mostly with products: the upper left block first, then its Schur
    complement. Raises LinAlgError if a factorisation fails.
    """
    if _is_one_block(matrix):
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    half = len(matrix) // 2
    first = slice(None, half)
    rest = slice(half, None)
    head = _inverse_by_blocks(matrix[first, first])
    across = head @ matrix[first, rest]
    tail = _inverse_by_blocks(matrix[rest, rest] - matrix[rest, first] @ across)
    inverse = torch.empty_like(matrix)
    inverse[rest, rest] = tail
    inverse[first, rest] = (across @ tail).neg_()
    inverse[rest, first] = inverse[first, rest].T
    inverse[first, first] = torch.addmm(head, inverse[first, rest], across.T, alpha=-1)
    return inverse


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of a matrix (n, r), by a QR factorisation.

    On CUDA, where QR works column by column, `cholesky_qr` is used instead.
    """
    if not matrix.shape[1] or matrix.device.type != "cuda":
        return torch.linalg.qr(matrix).Q
    return cholesky_qr(matrix)


def cholesky_qr(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of a matrix (n, r), by three Cholesky
    factorisations of the columns' products (CholeskyQR3: Fukaya et al., arXiv 1809.11085).

    Each product, (r, r), is shifted by its rounding error; the last product only at columns in the
    span of other columns.
    """
    rounding = 4 * matrix.shape[1] * torch.finfo(matrix.dtype).eps
    with matmul_precision(matrix.device):
        for last in (False, False, True):
            products = matrix.T @ matrix
            squares = products.diagonal().clone()
            scale = 1 / unit_diagonal_scale(squares)
            matrix = matrix * scale
            products *= torch.outer(scale, scale)
            if last:
                products.diagonal().add_(rounding * (squares < 0.5))
            else:
                products.diagonal().add_(rounding)
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
    """Find S on a support with tr((T − S) H (T − S)ᵀ) small, by conjugate gradients on every row,
    Jacobi-preconditioned.

    No step raises the loss. If H is singular, no step is taken along a direction d with d H dᵀ at
    the level of rounding errors.

    Args:
        matrix: H, (in, in), positive semi-definite with a positive diagonal.
        target: T, (out, in).
        start: the initial S, (out, in), zero off the support.
        mask: the support, bool (out, in).
        steps: the maximum number of steps.
        tolerance: stop when in every row g diag(H)⁻¹ gᵀ ≤ tolerance²·Σ t²·H_jj, with g the gradient
            on the support.
        narrow: compute the products of directions with H by `narrow_products`. The first product,
            with the residual, keeps full precision.
    """
    diagonal = matrix.diagonal()
    inverse_diagonal = 1 / diagonal
    rounding = 4 * torch.finfo(matrix.dtype).eps * diagonal
    enough = None
    if tolerance:
        enough = target.square().mv(diagonal).mul_(tolerance**2).unsqueeze(1)
    sparse = start.clone()
    gradient = torch.sub(target, sparse).mm(matrix).mul_(mask)  # of −loss / 2
    direction = gradient * inverse_diagonal
    energy = torch.linalg.vecdot(gradient, direction).unsqueeze(1)
    for step in range(steps):
        if enough is not None and (energy <= enough).all():
            break
        image = direction.square()
        least_curvature = image.mv(rounding).unsqueeze(1)
        with narrow_products(matrix.device) if narrow else nullcontext():
            torch.mm(direction, matrix, out=image).mul_(mask)
        curvature = torch.linalg.vecdot(direction, image).unsqueeze(1)
        length = torch.where(curvature > least_curvature, energy / curvature, 0.0)
        sparse.addcmul_(direction, length)
        if step == steps - 1:
            break
        gradient.addcmul_(image, length, value=-1)
        preconditioned = torch.mul(gradient, inverse_diagonal, out=image)
        before = energy
        energy = torch.linalg.vecdot(gradient, preconditioned).unsqueeze(1)
        direction.mul_(torch.where(before > 0, energy / before, 0.0)).add_(preconditioned)
    return sparse
