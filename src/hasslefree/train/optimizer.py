"""The trained tensors of a compressed block and their units: Adam updates float32 master weights.

Adam moves every entry of a tensor about equally far. For equal changes of the output of a layer, S
and v are trained in units of their inputs, S D and v D with D² the mean square of each input, and
the scales of a grid in units of their group. After each step the layer stores the master weights,
rounded:

    values, u, v, biases    to the dtype of the model
    scales and offsets      likewise. An offset is trained as the value of the middle code, offset +
                            2^(bits − 1)·scale: a change of the scale then moves no group as a
                            whole. If they are multiples of units of a row, the units are trained,
                            so as to move the row as little as possible. Codes, zeros and multiples
                            are not trained.
    u and v in eight bits   to codes; the gradient with respect to a rounded factor is used for its
                            master (straight-through, arXiv 1308.3432)
    weights of norms        to the dtype of the model; training them adds no bytes
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hasslefree.core.coder import MIDDLE
from hasslefree.core.factors import nearest
from hasslefree.core.gram import working_dtype
from hasslefree.core.grids import Grid
from hasslefree.core.low_rank import LowRank
from hasslefree.core.scales import with_half_steps
from hasslefree.distributed import ALONE, World
from hasslefree.packed.linear import SparseLowRankLinear

# Adam's epsilon: small, because gradients differ widely in size.
EPSILON = 1e-12


@dataclass(eq=False)
class Variable:
    """A tensor that is trained.

    Args:
        leaf: the tensor with which the model computes, and which gets the gradient.
        master: the tensor that Adam updates, in units of `unit`.
        store: writes a new value, in the working dtype, to the layer; None to write to the leaf.
        scale, middle: for an offset only: the variable of its scale, and the difference of master
            and leaf in scales, broadcast with the leaf.
    """

    leaf: Tensor
    master: Tensor
    unit: Tensor
    store: Callable[[Tensor], None] | None = None
    scale: "Variable | None" = None
    middle: Tensor | int = 0

    def __post_init__(self) -> None:
        # The stored dtype: the leaf has a wider one while its block is `computing`.
        self.dtype = self.leaf.dtype

    def write(self, value: Tensor) -> None:
        """Store a value, given in the units of the leaf."""
        if self.scale is not None:
            shift = self.middle * self.scale.leaf.to(value.dtype)
            value = value - shift.to(value.device)
        if self.store is not None:
            self.store(value.to(self.leaf.device))
        else:
            self.leaf.copy_(value.to(self.dtype))


class BlockOptimizer:
    """Adam on float32 master weights of the trained tensors of a block.

    Args:
        scales: D of each compressed layer in the block.
        learning_rate: peak, relative to the root mean square of each tensor.
        world: the processes that sum their gradients.
        device: device of the masters, where Adam runs; None for that of the block.
        fixed: ids of the weights of norms that are not trained.
    """

    def __init__(
        self,
        block: nn.Module,
        scales: Mapping[SparseLowRankLinear, Tensor],
        learning_rate: float,
        world: World = ALONE,
        device: torch.device | None = None,
        fixed: Container[int] = (),
    ):
        self.variables = list(variables_of(block, scales, fixed))
        self.world = world
        groups: list[dict[str, Any]] = []
        for variable in self.variables:
            variable.master = variable.master.to(device)
            variable.unit = variable.unit.to(device)
            master = (variable.scale or variable).master
            typical = master.square().mean().sqrt().item()  # an offset moves as its scale does
            groups.append({"params": [variable.master], "peak": learning_rate * typical})
        self.optimizer: torch.optim.Adam | None = None
        if groups:  # a block may have been left dense
            self.optimizer = torch.optim.Adam(groups, eps=EPSILON, fused=True)

    @torch.no_grad()
    def update(self, rate: float) -> None:
        """Take a step of Adam with the gradients of the leaves, and clear them. rate: share of the
        peak learning rate.
        """
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        for variable, gradient in self.gradients().items():
            variable.master.grad = gradient.to(variable.master.device) / variable.unit
        self.optimizer.step()
        for variable in self.variables:
            variable.write(variable.master / variable.unit)
            variable.master.grad = None

    def gradients(self) -> dict[Variable, Tensor]:
        """Gradients of all processes, with respect to the masters in the units of the leaves."""
        gradients: dict[Variable, Tensor] = {}
        for variable in self.variables:
            # A missing gradient counts as zero, whatever the number of processes: a process without
            # a segment of the mini-batch has none to add, and a parameter that a mini-batch does
            # not reach still moves by its momentum.
            leaf = variable.leaf
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            leaf.grad = None
            gradients[variable] = gradient.to(variable.master.dtype)
            self.world.add(gradients[variable])
        for variable in self.variables:
            if variable.scale is not None:
                gradients[variable.scale] -= variable.middle * gradients[variable]
        return gradients


def variables_of(
    block: nn.Module, scales: Mapping[SparseLowRankLinear, Tensor], fixed: Container[int]
) -> Iterator[Variable]:
    """Yield the variables of a block; none without compressed layers. Arguments as for
    `BlockOptimizer`.
    """
    for layer, scale in scales.items():
        yield from variables_of_sparse(layer, scale)
        yield from variables_of_factors(layer, scale)
        if layer.bias is not None:
            yield plain(layer.bias)
    if not scales:
        return
    for weight in norms(block):
        if id(weight) not in fixed:
            yield plain(weight)


def plain(leaf: Tensor, unit: Tensor | None = None) -> Variable:
    """A variable that is stored in its own dtype. unit: of its master weights; None for 1."""
    if unit is None:
        unit = torch.ones((), device=leaf.device)
    value = leaf.detach().to(working_dtype(leaf))
    return Variable(leaf, value * unit, unit)


def variables_of_sparse(layer: SparseLowRankLinear, scale: Tensor) -> Iterator[Variable]:
    """The values of S, or its scales and offsets. scale: D, (in,)."""
    grid = layer.spec.grid
    if grid is None:
        if layer.values.numel():
            dense = scale.expand(layer.spec.shape)
            unit = dense.masked_select(layer.support())
            yield plain(layer.values, unit.view_as(layer.values))
        return
    stored = layer.get_parameter("weight_scale")
    groups = 1 if stored.ndim == 1 else stored.shape[1]
    unit = scale.view(groups, -1).square().mean(1).sqrt()
    steps = plain(stored, unit)
    if grid.rate is not None:
        yield steps
        codes = layer.codes(layer.tensors()).to(scale.dtype) - MIDDLE
        deviation = codes.square().mean(0).sqrt()
        # The scale of an input whose codes are all zero changes nothing.
        unit = scale * deviation.where(deviation > 0, 1)
        yield plain(layer.get_parameter("weight_input_scale"), unit)
        return
    steps.store = storing(stored, grid)
    yield steps
    if grid.offset:
        offset = layer.get_parameter("weight_offset")
        middle = middle_of(layer)
        centre = plain(offset, unit).master + middle * steps.master
        yield Variable(offset, centre, unit, storing(offset, grid), steps, middle)


def storing(leaf: Tensor, grid: Grid) -> Callable[[Tensor], None] | None:
    """Return a function that stores values as llama.cpp needs them; None if it needs nothing.

    The steps of units of blocks, unit / 2^bits, must be numbers of float16, and floats must remain
    such numbers if all are before training.
    """
    bits = 0
    if grid.scale_bits is not None:
        if grid.block is None:
            return None
        bits = grid.scale_bits - grid.signed_scales
    elif not torch.equal(with_half_steps(leaf.detach(), bits), leaf):
        return None
    dtype = leaf.dtype

    def store(value: Tensor) -> None:
        leaf.copy_(with_half_steps(value.to(dtype), bits))

    return store


def middle_of(layer: SparseLowRankLinear) -> Tensor:
    """The difference of the middle code and the offset, in scales: a number.

    For units, numbers of their shape, which keep the values of the middle codes of a row or block
    in place, in least squares.
    """
    grid = layer.spec.grid
    assert grid is not None
    code = layer.weight.new_tensor((grid.top + 1) / 2, dtype=working_dtype(layer.weight))
    if grid.scale_bits is None:
        return code
    # With scales k_g·U and offsets −m_g·U', a step d of U and b·d of U' moves the middle codes by
    # (code·k_g − b·m_g)·d.
    tensors = layer.tensors()
    ones = torch.ones_like(layer.weight)
    units = tensors | {"weight_scale": ones, "weight_offset": ones}
    parts = (*layer.weight.shape, -1)
    k = layer.spec.scales(units).view(parts)
    m = -layer.spec.offsets(units).view(parts)
    along = (k * m).sum(-1)
    square = m.square().sum(-1)
    return -code * along / square.clamp_min(torch.finfo(square.dtype).tiny)


def variables_of_factors(layer: SparseLowRankLinear, scale: Tensor) -> Iterator[Variable]:
    """u and v. scale: D, (in,)."""
    factors = layer.factors()
    if factors is None:
        return
    u, v = (factor.detach().to(working_dtype(factor)) for factor in factors)
    if layer.spec.factor_bits is None:
        # The masters are balanced, and what is stored keeps its own units.
        of_columns, of_rows = LowRank(u, v * scale).balancing()
        yield plain(layer.get_parameter("low_rank_u"), of_columns)
        yield plain(layer.get_parameter("low_rank_v"), scale / of_rows.unsqueeze(1))
        return
    # Not balanced: u and v were mixed to reduce the rounding error.
    yield coded(layer, "low_rank_u", u, torch.ones_like(u[0, 0]))
    yield coded(layer, "low_rank_v", v, scale)


def coded(layer: SparseLowRankLinear, name: str, factor: Tensor, unit: Tensor) -> Variable:
    """A factor that is stored as codes in the layer, and their values in the leaf."""
    leaf = factor.clone().requires_grad_()
    layer.wide_factors[name] = leaf
    # The stored dtype of scales: they have a wider one while the block is `computing`.
    dtype = layer.weight.dtype

    def store(value: Tensor) -> None:
        rows = nearest(value, dtype)
        layer.get_buffer(name).copy_(rows.codes)
        layer.get_parameter(f"{name}_scale").copy_(rows.scale)
        leaf.copy_(rows.values())

    return Variable(leaf, factor * unit, unit, store)


def norms(block: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of the norms of a block: vectors of modules with "norm" in their names."""
    for module in block.modules():
        weight = getattr(module, "weight", None)
        is_norm = "norm" in type(module).__name__.lower()
        if is_norm and isinstance(weight, nn.Parameter) and weight.ndim == 1:
            yield weight
