"""Find the weight matrices in a block, watch their inputs, and replace them.

A kind of site is a class here and its entry in `KINDS`; nothing else knows how a model stores a
matrix.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hasslefree.models.calls import replaced


@cache
def multiplies(kind: Any) -> bool:
    """Return True if a subclass of `nn.Linear` computes x Wᵀ. Others multiply group by group, or
    choose between experts.
    """
    if kind.forward is nn.Linear.forward:
        return True
    # Models are made on the meta device, where weights have no values.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        x = torch.arange(1.0, 4.0)[None]
        weight = torch.arange(6.0).view(2, 3)
        try:
            layer = kind(3, 2, bias=False)
            layer.weight = nn.Parameter(weight)
            return torch.allclose(layer(x), x @ weight.T)
        except Exception:  # it has another signature or another output; it may raise anything
            return False


@dataclass(frozen=True)
class Site:
    """A weight matrix of an `nn.Linear`; subclasses are other kinds.

    Args:
        root: a block or a model.
        name: of the matrix under root, and of the tensors that replace it.
        module: the module that holds it in the dense model.
    """

    root: nn.Module
    name: str
    module: Any

    # True if the model stores the matrix as (in, out).
    transposed: ClassVar[bool] = False

    @classmethod
    def at(
        cls,
        root: nn.Module,
        name: str,
        module: nn.Module,
    ) -> "Iterator[Site]":
        """Yield the sites of this kind that a module holds itself, not those of its children.

        name: of the module under root.
        """
        if isinstance(module, nn.Linear) and multiplies(type(module)):  # type: ignore[arg-type]
            yield cls(root, name, module)

    @property
    def path(self) -> str:
        """The name of the module under root."""
        return self.name

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that holds the matrix, possibly transposed."""
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        """(out,), or None."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        if bias is None:
            return None
        return bias.detach()

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        first, second = self.parameter.shape
        if self.transposed:
            return second, first
        return first, second

    def weight(self) -> Tensor:
        """The matrix: (out, in)."""
        weight = self.parameter.detach()
        if self.transposed:
            return weight.T.contiguous()
        return weight

    def on_input(self, see: Callable[[Tensor], None]) -> Any:
        """Call `see` with the inputs (…, in) whenever the matrix is multiplied. The result has
        `remove()`.
        """
        return self.module.register_forward_pre_hook(lambda module, args: see(args[0]))

    def on_output(self, see: Callable[[Tensor], None]) -> Any:
        """Call `see` with the outputs (…, out) whenever the matrix is multiplied. The result has
        `remove()`.
        """
        return self.module.register_forward_hook(lambda module, args, output: see(output))

    def on_call(self, compute: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """Within it, `compute`, (…, in) → (…, out) with the bias, takes the place of the
        product.
        """
        return replaced(self.module, "forward", compute)

    def wrapped(self, layer: nn.Module) -> nn.Module:
        """The module that replaces `module` once `layer` computes the product."""
        return layer

    def replace(self, layer: nn.Module) -> None:
        """Let a layer, (…, in) → (…, out) with the bias, take the place of the matrix."""
        replace_module(self.root, self.path, self.wrapped(layer))

    def set_weight(self, weight: Tensor, bias: Tensor | None) -> None:
        """Give the dense module a matrix (out, in) and a bias (out,)."""
        if self.transposed:
            weight = weight.T.contiguous()
        self.module.weight = nn.Parameter(weight)
        self.module.bias = bias


@dataclass(frozen=True)
class Conv1DSite(Site):
    """GPT-2's `Conv1D`: a linear layer that stores its weight as (in, out)."""

    transposed: ClassVar[bool] = True

    @classmethod
    def at(
        cls,
        root: nn.Module,
        name: str,
        module: nn.Module,
    ) -> Iterator[Site]:
        if isinstance(module, Conv1D):
            yield cls(root, name, module)


KINDS: list[type[Site]] = [Site, Conv1DSite]


def find_sites(root: nn.Module) -> dict[str, Site]:
    """Find the sites under a block or a model, by their names, in the order of its modules."""
    sites = {}
    for name, module in root.named_modules():
        for kind in KINDS:
            for site in kind.at(root, name, module):
                sites[site.name] = site
    return sites


def find_site(root: nn.Module, name: str) -> Site:
    """Find the site of this name under a block or a model, without a search of all modules.

    Raises a KeyError if there is none.
    """
    parent = name.rpartition(".")[0]
    for path in (name, parent):  # of a layer, or of a module that holds a parameter
        try:
            module = root.get_submodule(path)
        except AttributeError:
            continue
        for kind in KINDS:
            for site in kind.at(root, path, module):
                if site.name == name:
                    return site
    raise KeyError(name)


def replace_module(
    root: nn.Module,
    name: str,
    module: nn.Module,
) -> None:
    """Put `module` in the place of the one called `name` under root."""
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)
