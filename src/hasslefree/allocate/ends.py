"""The loss of embedding and head on each grid, in nats per token, measured with the probes.

Both are rounded to the nearest values of one grid, with errors E. The divergence of the predictions
with a rounded head is measured. A rounded embedding moves the inputs of the first block by Δ_t, and
to second order the divergence is ½ · mean over tokens of (g_tᵀ Δ_t)² (`allocate.sensitivity`).
Divided by tr(E H Eᵀ) for the head and by ‖E‖² for the embedding, the divergence gives a rate, with
which the losses of other errors are estimated. A tied matrix thus loses

    rate · tr(E (H + αI) Eᵀ),    α = rate of the embedding / rate of the head
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from hasslefree.allocate.options import (
    GridOptions,
    LayerChoice,
    errors_on,
    grids_like,
    reciprocal,
)
from hasslefree.allocate.sensitivity import bits_and_error, probe_method, some_rows
from hasslefree.core.gram import Gram, working_dtype
from hasslefree.core.grids import Grid
from hasslefree.core.predictions import kl_by_token
from hasslefree.distributed import World
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import MomentSums, widest_dtype
from hasslefree.models.calls import hooks
from hasslefree.models.ends import End
from hasslefree.models.precision import as_multiplied
from hasslefree.models.sites import find_site
from hasslefree.models.walk import Walk, values_replaced
from hasslefree.planning.plan import LayerPlan
from hasslefree.recipe.resolve import Resolved

# The bits to which embedding and head are rounded for the rates.
ROUNDED_BITS = 4
# The most bits by which the rate of an end may differ from the rate in the uniform plan.
NEAR = 0.5
# The errors of this many rows stand for the errors of all rows.
ROWS = 2048


@dataclass
class EndProbe:
    """Watches the probes at both ends of the dense model.

    Args:
        plans: by the name of the end.
        seqlen: tokens per segment.
        look_ups: α by the name of a tied matrix, filled by `choices`.
    """

    walk: Walk
    plans: Mapping[str, LayerPlan]
    world: World
    seqlen: int
    rounded: dict[str, Tensor] = field(default_factory=dict)
    errors: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    divergence_of_head: float = 0.0
    divergence_of_embedding: float = 0.0
    look_ups: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = MomentSums(self.seqlen)
        if not self.plans:
            return  # parameters outside the blocks need not be read
        with self.walk.outside():
            for name, plan in self.plans.items():
                weight = self.walk.model.get_parameter(f"{name}.weight").detach()
                assert plan.grid is not None
                grid = replace(plan.grid, bits=ROUNDED_BITS, rate=None)
                wide = weight.to(working_dtype(weight))
                nearest = grid.scaling(wide).nearest(wide).to(weight.dtype)
                self.rounded[name] = nearest
                self.errors[name] = wide - nearest

    @property
    def ends(self) -> list[End]:
        """The matrices that have a plan."""
        return [end for end in self.walk.blocks.ends if end.name in self.plans]

    @property
    def head(self) -> End | None:
        """The planned matrix that is a head."""
        return next((end for end in self.ends if end.head is not None), None)

    @property
    def embedding(self) -> End | None:
        """The planned matrix that is an embedding."""
        return next((end for end in self.ends if end.embedding is not None), None)

    def at_head(
        self,
        segment: Tensor,
        states: Tensor,
        logits: Tensor,
    ) -> None:
        """Add the divergence of the predictions with the rounded head on a segment.

        Args:
            segment: token ids (tokens,).
            states: outputs of the last block, as `Walk.logits` takes them.
            logits: of the dense model, (tokens, vocabulary).
        """
        self.tokens += len(segment)
        head = self.head
        if head is None or head.head is None:
            return
        walk = self.walk
        weight = f"{head.name}.weight"
        # `computing` may have widened the parameter.
        dtype = walk.model.get_parameter(weight).dtype
        values = {weight: self.rounded[head.name].to(dtype)}

        def take(x: Tensor) -> None:
            self.inputs.take(as_multiplied(x.reshape(-1, x.shape[-1])))

        site = find_site(walk.model, head.head)
        watching = hooks([site.on_input(take)])
        with torch.no_grad(), watching, values_replaced(walk.model, values):
            changed = walk.logits(segment, states)
        self.divergence_of_head += kl_by_token(logits.detach(), changed).sum().item()

    def at_embedding(self, segments: Tensor, gradients: Activations) -> None:
        """Measure the divergence for the rounded embedding.

        Args:
            segments: token ids (samples, tokens).
            gradients: of the labels' log-likelihood with respect to the inputs of the first block.
        """
        end = self.embedding
        if end is None:
            return
        values = {f"{end.name}.weight": self.rounded[end.name]}
        before = self.walk.entering(segments)
        after = replace(self.walk, rounded=values).entering(segments)
        for index in range(len(segments)):
            change = after[index] - before[index]
            first_order = (change * gradients[index]).sum(-1, dtype=widest_dtype(change.device))
            self.divergence_of_embedding += 0.5 * first_order.square().sum().item()

    def choices(self, resolved: Resolved) -> dict[str, LayerChoice]:
        """The options and the sensitivity of each matrix, by name."""
        return {end.name: self.choice(end, resolved) for end in self.ends}

    def norm(self, end: End) -> tuple[Gram, float]:
        """The second moment H that weights the error E of a matrix, and the loss per tr(E H Eᵀ)."""
        errors = self.errors[end.name]
        of_embedding = self.rate(self.divergence_of_embedding, errors.square().sum().item())
        if end.head is None:
            return Gram.identity(end.shape[1]).to(errors), of_embedding
        if not self.inputs.count:
            self.inputs.take(errors[:0])  # a process without probes takes part in the sums
        gram = self.inputs.gram(self.world).to(errors)
        of_head = self.rate(self.divergence_of_head, gram.loss(errors))
        if end.embedding is None:
            return gram, of_head
        look_ups = of_embedding * reciprocal(of_head)
        self.look_ups[end.name] = look_ups
        return with_look_ups(gram, look_ups), of_head

    def rate(self, summed: float, error: float) -> float:
        """The mean divergence per token and unit of error.

        Args:
            summed: divergence, summed over the tokens of this process.
        """
        device = self.walk.weights.device
        tokens = self.world.total(self.tokens, device)
        return self.world.total(summed, device) / tokens * reciprocal(error)

    def choice(self, end: End, resolved: Resolved) -> LayerChoice:
        """The options and the sensitivity of a matrix, from the errors of some of its rows."""
        gram, loss_per_error = self.norm(end)
        with self.walk.outside():
            weight = self.walk.model.get_parameter(f"{end.name}.weight").detach()
            sample = some_rows(weight, ROWS).to(gram.matrix.dtype)
        prepared = probe_method(resolved.end_grids[0]).prepare(gram)
        uniform = self.plans[end.name]
        assert uniform.grid is not None
        grids = [uniform.grid]
        if resolved.embedding_bits is None:
            grids = grids_like(uniform, resolved.end_grids, resolved)
        # The loss per error is measured on an error that is alike in all inputs. The error of an
        # entropy-coded end is not: the estimate is too rough to move the end far from the layers.
        rate = uniform.grid.rate
        near = [grid for grid in grids if rate is None or abs(grid.stored_bits - rate) <= NEAR]
        plans = [replace(uniform, grid=grid) for grid in near]
        measure = partial(bits_and_error, sample, gram, prepared, uniform.kept)
        losses: dict[Grid, Tensor] = {}
        share = len(weight) / len(sample)
        for grid, lost in errors_on(grids, measure, share).items():
            losses[grid] = torch.tensor([lost], dtype=torch.float64)
        return LayerChoice(GridOptions(plans, losses), loss_per_error, end.name)


def with_look_ups(gram: Gram, look_ups: float) -> Gram:
    """H + αI, α = `look_ups`."""
    matrix = gram.matrix.clone()
    matrix.diagonal().add_(look_ups)
    return Gram(matrix, gram.tokens)
