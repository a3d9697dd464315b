"""Sensitivity: how much the predictions of the model change if one layer alone is pruned or
rounded.

Let g_t be the gradient, with respect to a layer's output at token t, of the log-likelihood of
labels that are drawn from the model's own predictions. To second order the divergence of the
predictions after a change ΔW of the layer is

    KL ≈ ½ · mean over tokens of (g_tᵀ ΔW x_t)²

since the expectation of g gᵀ is the Fisher information (Martens, arXiv 1412.1193). One forward and
one backward pass give g at the output of every layer. Blocks run backwards one at a time, each from
its inputs, which are kept: at most one block is in memory.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasslefree.core.entropy import encode
from hasslefree.core.gram import Gram, working_dtype
from hasslefree.core.grids import Grid
from hasslefree.core.patterns import Pattern
from hasslefree.core.protocols import Method
from hasslefree.distributed import World
from hasslefree.errors import HasslefreeError, ModelError, NonFiniteError, lacks_memory, option
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import (
    MomentSums,
    checked,
    groups_by_input,
    probes,
    tensors_read,
    widest_dtype,
)
from hasslefree.models.calls import hooks
from hasslefree.models.experts import every_expert_called
from hasslefree.models.precision import as_multiplied, computing, only_trained
from hasslefree.models.sites import find_sites
from hasslefree.models.walk import Visit, Walk
from hasslefree.planning.plan import LayerPlan, Plan
from hasslefree.progress import ALLOCATION, PROBES
from hasslefree.solve.decompose import approximation
from hasslefree.solve.methods.joint import QUICK_PRUNING
from hasslefree.solve.methods.joint_on_grid import JointOnGrid

if TYPE_CHECKING:
    from hasslefree.allocate.ends import EndProbe

T = TypeVar("T")
# The bits per weight of the codes of a matrix, and the `expected_loss` of its error.
BitsAndError = tuple[float, float]
# Number of tokens whose labels are sampled at a time.
TOKENS = 256
# The least weight of an output, relative to the mean: an output that no gradient reached on the
# probes still counts a little.
LEAST_WEIGHT = 1e-3
# Tolerance of the bits of an entropy-coded grid in `bits_and_error`, as a share of them.
ROUGH = 0.1
# Difference between the seeds of two segments.
SPREAD = 0x9E3779B97F4A7C15


def probe_method(grid: Grid | None) -> Method:
    """A fast method that prunes a layer for the probes, or rounds it to a grid."""
    if grid is None:
        return QUICK_PRUNING
    rounds = QUICK_PRUNING.rounds
    return JointOnGrid(grid, rounds=rounds, turns=1, passes=0, ranges=1, rate_tolerance=ROUGH)


def bits_and_error(
    weight: Tensor, gram: Gram, prepared: Any, pattern: Pattern, grid: Grid
) -> BitsAndError:
    """Approximate a weight (out, in), in the working dtype, on a grid by `probe_method`.

    Args:
        prepared: result of `probe_method(grid).prepare(gram)`.
    """
    found = approximation(probe_method(grid), weight, gram, prepared, pattern, 0, 0)
    error = gram.expected_loss(weight - found.sparse)
    if grid.rate is None or found.scaling is None:
        return grid.stored_bits, error
    words = len(encode(found.scaling.codes(found.sparse)))
    return 32 * words / weight.numel(), error


def some_rows(weight: Tensor, rows: int) -> Tensor:
    """At most `rows` rows of a weight, evenly spaced."""
    count = len(weight)
    chosen = torch.linspace(0, count - 1, min(rows, count)).long()
    return weight[chosen.to(weight.device)]


@dataclass(frozen=True)
class BackwardVisit:
    """A block while the gradients run backwards through the model.

    Args:
        visit: the block and its call.
        states: the inputs of the block on the probes.
        gradients: with respect to the outputs of the block; after its backward pass, with respect
            to its inputs.
        tokens: number of tokens in the probes of this process; 0 in a process without probes,
            which runs a segment that does not count.
    """

    visit: Visit
    states: Activations
    gradients: Activations
    tokens: int


def sensitivities(
    walk: Walk,
    plan: Plan,
    segments: Tensor,
    world: World,
    inspect: "Inspect[T]",
    seed: int = 0,
    ends: "EndProbe | None" = None,
) -> list[dict[str, tuple[T, float]]]:
    """The result and the sensitivity that `inspect` returns for each planned layer, by block and by
    name in the block.

    The sensitivity is an estimate of the mean over tokens of KL(dense ‖ changed) between the
    models' predictions, in nats, on the first segments (`probes`), with only this layer changed. A
    layer that no gradient reaches, such as an indexer of attention, which only selects, gets the
    mean of the block's other layers.

    Args:
        segments: of this process.
        seed: of the labels.
        ends: watches embedding and head in the same passes.
    """
    total = round(world.total(len(segments), segments.device))
    count = len(world.local(range(probes(total, segments.shape[1]))))
    segments = segments[: max(count, 1)]
    watched = ends if count else None
    measured: list[dict[str, tuple[T, float]]] = [{} for _ in plan.blocks]
    with walk.phases.phase(ALLOCATION, len(plan.blocks), "blocks") as phase:
        with walk.phases.phase(PROBES, len(walk.blocks.modules), "blocks") as probing:
            hidden = walk.entering(segments)
            entering: list[Activations] = []
            check_predictions(walk, segments, hidden)
            for _ in walk.visits(hidden):
                entering.append(hidden.copy())
                probing.advance()
            gradients = gradients_of_labels(walk, segments, hidden, world, seed, watched)
        for visit in walk.backwards():
            tokens = count * segments.shape[1]
            backward = BackwardVisit(visit, entering.pop(), gradients, tokens)
            plans = plan.blocks[visit.index]
            measured[visit.index] = block_sensitivities(backward, plans, world, inspect)
            phase.advance()
        if watched is not None:
            watched.at_embedding(segments, gradients)
    return measured


def check_predictions(
    walk: Walk,
    segments: Tensor,
    states: Activations,
) -> None:
    """Raise a ModelError, before any work, if the output head cannot run without the blocks."""
    try:
        with walk.head(), torch.no_grad():
            walk.logits(segments[0], states[0])
    except HasslefreeError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise ModelError(
            f"the output head of {type(walk.model).__name__} cannot be run on its own"
            f" ({type(error).__name__}: {error}), which {option('allocate', 'error')} and"
            f" prediction matching need; use {option('allocate', 'uniform')} and"
            f" {option('match_predictions', 0)}"
        ) from error


def gradients_of_labels(
    walk: Walk,
    segments: Tensor,
    states: Activations,
    world: World,
    seed: int,
    ends: "EndProbe | None",
) -> Activations:
    """The gradient of log p(label), summed over tokens, with respect to the outputs of the last
    block.
    """
    gradients = states.copy()
    with walk.head(), torch.enable_grad():
        for index, segment in enumerate(segments):
            position = index * world.size + world.rank
            generator = torch.Generator().manual_seed((seed + SPREAD * position) % 2**63)
            leaf = states[index].requires_grad_()
            logits = walk.logits(segment, leaf)
            if ends is not None:
                ends.at_head(segment, leaf.detach(), logits)
            labels = sample_labels(logits.detach(), generator)
            loss = F.cross_entropy(logits.to(working_dtype(logits)), labels, reduction="sum")
            [gradient] = torch.autograd.grad(loss, leaf)
            if not torch.isfinite(gradient).all():
                raise NonFiniteError(
                    "the gradient of the model's predictions contains NaN or Inf; try another"
                    f" dtype ({option('dtype', 'float32')}), or {option('allocate', 'uniform')}"
                )
            gradients[slice(index, index + 1)] = gradient
    return gradients


def sample_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token id for each row of logits (tokens, vocabulary) from their softmax."""
    labels: list[Tensor] = []
    last = logits.shape[1] - 1
    for rows in logits.split(TOKENS):
        cumulative = F.softmax(rows.to(working_dtype(rows)), -1).cumsum(-1)
        uniform = torch.rand(len(rows), 1, generator=generator, dtype=torch.float64)
        threshold = uniform.to(cumulative) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, threshold, right=True)
        labels.append(drawn.squeeze(1).clamp_max(last))
    return torch.cat(labels)


