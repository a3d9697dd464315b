"""A plan as JSON and as a table for the terminal, and a table of advice."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hasslefree.errors import with_flags
from hasslefree.models.blocks import other_modalities
from hasslefree.models.unloaded import copied_bytes
from hasslefree.packed.kernels import byte_codes, int8
from hasslefree.packed.kernels.backends import Case, choose
from hasslefree.packed.kernels.codes import Nibbles
from hasslefree.planning.advice import Advice
from hasslefree.planning.disk import ROOM, bytes_on_disk, weights_on_disk
from hasslefree.planning.duration import flops_by_phase, seconds_by_phase
from hasslefree.planning.memory import footprint_here, states_bytes, total, verdict
from hasslefree.planning.plan import LayerPlan
from hasslefree.planning.selection import select
from hasslefree.planning.setup import Setup
from hasslefree.units import duration, size, span, table


def plan_summary(setup: Setup) -> dict[str, Any]:
    """The plan and the costs of a compression, for JSON. Sizes are in bytes, `phases` in
    floating-point operations.
    """
    footprint = footprint_here(setup)
    flops = flops_by_phase(setup)
    reasons = select(setup.blocks, setup.resolved).reasons()
    problem = verdict(footprint)
    return {
        "blocks": len(setup.plan.blocks),
        "layers": layer_rows(setup),
        "kept": sum(matrix.parameters for matrix in setup.plan.matrices),
        "dense": sum(matrix.dense_parameters for matrix in setup.plan.matrices),
        "disk": bytes_on_disk(setup.model, setup.plan),
        "to_run": bytes_to_run(setup),
        "unpacked": setup.plan.dense_size,
        "device": setup.device.type,
        "storage": setup.storage,
        "activations": states_bytes(setup),
        "device_peak": total(footprint.device),
        "ram_peak": total(footprint.ram),
        "memory": {"device": footprint.device, "ram": footprint.ram},
        "dense_by_default": [*reasons, *other_modalities(setup.model, setup.blocks)],
        "phases": flops,
        "flops": sum(flops.values()),
        "model": setup.model_bytes,
        "problem": with_flags(problem) if problem else None,
    }


def bytes_to_run(setup: Setup) -> int:
    """The bytes of the result in memory: codes of S in the format of the kernel, everything else as
    in the file.

    The formats of kernels include pruned entries. Without a kernel, entropy-coded codes take a byte
    each beside their stream, and other codes are as in the file.
    """
    device = setup.device.type
    held = weights_on_disk(setup.model, setup.plan) - copied_bytes(setup.model)
    for matrix in setup.plan.matrices:
        grid = matrix.grid
        if grid is None:
            continue
        out, width = matrix.shape
        backend = choose(Case(device, matrix.dtype, matrix.layout, False, grid, matrix.shape))
        if backend == "int8":
            codes = int8.bytes_of(out, width)
        elif backend == "int4":
            nibbles = Nibbles.fitting(grid.bits, grid.group or width, device)
            assert nibbles is not None
            codes = nibbles.bytes(out, width)
        elif backend == "numba":
            codes = byte_codes.bytes_of(out, width, grid.groups(width))
        else:
            if grid.rate is not None:
                held += out * width
            continue
        shape, _ = matrix.sparse_tensors()["weight_packed"]
        held += codes - math.prod(shape) * torch.int32.itemsize
    return held


def layer_rows(setup: Setup) -> list[dict[str, Any]]:
    """A row for each kind of layer and plan, for JSON."""
    counts: Counter[tuple[str, LayerPlan]] = Counter()
    for plans in setup.plan.parts:
        for name, layer in plans.items():
            counts[name.rpartition(".")[2], layer] += 1
    rows = []
    for (kind, layer), count in counts.items():
        rows.append(
            {
                "kind": kind,
                "shape": list(layer.shape),
                "pattern": layer.kind,
                "rank": layer.rank,
                "bits": layer.grid.stored_bits if layer.grid else None,
                "coding": "entropy" if layer.grid and layer.grid.rate else "fixed",
                "bytes": layer.size * count,
                "count": count,
                "kept": layer.parameters / layer.dense_parameters,
            }
        )
    return rows


def plan_table(setup: Setup, *more: Table) -> Group:
    """The plan of each kind of layer; its memory, disk and time; `more`; and whether it fits."""
    plan = plan_summary(setup)
    title = f"{plan['blocks']} blocks, {len(setup.plan.matrices)} layers"
    totals = Table.grid(padding=(0, 3, 0, 1), pad_edge=True)
    kept = plan["kept"]
    dense = plan["dense"]
    if kept < dense:  # a dense matrix on a grid keeps all parameters, in fewer bits
        share = f"{kept / 1e6:,.1f} M of {dense / 1e6:,.1f} M ({kept / dense:.1%})"
        totals.add_row("parameters kept", share)
    stored = plan["disk"] - ROOM
    model = plan["model"]
    totals.add_row("weights", f"{size(model)} → {size(stored)} ({100 * stored / model:.0f} %)")
    unpacked = f"{size(plan['to_run'])}; with the backend unpacked {size(plan['unpacked'])} more"
    totals.add_row("in memory to run", unpacked)
    for name, peak in footprint_here(setup).peaks().items():
        totals.add_row(name, peak)
    if plan["dense_by_default"]:
        totals.add_row("kept dense automatically", "\n".join(plan["dense_by_default"]))
    seconds = seconds_by_phase(setup)
    time = f"about {duration(sum(seconds.values()))}"
    phases = [f"{name} {duration(taken)}" for name, taken in seconds.items()]
    totals.add_row("time", "\n".join([time, *phases]))
    end = plan["problem"] or f"It fits, in memory and on this disk, and takes {time}."
    return Group(layer_table(plan["layers"], title), totals, *more, Text(f"\n{end}"))


def layer_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """A row for each kind and shape of layer. rows: from `layer_rows`."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        shape = "×".join(map(str, row["shape"]))
        kinds.setdefault((row["kind"], shape), []).append(row)
    layers = table(["kind", "pattern"], ["layers", "out×in", "rank", "size"], title)
    for (kind, shape), group in kinds.items():
        ranks = span([row["rank"] for row in group])
        count = sum(row["count"] for row in group)
        stored = sum(row["bytes"] for row in group)
        layers.add_row(kind, patterns(group), str(count), shape, ranks, size(stored))
    return layers


def patterns(rows: Sequence[dict[str, Any]]) -> str:
    """The patterns of some rows of `layer_rows`, each on a line; or one with the range of bits."""
    bits = [row["bits"] for row in rows if row["bits"]]
    if len(set(bits)) <= 1:
        return "\n".join(dict.fromkeys(row["pattern"] for row in rows))
    if rows[0]["coding"] == "entropy":
        return f"dense, entropy-coded, {span(bits, '{:g}')} bits"
    integers = f"int{span(bits)}"
    zeros, _, _ = rows[0]["pattern"].partition(", ")
    if zeros == "dense":
        return integers
    return f"{zeros}, {integers}"


def advice_table(advice: Sequence[Advice]) -> Table:
    """One row for the plan chosen by layer, and one for each uniform plan."""
    headings = ("bits", "rank", "weights", "estimated KL, nats per token")
    choices = table(["bits and ranks"], headings, "expected loss before any training")
    for number, choice in enumerate(advice):
        bits = span(choice.bits, "{:g}") if choice.bits else ""
        kind = "uniform" if number else "by layer"
        choices.add_row(
            kind, bits, span(choice.rank), size(choice.bytes), f"{choice.divergence:.3g}"
        )
    return choices
