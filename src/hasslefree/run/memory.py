"""Whether a compression fits into free memory, and which options make it fit."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import torch

from hasslefree.errors import MemoryShortError, option
from hasslefree.models.activations import STORAGES
from hasslefree.run.estimate import Footprint
from hasslefree.run.machine import free_memory
from hasslefree.run.tables import as_text, estimate_table

logger = logging.getLogger(__name__)


def check_memory(found: Footprint, device: torch.device) -> None:
    """Raise a MemoryShortError, with the estimate and a remedy, where a compression will not fit.

    Reads and writes in the background are not counted: without them less memory is needed.
    """
    found = dataclasses.replace(found, beside=0)
    if fits(found, device):
        return
    remedy = next((remedy for other, where, remedy in remedies(found, device) if fits(other, where)), None)
    advice = f"it fits with {remedy}" if remedy else "it needs a machine with more memory"
    raise MemoryShortError(f"not enough memory; {advice}\n{as_text(estimate_table(found, device))}")


def runs_beside(found: Footprint, device: torch.device) -> bool:
    """Whether there is memory to read and write blocks in the background; a log line says where there is not."""
    if fits(found, device):
        return True
    logger.info(
        "not enough memory to read and write blocks in the background: each block is read, compressed and written in "
        "turn, which takes longer"
    )
    return False


def as_run(found: Footprint, device: torch.device) -> Footprint:
    """The footprint as `compress` runs it on this machine, with reads and writes beside the work or without."""
    return found if fits(found, device) else dataclasses.replace(found, beside=0)


def fits(found: Footprint, device: torch.device) -> bool:
    ram = torch.device("cpu")
    return found.ram_peak <= free_memory(ram) and found.device_peak <= free_memory(device)


def remedies(found: Footprint, device: torch.device) -> Iterator[tuple[Footprint, torch.device, str]]:
    """Options that need less memory: first those that change the result least."""
    for storage in STORAGES[STORAGES.index(found.storage) + 1 :]:
        yield dataclasses.replace(found, storage=storage), device, option("activations", storage)
    if found.resident:
        by_name = dataclasses.replace(found, resident=0, storage="disk")
        disk = option("activations", "disk")
        yield by_name, device, f"{disk} and the model's name or folder in the place of the loaded model"
    logits = found.logits if found.probes else 0
    blockwise = dataclasses.replace(found, reference=0, whole=0, masters=0, logits=logits, storage="disk")
    least = option("activations", "disk")
    if found.whole:
        alone = f"{option('match_predictions', 0)}, which keeps one block in memory"
        yield dataclasses.replace(blockwise, storage=found.storage), device, alone
        yield blockwise, device, f"{option('match_predictions', 0)} {least}"
    if found.probes:
        fast = f"{option('effort', 'fast')}, which runs no probes"
        yield dataclasses.replace(blockwise, probes=0, logits=0, storage=found.storage), device, fast
    if not found.resident and not found.on_cpu:
        cpu, on_cpu = torch.device("cpu"), dataclasses.replace(found, device="cpu")
        yield on_cpu, cpu, option("device", "cpu")
        yield dataclasses.replace(on_cpu, storage="disk"), cpu, f"{option('device', 'cpu')} {least}"
