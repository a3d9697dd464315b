"""Divide the work of one compression among the processes of `torchrun`, and combine results."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasslefree.errors import DistributedError, option

# Time that a process waits for others: longer than any layer takes. The death of a process is
# noticed at once.
PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class World:
    """The rank of this process, and the number of processes.

    Args:
        rank: of this process; rank 0 writes files.
        size: the number of processes.
    """

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        return self.rank == 0

    def share(self, items: Tensor) -> Tensor:
        """This process's rows of `items`."""
        return items[self.rank :: self.size]

    def local(self, items: Iterable[int]) -> list[int]:
        """Local indices of the global items that this rank owns, as `share` gives them out."""
        return [item // self.size for item in items if item % self.size == self.rank]

    def add(self, tensor: Tensor) -> None:
        """Sum a contiguous tensor over all processes, in place."""
        if self.size > 1:
            assert tensor.is_contiguous()
            with lost_peers():
                dist.all_reduce(tensor)

    def total(self, value: float, device: torch.device) -> float:
        """The sum of the values of all processes.

        Args:
            device: where the processes exchange tensors.
        """
        if self.size == 1:
            return value
        summed = torch.tensor(value, dtype=torch.float64, device=device)
        self.add(summed)
        return summed.item()

    def broadcast(self, value: Any, owner: int = 0) -> Any:
        """Return the owner's value in all processes. value: any object that pickle takes."""
        if self.size == 1:
            return value
        values = [value]
        with lost_peers():
            dist.broadcast_object_list(values, src=owner)
        return values[0]

    def broadcast_(self, tensor: Tensor, owner: int) -> None:
        """Overwrite a contiguous tensor by the owner's."""
        if self.size > 1:
            assert tensor.is_contiguous()  # NCCL refuses other tensors; gloo does not
            with lost_peers():
                dist.broadcast(tensor, src=owner)

    def assign(self, costs: Sequence[float]) -> list[int]:
        """The rank of each job: largest job first, to the least-loaded rank."""
        loads = [0.0] * self.size
        owners = [0] * len(costs)
        for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
            owners[job] = loads.index(min(loads))
            loads[owners[job]] += costs[job]
        return owners


ALONE = World()


@contextmanager
def process_group(device: torch.device) -> Iterator[World]:
    """Join the processes that `torchrun` started; without torchrun, this process is alone.

    Args:
        device: of this process. NCCL is used for GPUs, gloo for CPUs.

    Raises:
        DistributedError: the environment of torchrun is incomplete.
    """
    if dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size())
        return
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        yield ALONE
        return
    has_rank = os.environ.get("RANK", "").isdecimal() and "MASTER_ADDR" in os.environ
    if not size.isdecimal() or not has_rank:
        raise DistributedError(
            f"WORLD_SIZE is {size!r}, but RANK and MASTER_ADDR do not say which process this is;"
            " start the processes with torchrun, or unset WORLD_SIZE"
        )
    if device.type == "cuda":
        if device.index is None:
            device = torch.device(local_device() or "cuda:0")
        # Otherwise every process sends its objects through the first GPU.
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=PATIENCE, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield World(dist.get_rank(), dist.get_world_size())
        # One process writes the last files. A group that the others began meanwhile would fail.
        with lost_peers():
            dist.barrier()
    finally:
        dist.destroy_process_group()


def local_device() -> str | None:
    """The GPU of this process under `torchrun`; None without torchrun or without a GPU."""
    rank = os.environ.get("LOCAL_RANK")
    if not rank or not torch.cuda.is_available():
        return None
    return f"cuda:{int(rank) % torch.cuda.device_count()}"


@contextmanager
def lost_peers() -> Iterator[None]:
    """Turn the errors of gloo and NCCL after the death of a process into a DistributedError."""
    try:
        yield
    except RuntimeError as error:
        first_line, _, _ = str(error).partition("\n")
        raise DistributedError(
            "another process of this compression has failed; the last lines of torchrun's output"
            " say which one. Finished blocks are kept: correct the cause, and use"
            f" {option('resume', True)} ({first_line[:200]})"
        ) from error
