"""Rotation: before pruning, choose coordinates in which pruning removes less; the model's function does not change.

Two rotations cost no bytes, since the matrices on either side take them in (`models.stream`): one of the residual
stream, for the whole model, and one of the values of each attention head. They are learned, by Adam on the share of
importance that the pattern removes. Where Q rotates the inputs of W, with second moment H, that is

    Σ over removed (i, j) of (W Q)²_ij / [(QᵀHQ)⁻¹]_jj

as in SparseGPT (arXiv 2301.00774); where it rotates the outputs, of (QᵀW)²_ij / [H⁻¹]_jj. What L would recover is not
counted. Rotations for pruning: DenoiseRotator (arXiv 2505.23049), which stores them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hasslefree.core.cost import FLOAT
from hasslefree.core.linalg import inverse_
from hasslefree.core.patterns import Pattern
from hasslefree.distributed import World
from hasslefree.errors import ModelError, option
from hasslefree.folder.record import RotationRecord
from hasslefree.models.activations import Activations
from hasslefree.models.moments import gather, groups_by_input
from hasslefree.models.precision import solving
from hasslefree.models.stream import HeadUse, StreamUse, head_use, one_after_the_other, outer_use, stream_use, tied
from hasslefree.models.streaming import Change
from hasslefree.models.walk import Visit, Walk
from hasslefree.phases import BLOCK_ROTATION, STREAM_ROTATION
from hasslefree.recipe.plan import LayerPlan, Plan

logger = logging.getLogger(__name__)

# Blocks whose layers the rotation of the stream is learned on, evenly spaced, and rows of each matrix.
BLOCKS, ROWS = 8, 1024
# Calibration segments for H, and its damping.
SEGMENTS, DAMPING = 16, 0.01


@dataclass(frozen=True)
class Learning:
    """How a rotation is learned: the exponential of a skew matrix, whose entries Adam moves from zero.

    Args:
        steps: of Adam. learning_rate: at the first one, falling along half a cosine to zero.
    """

    steps: int = 150
    learning_rate: float = 0.01


# The importance of the entries of a matrix after a rotation; of the inputs, or of the outputs.
Importance = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Term:
    """A matrix that rotates along: the importance of its entries, and the pattern that it will have."""

    importance: Importance
    pattern: Pattern

    def removed(self, rotation: Tensor) -> Tensor:
        """The importance that the pattern removes, a scalar."""
        found = self.importance(rotation)
        return (found * ~self.pattern.mask(found.detach())).sum()


def of_inputs(weight: Tensor, inverse: Tensor) -> Importance:
    """Of W Q. weight: (out, in); inverse: H⁻¹, (in, in)."""
    return lambda q: (weight @ q).square() / (q * (inverse @ q)).sum(0)


def of_outputs(weight: Tensor, diagonal: Tensor) -> Importance:
    """Of QᵀW. weight: (out, in); diagonal: of H⁻¹, (in,)."""
    return lambda q: (q.T @ weight).square() / diagonal


def of_head_inputs(weight: Tensor, inverse: Tensor, heads: HeadUse) -> Importance:
    """Of W with its inputs rotated head by head. weight: (out, in); inverse: H⁻¹, (in, in)."""
    count = weight.shape[1] // heads.size
    each = weight.unflatten(1, (count, heads.size)).transpose(0, 1)
    blocks = torch.stack([inverse[i : i + heads.size, i : i + heads.size] for i in range(0, len(inverse), heads.size)])

    def importance(q: Tensor) -> Tensor:
        q = q.repeat_interleave(count // heads.count, dim=0)
        found = (each @ q).square() / (q * (blocks @ q)).sum(1, keepdim=True)
        return found.transpose(0, 1).flatten(1)

    return importance


def of_head_outputs(weight: Tensor, diagonal: Tensor, heads: HeadUse) -> Importance:
    """Of W with its outputs rotated head by head. weight: (out, in); diagonal: of H⁻¹, (in,)."""
    each = weight.unflatten(0, (heads.count, heads.size))
    return lambda q: ((q.mT @ each).square() / diagonal).flatten(0, 1)


def learned(
    terms: Sequence[Term], start: Tensor, how: Learning, stepped: Callable[[], None] | None = None
) -> tuple[Tensor, float]:
    """The rotation after which the pattern removes least, as far as it was found.

    Args:
        terms: count alike, each by what is removed over what was before. start: of the rotation, (…, size, size);
            no rotation is a start too. stepped: called after each step, and once more.

    Returns:
        Q, (…, size, size), and what is removed over what was before, on average; never more than 1.
    """
    with torch.no_grad():
        before = [term.removed(start).clamp_min(torch.finfo(start.dtype).tiny) for term in terms]
    skew = torch.zeros_like(start).requires_grad_()
    optimizer = torch.optim.Adam([skew], lr=how.learning_rate)
    best, found = 1.0, start
    for step in range(how.steps + 1):
        rotation = start @ torch.matrix_exp(skew - skew.mT)
        leaf = rotation.detach().requires_grad_()
        total = 0.0
        for term, norm in zip(terms, before, strict=True):
            share = term.removed(leaf) / norm / len(terms)
            share.backward()
            total += share.item()
        if total < best:
            best, found = total, leaf.detach()
        optimizer.param_groups[0]["lr"] = how.learning_rate * (1 + math.cos(math.pi * step / how.steps)) / 2
        optimizer.zero_grad()
        rotation.backward(leaf.grad)
        optimizer.step()
        if stepped is not None:
            stepped()
    return orthogonal(found), best


def orthogonal(near: Tensor) -> Tensor:
    """The orthogonal matrix that is nearest to one which is orthogonal up to rounding."""
    u, _, v = torch.linalg.svd(near.double())
    return (u @ v).to(near.dtype)


def rotate(walk: Walk, plan: Plan, segments: Tensor, world: World, how: Learning | None = None) -> RotationRecord:
    """Rotate a model so that the plan's patterns remove less; its predictions do not change.

    Args:
        segments: of this process.

    Raises:
        ModelError: neither the residual stream nor the heads can be rotated; the message says why.
    """
    how = how or Learning()
    hidden = walk.entering(segments[: max(SEGMENTS // world.size, 1)])
    entering, seen = hidden[0].clone(), Seen(walk, plan, world, how)
    if reason := tied(walk.model):
        seen.left_out["stream"] = f"the residual stream cannot be rotated: {reason}"
    for visit in walk.phases.counted(BLOCK_ROTATION, walk.visits(hidden), len(plan), "blocks"):
        seen.look(visit, hidden)
    found: RotationRecord = world.broadcast(seen.rotated(segments[0], entering, hidden[0]))
    for reason in found["left_out"]:
        logger.info("rotation: %s", reason)
    return found


@dataclass
class Seen:
    """What is known about rotating the dense model, collected block by block.

    Args:
        streams: how each block uses the stream; terms: for its rotation. heads: for each block its heads, and their
            rotations. shares: what is removed after these over before.
        left_out: the first reason of each kind why something cannot be rotated.
    """

    walk: Walk
    plan: Plan
    world: World
    how: Learning
    streams: list[StreamUse] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    heads: dict[int, tuple[HeadUse, Tensor]] = field(default_factory=dict)
    shares: list[float] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def look(self, visit: Visit, hidden: Activations) -> None:
        """At a block, while it is in memory."""
        plans, states = self.plan[visit.index], hidden[0].clone()
        self.world.broadcast_(states, 0)  # so that all processes come to the same conclusions
        groups = groups_by_input(visit.block, visit.call, states, plans)
        grams = gather(visit.block, visit.prefix, visit.call, hidden, groups, self.world.add)
        with solving(states.device):
            known = [inverse_(gram.damped(DAMPING).matrix) for gram in grams]
        inverses = {name: inverse for group, inverse in zip(groups, known, strict=True) for name in group}
        if "stream" not in self.left_out:
            try:
                use = stream_use(visit.block, visit.call, states)
                self.streams.append(use)
                if visit.index in chosen(len(self.plan)):
                    self.terms += stream_terms(visit, plans, use, inverses)
            except ModelError as error:
                self.left_out["stream"] = f"the residual stream cannot be rotated: in {visit.prefix}, {error.message}"
        self.turn_heads(visit, plans, states, inverses)

    def turn_heads(
        self, visit: Visit, plans: Mapping[str, LayerPlan], states: Tensor, inverses: Mapping[str, Tensor]
    ) -> None:
        """Learn the rotation of a block's heads, where it has any."""
        known = next(iter(self.heads.values()))[0] if self.heads else None
        try:
            use = head_use(visit.block, visit.call, states, known)
        except ModelError as error:
            self.left_out.setdefault(
                "heads", f"the attention heads of {visit.prefix} cannot be rotated: {error.message}"
            )
            return
        terms = list(head_terms(visit, plans, use, inverses))
        if not terms:
            return
        start = torch.eye(use.size).to(states).repeat(use.count, 1, 1)
        with solving(states.device), torch.enable_grad():
            rotations, share = learned(terms, start, self.how)
        self.world.broadcast_(rotations, 0)  # processors of different kinds round otherwise
        self.heads[visit.index] = use, rotations
        self.shares.append(share)

    def rotated(self, segment: Tensor, entering: Tensor, leaving: Tensor) -> RotationRecord:
        """Change the weights of the model, and return the record."""
        walk, model = self.walk, self.walk.model
        changes: dict[str, Change] = {}
        stream = None
        if "stream" not in self.left_out:
            try:
                outer, embeddings = outer_use(walk, segment, entering, leaving)
                rotation, stream = self.learned_stream(entering)
                changes = outer.changes(model, rotation) | {embeddings: lambda weight: weight @ rotation}
            except ModelError as error:
                self.left_out["stream"] = f"the residual stream cannot be rotated: {error.message}"
        if stream is None and not self.heads:
            raise ModelError(
                f"nothing in this model can be rotated: {'; '.join(self.left_out.values())}. "
                f"Leave out {option('rotate', True)}"
            )
        for index, block in enumerate(walk.blocks.modules):
            own = [self.streams[index].changes(block, rotation)] if stream is not None else []
            own += [self.heads[index][0].changes(block, self.heads[index][1])] if index in self.heads else []
            named = one_after_the_other(*own)
            changes |= {f"{walk.blocks.prefix(index)}.{name}": change for name, change in named.items()}
        walk.weights.change(model, changes)
        heads = sum(self.shares) / len(self.shares) if self.shares else None
        return RotationRecord(stream=stream, heads=heads, left_out=list(self.left_out.values()))

    def learned_stream(self, states: Tensor) -> tuple[Tensor, float]:
        """The rotation of the stream: (width, width). states: that enter the first block."""
        start = torch.eye(states.shape[-1]).to(states)
        steps = self.walk.phases.phase(STREAM_ROTATION, self.how.steps + 1, "steps")
        with steps as phase, solving(states.device), torch.enable_grad():
            rotation, share = learned(self.terms, start, self.how, phase.advance)
        self.world.broadcast_(rotation, 0)
        return rotation, share


