"""Files of weights: their headers and tensors, and the index of a folder. Oracle: what safetensors writes and loads."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hasslefree.errors import CheckpointError
from hasslefree.files import INDEX, stored_tensors, weight_files
from hasslefree.models.load import load_model
from tests.tiny_models import build


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int32", "uint8", "float8_e4m3fn"])
def test_headers_and_tensors_are_those_of_safetensors(dtype, tmp_path):
    octets = torch.arange(64, dtype=torch.uint8) % 2
    values = octets.view(getattr(torch, dtype))
    tensors = {"matrix": values.view(2, -1), "empty": values[:0].view(0, 3), "scalar": values[0]}
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "a.safetensors")
    expected = load_file(tmp_path / "a.safetensors")
    with torch.device("meta"):  # as while transformers builds a model
        stored = stored_tensors([tmp_path / "a.safetensors"])
        found = {name: tensor.read() for name, tensor in stored.items()}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        meta = stored[name].meta
        assert (meta.dtype, meta.shape, meta.device.type) == (tensor.dtype, tensor.shape, "meta")
        assert found[name].device.type == "cpu"
        assert found[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def entry(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


HEADERS = {
    "no object": [1],
    "no entry": {"a": 3},
    "a dtype that there is not": {"a": entry([2], 0, 8, "F31")},
    "a shape that no machine can count": {"a": entry([2**70], 0, 8)},
    "a negative shape": {"a": entry([-2], 0, 8)},
    "an overlap": {"a": entry([2], 0, 8), "b": entry([1], 4, 8)},
    "too few bytes": {"a": entry([3], 0, 12)},
    "too many bytes": {"a": entry([1], 0, 4)},
    "depth": b"[" * 100_000,
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_is_wrong_is_refused_in_a_sentence(header, tmp_path):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is truncated, or not a safetensors file \(.+\); downlo"):
        stored_tensors([file])


def test_a_file_that_changes_once_its_header_was_read(tmp_path):
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    stored = stored_tensors([file])
    read = stored["a"].read()
    os.truncate(file, 100)
    assert read.equal(torch.ones(1000)), "what was read is a copy"
    with pytest.raises(CheckpointError, match=r"a\.safetensors is truncated"):
        stored["a"].read()
    file.write_bytes((2**60).to_bytes(8, "little") + bytes(100))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is truncated, .*header too large"):
        stored_tensors([file])
    save_file({"b": torch.zeros(9)}, file)
    with pytest.raises(CheckpointError, match=r"a\.safetensors no longer contains a: it was replaced"):
        stored["a"].read()


def test_an_index_beside_one_whole_file_is_left_over(tmp_path):
    """Oracle: transformers, which loads the one file."""
    build("llama").save_pretrained(tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    found = load_model(str(tmp_path), device="cpu").state_dict()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [("../a.safetensors", "is not the name of a file in the same folder"), ("b.safetensors", "is missing"),
     (3, "is missing")],
)  # fmt: skip
def test_an_index_names_files_of_its_folder_alone(name, message, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=message):
        weight_files(folder)


@pytest.mark.parametrize("shards", [True, False])
def test_files_may_be_links(shards, tmp_path):
    """As in the hub's cache, and in copies of it: to blobs outside the folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "hash")
    name = "model-00001-of-00001.safetensors" if shards else "model.safetensors"
    (folder / name).symlink_to(tmp_path / "hash")
    if shards:
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert stored_tensors(weight_files(folder)).keys() == {"a"}


@pytest.mark.parametrize("content", ["{", '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'])
def test_an_index_that_was_left_behind_does_not_count(content, tmp_path):
    """Beside a whole model.safetensors, which transformers loads."""
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / INDEX).write_text(content)
    assert stored_tensors(weight_files(tmp_path)).keys() == {"a"}
