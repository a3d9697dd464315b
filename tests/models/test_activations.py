"""Hidden states between blocks, wherever they are."""

import itertools
from pathlib import Path

import pytest
import torch

from hasslefree.errors import OutputError
from hasslefree.models.activations import STORAGES, Activations

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_put_in_comes_out(storage, dtype, tmp_path):
    states = torch.randn(3, 5, 7).to(dtype)
    held = Activations((3, 5, 7), dtype, CPU, storage, tmp_path)
    for index in (2, 0, 1):
        held[index] = states[index : index + 1]
    assert len(held) == 3
    found = list(itertools.islice(held, 4))
    assert len(found) == 3, "a loop over them ends"
    assert all(torch.equal(one, states[None, index]) for index, one in enumerate(found))
    assert not list(tmp_path.iterdir()), "a file without a name is gone with the process"


def test_a_disk_without_room(tmp_path, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OutputError, match=r"no room for 1 MB of activations in .*use activations='cpu'"):
        Activations((10, 50, 500), torch.float32, CPU, "disk", tmp_path)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no /proc")
def test_no_descriptor_stays_open(tmp_path):
    """A process may have a thousand, and allocation holds the states of a model for every layer."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [Activations((2, 3, 4), torch.float32, CPU, "disk", tmp_path) for _ in range(20)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert len(held) == 20
