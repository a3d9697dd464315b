"""An estimate of a compression before it runs: memory of the device and RAM, time, and options that
need less memory.

Memory is the largest of three moments, each a sum of a few terms (`Footprint`): what is outside the
blocks is read and written; a block is run and solved; all compressed blocks are trained together.
Time is products of float32 matrices: 2 · tokens · parameters for a forward pass and twice that for
a backward pass, and 2 · rounds · out · in² for each layer (out, in).
"""

import dataclasses
import logging
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hasslefree.core.protocols import Method
from hasslefree.errors import LINE, MemoryShortError, option
from hasslefree.models.activations import STORAGES, check_storage
from hasslefree.models.blocks import Blocks, find_blocks
from hasslefree.models.calibrate import BATCH, activation_values, probes, sums_bytes
from hasslefree.models.experts import share_of_tokens, split_experts
from hasslefree.models.load import load_shapes, refuse_compressed, resolve_seqlen
from hasslefree.models.precision import product_dtype
from hasslefree.models.rules import by_kind
from hasslefree.planning.machine import free_memory, in_one_pass, product_rate, room_for_sums
from hasslefree.planning.plan import (
    LayerPlan,
    Plan,
    bytes_on_disk,
    plan_of,
    relative_cost,
    select,
)
from hasslefree.planning.schedule import HELD_OUT_ROWS, Training, segments_for, segments_held_out
from hasslefree.progress import ALLOCATION, CHECK, INPUTS, PREDICTIONS, PROBES, REFERENCE, SOLVING
from hasslefree.recipe.recipe import Recipe
from hasslefree.recipe.resolve import Resolved
from hasslefree.solve.methods.joint import CHECKS, QUICK_PRUNING
from hasslefree.solve.scaled import cache_bytes
from hasslefree.units import FLOAT, size

logger = logging.getLogger(__name__)

# Bytes that Python and the libraries take, in RAM and of a GPU.
LIBRARIES = 600_000_000
# Matrices (tokens, width of the widest layer) that a forward pass holds at a time.
FORWARD = 5
# On a CPU, the memory of a solver over that of its matrices: the C library keeps some of what was
# freed.
HEAP = 1.2
# Matrices (tokens, vocabulary) held at a time when labels are drawn from predictions.
LOGITS = 5
# Float32 matrices that a solver takes besides W and H, at most: (in, in), (out, in), and (out + in,
# rank). benchmarks/memory.py measures them for each method.
SQUARES = 11
ARRAYS = 12
FACTORS = 8
# Numbers for each trained one: the master, its unit and the two moments of Adam.
MASTERS = 4
RAM = torch.device("cpu")


