"""S on a grid for programs that have such a format: the check that they hold it, and its scales,
zeros or offsets.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.core.grids import Grid
from hasslefree.errors import ModelError, option
from hasslefree.models.experts import experts_of
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from hasslefree.recipe.engines import ENGINES, GROUP, fused_apart, not_held


@dataclass(frozen=True)
class Coded:
    """A layer whose S an engine holds exactly. group: the group size that the engine stores."""

    layer: SparseLowRankLinear
    grid: Grid
    group: int

    def repeated(self, numbers: Tensor) -> Tensor:
        """The numbers of the layer's groups, (out, groups), for each group of the engine."""
        groups = self.layer.in_features // self.group
        return numbers.detach().repeat_interleave(groups // numbers.shape[1], 1)

    @property
    def scale(self) -> Tensor:
        """(out, groups of the engine), in the layer's dtype."""
        return self.repeated(self.layer.weight)

    @property
    def second(self) -> Tensor:
        """The offset, or the zero, of each group, as `scale`."""
        tensors = self.layer.tensors()
        if self.grid.offset:
            return self.repeated(tensors["weight_offset"])
        return self.repeated(self.layer.spec.zeros(tensors)).to(self.layer.weight)


def check_layers(model: PreTrainedModel, engine: str) -> dict[str, Coded]:
    """The compressed layers by their names, or a ModelError if the engine cannot hold one of them
    exactly.
    """
    held: dict[str, Coded] = {}
    others = f"export with {option('to', 'dense')} or {option('to', 'peft')}"
    again = f"compress again with {option('method', 'joint-grid')} and {option('engine', engine)}"
    for name, layer in compressed_layers(model).items():
        grid = layer.spec.grid
        width = layer.in_features
        pattern = layer.spec.pattern
        reason = None
        if experts_of(model, name):
            reason = "it belongs to experts, which this export does not know"
        elif grid is None:
            reason = f"its S is not quantised: {again}"
        elif pattern != "dense":
            reason = (
                f"pattern {pattern} saves nothing there, where every entry of S is stored: {again}"
            )
        elif width % GROUP:
            reason = f"its rows of {width} inputs are no multiple of {GROUP}"
        elif not ENGINES[engine].holds(grid):
            reason = f"{not_held(engine, grid)}: {again}"
        if grid is None or reason:
            raise ModelError(f"{engine} cannot hold layer {name}: {reason}; or {others}")
        group = grid.group if grid.block else ENGINES[engine].group_for(grid, width)
        held[name] = Coded(layer, grid, group or width)
    if ENGINES[engine].fuses:
        forms = dict.fromkeys(dense_linear(model), "dense")
        forms |= {name: str(coded.grid) for name, coded in held.items()}
        if apart := fused_apart(forms, {}):
            raise ModelError(f"{apart}: {again}; or {others}")
    return held


def dense_linear(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers that are not compressed, the head among them."""
    # Compressed layers are no nn.Linear.
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
