"""The command `bench`: speed and memory of the compressed and of the dense model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from rich.table import Table

from hasslefree.cli import common
from hasslefree.cli.common import Device, Dtype, Folder, Json, Output, Quiet, Trust, command, flag
from hasslefree.cli.evaluate import BESIDE, dense_model
from hasslefree.cli.generate import Backend, Threads
from hasslefree.units import size, table

if TYPE_CHECKING:
    from hasslefree.evaluation.bench import Speed

MEASURED = "Measurements"


@command("bench", rich_help_panel=common.MEASURE)
def call_bench(
    folder: Folder,
    dense: Annotated[str | None, flag(None, BESIDE)] = None,
    new_tokens: Annotated[int, flag(MEASURED, "Tokens to generate.", min=2)] = 64,
    prompt: Annotated[int, flag(MEASURED, "Tokens of the prompt.", min=1)] = 256,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = None,
    backend: Backend = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    output: Output = None,
    quiet: Quiet = False,
) -> None:
    """Measure speed and memory, and compare them with the dense model.

    The table shows tokens per second, the time to read a prompt, and the memory of the weights, as
    medians of five turns. The models take turns, each in its own process; both are in memory.
    """
    from hasslefree.checkpoint.inspect import read_quantization
    from hasslefree.evaluation.bench import Bench, run_bench

    read_quantization(folder)  # raises an error if OUT is not a compressed folder
    names = {"compressed": str(folder)}
    beside = dense_model(str(folder), dense, trust_remote_code)
    if beside is not None:
        names["dense"] = beside
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    bench = Bench(new_tokens, prompt, threads, backend, options)
    with common.console.status("measuring"):
        speeds = run_bench(names, bench)
    results = {role: asdict(speed) for role, speed in speeds.items()}
    common.show(results, output, as_json, speed_table(speeds, prompt))


def speed_table(speeds: dict[str, Speed], prompt: int) -> Table:
    """Table of each model's figures, with the ratios of the compressed to the dense model."""
    rows = table([""], ["tokens/s", f"prompt of {prompt}, s", "weights"])
    dense = speeds.get("dense")
    for role, speed in speeds.items():
        cells = [
            f"{speed.tokens_per_second:.1f}",
            f"{speed.prompt_seconds:.2f}",
            size(speed.weights),
        ]
        if dense is not None and role != "dense":
            faster = speed.tokens_per_second / dense.tokens_per_second
            longer = speed.prompt_seconds / dense.prompt_seconds
            cells[0] += f" ({faster:.2f} ×)"
            cells[1] += f" ({longer:.2f} ×)"
            cells[2] += f" ({speed.weights / dense.weights:.2f} ×)"
        rows.add_row(role, *cells)
    return rows
