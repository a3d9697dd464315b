"""What is decoded when a model is loaded, and what is said of codes that are damaged."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import CheckpointError, GridError
from hasslefree.files import StoredTensor
from hasslefree.packed import spec
from hasslefree.packed.decoding import entropy_coded
from tests.tiny_models import build, logits, segments


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """A folder, and the logits of the model that was compressed."""
    folder = tmp_path_factory.mktemp("coded") / "out"
    model = build("llama")
    hasslefree.compress(model, folder, Recipe(bits=5, coding="entropy", effort="fast"), segments=segments())
    return folder, logits(model, segments())


def test_layers_are_decoded_when_they_are_loaded_and_not_again(coded, monkeypatch):
    folder, expected = coded
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = dict(entropy_coded(model))
    assert len(layers) == 14
    monkeypatch.setattr(spec, "decode", lambda *_: pytest.fail("decoded again"))
    assert torch.equal(logits(model, segments()), expected)


@pytest.mark.parametrize(("pattern", "read"), [("dense", 0), ("2:4", 14)])
def test_an_empty_index_is_not_read(pattern, read, tmp_path, monkeypatch):
    """Each reading parses the header of the file, in which a mixture of experts has thousands of layers."""
    recipe = Recipe(bits=4, pattern=pattern, rank=0, effort="fast", group_size=None)
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    names = []
    reading = StoredTensor.read
    monkeypatch.setattr(StoredTensor, "read", lambda self: names.append(self) or reading(self))
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert len(names) == read


def test_codes_move_with_their_layers(coded, monkeypatch):
    """Without a second device, a move is a copy."""
    folder, expected = coded
    model = AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(spec, "decode", lambda *_: pytest.fail("decoded again"))
    model._apply(lambda tensor: tensor.clone())
    assert torch.equal(logits(model, segments()), expected)


def test_codes_whose_stream_has_changed_do_not_move(coded):
    model = AutoModelForCausalLM.from_pretrained(coded[0])
    [layer, *_] = dict(entropy_coded(model)).values()
    with torch.no_grad():
        layer.get_buffer("weight_packed")[5] ^= 1 << 9
    model._apply(lambda tensor: tensor.clone())
    with pytest.raises(GridError, match="are damaged"):
        layer(torch.ones(1, layer.in_features))


def test_layers_on_the_disk_are_decoded_at_a_call(coded, tmp_path):
    folder, expected = coded
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": "disk"}, offload_folder=tmp_path)
    assert not dict(entropy_coded(model))
    # No kernel multiplies what is not in memory.
    torch.testing.assert_close(logits(model, segments()), expected, rtol=1e-4, atol=1e-5)


def test_damaged_codes_are_refused_by_the_name_of_their_layer(coded, tmp_path):
    folder = shutil.copytree(coded[0], tmp_path / "copy")
    name = "model.layers.1.mlp.up_proj"
    stream = f"{name}.weight_packed"
    [file] = [shard for shard in folder.glob("*.safetensors") if stream in load_file(shard)]
    tensors = load_file(file)
    tensors[stream][5] ^= 1 << 9
    save_file(tensors, file, {"format": "pt"})
    message = (
        rf"{name}: the entropy-coded codes of a layer of \d+ × \d+ are damaged: .*download the model's files again"
    )
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)
