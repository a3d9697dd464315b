"""The matrices at the ends of a model: those of the input embedding and of the output head, which
may be one.
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
    """A matrix (vocabulary, hidden).

    Args:
        embedding: the name of the module that looks up its rows, or None.
        head: the name of the module that multiplies by it, or None.
        shape: (vocabulary, hidden).
        dtype: of the dense model.
        obstacle: the reason for which the matrix stays dense; None if it can be compressed.
        scale: what rows that are looked up are multiplied by.
    """

    embedding: str | None
    head: str | None
    shape: tuple[int, int]
    dtype: torch.dtype
    obstacle: str | None = None
    scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules that use the matrix, that of the embedding first."""
        return tuple(name for name in (self.embedding, self.head) if name is not None)

    @property
    def name(self) -> str:
        """The name of the module that stores the matrix: the embedding, if the head is tied."""
        return self.names[0]

    @property
    def kind(self) -> type[SparseLowRankLinear]:
        """The class of the compressed layer."""
        if self.embedding is None:
            return SparseLowRankLinear
        return PackedEmbedding

    def empty_layer(self, model: nn.Module, spec: LayerSpec) -> SparseLowRankLinear:
        """A compressed layer for the matrix, without values."""
        module: Any = model.get_submodule(self.name)
        weight = module.weight
        has_bias = getattr(module, "bias", None) is not None
        return self.kind(spec, has_bias, weight.dtype, weight.device)

    def replace(self, model: nn.Module, layer: SparseLowRankLinear) -> None:
        """Let a compressed layer take the place of the matrix; a tied head shares it."""
        if isinstance(layer, PackedEmbedding):
            layer.scale = self.scale
            if self.head is not None:
                head: Any = model.get_submodule(self.head)
                model.set_submodule(self.head, TiedHead(layer, head.bias))
        model.set_submodule(self.name, layer)
        untie(model, [f"{name}.weight" for name in self.names])

    def restore(self, model: Any, original: nn.Module, weight: Tensor) -> None:
        """Put the dense modules back in the place of the compressed matrix.

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
    """Let transformers tie these parameters no more: they are gone."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for attribute in ("all_tied_weights_keys", "_tied_weights_keys"):
            ties = getattr(module, attribute, None)
            if ties:
                left = {name: ties[name] for name in ties if start + name not in names}
                setattr(module, attribute, left)


def find_ends(model: Any) -> tuple[End, ...]:
    """Find the matrices of the input embedding and of the output head, or the one of both."""
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
    """The name and the module of what a method of transformers returns.

    ("", None) if the model's class does not know the method, or the model has no such module.
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
    """The matrix of an embedding or of a head; None if the module has no such matrix."""
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
    """What a module multiplies the rows that it looks up by: 1 for torch's embedding; None if it
    does anything else.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        return None
    kind = type(module)
    if kind.forward is nn.Embedding.forward:
        return 1.0
    if kind.__name__.endswith("ScaledWordEmbedding"):  # of transformers
        scale: float | None = getattr(module, "scalar_embed_scale", None)
        return scale
    return None


def sharing(model: Any, name: str) -> set[str]:
    """The names of other modules whose weight is that of the module of this name."""
    ties = model.all_tied_weights_keys
    weight = f"{name}.weight"
    source = ties.get(weight, weight)
    tied = {source, *(other for other, its_source in ties.items() if its_source == source)}
    return {other.removesuffix(".weight") for other in tied - {weight}}
