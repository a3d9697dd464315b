"""The estimated memory of a compression, and which options to change if there is too little.

It is a sum of a few named terms, computed from shapes. Every term is an upper bound.
"""

import logging
import shutil
from dataclasses import dataclass, replace

import torch

from hasslefree.errors import LINE, MemoryShortError, option
from hasslefree.models.calibrate import BATCH, pass_bytes, sums_bytes
from hasslefree.models.experts import SplitExperts
from hasslefree.models.load import quantization
from hasslefree.models.precision import product_dtype
from hasslefree.planning.disk import bytes_to_write
from hasslefree.planning.machine import free_memory, in_one_pass, local_processes, room_for_sums
from hasslefree.planning.plan import LayerPlan, bytes_of
from hasslefree.planning.schedule import HELD_OUT_ROWS, Training
from hasslefree.planning.setup import Setup
from hasslefree.solve.at_rate import ROWS
from hasslefree.solve.methods.joint import CHECKS
from hasslefree.solve.scaled import cache_bytes
from hasslefree.units import FLOAT, size

logger = logging.getLogger(__name__)

# Memory of Python and the libraries, in bytes, in RAM and on a GPU.
LIBRARY_BYTES = 600_000_000
# Number of matrices (tokens, width of the widest layer) that a forward pass holds at a time.
FORWARD = 5
# On a CPU, the memory of a solver relative to its matrices: the C library keeps some freed memory.
HEAP = 1.2
# Number of matrices (tokens, vocabulary) held while labels are drawn from predictions.
LOGITS = 5
# The most float32 matrices of a solver besides H: (in, in), for `joint` and for other methods;
# (out, in), with W; and (out + in, rank). Measured by benchmarks/memory.py.
SQUARES_OF_JOINT = 4
SQUARES = 11
ARRAYS = 13
FACTORS = 8
# Numbers for each trained one: the master, its unit and the two moments of Adam.
MASTER_NUMBERS = 4
# Bytes per entry of an entropy-coded embedding or head while its steps are searched: the entry in
# float32, and codes, of two tries and while they are encoded.
SEARCH = 10
RAM = torch.device("cpu")

LIBRARIES = "libraries"
LOADED = "loaded model"
ENDS = "embeddings and head"
BLOCK = "block"
PREFETCH = "prefetch"
SOLVER = "solver"
PROBES = "probes"
TRAINING = "training"
MASTERS = "masters"
STATES = "hidden states"
# Terms below this share of a peak are not listed.
NAMED = 0.02
# Bytes by the name of the term.
Terms = dict[str, int]

DISK = option("activations", "disk")
UNTRAINED = option("match_predictions", 0)
UNIFORM = option("allocate", "uniform")
# Options that need less memory, and the terms that they remove, in the order of their effect on the
# result.
REMEDIES = {
    DISK: (STATES,),
    f"{DISK} and the model's name or folder instead of the loaded model": (STATES, LOADED),
    f"{UNTRAINED}, which keeps one block in memory": (TRAINING, MASTERS),
    f"{UNTRAINED} {DISK}": (TRAINING, MASTERS, STATES),
    f"{UNIFORM} {UNTRAINED} {DISK}, which runs no probes": (TRAINING, MASTERS, STATES, PROBES),
}


@dataclass(frozen=True)
class Footprint:
    """The most memory that one process of a compression takes, in bytes.

    Args:
        device, ram: the terms of each memory; the same dictionary on a CPU.
    """

    setup: Setup
    device: Terms
    ram: Terms

    @property
    def fits(self) -> bool:
        """True if the available memory suffices."""
        processes = self.setup.processes
        if total(self.ram) > free_memory(RAM, processes):
            return False
        return total(self.device) <= free_memory(self.setup.device, processes)

    def without(self, *names: str) -> "Footprint":
        """The footprint without these terms."""
        device = {name: taken for name, taken in self.device.items() if name not in names}
        ram = {name: taken for name, taken in self.ram.items() if name not in names}
        return Footprint(self.setup, device, ram)

    def peaks(self) -> dict[str, str]:
        """The peak of each memory with its largest terms, and the available memory, in words."""
        memories = {self.setup.device: self.device, RAM: self.ram}
        peaks = {}
        for device, taken in memories.items():
            name = "RAM" if device == RAM else str(device)
            free = free_memory(device, self.setup.processes)
            least = NAMED * total(taken)
            terms = [f"{term} {size(amount)}" for term, amount in taken.items() if amount > least]
            peak = f"{size(total(taken))}, of {size(free)} available: {', '.join(terms)}"
            peaks[f"peak of {name}"] = peak
        return peaks


