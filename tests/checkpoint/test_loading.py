"""Loading a folder: whole, in every way that transformers offers, without ever building a dense S."""

import copy
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hasslefree
from hasslefree import Recipe, SparseLowRankLinear
from hasslefree.models.sites import find_sites
from hasslefree.packed.layouts import Bitmask, Columns, PackedGroups
from tests.tiny_models import build, logits, segments, tensors_of

RECIPES = {
    "2:4": Recipe(rank=2, method="eora"),
    "3:8": Recipe(pattern="3:8", rank=2, method="eora"),
    "2:8": Recipe(pattern="2:8", method="wanda"),
    "unstructured": Recipe(pattern="unstructured", sparsity=0.7, rank=2, method="eora"),
    "row": Recipe(pattern="row", sparsity=0.5, method="wanda"),
    "structured": Recipe(pattern="structured", sparsity=0.5, rank=2, method="eora"),
    "int4": Recipe(method="gptq", group_size=16),
    "int8 rows": Recipe(method="caldera", rank=2, rounds=2, bits=8, group_size=0, symmetric=True),
    "2:4 int4": Recipe(method="caldera", rank=2, rounds=2, pattern="2:4", group_size=8),
    "2:4 int4, small scales": Recipe(method="gptq", pattern="2:4", group_size=8, scale_bits=4),
    "int4, small offsets": Recipe(method="gptq", group_size=8, scale_bits=4, offset=True),
    "entropy-coded": Recipe(method="gptq", coding="entropy", bits=5),
    "entropy-coded, int8 factors": Recipe(method="caldera", rank=2, rounds=2, coding="entropy", factor_bits=8),
    "row int4": Recipe(method="gptq", pattern="row", sparsity=0.5, group_size=16),
    "structured int8": Recipe(method="rtn", pattern="structured", sparsity=0.5, bits=8, group_size=16),
    "int8 factors": Recipe(rank=2, method="eora", factor_bits=8),
    "int4, int8 factors": Recipe(method="caldera", rank=2, rounds=2, group_size=16, factor_bits=8),
    # Nothing is kept: tensors without elements.
    "0:4": Recipe(pattern="0:4", rank=2, method="eora"),
    "no columns": Recipe(pattern="structured", sparsity=1.0, rank=2, method="eora"),
}


@pytest.fixture
def folder(compressed_copy):
    return compressed_copy(RECIPES["2:4"])


