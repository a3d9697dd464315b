"""The memory that a process may use, against the files of the kernel, written by hand."""

from types import SimpleNamespace

import psutil
import pytest
import torch

from hasslefree.planning import machine

CPU = torch.device("cpu")
GB = 10**9
VERSIONS = {
    "second": ("", {"memory.max": 8 * GB, "memory.current": 6 * GB}, "inactive_file"),
    "first": (
        "memory",
        {"memory.limit_in_bytes": 8 * GB, "memory.usage_in_bytes": 6 * GB},
        "total_inactive_file",
    ),
}


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A machine with 64 GB, of which 40 are available; this process has 1 GB, and no container."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=40 * GB, total=64 * GB))
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: SimpleNamespace(rss=GB))
    return tmp_path


def test_processes_of_one_machine_share_what_is_available(memory, monkeypatch):
    assert machine.free_memory(CPU) == 41 * GB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert machine.free_memory(CPU) == 11 * GB


def test_processes_of_one_gpu_share_it(memory, monkeypatch):
    """Four processes on two GPUs, of which each has 8 GB free and 2 GB in torch's cache."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = torch.device("cuda")
    assert [machine.free_memory(gpu, processes) for processes in (1, 2, 4)] == [10 * GB, 10 * GB, 6 * GB]


@pytest.mark.parametrize(("folder", "numbers", "cache"), VERSIONS.values(), ids=VERSIONS)
def test_what_a_container_has_used_is_not_free(memory, folder, numbers, cache):
    """Of 8 GB, 6 are used, and half a GB of these are pages of files: 2.5 GB are left, beside this process's own."""
    (memory / folder).mkdir(exist_ok=True)
    for name, value in numbers.items():
        (memory / folder / name).write_text(f"{value}\n")
    (memory / folder / "memory.stat").write_text(f"anon 5\n{cache} {GB // 2}\n")
    assert machine.free_memory(CPU) == GB + 5 * GB // 2
    assert machine.total_memory(CPU) == 8 * GB


@pytest.mark.parametrize(("folder", "numbers", "cache"), VERSIONS.values(), ids=VERSIONS)
def test_the_limits_of_all_groups_around_a_process_hold(memory, folder, numbers, cache):
    """As of a job of Slurm: the job may have 16 GB and has used 15, its step, in which we are, may have 12 and has
    used 1. The limit of 8 GB is that of another controller's group, or of a group that we are not in.
    """
    (memory / "cgroup").write_text("7:cpu,pids:/slurm/other\n4:memory:/slurm/job/step\n0::/slurm/job/step\n")
    for group, limit, used in (("", 32, 20), ("job", 16, 15), ("job/step", 12, 1), ("other", 8, 6)):
        inside = memory / folder / "slurm" / group
        inside.mkdir(parents=True)
        for name, value in zip(numbers, (limit, used), strict=True):
            (inside / name).write_text(f"{value * GB}\n")
    assert machine.total_memory(CPU) == 12 * GB
    assert machine.free_memory(CPU) == GB + GB


def test_a_container_without_a_limit(memory):
    (memory / "memory.max").write_text("max\n")
    (memory / "memory.current").write_text("5\n")
    assert machine.free_memory(CPU) == 41 * GB
    assert machine.total_memory(CPU) == 64 * GB


def test_free_memory_is_what_the_machine_has():
    assert 10**8 < machine.free_memory(CPU) < 10**14


def test_the_timed_products_draw_no_random_numbers():
    """A run draws the same numbers whether or not its time is estimated."""
    before = torch.random.get_rng_state()
    assert 1e6 < machine.product_rate(CPU) < 1e15
    assert torch.equal(torch.random.get_rng_state(), before)
