"""An embedding whose matrix is on a grid, and an output head that shares the matrix."""

import torch
from torch import Tensor, nn

from hasslefree.errors import GridError
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec


class PackedEmbedding(SparseLowRankLinear):
    """Look up rows of a matrix (vocabulary, hidden) that is stored as the S of a compressed layer.

    Only the rows that are looked up are unpacked. Floats are multiplied by the matrix, for a head
    that shares it: both use one copy of the codes.

    The attribute `scale` is what the rows that are looked up are multiplied by, rounded to their
    dtype; Gemma's are scaled by the root of the width.

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
        # Each row must be stored by itself, and zeros are packed along the rows.
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
        """The scales or their units, (vocabulary, ·): transformers looks up the first size."""
        return super().weight.view(self.num_embeddings, -1)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: (...) → (..., hidden). Floats are inputs of a head that shares the matrix, (...,
        hidden) → (..., vocabulary): accelerate, which keeps the tensors of a module on a disk or on
        another device, brings them for a call of `forward`.
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
        embedding: it stores the matrix.
        bias: of the head, (vocabulary,), or None.
    """

    bias: nn.Parameter | None

    def __init__(self, embedding: PackedEmbedding, bias: nn.Parameter | None):
        super().__init__()
        # In a tuple, so that it is no submodule: its tensors have one name.
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
        """As `SparseLowRankLinear.weight`."""
        return self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., hidden) → (..., vocabulary)."""
        y = self.embedding.forward(x)  # without the hooks on what the embedding returns
        if self.bias is None:
            return y
        return y + self.bias