def test_a_fresh_process_needs_one_import(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.save(logits(model, segments()), folder / "logits.pt")
    program = (
        "import sys, torch, hasslefree; from transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); want = torch.load(sys.argv[1] + '/logits.pt')\n"
        "g = torch.Generator().manual_seed(0); tokens = torch.randint(3, 64, (4, 16), generator=g)\n"
        "with torch.no_grad(): found = m(input_ids=tokens, use_cache=False).logits\n"
        "assert torch.equal(found, want)\n"
        "print(m.model.layers[0].mlp.up_proj)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert "SparseLowRankLinear(in_features=32, out_features=48, rank=2, bias=False, backend=" in done.stdout


def test_the_names_of_all_layers_are_listed_once(folder, monkeypatch):
    """Not once for each layer: models have up to 70,000."""
    listed = []

    class Sites(dict):
        def keys(self):
            listed.append(len(self))
            return super().keys()

    monkeypatch.setattr("hasslefree.checkpoint.plugin.find_sites", lambda model: Sites(find_sites(model)))
    AutoModelForCausalLM.from_pretrained(folder)
    assert len(listed) == 1


@pytest.mark.parametrize(
    ("numba", "pattern", "warnings"), [(False, "2:4", 1), (True, "2:4", 0), (False, "structured", 0)]
)
def test_a_missing_numba_is_said_once_at_load(numba, pattern, warnings, compressed_once, monkeypatch, caplog):
    """And neither with Numba nor for the pattern that has no kernel."""
    folder = compressed_once(RECIPES[pattern])
    monkeypatch.setattr(importlib.import_module("hasslefree.packed.kernels.backends"), "HAS_NUMBA", numba)
    caplog.clear()
    AutoModelForCausalLM.from_pretrained(folder)
    found = [record.getMessage() for record in caplog.records if "Numba" in record.getMessage()]
    assert len(found) == warnings
    assert all('pip install "hasslefree[fast]"' in text and "14 layers" in text for text in found)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_every_pattern_goes_to_disk_and_back_twice(recipe, tmp_path, monkeypatch):
    """Oracle: the compressed model in memory. The second time in shards, by transformers' own save_pretrained."""
    model = build("opt")
    hasslefree.compress(model, tmp_path / "one", recipe, segments=segments())
    expected = logits(model, segments())
    with monkeypatch.context() as patch:
        for layout in (PackedGroups, Bitmask, Columns):
            patch.setattr(layout, "unpack", lambda *_: pytest.fail("a dense S was built"))
        one = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
        one.save_pretrained(tmp_path / "two", max_shard_size="10KB")
        two = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    assert len(list((tmp_path / "two").glob("*.safetensors"))) > 2
    assert torch.equal(logits(one, segments()), expected)
    assert torch.equal(logits(two, segments()), expected)


def test_no_kernel_keeps_an_offloaded_layer_in_memory(folder, tmp_path):
    options = {"device_map": PLACES, "offload_buffers": True, "offload_folder": str(tmp_path / "offload")}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    with torch.no_grad():
        model(segments(1)[:, :1])
    layer = model.model.layers[1].mlp.up_proj
    assert layer.values.is_meta
    assert not layer.kernel.prepared.tensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_may_be_asked_for(dtype, folder):
    """Oracle: the loaded model, cast. The index has no part in it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    layer, kept = model.model.layers[0].mlp.up_proj, AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp
    assert torch.equal(layer.positions, kept.up_proj.positions)
    assert torch.equal(layer.unpacked(), kept.up_proj.unpacked().to(dtype))


def test_a_loaded_model_can_be_cast_and_trained(folder):
    """transformers forbids both for models that it takes for quantised."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert copy.deepcopy(model).half().float().dtype == torch.float32
    tokens = segments()
    before = model(input_ids=tokens, labels=tokens).loss
    before.backward()
    layer = model.model.layers[0].mlp.up_proj
    assert all(p.grad.abs().sum() > 0 for p in (layer.values, layer.low_rank_u, layer.low_rank_v))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    assert model(input_ids=tokens, labels=tokens).loss < before
    model.save_pretrained(folder / "trained")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder / "trained"), tokens), logits(model, tokens))


PLACES = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
          "model.rotary_emb": "cpu", "lm_head": "cpu"}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"device_map": "auto"}, {"device_map": "cpu"}, {"device_map": PLACES},
                {"device_map": PLACES, "offload_buffers": True}], ids=["auto", "cpu", "disk", "disk, buffers too"]
)  # fmt: skip
def test_device_maps(options, folder, tmp_path):
    """Oracle: the model loaded without one."""
    model = AutoModelForCausalLM.from_pretrained(folder, offload_folder=str(tmp_path / "offload"), **options)
    expected = logits(AutoModelForCausalLM.from_pretrained(folder), segments())
    assert torch.equal(logits(model, segments()), expected)
    offloaded = "offload_buffers" in options
    assert (model.model.layers[1].mlp.up_proj.positions.device.type == "meta") == offloaded


def test_config_json_describes_every_layer(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["version"], config["layout"]) == ("hasslefree", 2, "packed")
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLowRankLinear)}
    assert config["modules"].keys() == layers.keys()
    entry = config["modules"]["model.layers.1.mlp.down_proj"]
    assert len(entry.pop("crc32")) == 8
    assert entry == {"pattern": "2:4", "shape": [32, 48], "rank": 2, "nonzeros": 32 * 24}


def test_config_json_describes_the_grid(compressed_once):
    config = json.loads((compressed_once(RECIPES["2:4 int4"]) / "config.json").read_text())["quantization_config"]
    entry = config["modules"]["model.layers.1.mlp.down_proj"]
    assert len(entry.pop("crc32")) == 8
    grid = {"bits": 4, "group": 8, "symmetric": False}
    assert entry == {"pattern": "2:4", "shape": [32, 48], "rank": 2, "nonzeros": 32 * 24, "grid": grid}