@dataclass(frozen=True)
class ProbedLayer:
    """A layer of the dense model on the probes.

    Args:
        name: in the model.
        weight: (out, in).
        gram: of its inputs.
        prepared: result of `probe_method(…).prepare(gram)`, in the process that owns the layer.
        inputs: (rows, in). The rows are the tokens of this process's probes; for the layer of an
            expert, the tokens that were routed to it.
        gradients: of the labels' log-likelihood with respect to the outputs of the layer, (rows,
            out); None if no gradient reaches it.
        tokens: number of tokens in the probes of all processes.
        owner: rank of the process that prunes or rounds the layer.
        world: the processes that share the probes.
    """

    name: str
    weight: Tensor
    gram: Gram
    prepared: Any
    inputs: Tensor
    gradients: Tensor | None
    tokens: int
    owner: int
    world: World

    def changed(self, pattern: Pattern, grid: Grid | None) -> Tensor:
        """S of `probe_method`: (out, in), in the working dtype, the same in all processes."""
        # Contiguous, as NCCL wants it; the weight of an expert may be a transposed view.
        kept = self.weight.new_empty(self.weight.shape, dtype=self.gram.matrix.dtype)
        if self.owner == self.world.rank:
            weight = self.weight.to(kept.dtype)
            method = probe_method(grid)
            result = approximation(method, weight, self.gram, self.prepared, pattern, 0, 0)
            kept.copy_(result.sparse)
        self.world.broadcast_(kept, self.owner)
        return kept

    def measured(self, pattern: Pattern, grid: Grid) -> BitsAndError:
        """`bits_and_error` of the layer, the same in all processes."""
        measured = None
        if self.owner == self.world.rank:
            weight = self.weight.to(self.gram.matrix.dtype)
            measured = bits_and_error(weight, self.gram, self.prepared, pattern, grid)
        shared: BitsAndError = self.world.broadcast(measured, self.owner)
        return shared

    def output_weights(self) -> Tensor | None:
        """The mean square of the gradient at each output, relative to the mean over all outputs,
        and at least `LEAST_WEIGHT`: (out,) in the working dtype, the same in all processes.

        None if no gradient reaches the layer.
        """
        if self.gradients is None:
            return None
        squares = self.gradients.square().sum(0, dtype=widest_dtype(self.gradients.device))
        self.world.add(squares)
        mean = squares.mean()
        if not mean > 0:  # NaN is not
            return None
        return (squares / mean).clamp_min(LEAST_WEIGHT).to(self.gram.matrix.dtype)

    def sample(self, rows: int) -> "ProbedLayer":
        """The layer with some of its outputs, without gradients."""
        return replace(self, weight=some_rows(self.weight, rows), gradients=None)

    def divergence(self, changed: Tensor, rows_independent: bool = False) -> float:
        """The estimated mean KL(dense ‖ changed) per token, in nats; 0 if no gradient reaches the
        layer.

        Args:
            changed: another weight, (out, in).
            rows_independent: the errors of two outputs are independent, as with rounding. Their
                products, which are 0 on average, are left out: in a model with attention sinks, few
                tokens decide the sum, and chance would not cancel.
        """
        if self.gradients is None:
            return 0.0
        change = (self.weight.to(self.gram.matrix.dtype) - changed).T
        output_change = self.inputs.to(change.dtype) @ change
        # (g_t)_o (ΔW x_t)_o for each token t and output o; the sum over outputs is g_tᵀ ΔW x_t.
        first_order = output_change.mul_(self.gradients)
        if not rows_independent:
            first_order = first_order.sum(-1)
        norm = torch.linalg.vector_norm(first_order, dtype=widest_dtype(change.device))
        local = norm.square().item()
        divergence = 0.5 * self.world.total(local, first_order.device) / self.tokens
        if not math.isfinite(divergence):
            raise NonFiniteError(
                f"the gradient at the output of layer {self.name} contains NaN or Inf; try another"
                f" dtype ({option('dtype', 'float32')}), or {option('allocate', 'uniform')}"
            )
        return divergence

    def rate(self, changed: Tensor, rows_independent: bool = False) -> float:
        """The divergence per unit of loss on the probes; 0 without a loss. Arguments as for
        `divergence`.
        """
        # Even without a loss: `divergence` sums over all processes.
        divergence = self.divergence(changed, rows_independent)
        loss = self.gram.loss(self.weight.to(changed.dtype) - changed)
        if loss == 0.0:
            return 0.0
        return divergence / loss


