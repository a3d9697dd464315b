"""S on a grid for programs that have such a format: the check that they hold it, and its scales,
zeros or offsets.
"""

from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.core.grids import Grid
from hasslefree.errors import ModelError, option
from hasslefree.models.experts import experts_of
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from hasslefree.recipe.engines import ENGINES, GROUP, refusal


def check_layers(model: PreTrainedModel, engine: str) -> dict[str, SparseLowRankLinear]:
    """The compressed layers by their names, or a ModelError if the engine cannot hold one of them
    exactly.
    """
    layers = compressed_layers(model)
    again = f"compress with {option('method', 'joint-grid')} and {option('engine', engine)}"
    for name, layer in layers.items():
        grid = layer.spec.grid
        width = layer.in_features
        pattern = layer.spec.pattern
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
        else:
            reason = refusal(engine, grid) or ""
        if reason:
            others = f"export with {option('to', 'dense')} or {option('to', 'peft')}"
            raise ModelError(f"{engine} cannot hold layer {name}: {reason}; or {others}")
    return layers


def grid_of(layer: SparseLowRankLinear) -> Grid:
    """The grid of a layer that `check_layers` let pass."""
    assert layer.spec.grid is not None
    return layer.spec.grid


def numbers_of(layer: SparseLowRankLinear, engine: str) -> tuple[Tensor, Tensor]:
    """The scale and the zero or offset of each group of the engine: (out, groups) each, in the
    layer's dtype.
    """
    grid = grid_of(layer)
    scale = layer.get_parameter("weight_scale").detach()
    tensors = layer.tensors()
    second = (
        tensors["weight_offset"].detach() if grid.offset else layer.spec.zeros(tensors).to(scale)
    )
    times = (grid.group or layer.in_features) // group_of(layer, engine)
    return scale.repeat_interleave(times, 1), second.repeat_interleave(times, 1)


def group_of(layer: SparseLowRankLinear, engine: str) -> int:
    """The group size that the engine stores."""
    return ENGINES[engine].group_for(grid_of(layer), layer.in_features)
