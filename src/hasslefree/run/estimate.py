"""An estimate of a compression before it runs: memory on each device, bytes on the disk, time."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hasslefree.core.cost import FLOAT, workspace
from hasslefree.levers.train import Training, segments_for
from hasslefree.models.activations import check_storage
from hasslefree.models.blocks import Blocks, by_kind, find_blocks, select_sites, towers
from hasslefree.models.experts import experts_of, split_experts
from hasslefree.models.load import load_shapes, refuse_compressed, resolve_seqlen
from hasslefree.models.moments import BATCH, pass_bytes, probes, sums_bytes, traffic
from hasslefree.models.precision import product_dtype
from hasslefree.recipe.plan import LayerPlan, Plan, bytes_on_disk, make_plan
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.flops import flops_by_phase
from hasslefree.run.machine import in_one_pass, room_for_sums
from hasslefree.run.sharing import cost_of, shared_layers
from hasslefree.solve.methods.joint import QUICK_PRUNING

# What Python and the libraries take, on a CPU and of a GPU.
LIBRARIES = 600_000_000
# Arrays (tokens, width of the widest layer) that a forward pass holds at a time.
FORWARD = 6
# Arrays (tokens, vocabulary) held at a time where labels are drawn from predictions.
LOGITS = 5
# What Adam holds of a kept value, in numbers: the master, its unit and two moments.
MASTER = 4


@dataclass(frozen=True)
class Footprint:
    """What a compression takes at most, on one of its processes. Sizes are in bytes.

    Args:
        layers: kind of layer (q_proj, …), its plan and how many there are. kept, dense: parameters of all layers.
        outside: what is outside the blocks. logits: of one segment, where the backward pass draws labels from them.
        block, solving: of the largest block: its weights before and after, and the Grams and the solver's arrays of its
            largest layer. resident: the rest of a model that is loaded already.
        beside: in RAM, the blocks that are read and written while another one is solved; 0 where none are.
        streams: hidden states of all segments. probes: those before each block that the backward pass keeps.
        reference, whole, masters: where predictions are matched, the dense model's last hidden states, all compressed
            blocks with what a step keeps of them, and what Adam holds for them; else 0.
        device: where it computes. storage: where the activations are. disk: the size of the folder.
        by_itself: what stays dense without being named, by kind.
        phases: the floating-point operations of each phase. levers: what is done beyond the layer, in words.
        unstated: plug-ins that state no cost, and are counted as the most expensive ones of this package.
    """

    blocks: int
    layers: tuple[tuple[str, LayerPlan, int], ...]
    kept: int
    dense: int
    outside: int
    logits: int
    block: int
    solving: int
    resident: int
    beside: int
    streams: int
    probes: int
    reference: int
    whole: int
    masters: int
    device: str
    storage: str
    disk: int
    phases: Mapping[str, float]
    levers: tuple[str, ...] = ()
    by_itself: tuple[str, ...] = ()
    unstated: tuple[str, ...] = ()

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def flops(self) -> float:
        """The floating-point operations of all phases."""
        return sum(self.phases.values())

    def seconds(self, rate: float) -> dict[str, float]:
        """How long each phase takes at so many floating-point operations a second."""
        return {name: flops / rate for name, flops in self.phases.items()}

    @property
    def unpacked(self) -> int:
        """Bytes of S of all layers where a GPU runs the result and S is unpacked."""
        return sum(layer.dense_bytes * count for _, layer, count in self.layers)

    @property
    def activations(self) -> int:
        """Bytes of hidden states at a time."""
        return self.reference + max(self.streams, self.probes)

    @property
    def device_peak(self) -> int:
        """Bytes of the device's memory."""
        here = self.storage == "device" or (self.storage == "cpu" and self.on_cpu)
        head = 2 * self.outside + self.logits
        blockwise = self.resident + max(head, self.block + self.solving + (self.beside if self.on_cpu else 0))
        together = self.whole + max(head, self.block) + (self.masters if here or self.on_cpu else 0)
        work = max(blockwise, together) if self.whole else blockwise
        return LIBRARIES + work + (self.activations if here else 0)

    @property
    def ram_peak(self) -> int:
        """Bytes of RAM; where the device is the CPU, that is all of it."""
        if self.on_cpu:
            return self.device_peak
        held = 2 * max(self.outside, self.block) + (self.activations if self.storage == "cpu" else 0)
        return 2 * LIBRARIES + held + self.beside + (self.masters if self.storage != "device" else 0)