def total(terms: Terms) -> int:
    """The bytes at the peak. Probes, solver and training take memory one after the other."""
    phases = [terms.get(name, 0) for name in (PROBES, SOLVER, TRAINING)]
    return sum(terms.values()) - sum(phases) + max(phases)


def estimate(setup: Setup) -> Footprint:
    """The footprint of a compression, from shapes alone."""
    on_cpu = setup.device.type == "cpu"
    blocks = [sum(p.nbytes for p in block.parameters()) for block in setup.blocks.modules]
    outside = setup.model_bytes - sum(blocks)
    loaded = sum(p.nbytes for p in setup.model.parameters() if not p.is_meta)
    largest = block_bytes(setup)
    # The inputs of all layers of a block, and the gradients of their outputs.
    probes = pass_bytes(max(setup.activation_values(setup.probe_tokens)))
    device = {
        LIBRARIES: LIBRARY_BYTES,
        LOADED: max(loaded - max(blocks), 0),
        ENDS: 2 * outside + logits_bytes(setup) + ends_bytes(setup),
        BLOCK: largest,
        PROBES: solver_bytes(setup, probes) if setup.probe_tokens else 0,
        SOLVER: solver_bytes(setup, forward_bytes(setup)),
        TRAINING: training_bytes(setup) if setup.matched_tokens else 0,
    }
    # On CUDA, pinned memory comes in powers of two; writing takes a copy.
    read = 0 if loaded else max(blocks) * (1 if on_cpu else 2)
    written = max(map(bytes_of, setup.plan.parts))
    ram = {
        LIBRARIES: 2 * LIBRARY_BYTES,
        "weights": 2 * max(outside, largest),
        PREFETCH: read + 2 * written,
    }
    if on_cpu:
        ram = device | {PREFETCH: ram[PREFETCH]}
        device = ram
    stored = device if setup.storage == "device" else ram
    if setup.matched_tokens:
        stored[MASTERS] = MASTER_NUMBERS * FLOAT * setup.trained
    if setup.storage != "disk":
        stored[STATES] = states_bytes(setup)
    return Footprint(setup, device, ram)


def block_bytes(setup: Setup) -> int:
    """The largest block: dense, a float32 copy if its products need one, and compressed layers."""
    largest = 0
    for block, plans in zip(setup.blocks.modules, setup.plan.blocks, strict=True):
        taken = bytes_of(plans)
        for parameter in block.parameters():
            taken += parameter.nbytes
            if parameter.itemsize < FLOAT and not product_dtype(parameter.dtype, setup.device):
                taken += FLOAT * parameter.numel()
        largest = max(largest, taken)
    return largest


def logits_bytes(setup: Setup) -> int:
    """The predictions for a segment, or for the rows of a segment that are measured at a time."""
    rows = 0
    if setup.probe_tokens or setup.matched_tokens:
        rows = setup.seqlen
    elif setup.checked_tokens:
        rows = min(HELD_OUT_ROWS, setup.seqlen)
    return LOGITS * FLOAT * rows * setup.embeddings.num_embeddings


def ends_bytes(setup: Setup) -> int:
    """The compressed embedding and head, packed and unpacked, and the solver for some rows."""
    taken = 0
    solver = 0
    for end in setup.plan.ends.values():
        out, width = end.shape
        taken += end.size + 2 * end.dense_size
        needed = workspace(setup, replace(end, shape=(min(ROWS, out), width)))
        if end.grid is not None and end.grid.rate is not None:
            needed += SEARCH * out * width
        solver = max(solver, needed)
    return taken + solver


def forward_bytes(setup: Setup) -> int:
    """A forward pass through a block."""
    tokens = setup.text_tokens
    if not setup.at_once:
        tokens = min(tokens, max(setup.seqlen, BATCH))
    widest = max(max(layer.shape) for layer in setup.plan.layers)
    return FORWARD * FLOAT * widest * tokens


def solver_bytes(setup: Setup, forward: int) -> int:
    """A pass through a block that sums Gram matrices, and then the solver, beside the matrices.

    Args:
        forward: bytes of the pass.
    """
    widest = max(layer.shape[1] for layer in setup.plan.layers)
    most = 0
    for plans in setup.plan.blocks:
        most = max(most, sum(sums_bytes(layer.shape[1]) for layer in plans.values()))
    most = min(most, max(room_for_sums(setup.device), sums_bytes(widest)))
    solver = max(workspace(setup, layer) for layer in setup.plan.layers) + most // 3
    if setup.device.type == "cpu":
        solver = round(HEAP * solver)
    return forward + max(most, solver)


