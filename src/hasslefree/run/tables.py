"""A plan as JSON and as a table for the terminal; tables of advice and of the seconds of a run."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table

from hasslefree.folder.record import Record
from hasslefree.models.blocks import by_kind, select_sites, towers
from hasslefree.recipe.plan import ROOM
from hasslefree.recipe.resolved import Resolved
from hasslefree.run.advise import Advice
from hasslefree.run.estimate import Setup, estimate, flops_by_phase, peaks
from hasslefree.run.machine import product_rate
from hasslefree.units import duration, size, span, table


def plan_summary(setup: Setup) -> dict[str, Any]:
    """What a compression does and takes, for JSON. Sizes are in bytes; `phases` has floating-point operations."""
    footprint, flops = estimate(setup), flops_by_phase(setup)
    sites = select_sites(setup.blocks, setup.resolved.recipe.leave_dense)
    kinds = Counter((name.rpartition(".")[2], layer) for plans in setup.plan for name, layer in plans.items())
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
        "dense_by_default": [*by_kind(sites.dense), *towers(setup.model, setup.blocks)],
        "levers": list(levers_of(setup.resolved)),
        "unstated": list(setup.resolved.method.cost.unstated),
        "phases": flops,
        "flops": sum(flops.values()),
    }


def plan_table(setup: Setup) -> Group:
    """The plan of each kind of layer, and the memory, disk and time that it takes."""
    plan, rate = plan_summary(setup), product_rate(setup.device)
    title = f"{plan['blocks']} blocks, {len(setup.layers)} layers"
    layers = table(["kind", "pattern"], ["layers", "out×in", "rank", "size"], title)
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in plan["layers"]:
        kinds.setdefault((row["kind"], "×".join(map(str, row["shape"]))), []).append(row)
    for (kind, shape), rows in kinds.items():
        patterns, bits = dict.fromkeys(row["pattern"] for row in rows), [row["bits"] for row in rows if row["bits"]]
        pattern = f"int{span(bits)}" if len(set(bits)) > 1 else "\n".join(patterns)
        count, stored = (sum(row[name] for row in rows) for name in ("count", "bytes"))
        layers.add_row(kind, pattern, str(count), shape, span([row["rank"] for row in rows]), size(stored))
    totals = Table.grid(padding=(0, 3, 0, 1), pad_edge=True)
    kept, dense = plan["kept"], plan["dense"]
    totals.add_row("parameters kept", f"{kept / 1e6:,.1f} M of {dense / 1e6:,.1f} M ({kept / dense:.1%})")
    totals.add_row("weights of OUT", f"{size(plan['disk'] - ROOM)}; {size(plan['disk'])} of free disk space are needed")
    totals.add_row("to run on a GPU", f"{size(plan['unpacked'])} more, for unpacked weights (none with backend dense)")
    for name, peak in peaks(setup).items():
        totals.add_row(name, peak)
    if plan["dense_by_default"]:
        totals.add_row("kept dense automatically", "\n".join(plan["dense_by_default"]))
    if plan["levers"]:
        totals.add_row("beyond the layer", "\n".join(plan["levers"]))
    if plan["unstated"]:
        note = "states no cost: memory and time are those of the most expensive plug-in of its kind"
        totals.add_row("counted by rule", f"{', '.join(plan['unstated'])} {note}")
    phases = (f"{name} {duration(flops / rate)}" for name, flops in plan["phases"].items())
    totals.add_row("time", "\n".join([f"about {duration(plan['flops'] / rate)}", *phases]))
    return Group(layers, totals)


def levers_of(resolved: Resolved) -> Iterator[str]:
    """A sentence for each lever beyond single layers: what it does, and what it costs."""
    if resolved.allocate == "error":
        yield (
            "allocation error: bits, ranks and non-zeros move between layers; on a few segments a forward and a "
            "backward pass of the dense model, and a first look at every layer"
        )
    if resolved.match_predictions:
        yield (
            f"prediction matching: forward and backward passes of the whole model over {resolved.match_predictions:,} "
            "tokens at most, and 16 bytes for each value that is kept"
        )


def phase_table(report: Record) -> Table:
    """The seconds of each phase of a compression."""
    phases = table(["phase"], ["seconds"])
    for phase in report.phases:
        phases.add_row(phase.name, f"{phase.seconds:.1f}")
    phases.add_row("other", f"{report.seconds - sum(phase.seconds for phase in report.phases):.1f}")
    phases.add_section()
    phases.add_row("total", f"{report.seconds:.1f}")
    return phases


def advice_table(advice: Sequence[Advice]) -> Table:
    """One line for the plan that is dealt, and one for each uniform plan."""
    headings = ("bits", "rank", "weights", "estimated KL, nats a token")
    choices = table(["bits and ranks"], headings, "what the size is expected to lose, before any training")
    for number, choice in enumerate(advice):
        bits = span(choice.bits) if choice.bits else ""
        kind = "uniform" if number else "by layer"
        choices.add_row(kind, bits, span(choice.rank), size(choice.bytes), f"{choice.divergence:.3g}")
    return choices
