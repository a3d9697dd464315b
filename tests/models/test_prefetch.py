"""The weights of the next block are read while the present one is there."""

import gc
import json
import threading
import weakref
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError
from hasslefree.models.blocks import find_blocks
from hasslefree.models.load import load_on_disk
from hasslefree.models.weights import Source, Weights
from tests.listeners import by_layer
from tests.tiny_models import NO_TOKENIZER, build, segments

CPU = torch.device("cpu")
RECIPES = {
    "mixtral": Recipe(rank=2, method="eora", dtype="bfloat16"),
    "forwards and backwards": Recipe(rank=2, effort="fast", rounds=2, allocate="error"),
}


def opened(folder):
    """A model with its parameters in files, what reads them, and its blocks."""
    model = load_on_disk(str(folder), "auto", folder)
    return model, Weights(model, CPU), find_blocks(model).modules


def ended(name):
    """Wait for the end of all threads of this name."""
    for thread in threading.enumerate():
        if thread.name.startswith(name):
            thread.join(60)


@pytest.fixture
def reads(monkeypatch):
    """Of each read of a checkpoint the tensor's name and whether the main thread read it, and a reference to it."""
    seen, original = [], Source.read

    def read(self):
        found = original(self)
        seen.append((self.name, threading.current_thread() is threading.main_thread(), weakref.ref(found)))
        return found

    monkeypatch.setattr(Source, "read", read)
    return seen


@pytest.mark.parametrize("name", RECIPES)
def test_the_bytes_are_those_of_one_step_after_the_other(name, reads, tmp_path, monkeypatch):
    """Oracle: the same run, where nothing is read ahead and nothing written beside the work."""
    build(name if name == "mixtral" else "llama", num_hidden_layers=3).save_pretrained(tmp_path / "dense")
    for beside in (True, False):
        reads.clear()
        monkeypatch.setattr("hasslefree.pipeline.preflight.check_memory", lambda setup, beside=beside: beside)
        hasslefree.compress(
            tmp_path / "dense", tmp_path / str(beside), RECIPES[name], tokenizer=NO_TOKENIZER, segments=segments(),
            device="cpu",
        )  # fmt: skip
        assert beside != all(by_main for _, by_main, _ in reads)
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / each).iterdir()} for each in ("True", "False"))
    assert one == other


def test_the_next_block_is_read_by_a_thread_and_not_again(reads, tmp_path):
    """Oracle: the file itself."""
    build("llama").save_pretrained(tmp_path)
    model, weights, (first, second) = opened(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    with weights.present(first.modules, second.modules):
        ended("read ahead")
        before = [(name, by_main) for name, by_main, _ in reads]
        assert before == [(name, ".layers.0." in name) for name, _ in before]
        assert {name for name, _ in before} == {name for name in stored if ".layers." in name}
        assert all(parameter.is_meta for parameter in second.parameters())
    with weights.present(second.modules):
        assert len(reads) == len(before)
        for name, parameter in model.named_parameters():
            assert parameter.is_meta or torch.equal(parameter, stored[name])


def test_no_more_than_the_next_block_is_read_ahead(reads, tmp_path):
    """As the estimate counts it. What a reader handed over is in the block: a tensor of its own holds it no more."""
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path / "dense")
    held = []

    def look(layer, done, total):
        ended("read ahead")
        alive = {int(name.split(".")[2]) for name, _, tensor in reads if tensor() is not None}
        held.append((int(layer.name.split(".")[2]), alive))

    hasslefree.compress(
        tmp_path / "dense", tmp_path / "out", Recipe(rank=2, method="eora"), tokenizer=NO_TOKENIZER,
        segments=segments(), device="cpu", progress=by_layer(look),
    )  # fmt: skip
    assert held == [(block, {block + 1} - {4}) for block in range(4) for _ in range(7)]


def test_what_is_not_taken_is_dropped_with_the_work_that_fails(reads, tmp_path):
    build("llama").save_pretrained(tmp_path)
    _, weights, (first, second) = opened(tmp_path)
    gc.disable()
    try:
        with suppress(KeyError), weights.present(first.modules, second.modules):
            raise KeyError
        assert not any(thread.name.startswith("read ahead") for thread in threading.enumerate())
        assert not any(tensor() is not None for _, _, tensor in reads)
    finally:
        gc.enable()


@pytest.mark.parametrize("damage", ["gone", "cut short"])
def test_an_error_of_the_reader_names_the_tensor_and_the_file_when_it_is_needed(damage, tmp_path):
    """And not before: the block that is there is still compressed."""
    build("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    _, weights, (first, second) = opened(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    file = tmp_path / index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:100])
    with weights.present(first.modules, second.modules):
        ended("read ahead")
    message = rf"{file} (cannot be read|is truncated, or not a safetensors file) \(.*\); download or copy it again"
    with pytest.raises(ModelError, match=message), weights.present(second.modules):
        pass
    assert all(parameter.is_meta for parameter in second.parameters())
