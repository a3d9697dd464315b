"""One block in memory at a time gives what the whole model in memory gives."""

import dataclasses
import filecmp
import gc
import json
import re
import weakref
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasslefree
from hasslefree import Recipe
from hasslefree.models.blocks import find_blocks
from hasslefree.models.load import load_model, load_on_disk
from hasslefree.models.weights import Weights, outside
from tests.listeners import by_layer
from tests.tiny_models import NO_TOKENIZER, build, segments, tensors_of

RECIPE = Recipe(rank=2, method="eora")


def streamed(source, out, recipe=RECIPE, **options):
    return hasslefree.compress(
        str(source), out, recipe, tokenizer=NO_TOKENIZER, segments=segments(), device="cpu", **options
    )


def in_memory_of(model):
    """The names of the parameters that are on no meta device."""
    return {name for name, parameter in model.named_parameters() if not parameter.is_meta}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "mixtral"])
def test_a_model_from_disk_gives_the_bytes_of_one_in_memory(family, tmp_path):
    """Oracle: the same model, loaded whole. Buffers that are computed at construction would show in every byte."""
    model = build(family)
    model.save_pretrained(tmp_path / "dense")
    hasslefree.compress(model, tmp_path / "whole", RECIPE, segments=segments())
    streamed(tmp_path / "dense", tmp_path / "streamed")
    files = [file.name for file in (tmp_path / "whole").glob("*.safetensors")]
    assert len(files) == 3
    same = filecmp.cmpfiles(tmp_path / "whole", tmp_path / "streamed", files, shallow=False)
    assert same == (files, [], [])


def test_another_dtype_and_shards(tmp_path):
    """Oracle: the model loaded whole in that dtype."""
    build("llama").save_pretrained(tmp_path / "dense", max_shard_size="10KB")
    recipe = Recipe(rank=2, method="eora", dtype="bfloat16")
    whole = load_model(str(tmp_path / "dense"), "bfloat16", "cpu")
    hasslefree.compress(whole, tmp_path / "whole", recipe, segments=segments())
    streamed(tmp_path / "dense", tmp_path / "streamed", recipe)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "streamed" / file.name).read_bytes()


# Tensors that a family keeps in float32: buffers, and parameters.
KEPT = {
    "deepseek_v3": "e_score_correction_bias",
    "nemotron_h": "e_score_correction_bias",
    "flint": r"gate\.weight|sinks",
}


@pytest.mark.parametrize("family", KEPT)
def test_what_a_family_keeps_in_float32_is_not_rounded(family, tmp_path):
    """Oracle: the model that transformers loads from the same folder, for every tensor that is not compressed."""
    build(family, torch.bfloat16).save_pretrained(tmp_path / "dense")
    tensors = tensors_of(tmp_path / "dense")
    for name in tensors:
        if re.search(KEPT[family], name):  # most of these are no numbers of bfloat16
            tensors[name] = torch.linspace(0.1, 0.11, tensors[name].numel()).view(tensors[name].shape)
    save_file(tensors, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    expected = load_model(str(tmp_path / "dense"), device="cpu").state_dict()
    kept = [name for name in expected if re.search(KEPT[family], name)]
    assert kept
    assert all(len(expected[name].unique()) == expected[name].numel() for name in kept)
    streamed(tmp_path / "dense", tmp_path / "out")
    stored = tensors_of(tmp_path / "out")
    assert set(kept) <= stored.keys()
    for name in stored.keys() & expected.keys():
        assert stored[name].dtype == expected[name].dtype, name
        assert torch.equal(stored[name], expected[name]), name


@pytest.mark.parametrize("activations", ["cpu", "disk"])
def test_where_the_activations_are_changes_nothing(activations, tmp_path):
    build("llama").save_pretrained(tmp_path / "dense")
    streamed(tmp_path / "dense", tmp_path / "device")
    streamed(tmp_path / "dense", tmp_path / "elsewhere", activations=activations)
    for file in (tmp_path / "device").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "elsewhere" / file.name).read_bytes()


def test_no_more_than_one_block_is_in_memory(tmp_path, monkeypatch):
    build("llama", num_hidden_layers=4).save_pretrained(tmp_path / "dense")
    models, seen = [], []
    load = load_on_disk

    def loaded(*arguments):
        models.append(load(*arguments))
        return models[0]

    monkeypatch.setattr("hasslefree.pipeline.opening.load_on_disk", loaded)

    def look(report, done, total):
        seen.append({name.split(".")[2] for name in in_memory_of(models[0])})

    streamed(tmp_path / "dense", tmp_path / "out", progress=by_layer(look))
    assert seen == [{str(block)} for block in range(4) for _ in range(7)]
    assert not in_memory_of(models[0])
    assert not any(buffer.numel() > 64 for buffer in models[0].buffers() if not buffer.is_meta), "positions of S"