# Measures a planned layer: returns a result, and the sensitivity of the layer.
Inspect = Callable[[ProbedLayer, LayerPlan], tuple[T, float]]


def block_sensitivities(
    backward: BackwardVisit, plans: Mapping[str, LayerPlan], world: World, inspect: Inspect[T]
) -> dict[str, tuple[T, float]]:
    """Inspect the planned layers of one block, in the order of the plan.

    Overwrites the gradients with those at the inputs of the block.
    """
    visit = backward.visit
    states = backward.states
    groups = groups_by_input(tensors_read(visit.block, visit.call, states[0], plans))
    inputs, outer = inputs_and_gradients(backward, groups)
    sites = find_sites(visit.block)
    tokens = round(world.total(backward.tokens, states.device))
    inspected: dict[str, T] = {}
    divergences: dict[str, float] = {}
    for group in groups:
        rows = inputs[group[0]]
        sums = MomentSums(states.states.shape[1])
        sums.take(rows)
        gram = checked(sums.gram(world), f"{visit.prefix}.{group[0]}")
        owners = world.assign([plans[name].dense_parameters for name in group])
        prepared = None
        if world.rank in owners:
            prepared = probe_method(plans[group[0]].grid).prepare(gram)
        for name, owner in zip(group, owners, strict=True):
            full_name = f"{visit.prefix}.{name}"
            weight = sites[name].weight()
            gradients = outer[name]
            layer = ProbedLayer(
                full_name, weight, gram, prepared, rows, gradients, tokens, owner, world
            )
            inspected[name], divergence = inspect(layer, plans[name])
            if gradients is not None:
                divergences[name] = divergence
    mean = sum(divergences.values()) / max(len(divergences), 1)
    return {name: (inspected[name], divergences.get(name, mean)) for name in plans}


