"""Find the weight matrices in a block, watch their inputs, and replace them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hasslefree.models.calls import replaced


@cache
def multiplies(kind: Any) -> bool:
    """Return True if a subclass of `nn.Linear` computes x Wᵀ. Some subclasses multiply group by
    group, or choose between experts.
    """
    if kind.forward is nn.Linear.forward:
        return True
    # The default device may be meta, where tensors have no values.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        x = torch.arange(1.0, 4.0)[None]
        weight = torch.arange(6.0).view(2, 3)
        try:
            layer = kind(3, 2, bias=False)
            layer.weight = nn.Parameter(weight)
            return torch.allclose(layer(x), x @ weight.T)
        except Exception:  # a class of another kind may raise anything
            return False


def is_matrix(module: nn.Module) -> bool:
    """Return True if a module multiplies by a matrix: a linear layer, or GPT-2's `Conv1D`."""
    if isinstance(module, nn.Linear):
        return multiplies(type(module))  # type: ignore[arg-type]
    return isinstance(module, Conv1D)


@dataclass(frozen=True)
class Site:
    """A weight matrix.

    Args:
        root: a block or a model.
        name: name of the module under root.
        module: the linear layer of the dense model.
    """

    root: nn.Module
    name: str
    module: Any

    @property
    def transposed(self) -> bool:
        """True if the model stores the matrix as (in, out), as `Conv1D` does."""
        return isinstance(self.module, Conv1D)

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that stores the matrix, transposed if `transposed`."""
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        """(out,), or None."""
        if self.module.bias is None:
            return None
        return self.module.bias.detach()

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
        """Call `see` with the inputs (…, in) at every product. Return the handle of the hook."""
        return self.module.register_forward_pre_hook(lambda module, args: see(args[0]))

    def on_output(self, see: Callable[[Tensor], None]) -> Any:
        """Call `see` with the outputs (…, out) at every product. Return the handle of the hook."""
        return self.module.register_forward_hook(lambda module, args, output: see(output))

    def on_call(self, compute: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """Replace the product temporarily by `compute`, (…, in) → (…, out) with the bias."""
        return replaced(self.module, "forward", compute)

    def replace(self, layer: nn.Module) -> None:
        """Replace the module by a layer, (…, in) → (…, out) with the bias."""
        self.root.set_submodule(self.name, layer)

    def set_weight(self, weight: Tensor, bias: Tensor | None) -> None:
        """Set the matrix (out, in) and the bias (out,) of the dense module."""
        if self.transposed:
            weight = weight.T.contiguous()
        self.module.weight = nn.Parameter(weight)
        self.module.bias = bias


def find_sites(root: nn.Module) -> dict[str, Site]:
    """Find the sites under a block or a model by name, in the order of its modules."""
    sites = {}
    for name, module in root.named_modules():
        if is_matrix(module):
            sites[name] = Site(root, name, module)
    return sites


def find_site(root: nn.Module, name: str) -> Site:
    """Return the site of this name under a block or a model, without a search of all modules."""
    return Site(root, name, root.get_submodule(name))