@dataclass(frozen=True)
class Setup:
    """A compression, on one of its processes.

    Args:
        tokens: calibration segments, and tokens in each.
        width: numbers per token between blocks; None for the width of the embeddings. Blocks that
            take more than hidden states are known only once the model has run.
        prefetch: whether blocks are read and written in the background.
        by_name: whether weights are read from the disk even if the model is loaded.
    """

    model: PreTrainedModel
    blocks: Blocks
    plan: Plan
    resolved: Resolved
    tokens: tuple[int, int]
    device: torch.device
    storage: str
    processes: int = 1
    width: int | None = None
    prefetch: bool = True
    by_name: bool = False

    @property
    def layers(self) -> list[LayerPlan]:
        return [layer for plans in self.plan for layer in plans.values()]

    @property
    def loaded(self) -> int:
        """Bytes of the weights that are in memory before the compression."""
        return 0 if self.by_name else bytes_of(p for p in self.model.parameters() if not p.is_meta)

    @property
    def embeddings(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def text_tokens(self) -> int:
        """Calibration tokens of a process."""
        return -(-self.tokens[0] // self.processes) * self.tokens[1]

    @property
    def probe_tokens(self) -> int:
        """Tokens of a process that run through the dense model, with gradients; 0 if none do."""
        if self.resolved.allocate != "error":
            return 0
        return -(-probes(*self.tokens) // self.processes) * self.tokens[1]

    @property
    def matched_tokens(self) -> int:
        """Tokens of a process on which predictions are matched, at most; 0 if they are not."""
        return (
            -(-segments_for(self.resolved.match_predictions, self.tokens[1]) // self.processes)
            * self.tokens[1]
        )

    @property
    def checked_tokens(self) -> int:
        """Held-out tokens, at most; every process runs all of them."""
        return segments_held_out(self.tokens[1]) * self.tokens[1] if self.resolved.check else 0

    @property
    def at_once(self) -> bool:
        """Whether all segments run through a block at once, and its layers are solved meanwhile."""
        in_order = self.resolved.sequential == "layer"
        return in_order and in_one_pass(max(self.activation_values(self.text_tokens)), self.device)

    def activation_values(self, tokens: int) -> list[float]:
        """The `activation_values` of the planned layers of each block."""
        shapes = ({name: layer.spec.shape for name, layer in plans.items()} for plans in self.plan)
        return [
            activation_values(block, each, tokens)
            for block, each in zip(self.blocks.modules, shapes, strict=True)
        ]


def setup_of(
    name: str,
    recipe: Recipe,
    device: torch.device,
    storage: str,
    processes: int = 1,
    trust_remote_code: bool = False,
) -> Setup:
    """The compression of a model by name, from its configuration alone."""
    resolved = recipe.resolve(with_text=False)
    check_storage(storage)
    model = load_shapes(name, recipe.dtype, trust_remote_code)
    refuse_compressed(model.config, name)
    split_experts(model)
    selection = select(find_blocks(model), resolved)
    tokens = recipe.samples, resolve_seqlen(model, recipe.seqlen)
    return Setup(
        model,
        selection.blocks,
        plan_of(model, selection, resolved),
        resolved,
        tokens,
        device,
        storage,
        processes,
    )


@dataclass(frozen=True)
class Footprint:
    """What a compression takes on one process, at most. Sizes are in bytes.

    device, ram: by what takes them, at the peak; the same on a CPU. activations: hidden states.
    disk: the folder.
    """

    device: dict[str, int]
    ram: dict[str, int]
    activations: int
    disk: int

    @property
    def device_peak(self) -> int:
        return total(self.device)

    @property
    def ram_peak(self) -> int:
        return total(self.ram)


def estimate(setup: Setup) -> Footprint:
    """The footprint of a compression, from shapes alone."""
    on_cpu, inside = (
        setup.device.type == "cpu",
        [bytes_of(block.parameters()) for block in setup.blocks.modules],
    )
    outside = bytes_of(setup.model.parameters()) - sum(inside)
    head = {"embeddings and head": 2 * outside}
    if setup.probe_tokens or setup.matched_tokens:
        head["logits"] = LOGITS * FLOAT * setup.tokens[1] * setup.embeddings.num_embeddings
    elif setup.checked_tokens:
        head["logits"] = (
            LOGITS * FLOAT * min(HELD_OUT_ROWS, setup.tokens[1]) * setup.embeddings.num_embeddings
        )
    block = {"block": max(map(block_bytes, repeat(setup), setup.blocks.modules, setup.plan))}
    moments: list[dict[str, int]] = [head, block | solving_terms(setup)]
    if setup.matched_tokens:
        moments.append(in_training(setup) | max(head, block, key=total))
    peak = max(moments, key=total)
    device = {"libraries": LIBRARIES, "loaded model": max(setup.loaded - max(inside), 0)} | peak
    ram = (
        device
        if on_cpu
        else {"libraries": 2 * LIBRARIES, "weights": 2 * max(outside, total(block))}
    )
    if setup.matched_tokens and not on_cpu and setup.storage != "device":
        ram["masters"] = masters(setup)
    if (
        setup.prefetch and len(setup.plan) > 1
    ):  # on CUDA, pinned memory comes in powers of two; writing takes a copy
        read = 0 if setup.loaded else max(inside) * (1 if on_cpu else 2)
        ram["prefetch"] = read + 2 * max(
            sum(layer.bytes for layer in plans.values()) for plans in setup.plan
        )
    states = setup.matched_tokens + max(
        setup.text_tokens, (2 + len(setup.plan)) * setup.probe_tokens
    )
    states += 2 * setup.checked_tokens
    activations = FLOAT * (setup.width or setup.embeddings.embedding_dim) * states
    if setup.storage != "disk":
        (device if setup.storage == "device" else ram)["hidden states"] = activations
    return Footprint(device, ram, activations, bytes_on_disk(setup.model, setup.plan))


def total(terms: dict[str, int]) -> int:
    return sum(terms.values())


def bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def block_bytes(setup: Setup, block: nn.Module, plans: dict[str, LayerPlan]) -> int:
    """A dense block, in float32 too if its products are, and its compressed layers."""
    wide = [
        p
        for p in block.parameters()
        if p.element_size() < FLOAT and not product_dtype(p.dtype, setup.device)
    ]
    compressed = sum(layer.bytes for layer in plans.values())
    return bytes_of(block.parameters()) + FLOAT * sum(p.numel() for p in wide) + compressed


def solving_terms(setup: Setup) -> dict[str, int]:
    """A forward pass through a block that sums Gram matrices, and the solver: one after the other,
    or at once.
    """
    device, widest = setup.device, max(max(layer.spec.shape) for layer in setup.layers)
    tokens = (
        setup.text_tokens if setup.at_once else min(setup.text_tokens, max(setup.tokens[1], BATCH))
    )
    forward = FORWARD * FLOAT * widest * tokens
    if (
        setup.probe_tokens
    ):  # the inputs of all layers of a block, and the gradients of their outputs
        forward = max(forward, 2 * FLOAT * round(max(setup.activation_values(setup.probe_tokens))))
    sums, solver = Counter[tuple[int, str]](), 0
    for index, plans in enumerate(setup.plan):
        for name, layer in plans.items():
            (out, width), rank = layer.spec.shape, layer.spec.rank
            needs = workspace(out, width, rank, device.type)
            solver = max(solver, FLOAT * out * width + needs)
            # One pass sums for all layers of a block, or for one; layers of the same name are
            # experts of a mixture.
            kind = name.rpartition(".")[2] if setup.resolved.sequential == "layer" else ""
            sums[index, kind] += sums_bytes(width)
    most = min(max(sums.values()), max(room_for_sums(device), sums_bytes(widest)))
    solver = round((most // 3 + solver) * (HEAP if device.type == "cpu" else 1))
    if setup.at_once:
        return {"forward pass": forward, "Gram matrices and solver": max(most, solver)}
    return {"Gram matrices and solver": max(forward + most, solver)}


def workspace(out: int, width: int, rank: int, device: str) -> int:
    """The bytes that a solver takes at most besides W and H for a layer (out, width).

    Args:
        device: a type of device, such as "cuda".
    """
    numbers = SQUARES * width**2 + ARRAYS * out * width + FACTORS * (out + width) * rank
    kernels = min(CHECKS * FLOAT * width**2, cache_bytes(device))
    return FLOAT * numbers + kernels


def rounds_of(method: Method) -> int:
    """The number of products out × in × in that a method takes for a layer."""
    return getattr(method, "rounds", 1)


def masters(setup: Setup) -> int:
    return MASTERS * FLOAT * sum(layer.spec.trained for layer in setup.layers)


def in_training(setup: Setup) -> dict[str, int]:
    """All compressed blocks, what enters each, what a step keeps of all or, if tight, of one, and
    Adam's numbers.
    """
    tokens = Training().tokens(setup.tokens[1])
    states = len(setup.plan) * tokens * FLOAT * (setup.width or setup.embeddings.embedding_dim)
    numbers = setup.activation_values(tokens)
    if in_one_pass(sum(numbers), setup.device):
        # S + u v; the steps of a grid, for the gradients of its scales; and what is trained, with
        # its gradients.
        sums = sum(
            layer.spec.dense_parameters * (2 if layer.spec.grid else 1) for layer in setup.layers
        )
        copies = sums + 2 * sum(layer.spec.trained for layer in setup.layers)
        step = FLOAT * (sum(numbers) + copies)
    else:
        step = 2 * FLOAT * max(numbers)
    on_device = setup.device.type == "cpu" or setup.storage == "device"
    return {
        "compressed blocks": sum(layer.bytes for layer in setup.layers),
        "training step": states + round(step),
        "masters": masters(setup) if on_device else 0,
    }


def flops_by_phase(setup: Setup) -> dict[str, float]:
    """The floating-point operations of one process in each phase; phases without any are left
    out.
    """
    resolved, tokens, head = setup.resolved, setup.text_tokens, setup.embeddings.weight.numel()
    parameters = squares = 0.0
    for block, plans in zip(setup.blocks.modules, setup.plan, strict=True):
        for name, parameter in block.named_parameters():
            parameters += share_of_tokens(block, name.rpartition(".")[0]) * parameter.numel()
        squares += sum(
            share_of_tokens(block, name) * layer.spec.shape[1] ** 2 for name, layer in plans.items()
        )
    forward, grams = 2 * tokens * parameters, 2 * tokens * squares
    # A pass for each group of layers with the same input, about one for two kinds, and one that
    # moves on.
    by_layer = 1 + len(by_kind(setup.plan[0])) / 2
    passes = 1 if setup.at_once else 2 if resolved.sequential == "block" else by_layer
    volume = sum(map(relative_cost, setup.layers)) / setup.processes
    probing = 2 * setup.probe_tokens * (parameters + head)
    looks = 2 * (rounds_of(QUICK_PRUNING) + len(resolved.grids))
    phases = {
        REFERENCE: 2 * setup.matched_tokens * parameters,
        PROBES: probing,
        ALLOCATION: 2 * probing + looks * volume if probing else 0.0,
        INPUTS: grams + passes * forward + 4 * setup.checked_tokens * parameters,
        SOLVING: 2 * rounds_of(resolved.solver) * volume,
        # A step runs a block forward, again and backward; predictions of both models, and a
        # backward pass of the head.
        PREDICTIONS: 2 * setup.matched_tokens * (4 * parameters + 3 * head),
        CHECK: 4 * setup.checked_tokens * head,
    }
    return {name: float(flops) for name, flops in phases.items() if flops}


def seconds_by_phase(setup: Setup, without: Collection[str] = ()) -> dict[str, float]:
    """How long the phases of a compression should take on this machine. without: phases that it
    does not run.
    """
    rate = product_rate(setup.device)
    return {
        name: flops / rate for name, flops in flops_by_phase(setup).items() if name not in without
    }


def fits(setup: Setup) -> bool:
    footprint = estimate(setup)
    if footprint.ram_peak > free_memory(RAM, setup.processes):
        return False
    return footprint.device_peak <= free_memory(setup.device, setup.processes)


def without_prefetch_if_tight(setup: Setup) -> Setup:
    """The compression as it runs here: blocks are read and written in the background only if there
    is memory.
    """
    return setup if fits(setup) else dataclasses.replace(setup, prefetch=False)


def check_memory(setup: Setup) -> Setup:
    """The compression as it runs here."""
    lean = dataclasses.replace(setup, prefetch=False)
    if not fits(lean):
        lines = [f"not enough memory; {remedy(lean)}"]
        raise MemoryShortError(LINE.join([*lines, *map(": ".join, peaks(lean).items())]))
    if setup.prefetch and not fits(setup):
        logger.info(
            "not enough memory to read and write blocks in the background: each block is read,"
            " compressed and written in turn, which takes longer"
        )
        return lean
    return setup


def remedy(setup: Setup) -> str:
    """What to change in a compression that does not fit in memory."""
    advice = next(
        (f"it fits with {advice}" for other, advice in remedies(setup) if fits(other)), None
    )
    return advice or "it needs a machine with more memory"


def verdict(setup: Setup) -> str | None:
    """Why a compression cannot run here, and what to change; None if it can."""
    lean = dataclasses.replace(setup, prefetch=False)
    need = estimate(lean).disk + (
        sum(layer.bytes for layer in setup.layers) if setup.matched_tokens else 0
    )
    free = shutil.disk_usage(".").free
    wrong = [] if fits(lean) else [f"It does not fit in memory; {remedy(lean)}."]
    if need > free:
        wrong.append(
            f"This disk has {size(free)} free of the {size(need)} needed; free some, or write to"
            " another."
        )
    return " ".join(wrong) or None


def peaks(setup: Setup) -> dict[str, str]:
    """The peak of each memory, with its terms, and what is available, in words."""
    footprint = estimate(setup)
    memories = {"peak of RAM": (footprint.ram, RAM)}
    if setup.device.type != "cpu":
        memories = {f"peak of {setup.device}": (footprint.device, setup.device)} | memories
    return {
        name: (
            f"{size(total(terms))}, of {size(free_memory(device, setup.processes))} available: "
            + ", ".join(f"{term} {size(value)}" for term, value in terms.items() if value)
        )
        for name, (terms, device) in memories.items()
    }


def remedies(setup: Setup) -> Iterator[tuple[Setup, str]]:
    """Options that need less memory, each as the compression with it: first those that change the
    result least.
    """
    change, resolved, disk = dataclasses.replace, setup.resolved, option("activations", "disk")
    for storage in STORAGES[STORAGES.index(setup.storage) + 1 :]:
        yield change(setup, storage=storage), option("activations", storage)
    loaded = setup.loaded > 0
    if loaded:
        by_name = f"{disk} and the model's name or folder in the place of the loaded model"
        yield change(setup, storage="disk", by_name=True), by_name
    blockwise = change(setup, resolved=change(resolved, match_predictions=0))
    if resolved.match_predictions:
        yield blockwise, f"{option('match_predictions', 0)}, which keeps one block in memory"
        yield change(blockwise, storage="disk"), f"{option('match_predictions', 0)} {disk}"
    if setup.probe_tokens:
        fast = change(resolved, allocate="uniform", match_predictions=0)
        yield change(setup, resolved=fast), f"{option('effort', 'fast')}, which runs no probes"
    if not loaded and setup.device.type != "cpu":
        yield change(setup, device=RAM), option("device", "cpu")
        yield change(setup, device=RAM, storage="disk"), f"{option('device', 'cpu')} {disk}"
