"""What `inspect` says, against the weights themselves."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe, SparseLowRankLinear
from hasslefree.checkpoint.inspect import inspect_folder
from hasslefree.errors import CheckpointError, ModelError
from hasslefree.evaluation.continuation import dense_original
from hasslefree.recipe.resolve import with_defaults
from tests.checkpoint.test_loading import RECIPES
from tests.tiny_models import build, segments


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_sizes_are_those_of_the_tensors(recipe, compressed_once):
    """Oracle: the loaded model's tensors, and those of the model before. Tied weights count once."""
    before = {name: parameter.nbytes for name, parameter in build("gpt2", torch.bfloat16).named_parameters()}
    folder = compressed_once(recipe, "gpt2", torch.bfloat16)
    found = inspect_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLowRankLinear)}
    assert {layer.name for layer in found.layers} == layers.keys()
    for layer in found.layers:
        module = layers[layer.name]
        assert layer.bytes == sum(tensor.nbytes for tensor in module.state_dict().values())
        assert layer.dense_bytes == before[f"{layer.name}.weight"] + before[f"{layer.name}.bias"]
        assert layer.spec.shape == tuple(module.unpacked().shape)
        assert (layer.spec.pattern, layer.spec.rank, layer.dtype) == (
            with_defaults(recipe).pattern,
            recipe.rank or 0,
            "BF16",
        )
        assert layer.spec.nonzeros == module.spec.nonzeros
        assert layer.to_dict()["grid"] == (str(module.spec.grid) if module.spec.grid else None)
        assert layer.spec.factor_bits == recipe.factor_bits
        assert ("factors in int8" in layer.spec.kind) == (recipe.factor_bits == 8)
    totals = found.to_dict()
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    assert totals["bytes"] == sum(tensor.nbytes for file in files for tensor in file.values())
    assert totals["dense_bytes"] == sum(before.values())
    assert totals["layer_bytes"] == sum(layer.bytes for layer in found.layers)
    assert json.loads(json.dumps(totals))["layers"][0]["name"] == found.layers[0].name


def test_layers_are_in_the_order_of_the_model(tmp_path):
    hasslefree.compress(
        build("llama", num_hidden_layers=11), tmp_path / "out", Recipe(method="wanda"), segments=segments()
    )
    blocks = [int(layer.name.split(".")[2]) for layer in inspect_folder(tmp_path / "out").layers]
    assert blocks == sorted(blocks)


def test_what_is_no_compressed_folder(tmp_path):
    build("llama").save_pretrained(tmp_path / "dense")
    (tmp_path / "empty").mkdir()
    for folder, message in [
        (tmp_path / "dense", "is not a compressed model; give a folder that `hasslefree compress` wrote"),
        (tmp_path / "none", "the folder .*none does not exist; a model on the hub must be downloaded first"),
        (tmp_path / "empty", r"config\.json cannot be read"),
    ]:
        with pytest.raises(ModelError, match=message):
            inspect_folder(folder)


@pytest.mark.parametrize("content", [b"{}", b'{"layers": "\xff"}'], ids=["no layers", "no text"])
def test_a_damaged_record_is_one_message(content, compressed_copy):
    """It names the folder and what to do, whoever reads the record."""
    folder = compressed_copy(RECIPES["2:4"])
    (folder / "compression.json").write_bytes(content)
    for read in (inspect_folder, dense_original):
        with pytest.raises(CheckpointError, match="out.*compression.json .*; compress the model again"):
            read(folder)