def test_a_replaced_layer_is_gone_at_once(tmp_path):
    """A cycle would keep its weight until Python happens to collect."""
    build("llama").save_pretrained(tmp_path / "dense")
    model = load_on_disk(str(tmp_path / "dense"), "auto", tmp_path)
    weights, block = Weights(model, torch.device("cpu")), find_blocks(model).modules[0]
    gc.disable()
    try:
        with weights.present(block.modules):
            weight = weakref.ref(block.mlp.up_proj.weight)
            assert weight() is not None
            block.set_submodule("mlp.up_proj", torch.nn.Identity())
            assert weight() is None
    finally:
        gc.enable()


def test_weights_are_there_while_they_are_needed(tmp_path):
    """Oracle: the model loaded whole."""
    whole = build("gpt2")
    whole.save_pretrained(tmp_path / "dense")
    model = load_on_disk(str(tmp_path / "dense"), "auto", tmp_path)
    weights, blocks = Weights(model, torch.device("cpu")), find_blocks(model)
    expected = dict(whole.named_parameters())
    assert not in_memory_of(model)
    with suppress(KeyError), weights.present(outside(model, blocks)):
        names = in_memory_of(model)
        assert names == {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight",
                         "transformer.ln_f.bias"}  # fmt: skip
        assert all(torch.equal(model.get_parameter(name), expected[name]) for name in names)
        raise KeyError  # an error in between leaves nothing behind
    with weights.present(blocks.modules[1].modules):
        assert {name.split(".")[2] for name in in_memory_of(model)} == {"1"}
        assert all(torch.equal(model.get_parameter(name), expected[name]) for name in in_memory_of(model))
    assert not in_memory_of(model)


def test_tied_embeddings_and_buffers_in_shards_of_a_float32_config(tmp_path):
    """Oracle: the checkpoint as transformers 5 stores it.

    The embedding is stored under both names, in different shards; with what older checkpoints hold beside the weights;
    and the configuration says float32 where the file is bfloat16.
    """
    model = build("llama", torch.bfloat16, tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "dense")
    model.config.dtype = torch.float32
    older = tmp_path / "older"
    model.config.save_pretrained(older)
    tensors = load_file(tmp_path / "dense" / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    shards = {
        "model-00001-of-00002.safetensors": {"lm_head.weight": embedding, **extra},
        "model-00002-of-00002.safetensors": {"model.embed_tokens.weight": embedding.clone(), **tensors},
    }
    for file, content in shards.items():
        save_file(content, older / file, metadata={"format": "pt"})
    index = {name: file for file, content in shards.items() for name in content}
    (older / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    recipe = Recipe(rank=2, method="eora", allocate="error", dtype="float32")
    streamed(tmp_path / "dense", tmp_path / "one", recipe)
    streamed(older, tmp_path / "two", dataclasses.replace(recipe, dtype="auto"))
    expected, found = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("stored", ["source", "other name", "both", "two weights"])
def test_tied_embeddings_under_whichever_name_the_checkpoint_stores_them(stored, tmp_path):
    """Oracle: the checkpoint as transformers 5 stores it, or, of two different weights, the model loaded whole."""
    build("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    file = tmp_path / "dense" / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    if stored != "source":
        tensors["lm_head.weight"] = embedding.flip(0).clone() if stored == "two weights" else embedding.clone()
    if stored == "other name":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    recipe = Recipe(rank=2, method="eora", allocate="error")
    hasslefree.compress(load_model(str(file.parent), device="cpu"), tmp_path / "whole", recipe, segments=segments())

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamed(
            file.parent, tmp_path / "out", recipe, progress=by_layer(lambda report, done, total: done == 8 and stop())
        )
    streamed(file.parent, tmp_path / "out", recipe, resume=True)
    expected, found = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert ("lm_head.weight" in found) == (stored == "two weights")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loaded = load_model(str(tmp_path / "out"), device="cpu")
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)
    assert torch.equal(loaded.get_output_embeddings().weight, tensors.get("lm_head.weight", embedding))
