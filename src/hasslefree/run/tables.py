"""A footprint as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hasslefree.levers.advice import Advice
from hasslefree.run.estimate import Footprint
from hasslefree.run.machine import free_memory, product_rate
from hasslefree.units import duration, size


def estimate_table(found: Footprint, device: torch.device) -> Group:
    """The plan of each kind of layer, and the memory, disk and time that it takes."""
    table = Table(title=Text(f"{found.blocks} blocks, {sum(count for *_, count in found.layers)} layers"))
    for heading in ("", "out×in", "pattern", "rank", "kept", "count"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, layer, count in found.layers:
        spec, (out, width) = layer.spec, layer.spec.shape
        share = spec.parameters / spec.dense_parameters
        table.add_row(name, f"{out}×{width}", spec.kind, str(spec.rank), f"{share:.1%}", str(count))
    takes = Table(show_header=False)
    for name, value in totals(found, device).items():
        takes.add_row(name, value)
    return Group(table, takes)


def totals(found: Footprint, device: torch.device) -> dict[str, str]:
    """The figures of a footprint, in words."""

    def against(peak: int, where: torch.device) -> str:
        return f"{size(peak)}, of {size(free_memory(where))} available"

    here = found.device if found.storage == "device" else found.storage
    memory = {} if found.on_cpu else {f"peak of {device}": against(found.device_peak, device)}
    return {
        "parameters kept": f"{found.kept / 1e6:,.1f} M of {found.dense / 1e6:,.1f} M ({found.kept / found.dense:.1%})",
        "on the disk": size(found.disk),
        "to run on a GPU": f"{size(found.unpacked)} more, for unpacked weights (none with backend dense)",
        **memory,
        "peak of RAM": against(found.ram_peak, torch.device("cpu")),
        "activations": f"{size(found.activations)}, on {here}",
        **({"kept dense automatically": "\n".join(found.by_itself)} if found.by_itself else {}),
        **({"beyond the layer": "\n".join(found.levers)} if found.levers else {}),
        **({"counted by rule": unstated_note(found.unstated)} if found.unstated else {}),
        "time": f"about {duration(found.flops / product_rate(device))}",
    }


def advice_table(found: Sequence[Advice]) -> Table:
    """One line for each pattern and rank, in the given order."""
    table = Table(title="patterns and ranks within the budget, the best one first")
    for heading in ("pattern", "rank", "weights", "estimated KL, nats a token"):
        table.add_column(heading, justify="right")
    for each in found:
        table.add_row(each.pattern, str(each.rank), size(each.bytes), f"{each.divergence:.4f}")
    return table


def unstated_note(names: tuple[str, ...]) -> str:
    return f"{', '.join(names)} states no cost: memory and time are those of the most expensive plug-in of its kind"


def as_text(table: Group) -> str:
    """The table as plain text."""
    console = Console(width=100, no_color=True)
    with console.capture() as captured:
        console.print(table)
    return captured.get()