class Recording:
    """The inputs of the layers of a block, and the gradients at their outputs, in its passes.

    Attributes:
        inputs: of the first layer of each group, by its name: one tensor (tokens, in) per call.
        gradients: at the output of each layer: one (tokens, out) per call, in the order of the
            calls, like the inputs; autograd fills them in another order.
        reached: the layers that a gradient has reached.
    """

    def __init__(self) -> None:
        self.inputs: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.gradients: defaultdict[str, list[Tensor]] = defaultdict(list)
        self.reached: set[str] = set()

    def hooks(self, block: nn.Module, groups: list[list[str]]) -> list[Any]:
        """Begin to record. Returns handles, whose `remove()` ends it.

        Args:
            groups: names of layers; the layers of a group read the same input.
        """
        sites = find_sites(block)
        handles = []
        for group in groups:
            first = group[0]
            handles.append(sites[first].on_input(partial(self.keep_input, first)))
            for name in group:
                handles.append(sites[name].on_output(partial(self.keep_gradient, name)))
        return handles

    def keep_input(self, name: str, x: Tensor) -> None:
        rows = x.detach().flatten(0, -2).clone()
        self.inputs[name].append(as_multiplied(rows))

    def keep_gradient(self, name: str, y: Tensor) -> None:
        gradient = torch.zeros_like(y, dtype=working_dtype(y)).flatten(0, -2)
        self.gradients[name].append(gradient)

        def fill(g: Tensor) -> None:
            gradient.copy_(g.flatten(0, -2))
            self.reached.add(name)

        if y.requires_grad:
            y.register_hook(fill)


def inputs_and_gradients(
    backward: BackwardVisit, groups: list[list[str]]
) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
    """The inputs (tokens, in) of the first layer of each group, and the gradient (tokens, out) at
    the output of each layer, None if no gradient reaches it.
    """
    block = backward.visit.block
    call = backward.visit.call
    states = backward.states
    gradients = backward.gradients
    recording = Recording()
    with (
        hooks(recording.hooks(block, groups)),
        every_expert_called(block),
        computing(block),
        only_trained(block, []),
        torch.enable_grad(),
    ):
        for index in range(len(states)):
            leaf = states[index].requires_grad_()
            [gradient] = torch.autograd.grad(call.run(block, leaf), leaf, gradients[index])
            gradients[slice(index, index + 1)] = gradient

    rows: dict[str, Tensor] = {}
    for name, parts in recording.inputs.items():
        rows[name] = rows_of(parts, backward.tokens)
    gradient_rows: dict[str, Tensor | None] = dict.fromkeys(recording.gradients)
    for name in recording.reached:
        gradient_rows[name] = rows_of(recording.gradients[name], backward.tokens)
    return rows, gradient_rows


def rows_of(parts: list[Tensor], tokens: int) -> Tensor:
    """The rows of all calls of a layer; none in a process without probes, where `tokens` is 0."""
    rows = torch.cat(parts)
    if tokens == 0:
        return rows[:0]
    return rows
