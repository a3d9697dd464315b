"""The matrices at the ends of a model: the input embedding and the output head, which may share one
matrix.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.models.sites import is_matrix
from hasslefree.packed.embedding import PackedEmbedding, TiedHead
from hasslefree.packed.linear import SparseLowRankLinear
from hasslefree.packed.spec import LayerSpec

# Reasons for a matrix to stay dense.
NO_LOOK_UP = "its module does more than look up rows"
NO_PRODUCT = "its module does more than multiply"


@dataclass(frozen=True)
class End:
    """The matrix of the embedding, of the head, or of both.

    Args:
        embedding: name of the module that looks up rows of the matrix, or None.
        head: name of the module that multiplies by the matrix, or None.
        shape: (vocabulary, hidden).
        dtype: dtype in the dense model.
        obstacle: the reason why the matrix stays dense; None if it can be compressed.
        scale: factor of the rows that are looked up.
    """

    embedding: str | None
    head: str | None
    shape: tuple[int, int]
    dtype: torch.dtype
    obstacle: str | None = None
    scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules that use the matrix, the embedding first."""
        return tuple(name for name in (self.embedding, self.head) if name is not None)

    @property
    def name(self) -> str:
        """Name of the module that stores the matrix: the embedding, if the head is tied."""
        return self.names[0]

    @property
    def kind(self) -> type[SparseLowRankLinear]:
        """The class of the compressed layer."""
        if self.embedding is None:
            return SparseLowRankLinear
        return PackedEmbedding

    def empty_layer(self, model: nn.Module, spec: LayerSpec) -> SparseLowRankLinear:
        """Make a compressed layer for the matrix, without values."""
        module: Any = model.get_submodule(self.name)
        weight = module.weight
        has_bias = getattr(module, "bias", None) is not None
        return self.kind(spec, has_bias, weight.dtype, weight.device)

    def replace(self, model: nn.Module, layer: SparseLowRankLinear) -> None:
        """Replace the matrix by a compressed layer, which a tied head shares."""
        if isinstance(layer, PackedEmbedding):
            layer.scale = self.scale
            if self.head is not None:
                head: Any = model.get_submodule(self.head)
                model.set_submodule(self.head, TiedHead(layer, head.bias))
        model.set_submodule(self.name, layer)
        untie(model, [f"{name}.weight" for name in self.names])

    def restore(self, model: Any, original: nn.Module, weight: Tensor) -> None:
        """Replace the compressed matrix by the dense modules.

        Args:
            original: a model of the same class without values.
            weight: the matrix, (vocabulary, hidden).
        """
        parameter = nn.Parameter(weight)
        for name in self.names:
            module: Any = original.get_submodule(name)
            module.weight = parameter
            bias = getattr(model.get_submodule(name), "bias", None)
            if bias is not None:
                module.bias = bias
            model.set_submodule(name, module.train(model.training))
        for module in model.modules():
            if module.__dict__.pop("_tied_weights_keys", None) is not None:
                module.all_tied_weights_keys = module.get_expanded_tied_weights_keys()


def untie(model: Any, names: list[str]) -> None:
    """Remove these parameters, which no longer exist, from the tied weights of transformers."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
            ties = getattr(module, attribute, None)
            if ties:
                left = {name: ties[name] for name in ties if start + name not in names}
                setattr(module, attribute, left)


def find_ends(model: Any) -> tuple[End, ...]:
    """Find the matrices of the input embedding and of the output head; one if they are tied."""
    embedding = end_of(*asked(model, "get_input_embeddings"), is_embedding=True)
    head = end_of(*asked(model, "get_output_embeddings"), is_embedding=False)
    ends = [end for end in (embedding, head) if end is not None]
    if embedding and head and head.name in sharing(model, embedding.name):
        obstacle = embedding.obstacle or head.obstacle
        ends = [replace(embedding, head=head.name, obstacle=obstacle)]
    for index, end in enumerate(ends):
        others = sharing(model, end.name) - set(end.names)
        if others and end.obstacle is None:
            obstacle = f"{', '.join(sorted(others))} share it"
            ends[index] = replace(end, obstacle=obstacle)
    return tuple(ends)


def asked(model: Any, method: str) -> tuple[str, Any]:
    """Return the name of the module that a method of transformers returns, and the module.

    ("", None) if the model's class does not support the method, or the model has no such module.
    """
    try:
        wanted = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return "", None
    for name, module in model.named_modules():
        if module is wanted:
            return name, module
    return "", None


def end_of(name: str, module: Any, is_embedding: bool) -> End | None:
    """Return the matrix of an embedding or of a head; None if the module has no such matrix."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 2:
        return None
    shape = (weight.shape[0], weight.shape[1])
    if is_embedding:
        scale = scale_of(module)
        if scale is None:
            return End(name, None, shape, weight.dtype, NO_LOOK_UP)
        return End(name, None, shape, weight.dtype, scale=scale)
    multiplies = isinstance(module, nn.Linear) and is_matrix(module)
    obstacle = None if multiplies else NO_PRODUCT
    return End(None, name, shape, weight.dtype, obstacle)


def scale_of(module: Any) -> float | None:
    """Return the factor by which an embedding scales the rows that it looks up; None if the module
    does anything else.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    kind = type(module)
    if kind.forward is nn.Embedding.forward:
        return 1.0
    if kind.__name__.endswith("ScaledWordEmbedding"):  # of transformers
        return getattr(module, "scalar_embed_scale", None)
    return None


def sharing(model: Any, name: str) -> set[str]:
    """Return the names of the other modules that are tied to the weight of a module."""
    ties = model.all_tied_weights_keys
    weight = f"{name}.weight"
    source = ties.get(weight, weight)
    tied = {source, *(other for other, its_source in ties.items() if its_source == source)}
    return {other.removesuffix(".weight") for other in tied - {weight}}