def chosen(blocks: int) -> set[int]:
    """The indices of at most `BLOCKS` of the blocks, evenly spaced."""
    count = min(BLOCKS, blocks)
    return {(2 * i + 1) * blocks // (2 * count) for i in range(count)}


def stream_terms(
    visit: Visit, plans: Mapping[str, LayerPlan], use: StreamUse, inverses: Mapping[str, Tensor]
) -> Iterator[Term]:
    """Of the layers of a block that rotate with the stream. inverses: H⁻¹ of the inputs of each."""
    for name, site in visit.sites(list(plans)).items():
        pattern, inverse = plans[name].pattern, inverses[name]
        weight = site.weight().to(inverse.dtype)
        if name in use.reads:
            gain = use.norms[use.reads[name]].gain
            # Of the norm's output without gains: H⁻¹ = diag(g)⁻¹ N⁻¹ diag(g)⁻¹.
            yield Term(of_inputs(some_rows(weight * gain, pattern), gain[:, None] * inverse * gain), pattern)
        elif name in use.writes:
            columns = some_columns(weight.shape[1], pattern).to(weight.device)
            yield Term(of_outputs(weight[:, columns], inverse.diagonal()[columns]), pattern)


def head_terms(
    visit: Visit, plans: Mapping[str, LayerPlan], use: HeadUse, inverses: Mapping[str, Tensor]
) -> Iterator[Term]:
    """Of the layers of a block that rotate with the values of its heads. inverses: as for `stream_terms`."""
    sites = visit.sites([name for name in (use.values, use.output) if name in plans])
    for name, site in sites.items():
        inverse = inverses[name]
        weight = site.weight().to(inverse.dtype)
        own = name == use.values
        rotates = of_head_outputs(weight, inverse.diagonal(), use) if own else of_head_inputs(weight, inverse, use)
        yield Term(rotates, plans[name].pattern)


def some_rows(weight: Tensor, pattern: Pattern) -> Tensor:
    """At most `ROWS` rows, evenly spaced, where a pattern takes every row alone: enough to learn from."""
    if pattern.group is None:
        return weight
    return weight[:: -(-len(weight) // ROWS)].contiguous()


def some_columns(width: int, pattern: Pattern) -> Tensor:
    """The indices of about `ROWS` of the columns, in whole groups of the pattern; all where it has no groups."""
    every = torch.arange(width)
    if pattern.group is None:
        return every
    return every.view(-1, pattern.group)[:: -(-width // ROWS)].flatten()


def rotation_bytes(plan: Plan, width: int) -> int:
    """What learning the rotations of a model of this width takes at most, beside one block and the hidden states.

    The Grams of a block's inputs, as float64 sums, float32 means and inverses; a copy of the block in float32; of the
    blocks that the rotation of the stream is learned on, their layers and two inverses; and arrays for one of them.
    """
    shapes = [[layer.spec.shape for layer in plans.values()] for plans in plan]
    grams = max(sum(4 * inside**2 for _, inside in layers) for layers in shapes)
    copied = max(sum(out * inside for out, inside in layers) for layers in shapes)
    held = max(sum(ROWS * max(shape) for shape in layers) for layers in shapes) + 2 * width**2
    work = 8 * max(ROWS * max(shape) for layers in shapes for shape in layers) + 12 * width**2
    return FLOAT * (grams + copied + min(BLOCKS, len(plan)) * held + work)


def rotation_flops(plan: Plan, width: int) -> float:
    """The FLOPs of learning the rotation of the stream: of each step a product with every matrix, forwards and back."""
    rows = sum(min(ROWS, max(layer.spec.shape)) for plans in plan for layer in plans.values())
    return 3 * Learning().steps * 2 * rows * width**2 * min(BLOCKS, len(plan)) / len(plan)
