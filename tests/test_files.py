"""Safetensors files are read, never mapped. Oracle: what safetensors itself writes, reads and refuses."""

import json
import os
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hasslefree.errors import CheckpointError
from hasslefree.files import DTYPES, MOST_HEADER, TensorFile, stored_tensors
from hasslefree.models.load import load_model, load_on_disk
from hasslefree.models.weights import Weights
from tests.tiny_models import build


@pytest.mark.parametrize(("code", "name"), DTYPES.items())
def test_every_dtype_and_shape_is_read_as_safetensors_reads_it(code, name, tmp_path):
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    octets = torch.arange(64, dtype=torch.uint8) % 2
    values = octets.view(getattr(torch, name))
    shapes = {"matrix": (2, -1), "empty": (0, 3)} | ({} if code == "F4" else {"scalar": ()})
    tensors = {
        kind: values[: 0 if 0 in shape else 1 if shape == () else None].view(shape) for kind, shape in shapes.items()
    }
    save_file({kind: tensor.clone() for kind, tensor in tensors.items()}, tmp_path / "a", metadata={"format": "pt"})
    with safe_open(tmp_path / "a", "pt") as expected, TensorFile(tmp_path / "a") as file:
        assert set(file.keys()) == set(expected.keys()) == set(tensors)
        for kind in tensors:
            tensor, part = expected.get_tensor(kind), file.get_slice(kind)
            for read in (file.get_tensor(kind), part[...]):
                assert (read.dtype, read.shape, read.device) == (tensor.dtype, tensor.shape, tensor.device)
                assert read.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))
            assert part.get_dtype() == expected.get_slice(kind).get_dtype() == code
            assert (part.meta.dtype, part.get_shape()) == (tensor.dtype, list(tensor.shape))


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "no object": [1],
    "a number": 3,
    "no entry": {"a": 3},
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "a dtype that there is not": {"a": entry([2], 0, 8, "F31")},
    "a list for a dtype": {"a": entry([2], 0, 8, ["F32"])},
    "a shape that is too large": {"a": entry([2**40, 2**40], 0, 8)},
    "a shape that no machine can count": {"a": entry([2**70], 0, 8)},
    "a negative shape": {"a": entry([-2], 0, 8)},
    "a shape of words": {"a": entry(["2"], 0, 8)},
    "negative offsets": {"a": entry([2], -8, 0)},
    "a gap": {"a": entry([1], 0, 4), "b": entry([1], 5, 9)},
    "an overlap": {"a": entry([2], 0, 8), "b": entry([1], 4, 8)},
    "too few bytes": {"a": entry([3], 0, 12)},
    "too many bytes": {"a": entry([1], 0, 4)},
    "offsets of words": {"a": entry([2], "0", "8"), "b": entry([2], 0, 8)},
    "no UTF-8": b'{"\xff": 3}',
    "a number without end": b'{"a": ' + b"9" * 5000 + b"}",
    "depth": b"[" * 100_000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_wrong_is_refused_in_a_sentence(header, tmp_path):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(Exception, match="."):
        safe_open(file, "pt")
    with pytest.raises(CheckpointError, match=r"a\.safetensors is truncated, or not a safetensors file \(.+\); downlo"):
        TensorFile(file)


@pytest.mark.parametrize("length", [2**63, MOST_HEADER + 1, 9])
def test_the_length_of_a_header_is_checked_before_memory_is_taken(length, tmp_path, monkeypatch):
    """The file is a hole, so that it may have any size; the largest thing that is read is the length itself."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(length.to_bytes(8, "little"))
    os.truncate(file, 16 if length == 9 else MOST_HEADER + 64)
    counts, read = [], os.preadv
    monkeypatch.setattr(os, "preadv", lambda at, parts, start: counts.append(len(parts[0])) or read(at, parts, start))
    with pytest.raises(CheckpointError, match="a header of"):
        TensorFile(file)
    assert counts == [8]


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_is_cut_off_once_its_header_was_read(size, tmp_path):
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    stored = stored_tensors([file])
    os.truncate(file, size)
    with pytest.raises(
        CheckpointError, match=rf"a\.safetensors is truncated.*bytes from {max(size, 72)} on are missing"
    ):
        stored["a"].read()


def test_a_file_that_becomes_another_one_is_read_to_its_end(tmp_path):
    """Nothing of two files is mixed: what was open remains, and is closed with its last tensor."""
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    before, stored = len(os.listdir("/proc/self/fd")), stored_tensors([file])
    save_file({"a": torch.zeros(9), "b": torch.zeros(9)}, tmp_path / "b")
    (tmp_path / "b").rename(file)
    assert stored["a"].read().equal(torch.ones(1000))
    del stored
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_that_loads_a_model_maps_its_file(tmp_path, monkeypatch):
    """By `safe_open`, which maps the header of a file even where it reads the tensors."""
    build("llama").save_pretrained(tmp_path / "model")

    def forbidden(*args, **options):
        raise AssertionError("safe_open was called")

    for module in [module for module in sys.modules.values() if vars(module).get("safe_open") is safe_open]:
        monkeypatch.setattr(module, "safe_open", forbidden)
    expected = build("llama").state_dict()
    for name, tensor in load_model(str(tmp_path / "model"), "float32", "cpu").state_dict().items():
        assert tensor.equal(expected[name])
    weights = Weights(load_on_disk(str(tmp_path / "model"), "auto", tmp_path / "work"), torch.device("cpu"))
    assert weights.streamed