def workspace(setup: Setup, layer: LayerPlan) -> int:
    """Memory of a solver for a layer besides H, in bytes."""
    out, width = layer.shape
    squares = SQUARES_OF_JOINT if setup.resolved.method == "joint" else SQUARES
    numbers = squares * width**2 + ARRAYS * out * width + FACTORS * (out + width) * layer.rank
    kernels = min(CHECKS * FLOAT * width**2, cache_bytes(setup.device.type))
    return FLOAT * numbers + kernels


def training_bytes(setup: Setup) -> int:
    """All compressed blocks, the inputs of each, and the activations that a step keeps: of all
    blocks or, if memory is short, of one.
    """
    tokens = Training().tokens(setup.seqlen)
    values = setup.activation_values(tokens)
    numbers = len(setup.plan.blocks) * tokens * setup.state_width
    if in_one_pass(sum(values), setup.device):
        numbers += round(sum(values)) + 2 * setup.trained  # with its gradients
        for layer in setup.plan.layers:
            # S + u v, and the steps of a grid, for the gradients of its scales.
            numbers += layer.dense_parameters * (2 if layer.grid else 1)
    else:
        numbers += round(2 * max(values))
    decoded = 0
    for layer in setup.plan.layers:
        if layer.grid is not None and layer.grid.rate is not None:
            decoded += layer.dense_parameters  # a byte each, beside the stream
    return sum(map(bytes_of, setup.plan.blocks)) + decoded + FLOAT * numbers


def states_bytes(setup: Setup) -> int:
    """The hidden states of the calibration text, or the inputs of each block on the probes; and the
    hidden states of the training and the held-out text.
    """
    probing = (2 + len(setup.plan.blocks)) * setup.probe_tokens
    tokens = max(setup.text_tokens, probing) + setup.matched_tokens + 2 * setup.checked_tokens
    return FLOAT * setup.state_width * tokens


def footprint_here(setup: Setup) -> Footprint:
    """The footprint on this machine: blocks are read and written in the background only if there is
    enough memory.
    """
    footprint = estimate(setup)
    return footprint if footprint.fits else footprint.without(PREFETCH)


def check_memory(setup: Setup) -> bool:
    """Return True if blocks can be read and written in the background.

    Raises:
        MemoryShortError: there is not enough memory; the message names the options to change.
    """
    footprint = footprint_here(setup)
    if not footprint.fits:
        peaks = map(": ".join, footprint.peaks().items())
        raise MemoryShortError(LINE.join([f"not enough memory; {remedy(footprint)}", *peaks]))
    if PREFETCH in footprint.ram:
        return True
    logger.info(
        "not enough memory to read and write blocks in the background: each block is read,"
        " compressed and written in turn, which takes longer"
    )
    return False


def remedy(footprint: Footprint) -> str:
    """The change with which a compression fits in memory, in words."""
    in_ram = replace(footprint.setup, storage="cpu")
    if estimate(in_ram).without(PREFETCH).fits:
        return f"it fits with {option('activations', 'cpu')}"
    for options, names in REMEDIES.items():
        if footprint.without(*names).fits:
            return f"it fits with {options}"
    if footprint.setup.device == RAM:
        return "it needs a machine with more memory"
    return f"it needs a GPU with more memory, or {option('device', 'cpu')}"


def disk_bytes(setup: Setup) -> int:
    """The most bytes that a compression takes on the disk: the folder and, for each process, the
    weights converted while the model is loaded, and hidden states in a file.
    """
    model = setup.model
    converted = 0
    if quantization(model.config):
        converted = setup.model_bytes
    else:
        for module in model.modules():
            if isinstance(module, SplitExperts):  # stored one by one, and fused by transformers
                converted += sum(parameter.nbytes for parameter in module.parameters())
    if setup.storage == "disk":
        converted += states_bytes(setup)
    written = bytes_to_write(model, setup.blocks, setup.plan, setup.resolved)
    return written + local_processes(setup.processes) * converted


def verdict(footprint: Footprint) -> str | None:
    """The reason for which a compression cannot run here, and the remedy; None if it can."""
    setup = footprint.setup
    wrong = []
    if not footprint.fits:
        wrong.append(f"It does not fit in memory; {remedy(footprint)}.")
    need = disk_bytes(setup)
    free = shutil.disk_usage(".").free
    if need > free:
        wrong.append(
            f"This disk has {size(free)} free of the {size(need)} needed; free some, or write to"
            " another."
        )
    return " ".join(wrong) or None