def test_config_json_and_the_tensors_describe_factors_in_eight_bits(tmp_path):
    """Oracles: the shapes and dtypes of docs/reference/format.md; the model in memory, its factors by hand."""
    model = build("llama", torch.bfloat16)
    hasslefree.compress(model, tmp_path / "out", RECIPES["int8 factors"], segments=segments())
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    name, stored = "model.layers.1.mlp.down_proj", tensors_of(tmp_path / "out")
    entry = config["modules"][name]
    assert len(entry.pop("crc32")) == 8
    assert entry == {"pattern": "2:4", "shape": [32, 48], "rank": 2, "nonzeros": 32 * 24, "factor_bits": 8}
    own = {leaf: stored[f"{name}.low_rank_{leaf}"] for leaf in ("u", "v", "u_scale", "v_scale")}
    shapes = {"u": (32, 2), "v": (2, 48), "u_scale": (32,), "v_scale": (2,)}
    assert {leaf: tuple(tensor.shape) for leaf, tensor in own.items()} == shapes
    assert {tensor.dtype for tensor in own.values()} == {torch.int8, torch.bfloat16}
    u, v = model.get_submodule(name).factors()
    assert torch.equal(own["u"].bfloat16() * own["u_scale"][:, None], u)
    assert torch.equal(own["v"].bfloat16() * own["v_scale"][:, None], v)
    for dtype in (torch.float16, torch.float32):
        cast = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).get_submodule(name)
        assert torch.equal(cast.low_rank_u, own["u"])
        assert torch.equal(cast.low_rank_u_scale.bfloat16(), own["u_scale"])
        assert cast.low_rank_u_scale.dtype == dtype


def test_without_pruning_the_tensors_are_those_of_pack_quantized(tmp_path):
    """Oracle: the format of compressed-tensors, decoded here: offset binary, eight codes a word, low bits first."""
    model = build("llama", torch.bfloat16)
    hasslefree.compress(model, tmp_path / "out", RECIPES["int4"], segments=segments())
    stored = tensors_of(tmp_path / "out")
    name = "model.layers.1.mlp.down_proj"
    packed, scale, zero = (stored[f"{name}.weight_{part}"] for part in ("packed", "scale", "zero_point"))
    assert (packed.dtype, packed.shape) == (torch.int32, (32, 48 // 8))
    assert (scale.dtype, scale.shape) == (torch.bfloat16, (32, 3))
    assert (zero.dtype, zero.shape) == (torch.int32, (32 // 8, 3))
    signed = torch.stack([(packed >> 4 * k & 15) - 8 for k in range(8)], -1).flatten(1)
    points = torch.stack([(zero >> 4 * k & 15) - 8 for k in range(8)], 1).flatten(0, 1)
    values = (signed.view(32, 3, 16) - points[..., None]).bfloat16() * scale[..., None]
    assert torch.equal(values.view(32, 48), model.get_submodule(name).unpacked())


def test_without_the_import_the_layers_are_missing_not_taken_for_s_alone(folder, compressed_once):
    """S alone gives plausible text: it must not be found under the name of the dense weight."""
    stored, layers = set(tensors_of(folder)), json.loads((folder / "config.json").read_text())
    names = layers["quantization_config"]["modules"]
    assert names
    assert not {f"{name}.weight" for name in names} & stored
    assert {f"{name}.values" for name in names} <= stored
    assert not {f"{name}.weight" for name in names} & set(tensors_of(compressed_once(RECIPES["int4"])))


def test_every_file_can_be_read_by_whom_the_umask_lets(folder):
    umask = os.umask(0)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o666 & ~umask}


def test_a_model_without_its_head_and_back(folder, tmp_path):
    """Oracle: the whole model. Names in config.json have a prefix that those of the model without a head lack."""
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    headless = AutoModel.from_pretrained(folder).eval()
    headless.save_pretrained(tmp_path / "headless")
    again = AutoModel.from_pretrained(tmp_path / "headless").eval()
    with torch.no_grad():
        expected = whole.model(segments()).last_hidden_state
        assert torch.equal(headless(segments()).last_hidden_state, expected)
        assert torch.equal(again(segments()).last_hidden_state, expected)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "headless")
    with torch.no_grad():
        assert torch.equal(back.model(segments()).last_hidden_state, expected)


@pytest.mark.parametrize("family", ["llama", "phi"])  # phi: the head has a bias
def test_a_compressed_head_that_a_class_does_not_have(family, tmp_path):
    recipe = Recipe(method="rtn", bits=4, group_size=16, embedding_bits=8)
    hasslefree.compress(build(family), tmp_path / "out", recipe, segments=segments())
    modules = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["modules"]
    assert "lm_head" in modules
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.model.state_dict()[name], tensor), name
