"""The second moment of a layer's inputs, and the loss that it defines."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hasslefree.core.shrinkage import shrinkage
from hasslefree.errors import MomentError, NonFiniteError, ShapeError


@dataclass(frozen=True)
class Gram:
    """H = XᵀX / tokens, the second moment of the inputs X of a linear layer.

    Args:
        matrix: (in, in), symmetric positive semi-definite, float32 or float64.
        tokens: the number of rows of X, which decides how far `shrunk` trusts correlations; 0 if
            there were none and H = I takes their place.
        mean: (in,), the mean of the rows of X; None if not computed. Only DSNoT needs it.

    Example:
        >>> gram = Gram.from_activations(torch.randn(1000, 64))
        >>> gram.matrix.shape
        torch.Size([64, 64])
    """

    matrix: Tensor
    tokens: int
    mean: Tensor | None = None

    def __post_init__(self) -> None:
        check_floating("matrix", self.matrix)
        if self.matrix.ndim != 2 or self.matrix.shape[0] != self.matrix.shape[1]:
            raise ShapeError(f"a Gram matrix must be square, got shape {tuple(self.matrix.shape)}")
        if self.mean is None:
            return
        check_floating("mean", self.mean)
        if self.mean.shape != self.matrix.shape[:1]:
            raise ShapeError(
                f"mean must have shape ({len(self.matrix)},), got {tuple(self.mean.shape)}"
            )

    @classmethod
    def from_activations(cls, x: Tensor) -> "Gram":
        """Compute the Gram of activations.

        Args:
            x: (..., tokens, in), any floating dtype. float64 is summed in float64, other dtypes in
                float32.

        Raises:
            NonFiniteError: x holds NaN or Inf, or its squares overflow.
            ShapeError: x is not such a tensor.
        """
        given: object = type(x).__name__
        if isinstance(x, Tensor):
            given = tuple(x.shape)
        if not isinstance(x, Tensor) or x.ndim < 2 or not x.numel():
            raise ShapeError(
                f"x must be a tensor (..., tokens, in) with at least one token, got {given}"
            )
        check_floating("x", x)
        rows = x.detach().reshape(-1, x.shape[-1]).to(working_dtype(x))
        if not torch.isfinite(rows).all():
            raise NonFiniteError("the activations contain NaN or Inf; mask or drop those tokens")
        matrix = rows.T @ rows / len(rows)
        if not torch.isfinite(matrix).all():
            raise NonFiniteError(
                f"the squares of the activations overflow {dtype_name(rows)}; scale them down, or"
                " pass float64"
            )
        return cls(matrix, len(rows), rows.sum(0) / len(rows))

    @classmethod
    def identity(cls, width: int) -> "Gram":
        """Return H = I, for unknown inputs: the loss is then the squared error of the weight."""
        matrix = torch.eye(width, dtype=torch.float64)
        return cls(matrix, width, torch.zeros(width, dtype=torch.float64))

    @property
    def diagonal(self) -> Tensor:
        """(in,): the mean square of each input."""
        return self.matrix.diagonal()

    @property
    def alive(self) -> Tensor:
        """(in,) bool: the inputs that are not always zero."""
        return self.diagonal > 0

    @property
    def means(self) -> Tensor:
        """(in,): the mean of each input. Raises MomentError if it was not computed."""
        if self.mean is None:
            raise MomentError(
                "this method also needs the mean of the inputs; create the Gram with"
                " Gram.from_activations(x), or pass the mean: Gram(matrix, tokens, mean)"
            )
        return self.mean

    def to(self, like: Tensor) -> "Gram":
        """Return the Gram in the working dtype and on the device of `like`."""
        dtype = working_dtype(like)
        mean = None if self.mean is None else self.mean.to(like.device, dtype)
        return Gram(self.matrix.to(like.device, dtype), self.tokens, mean)

    def damped(self, damping: float) -> "Gram":
        """H + λI with λ = damping · mean(diag H), as SparseGPT does (arXiv 2301.00774).

        A diagonal entry that is still zero is set to one, so that H + λI can be inverted.
        """
        matrix = self.matrix.clone()
        diagonal = matrix.diagonal()
        diagonal.add_(damping * self.diagonal.mean())
        diagonal[diagonal == 0] = 1.0
        return Gram(matrix, self.tokens, self.mean)

    @cached_property
    def shrinkage(self) -> float:
        """α of `shrunk`, from `core.shrinkage`; 0 if there are no tokens."""
        return shrinkage(self.matrix, self.tokens)

    def shrunk(self) -> "Gram":
        """(1 − α) H + α diag H: with few tokens, many correlations between inputs are chance."""
        matrix = self.matrix * (1 - self.shrinkage)
        matrix.diagonal().copy_(self.diagonal)
        return Gram(matrix, self.tokens, self.mean)

    def scaled(self, scale: Tensor) -> "Gram":
        """D⁻¹HD⁻¹ for D = diag(scale), (in,), without a mean."""
        outer = torch.outer(scale, scale)
        return Gram(torch.div(self.matrix, outer, out=outer), self.tokens)

    def remarks(self) -> tuple[str, ...]:
        """Unusual properties of the inputs, one sentence each, for the report of a layer."""
        width = len(self.matrix)
        dead = width - int(torch.count_nonzero(self.alive))
        remarks = []
        if dead:
            remarks.append(f"{dead} of {width} inputs are always zero: they get no weight")
        if 0 < self.tokens < width:
            remarks.append(
                f"more inputs ({width}) than tokens ({self.tokens}): H has rank at most"
                f" {self.tokens}"
            )
        return tuple(remarks)

    def loss(self, residual: Tensor) -> float:
        """f = tr(R H Rᵀ), the mean squared output error per token, of a residual R, (out, in)."""
        product = residual @ self.matrix
        return max(torch.sum(product.mul_(residual), dtype=torch.float64).item(), 0.0)

    def expected_loss(self, residual: Tensor) -> float:
        """tr(R H′ Rᵀ) with H′ = `shrunk`: an estimate of the loss on other text, for a residual R,
        (out, in), that was fitted with H′. If tokens are few, the loss on them is far smaller.
        """
        squares = residual.square().sum(0, dtype=torch.float64)
        on_diagonal = torch.dot(squares, self.diagonal.double()).item()
        return (1 - self.shrinkage) * self.loss(residual) + self.shrinkage * on_diagonal


def relative(loss: float, norm: float) -> float:
    """loss / norm; 0 if both are zero."""
    if norm == 0.0:
        if loss == 0.0:
            return 0.0
        return float("inf")
    return loss / norm


def working_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that solvers work in: float64 for a tensor in float64, otherwise float32."""
    if tensor.dtype == torch.float64:
        return torch.float64
    return torch.float32


def dtype_name(tensor: Tensor) -> str:
    """Return the dtype of a tensor for an error message, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def check_floating(name: str, tensor: Tensor) -> None:
    """Raise ShapeError unless an argument is a tensor of a floating dtype of at least 16 bits.

    Args:
        name: the name of the argument.
    """
    if not isinstance(tensor, Tensor):
        raise ShapeError(
            f"{name} must be a tensor, got {type(tensor).__name__}; convert it by torch.as_tensor"
        )
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ShapeError(
            f"{name} must be of a floating dtype of at least 16 bits, got {dtype_name(tensor)};"
            f" convert it first, such as {name}.float() (for a complex tensor, take the real part:"
            f" {name}.real)"
        )
