"""An embedding whose matrix is on a grid, and an output head that shares the matrix."""

import torch
from torch import Tensor, nn

from hasslefree.errors import GridError
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec


class PackedEmbedding(SparseLowRankLinear):
    """Look up rows of a matrix (vocabulary, hidden) that is stored as the S of a compressed layer.

    Only these rows are unpacked. Inputs of a floating dtype are multiplied by the matrix instead,
    for an output head that shares the codes.

    The rows are multiplied by the attribute `scale`, rounded to their dtype: Gemma scales them by
    the square root of the width.

    Args:
        spec: of a complete matrix on a grid, without L.
        bias: False; an embedding has none.
        dtype, device: as for `SparseLowRankLinear`.

    Raises:
        GridError: the rows of such a matrix cannot be unpacked one by one.
    """

    def __init__(
        self,
        spec: LayerSpec,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        # Rows must be stored independently, and zeros are packed across rows.
        grid = spec.grid
        has_rows = grid is not None and (grid.offset or grid.symmetric)
        if spec.pattern != "dense" or not has_rows or spec.rank:
            raise GridError(
                "an embedding is stored on a symmetric grid, or one with offsets, without L, and"
                f" this is {spec.kind}, rank {spec.rank}"
            )
        super().__init__(spec, bias, dtype, device)
        self.num_embeddings, self.embedding_dim = spec.shape
        self.scale = 1.0

    @property
    def weight(self) -> Tensor:
        """The scales or their units, (vocabulary, ·): transformers reads the first dimension."""
        return super().weight.view(self.num_embeddings, -1)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (...) → (..., hidden).

        Inputs of a floating dtype are those of a head that shares the matrix: (..., hidden) →
        (..., vocabulary). The head calls `forward`, because accelerate loads offloaded tensors for
        calls of `forward` only.
        """
        if ids.is_floating_point():
            return super().forward(ids)
        if not ids.numel():
            return self.weight.new_empty(*ids.shape, self.embedding_dim)
        rows = self.rows(ids.flatten()).view(*ids.shape, self.embedding_dim)
        if self.scale == 1:
            return rows
        return rows * torch.tensor(self.scale).to(rows.dtype).item()


class TiedHead(nn.Module):
    """An output head that multiplies by the matrix of the embedding.

    Args:
        embedding: the module that stores the matrix.
        bias: (vocabulary,), or None.
    """

    bias: nn.Parameter | None

    def __init__(self, embedding: PackedEmbedding, bias: nn.Parameter | None):
        super().__init__()
        # In a tuple, so that the embedding is no submodule and its tensors have one name.
        self.shared = (embedding,)
        self.in_features = embedding.in_features
        self.out_features = embedding.out_features
        self.register_parameter("bias", bias)

    @property
    def embedding(self) -> PackedEmbedding:
        """The module that stores the matrix."""
        return self.shared[0]

    @property
    def weight(self) -> Tensor:
        """The `weight` of the embedding."""
        return self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) → (..., vocabulary)."""
        y = self.embedding.forward(x)  # bypasses forward hooks on embeddings
        if self.bias is None:
            return y
        return y + self.bias
