"""S on a grid for other programs: check that a program can hold it, and read its scales, zeros or
offsets.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hasslefree.checkpoint.entries import read_entries
from hasslefree.checkpoint.record import IN_BLOCK
from hasslefree.core.grids import Grid
from hasslefree.errors import ModelError, option
from hasslefree.models.experts import experts_of
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from hasslefree.packed.spec import LayerSpec
from hasslefree.recipe.engines import ENGINES, GROUP, fused_apart, not_held


@dataclass(frozen=True)
class Coded:
    """A layer whose S an engine holds exactly. group: the group size that the engine stores, or the
    length of a block with several groups.
    """

    layer: SparseLowRankLinear
    grid: Grid
    group: int

    def repeated(self, numbers: Tensor) -> Tensor:
        """Repeat numbers of the layer's groups, (out, groups), for each group of the engine."""
        groups = self.layer.in_features // self.group
        return numbers.detach().repeat_interleave(groups // numbers.shape[1], 1)

    @property
    def scale(self) -> Tensor:
        """The scale of each group: (out, groups of the engine), in the layer's dtype."""
        return self.repeated(self.layer.weight)

    @property
    def offset_or_zero(self) -> Tensor:
        """The offset or the zero of each group, in the shape and dtype of `scale`."""
        tensors = self.layer.tensors()
        if self.grid.offset:
            return self.repeated(tensors["weight_offset"])
        return self.repeated(self.layer.spec.zeros(tensors)).to(self.layer.weight)


def check_held(config: Any, engine: str) -> None:
    """Raise a ModelError if an engine cannot hold a layer of a compressed model exactly.

    Embedding and head are not checked for engines that need them dense: the export unpacks them.
    """
    entries = read_entries(config.quantization_config["modules"])
    specs = {name: entry.spec for name, entry in entries.items()}
    if not ENGINES[engine].embeddings:
        specs = {name: spec for name, spec in specs.items() if IN_BLOCK.search(name)}
    for name, spec in specs.items():
        reason = obstacle(spec, engine)
        if reason:
            others = other_exports(specs.values())
            raise ModelError(
                f"cannot export layer {name}: {reason}; {compress_again(engine)}, or {others}"
            )


def other_exports(specs: Iterable[LayerSpec]) -> str:
    """The remedy that needs no engine, in words."""
    if any(spec.rank for spec in specs):
        return f"export with {option('to', 'dense')} or {option('to', 'peft')}"
    return f"export with {option('to', 'dense')}"


def compress_again(engine: str) -> str:
    """The remedy for a layer that an engine cannot hold."""
    return f"compress again with {option('method', 'joint-grid')} and {option('engine', engine)}"


def obstacle(spec: LayerSpec, engine: str) -> str | None:
    """The reason why an engine cannot hold a layer exactly; None if it can."""
    width = spec.shape[1]
    if spec.grid is None:
        return "its S is not quantised"
    if spec.pattern != "dense":
        return f"{engine} stores every entry of S, so pattern {spec.pattern} saves nothing"
    if not ENGINES[engine].holds(spec.grid):
        return not_held(engine, spec.grid)
    if width % GROUP:
        return f"its {width} inputs are not a multiple of {GROUP}"
    return None


def check_layers(model: PreTrainedModel, engine: str) -> dict[str, Coded]:
    """The compressed layers by name. They have passed `check_held`.

    Raises:
        ModelError: a layer is an expert, or layers that the engine multiplies as one differ.
    """
    held: dict[str, Coded] = {}
    for name, layer in compressed_layers(model).items():
        if experts_of(model, name):
            raise ModelError(
                f"cannot export layer {name}: the export to {engine} does not support experts;"
                f" export with {option('to', 'dense')}"
            )
        grid = layer.spec.grid
        assert grid is not None
        group = grid.block or ENGINES[engine].group_for(grid, layer.in_features)
        held[name] = Coded(layer, grid, group)
    if ENGINES[engine].fuses:
        forms = dict.fromkeys(dense_linear(model), "dense")
        for name, coded in held.items():
            forms[name] = str(coded.grid)
        apart = fused_apart(forms, {})
        if apart is not None:
            others = other_exports(coded.layer.spec for coded in held.values())
            raise ModelError(f"{apart}; {compress_again(engine)}, or {others}")
    return held


def dense_linear(model: PreTrainedModel) -> list[str]:
    """The names of the linear layers that are not compressed, including the head."""
    # Compressed layers are no nn.Linear.
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
