"""Processes that share the rows of a layer, forked for a test and connected by gloo, as under torchrun on a CPU."""

import multiprocessing
import os
import socket
import tempfile
from pathlib import Path

import torch

from hasslefree.distributed import process_group


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def in_processes(size, work):
    """What work(world) returns in each of `size` processes, which torch.save must take."""
    context, port = multiprocessing.get_context("fork"), free_port()
    with tempfile.TemporaryDirectory() as folder:
        started = [context.Process(target=_one, args=(r, size, port, folder, work)) for r in range(size)]
        for each in started:
            each.start()
        for each in started:
            each.join(300)
        assert [each.exitcode for each in started] == [0] * size
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(size)]


def _one(rank, size, port, folder, work):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with process_group(torch.device("cpu")) as world:
        torch.save(work(world), Path(folder) / str(rank))
