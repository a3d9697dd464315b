"""A plan as JSON and as a table for the terminal, and a table of advice."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hasslefree.errors import with_flags
from hasslefree.models.blocks import other_modalities
from hasslefree.planning.advice import Advice
from hasslefree.planning.machine import product_rate
from hasslefree.planning.memory import Setup, estimate, flops_by_phase, peaks, verdict
from hasslefree.planning.plan import ROOM, select
from hasslefree.units import duration, size, span, table


def plan_summary(setup: Setup) -> dict[str, Any]:
    """What a compression does and takes, for JSON. Sizes are in bytes; `phases` has floating-point
    operations.
    """
    footprint, flops = estimate(setup), flops_by_phase(setup)
    selection = select(setup.blocks, setup.resolved)
    kinds = Counter(
        (name.rpartition(".")[2], layer) for plans in setup.plan for name, layer in plans.items()
    )
    return {
        "blocks": len(setup.plan),
        "layers": [
            {
                "kind": kind,
                "shape": list(layer.spec.shape),
                "pattern": layer.spec.kind,
                "rank": layer.spec.rank,
                "bits": layer.spec.grid.bits if layer.spec.grid else None,
                "bytes": layer.bytes * count,
                "count": count,
                "kept": layer.spec.parameters / layer.spec.dense_parameters,
            }
            for (kind, layer), count in kinds.items()
        ],
        "kept": sum(layer.spec.parameters for layer in setup.layers),
        "dense": sum(layer.spec.dense_parameters for layer in setup.layers),
        "disk": footprint.disk,
        "unpacked": sum(layer.dense_bytes for layer in setup.layers),
        "device": setup.device.type,
        "storage": setup.storage,
        "activations": footprint.activations,
        "device_peak": footprint.device_peak,
        "ram_peak": footprint.ram_peak,
        "memory": {"device": footprint.device, "ram": footprint.ram},
        "dense_by_default": [
            *selection.reasons(),
            *other_modalities(setup.model, setup.blocks),
        ],
        "phases": flops,
        "flops": sum(flops.values()),
        "model": sum(p.numel() * p.element_size() for p in setup.model.parameters()),
        "problem": with_flags(problem) if (problem := verdict(setup)) else None,
    }


def plan_table(setup: Setup, *more: Table) -> Group:
    """The plan of each kind of layer, and the memory, disk and time that it takes; `more`; and
    whether it fits.
    """
    plan, rate = plan_summary(setup), product_rate(setup.device)
    title = f"{plan['blocks']} blocks, {len(setup.layers)} layers"
    layers = table(["kind", "pattern"], ["layers", "out×in", "rank", "size"], title)
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in plan["layers"]:
        kinds.setdefault((row["kind"], "×".join(map(str, row["shape"]))), []).append(row)
    for (kind, shape), rows in kinds.items():
        patterns, bits = (
            dict.fromkeys(row["pattern"] for row in rows),
            [row["bits"] for row in rows if row["bits"]],
        )
        pattern = f"int{span(bits)}" if len(set(bits)) > 1 else "\n".join(patterns)
        count, stored = (sum(row[name] for row in rows) for name in ("count", "bytes"))
        layers.add_row(
            kind, pattern, str(count), shape, span([row["rank"] for row in rows]), size(stored)
        )
    totals = Table.grid(padding=(0, 3, 0, 1), pad_edge=True)
    if (chosen := setup.resolved.size) and setup.resolved.allocate == "error" and not more:
        note = (
            "the same everywhere in this table; compress chooses them by layer, as plan --size"
            f" {chosen} shows"
        )
        totals.add_row("bits and ranks", note)
    kept, dense = plan["kept"], plan["dense"]
    if kept < dense:  # a matrix on a grid keeps all of them, in fewer bits
        totals.add_row(
            "parameters kept", f"{kept / 1e6:,.1f} M of {dense / 1e6:,.1f} M ({kept / dense:.1%})"
        )
    stored, model = plan["disk"] - ROOM, plan["model"]
    totals.add_row("weights", f"{size(model)} → {size(stored)} ({100 * stored / model:.0f} %)")
    totals.add_row(
        "to run on a GPU",
        f"the packed weights; with the backend unpacked {size(plan['unpacked'])} more",
    )
    for name, peak in peaks(setup).items():
        totals.add_row(name, peak)
    if plan["dense_by_default"]:
        totals.add_row("kept dense automatically", "\n".join(plan["dense_by_default"]))
    time = f"about {duration(plan['flops'] / rate)}"
    phases = (f"{name} {duration(flops / rate)}" for name, flops in plan["phases"].items())
    totals.add_row("time", "\n".join([time, *phases]))
    end = plan["problem"] or f"It fits, in memory and on this disk, and takes {time}."
    return Group(layers, totals, *more, Text(f"\n{end}"))


def advice_table(advice: Sequence[Advice]) -> Table:
    """One line for the plan that is dealt, and one for each uniform plan."""
    headings = ("bits", "rank", "weights", "estimated KL, nats a token")
    choices = table(
        ["bits and ranks"], headings, "what the size is expected to lose, before any training"
    )
    for number, choice in enumerate(advice):
        bits = span(choice.bits) if choice.bits else ""
        kind = "uniform" if number else "by layer"
        choices.add_row(
            kind, bits, span(choice.rank), size(choice.bytes), f"{choice.divergence:.3g}"
        )
    return choices
