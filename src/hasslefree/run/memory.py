"""Whether a compression fits into the memory that is free, and what to ask for where it does not."""

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

    Not even with reads and writes that do not run beside the work.
    """
    found = dataclasses.replace(found, beside=0)
    if fits(found, device):
        return
    remedy = next((remedy for other, where, remedy in remedies(found, device) if fits(other, where)), None)
    advice = f"it fits with {remedy}" if remedy else "it needs a machine with more memory"
    raise MemoryShortError(f"not enough memory; {advice}\n{as_text(estimate_table(found, device))}")


def runs_beside(found: Footprint, device: torch.device) -> bool:
    """Whether memory allows that blocks are read and written beside the work; it is logged where it does not."""
    if fits(found, device):
        return True
    logger.info("not enough memory to read and write blocks beside the work: each is read, compressed and then written")
    return False


def as_run(found: Footprint, device: torch.device) -> Footprint:
    """The footprint as `compress` runs it on this machine, with reads and writes beside the work or without."""
    return found if fits(found, device) else dataclasses.replace(found, beside=0)


def fits(found: Footprint, device: torch.device) -> bool:
    ram = torch.device("cpu")
    return found.ram_peak <= free_memory(ram) and found.device_peak <= free_memory(device)


def remedies(found: Footprint, device: torch.device) -> Iterator[tuple[Footprint, torch.device, str]]:
    """What else could be asked for: first what changes the result least."""
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
