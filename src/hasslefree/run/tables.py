"""A footprint, advice, and the times of a run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from rich.console import Console, Group
from rich.table import Table

from hasslefree.folder.record import Record
from hasslefree.levers.advice import Advice
from hasslefree.recipe.plan import ROOM
from hasslefree.run.estimate import Footprint
from hasslefree.run.machine import free_memory, product_rate
from hasslefree.tables import table
from hasslefree.units import duration, size


def estimate_table(found: Footprint, device: torch.device) -> Group:
    """The plan of each kind of layer, and the memory, disk and time that it takes."""
    title = f"{found.blocks} blocks, {sum(count for *_, count in found.layers)} layers"
    kinds = table(["kind", "pattern"], ["layers", "out×in", "rank", "kept"], title)
    for name, layer, count in found.layers:
        spec, (out, width) = layer.spec, layer.spec.shape
        share = spec.parameters / spec.dense_parameters
        kinds.add_row(name, spec.kind, str(count), f"{out}×{width}", str(spec.rank), f"{share:.1%}")
    takes = Table.grid(padding=(0, 3, 0, 1), pad_edge=True)
    for name, value in totals(found, device).items():
        takes.add_row(name, value)
    return Group(kinds, takes)


def totals(found: Footprint, device: torch.device) -> dict[str, str]:
    """The figures of a footprint, in words."""

    def against(peak: int, where: torch.device) -> str:
        return f"{size(peak)}, of {size(free_memory(where))} available"

    here = found.device if found.storage == "device" else found.storage
    memory = {} if found.on_cpu else {f"peak of {device}": against(found.device_peak, device)}
    return {
        "parameters kept": f"{found.kept / 1e6:,.1f} M of {found.dense / 1e6:,.1f} M ({found.kept / found.dense:.1%})",
        "weights of OUT": f"{size(found.disk - ROOM)}; {size(found.disk)} of free disk space are needed",
        "to run on a GPU": f"{size(found.unpacked)} more, for unpacked weights (none with backend dense)",
        **memory,
        "peak of RAM": against(found.ram_peak, torch.device("cpu")),
        "activations": f"{size(found.activations)}, on {here}",
        **({"kept dense automatically": "\n".join(found.by_itself)} if found.by_itself else {}),
        **({"beyond the layer": "\n".join(found.levers)} if found.levers else {}),
        **({"counted by rule": unstated_note(found.unstated)} if found.unstated else {}),
        "time": "\n".join(times(found, product_rate(device))),
    }


def times(found: Footprint, rate: float) -> Iterator[str]:
    """How long it all takes, and each phase. rate: of the device, in FLOPs a second."""
    yield f"about {duration(found.flops / rate)}"
    for name, seconds in found.seconds(rate).items():
        yield f"{name} {duration(seconds)}"


def phase_table(report: Record) -> Table:
    """One line for each phase of a compression: how long it took."""
    phases = table(["phase"], ["seconds"])
    for phase in report.phases:
        phases.add_row(phase.name, f"{phase.seconds:.1f}")
    phases.add_row("other", f"{report.seconds - sum(phase.seconds for phase in report.phases):.1f}")
    phases.add_section()
    phases.add_row("total", f"{report.seconds:.1f}")
    return phases


def advice_table(found: Sequence[Advice]) -> Table:
    """One line for each pattern and rank, in the given order."""
    headings = ("rank", "weights", "estimated KL, nats a token")
    made = table(["pattern"], headings, "patterns and ranks within the budget, the best one first")
    for each in found:
        made.add_row(each.pattern, str(each.rank), size(each.bytes), f"{each.divergence:.4f}")
    return made


def unstated_note(names: tuple[str, ...]) -> str:
    return f"{', '.join(names)} states no cost: memory and time are those of the most expensive plug-in of its kind"


def as_text(shown: Group) -> str:
    """The table as plain text."""
    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()