def estimate(
    model: nn.Module,
    blocks: Blocks,
    plan: Plan,
    resolved: Resolved,
    tokens: tuple[int, int],
    device: torch.device,
    storage: str,
    processes: int = 1,
    width: int | None = None,
) -> Footprint:
    """The footprint of a compression on one of its processes, from shapes alone.

    Args:
        tokens: calibration segments, and tokens in each.
        width: numbers that each token hands from block to block; None for the width of the embeddings. Blocks that
            are given more than hidden states are known only once the model has run.
    """
    method = resolved.method
    samples, seqlen = -(-tokens[0] // processes), tokens[1]
    inside = {id(p) for block in blocks.modules for p in block.parameters()}
    outside = {id(p): p for p in model.parameters() if id(p) not in inside}.values()
    embedding: int = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    width = width or embedding
    layers = [layer for plans in plan for layer in plans.values()]
    loaded = _bytes(p for p in model.parameters() if not p.is_meta)
    vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    probed, logits = 0, 0
    if resolved.allocate == "error":
        probed = -(-probes(*tokens) // processes)
    if probed or resolved.match_predictions:
        logits = LOGITS * FLOAT * seqlen * vocabulary
    # At most: a short text has fewer.
    matched = -(-segments_for(resolved.match_predictions, seqlen) // processes)
    numbers = max(traffic_of(blocks, plan, samples * seqlen))
    at_once = resolved.recipe.sequential == "layer" and in_one_pass(numbers, device)
    kept = sum(layer.spec.parameters for layer in layers)
    return Footprint(
        blocks=len(blocks.modules),
        layers=tuple(kinds(plan)),
        kept=kept,
        dense=sum(layer.spec.dense_parameters for layer in layers),
        outside=_bytes(outside),
        logits=logits,
        block=max(
            _running(block, device) + _compressed(plans, resolved)
            for block, plans in zip(blocks.modules, plan, strict=True)
        ),
        solving=max(_solving(plans, resolved, device.type, processes) for plans in plan)
        + _passing(blocks, plan, resolved, seqlen, device, numbers if at_once else None),
        resident=max(loaded - max(_bytes(block.parameters()) for block in blocks.modules), 0),
        beside=_beside(blocks, plan, device),
        streams=samples * seqlen * width * FLOAT,
        probes=(2 + len(plan)) * probed * seqlen * width * FLOAT,
        reference=matched * seqlen * width * FLOAT,
        whole=_together(blocks, plan, Training().tokens(seqlen), width, device) if matched else 0,
        # In RAM, those of all processes.
        masters=MASTER * FLOAT * kept * (1 if storage == "device" else processes) if matched else 0,
        device=device.type,
        storage=storage,
        disk=bytes_on_disk(model, plan),
        phases=flops_by_phase(model, blocks, plan, resolved, tokens, processes, at_once),
        levers=tuple(levers_of(resolved)),
        by_itself=(*by_kind(select_sites(blocks, resolved.recipe.leave_dense).dense), *towers(model, blocks)),
        unstated=method.cost(*layers[0].spec.shape, layers[0].spec.rank).unstated,
    )


# What each allocation does, and its cost beyond one pass.
MOVED = {
    "owl": "budgets differ by block; one more pass of the dense model",
    "error": "ranks and non-zeros move between layers; on a few segments a forward and a backward pass of the dense "
    "model, and a first look at every layer",
}


def levers_of(resolved: Resolved) -> Iterator[str]:
    """A sentence for each lever beyond single layers: what it does, and what it costs."""
    if resolved.allocate in MOVED:
        yield f"allocation {resolved.allocate}: {MOVED[resolved.allocate]}"
    if resolved.match_predictions:
        yield (
            f"prediction matching: forward and backward passes of the whole model over {resolved.match_predictions:,} "
            "tokens at most, and 16 bytes for each value that is kept"
        )


def estimate_model(
    name: str, recipe: Recipe, device: torch.device, storage: str, processes: int = 1, trust_remote_code: bool = False
) -> Footprint:
    """The footprint of a compression of a model by name, from its configuration.

    Raises:
        HasslefreeError: a wrong recipe, a model that cannot be compressed, or layers that cannot meet the budget.
    """
    resolved = recipe.resolve(with_text=False)
    check_storage(storage)
    model = load_shapes(name, recipe.dtype, trust_remote_code)
    refuse_compressed(model.config, name)
    split_experts(model)
    blocks = find_blocks(model)
    tokens = recipe.samples, resolve_seqlen(model, recipe.seqlen)
    return estimate(model, blocks, make_plan(blocks, resolved), resolved, tokens, device, storage, processes)


def _bytes(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def _running(block: nn.Module, device: torch.device) -> int:
    """A dense block; and once more in float32, where its products are not in its own dtype."""
    parameters = list(block.parameters())
    wide = [p for p in parameters if p.element_size() < FLOAT and product_dtype(p.dtype, device) is None]
    return _bytes(parameters) + FLOAT * sum(p.numel() for p in wide)


def _beside(blocks: Blocks, plan: Plan, device: torch.device) -> int:
    """The next block, unless it is loaded, and the one before as it is written.

    Pinned memory comes in powers of two. What is written may be there twice: some versions of safetensors copy it.
    """
    if len(blocks.modules) == 1:
        return 0
    pinned = 2 if device.type == "cuda" else 1
    read = max(_bytes(p for p in block.parameters() if p.is_meta) for block in blocks.modules)
    written = max(
        _bytes(block.parameters()) + sum(layer.bytes - layer.dense_bytes for layer in plans.values())
        for block, plans in zip(blocks.modules, plan, strict=True)
    )
    return pinned * read + 2 * written


def _compressed(plans: dict[str, LayerPlan], resolved: Resolved) -> int:
    """The compressed layers of a block; where it is matched, with S unpacked, its gradient, and what Adam holds."""
    held = sum(layer.bytes for layer in plans.values())
    return held


def _passing(
    blocks: Blocks, plan: Plan, resolved: Resolved, seqlen: int, device: torch.device, at_once: float | None
) -> int:
    """A forward pass that collects Grams, and the sums for those of experts.

    Args:
        at_once: the `traffic` of all segments, where they run at once; else None.
    """
    widest = max(max(layer.spec.shape) for plans in plan for layer in plans.values())
    passing = FORWARD * max(seqlen, BATCH) * widest * FLOAT
    if at_once is not None:
        return max(passing, pass_bytes(at_once))
    return passing + max(map(_sums_of_experts, blocks.modules, plan, itertools.repeat(device)))


def _sums_of_experts(block: nn.Module, plans: dict[str, LayerPlan], device: torch.device) -> int:
    """The sums for the experts of a block, which one pass gathers together as far as there is room."""
    sizes: dict[str, int] = {}
    for name, layer in plans.items():
        if experts_of(block, name) is not None:
            kind = name.rpartition(".")[2]
            sizes[kind] = sizes.get(kind, 0) + sums_bytes(layer.spec.shape[1])
    return min(max(sizes.values(), default=0), room_for_sums(device))


def _solving(plans: dict[str, LayerPlan], resolved: Resolved, device: str, processes: int) -> int:
    """Grams in float32 and the arrays of a solver, or sums in float64 and a product, whichever is more.

    Of a layer that processes share, those for its rows. Groups of layers are not known from shapes; a layer that is
    shared among all of the block is shared among those of its group. Where targets lead to the dense model, the drift
    is there beside each Gram, and its correction in float64.
    """
    squares = [layer.spec.shape[1] ** 2 * 4 for layer in plans.values()]
    most = max(squares, default=0)
    grams = sum(squares) if resolved.recipe.sequential == "block" else most
    shared = shared_layers(resolved.method, plans, processes)
    uses = [(resolved.method, layer, processes if name in shared else 1) for name, layer in plans.items()]
    if resolved.allocate == "error":
        uses += [(QUICK_PRUNING, layer, 1) for layer in plans.values()]
    solvers = []
    for method, layer, sharing in uses:
        (out, width), rank = layer.spec.shape, layer.spec.rank
        needed = workspace(cost_of(method, layer, sharing, device), -(-out // sharing), width, rank)
        solvers.append(needed + 4 * layer.spec.dense_parameters)
    return max(2 * grams + most, grams + max(solvers, default=0))


def kinds(plan: Plan) -> Iterator[tuple[str, LayerPlan, int]]:
    """Each kind of layer (the last part of the name) of each shape: a plan, and how many there are."""
    found: dict[tuple[str, LayerPlan], int] = {}
    for name, layer in ((name, layer) for plans in plan for name, layer in plans.items()):
        kind = name.rpartition(".")[2], layer
        found[kind] = found.get(kind, 0) + 1
    yield from ((name, layer, count) for (name, layer), count in found.items())


def traffic_of(blocks: Blocks, plan: Plan, tokens: int) -> list[float]:
    """The `traffic` of the planned layers of each block."""
    shapes = ({name: layer.spec.shape for name, layer in plans.items()} for plans in plan)
    return [traffic(block, each, tokens) for block, each in zip(blocks.modules, shapes, strict=True)]


def _together(blocks: Blocks, plan: Plan, tokens: int, width: int, device: torch.device) -> int:
    """All compressed blocks, and what a step of `tokens` tokens keeps of them.

    Where the activations of all blocks fit, these, and of every layer S + u v, the places of S and float32 copies; else
    what enters each block, and the activations of one.
    """
    layers = [layer for plans in plan for layer in plans.values()]
    whole = sum(_bytes(block.parameters()) for block in blocks.modules)
    whole += sum(layer.bytes - layer.dense_bytes for layer in layers)
    numbers = traffic_of(blocks, plan, tokens)
    entering = len(blocks.modules) * tokens * width * FLOAT
    if not in_one_pass(sum(numbers), device):
        return whole + entering + pass_bytes(max(numbers))
    copies = sum(FLOAT * layer.spec.dense_parameters + 2 * FLOAT * layer.spec.parameters for layer in layers)
    return whole + entering + pass_bytes(sum(numbers)) + copies


def to_dict(found: Footprint) -> dict[str, Any]:
    """A footprint for JSON."""
    layers = [
        {"kind": n, "shape": list(p.shape), "pattern": p.kind, "rank": p.rank, "count": c}
        for n, p, c in ((name, plan.spec, count) for name, plan, count in found.layers)
    ]
    peaks = {name: getattr(found, name) for name in ("activations", "device_peak", "ram_peak", "flops")}
    fields = dataclasses.asdict(dataclasses.replace(found, layers=())) | {"place": found.storage}
    del fields["storage"]
    return fields | {"layers": layers} | peaks
