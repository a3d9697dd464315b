"""Exports that keep the codes of S. Oracles: the gguf package for GGUF; for the others, their definition in NumPy."""

import json
import os
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint.record import read_record
from hasslefree.core.grids import BITS, Grid, Quantised
from hasslefree.core.low_rank import LowRank
from hasslefree.core.protocols import Decomposition
from hasslefree.errors import ModelError, OutputError
from hasslefree.exports.codes import Coded
from hasslefree.exports.gguf import Files, blocks_of
from hasslefree.exports.quantised import kernels_in_vllm, pack_affine, pack_quantized
from hasslefree.exports.template import find_vector, nearest_rows, read_template, row_order
from hasslefree.packed.linear import SparseLowRankLinear, compressed_layers
from hasslefree.recipe.engines import K_TYPES, fused_name, vllm_kernels
from tests.tiny_models import build, in_one_file, segments

# The engines' tensors are asked for by a row of these sizes: a multiple of 32, and of no other group.
WIDE = {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True, "mlp_bias": True}
HEADS = {"q_proj": 4, "k_proj": 2}


def compressed(folder, changes=None, dtype=torch.bfloat16, family="llama", **recipe):
    """A tiny model with random biases and gains, compressed into FOLDER by a quick method, and the dense one."""
    model = build(family, dtype, **(WIDE | (changes or {})))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                seed = zlib.crc32(name.encode())
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    dense = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fields = {"method": "lq-lora", "rank": 2, "group_size": 32, "scale_bits": 16} | recipe
    if fields["method"] == "lq-lora" and not fields.get("symmetric"):
        fields.setdefault("offset", True)
    hasslefree.compress(model, folder, Recipe(**fields), segments=segments())
    return dense


def permuted(name, tensor):
    """The rows of q and k in llama.cpp's order: conversion/llama.py, `permute`."""
    if (heads := next((count for part, count in HEADS.items() if part in name), 0)) == 0:
        return tensor
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


NAMES = {
    "self_attn.": "attn_", "mlp.": "ffn_", "_proj": "", "attn_o.": "attn_output.", "model.layers": "blk",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "model.norm": "output_norm",
    "model.embed_tokens": "token_embd", "lm_head": "output",
}  # fmt: skip


def renamed(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def write_template(path, dense, kind="BF16", leave=(), **metadata):
    """The dense model as llama.cpp's converter writes it."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_uint32("llama.block_count", 2)
    for key, value in metadata.items():
        writer.add_uint16(key, value)
    for name, tensor in dense.items():
        if name in leave or (name == "lm_head.weight" and torch.equal(tensor, dense["model.embed_tokens.weight"])):
            continue
        values = permuted(name, tensor.float().numpy())
        type_ = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else kind]
        writer.add_tensor(renamed(name), gguf.quantize(values, type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """packed, with its dense tensors, and template.gguf of these."""
    root = tmp_path_factory.mktemp("codes")
    dense = compressed(root / "packed")
    write_template(root / "template.gguf", dense)
    return root, dense


def read(path):
    gguf = pytest.importorskip("gguf")
    reader = gguf.GGUFReader(path)
    return reader, {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}


def in_float32(folder):
    """The compressed layers, whose S and factors are then exact."""
    return compressed_layers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def test_gguf_holds_s_bit_for_bit_in_the_order_of_the_template(work, tmp_path):
    root, _ = work
    hasslefree.export(root / "packed", tmp_path / "out", "gguf", template=root / "template.gguf")
    reader, found = read(tmp_path / "out" / "model.gguf")
    before, expected = read(root / "template.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert list(kinds) == [tensor.name for tensor in before.tensors]
    assert {"general.file_type", "general.quantization_version"} <= reader.fields.keys()
    for key in ("general.architecture", "tokenizer.ggml.tokens", "llama.block_count"):
        assert reader.get_field(key).contents() == before.get_field(key).contents()
    for name, layer in in_float32(root / "packed").items():
        theirs = renamed(f"{name}.weight")
        expected[theirs] = permuted(name, layer.unpacked().detach().numpy())
        assert kinds.pop(theirs) == "Q4_1"
    assert set(kinds.values()) == {"BF16", "F32"}
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


def test_a_gguf_file_behind_a_link_is_replaced(work, tmp_path):
    root, _ = work
    (tmp_path / "latest.gguf").symlink_to("v1.gguf")
    for _ in range(2):
        hasslefree.export(
            root / "packed", tmp_path / "latest.gguf", "gguf", template=root / "template.gguf", overwrite=True
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "latest.gguf",
            "v1-adapter.gguf",
            "v1.Modelfile",
            "v1.gguf",
        ]
        assert read(tmp_path / "latest.gguf")[1]
    llama_cli, ollama = Files.of(tmp_path / "latest.gguf").commands.split("\n")
    assert llama_cli == f"llama-cli -m {tmp_path}/v1.gguf --lora {tmp_path}/v1-adapter.gguf"
    assert ollama.endswith(f"{tmp_path}/v1.Modelfile")


def test_gguf_holds_l_as_an_adapter_of_scale_1(work, tmp_path):
    root, _ = work
    hasslefree.export(root / "packed", tmp_path / "out", "gguf", template=root / "template.gguf")
    reader, found = read(tmp_path / "out" / "adapter.gguf")
    keys = ("general.type", "adapter.type", "general.architecture", "adapter.lora.alpha")
    assert [reader.get_field(key).contents() for key in keys] == ["adapter", "lora", "llama", 2]
    layers = in_float32(root / "packed")
    assert found.keys() == {renamed(f"{name}.weight.lora_{x}") for name in layers for x in "ab"}
    for name, layer in layers.items():
        u, v = (factor.detach().numpy() for factor in layer.factors())
        assert np.array_equal(found[renamed(f"{name}.weight.lora_a")], v)
        assert np.array_equal(found[renamed(f"{name}.weight.lora_b")], permuted(name, u))


def test_a_float32_model_that_was_trained_has_scales_for_llama_cpp(tmp_path):
    fields = {"rank": 0, "bits": 3, "match_predictions": 96}
    dense = compressed(tmp_path / "packed", {"initializer_range": 0.2}, torch.float32, **fields)
    trained = read_record(tmp_path / "packed").predictions
    assert trained["after"] < trained["before"]
    write_template(tmp_path / "template.gguf", dense, "F32")
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")
    found = read(tmp_path / "out" / "model.gguf")[1]
    for name, layer in in_float32(tmp_path / "packed").items():
        assert np.array_equal(found[renamed(f"{name}.weight")], permuted(name, layer.unpacked().detach().numpy())), name


@pytest.mark.parametrize("kind", ["F16", "F32"])
@pytest.mark.parametrize("rank", [0, 2])
def test_templates_of_other_types(tmp_path, kind, rank):
    dense = compressed(tmp_path / "packed", rank=rank, symmetric=True, changes={"tie_word_embeddings": False})
    write_template(tmp_path / "template.gguf", dense, kind)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")
    assert (tmp_path / "out" / "adapter.gguf").exists() == (rank > 0)
    found = read(tmp_path / "out" / "model.gguf")[1]
    for name, layer in in_float32(tmp_path / "packed").items():
        values = permuted(name, layer.unpacked().detach().numpy())
        assert np.array_equal(found[renamed(f"{name}.weight")], values), name


def test_layers_of_several_ranks_get_an_alpha_of_0(work, tmp_path):
    """llama.cpp: `alpha ? adapter_scale * alpha / rank : adapter_scale`."""
    dense = compressed(tmp_path / "packed", leave_dense=("*.v_proj",))
    layer = "model.layers.1.mlp.up_proj"
    lower_rank(tmp_path / "packed", layer)
    write_template(tmp_path / "template.gguf", dense)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")
    reader, found = read(tmp_path / "out" / "adapter.gguf")
    assert reader.get_field("adapter.lora.alpha").contents() == 0
    assert found[renamed(f"{layer}.weight.lora_a")].shape == (1, 64)
    hasslefree.export(tmp_path / "packed", tmp_path / "mlx", "mlx")
    adapter = load_file(tmp_path / "mlx" / "adapters.safetensors")
    assert adapter[f"{layer}.lora_a"].shape == (64, 2)
    u, v = in_float32(tmp_path / "packed")[layer].factors()
    assert torch.equal(adapter[f"{layer}.lora_a"].float() @ adapter[f"{layer}.lora_b"].float(), (u @ v).T)


def test_biases_of_dense_layers_are_in_the_order_of_their_rows(tmp_path):
    dense = compressed(tmp_path / "packed", leave_dense=("*.0.*.q_proj",), rank=0)
    write_template(tmp_path / "template.gguf", dense)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")
    name = "model.layers.0.self_attn.q_proj.bias"
    found = read(tmp_path / "out" / "model.gguf")[1]
    assert np.array_equal(found[renamed(name)], permuted(name, dense[name].float().numpy()))


@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_experts_that_stay_dense_are_those_of_the_template(family, tmp_path):
    """Oracle: the template, but for the compressed layers. llama.cpp keeps gates and factors apart."""
    dense = compressed(tmp_path / "packed", {"attention_bias": False}, leave_dense=("*.experts.*",), family=family)
    experts = [name for name in dense if name.endswith("experts.gate_up_proj")]
    assert experts
    for name in experts:
        gate, up = dense.pop(name).chunk(2, -2)
        dense |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    write_template(tmp_path / "template.gguf", dense)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")
    found = read(tmp_path / "out" / "model.gguf")[1]
    expected = read(tmp_path / "template.gguf")[1]
    for name, layer in in_float32(tmp_path / "packed").items():
        expected[renamed(f"{name}.weight")] = permuted(name, layer.unpacked().detach().numpy())
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


def lower_rank(folder, layer):
    """Leave one column of u and one row of v of a layer, and its entry in config.json alike."""
    from safetensors.torch import save_file

    file, config = in_one_file(folder) / "model.safetensors", folder / "config.json"
    tensors, content = load_file(file), json.loads(config.read_text())
    tensors[f"{layer}.low_rank_u"] = tensors[f"{layer}.low_rank_u"][:, :1].contiguous()
    tensors[f"{layer}.low_rank_v"] = tensors[f"{layer}.low_rank_v"][:1].contiguous()
    content["quantization_config"]["modules"][layer]["rank"] = 1
    save_file(tensors, file, metadata={"format": "pt"})
    config.write_text(json.dumps(content))


def layer_on(grid, out=6, width=192, seed=0):
    """A layer whose S is random on a grid, in float32."""
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(seed))
    scaling = grid.scaling(weight)
    sparse = scaling.nearest(weight)
    nothing = LowRank(weight.new_zeros(out, 0), weight.new_zeros(0, width))
    quantised = Quantised.of(sparse, scaling, torch.float32)
    result = Decomposition(sparse, nothing, 0.0, 0.0, (), quantised=quantised)
    return SparseLowRankLinear.from_decomposition(result, None, "dense")


IN_BLOCKS = [
    Grid(bits, group, **kind)
    for bits in BITS
    for group in (32, 64, 96, None)
    for kind in ({"symmetric": True}, {"offset": True}, {})
    if not (kind == {"offset": True} and bits > 5) and not (kind == {} and bits == 8)
]


@pytest.mark.parametrize("grid", IN_BLOCKS, ids=str)
def test_every_grid_that_llama_cpp_holds_is_held_to_the_bit(grid):
    gguf = pytest.importorskip("gguf")
    from hasslefree.recipe.engines import block_of

    layer = layer_on(grid)
    blocks = blocks_of(Coded(layer, grid, 32)).numpy()
    found = gguf.dequantize(blocks, gguf.GGMLQuantizationType[block_of(grid)])
    assert np.array_equal(found, layer.unpacked().detach().numpy())


@pytest.mark.parametrize("name", K_TYPES)
def test_every_k_type_is_held_to_the_bit(name):
    gguf = pytest.importorskip("gguf")
    layer = layer_on(K_TYPES[name], width=768)
    blocks = blocks_of(Coded(layer, K_TYPES[name], 0)).numpy()
    found = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert np.array_equal(found, layer.unpacked().detach().numpy())


def test_a_size_gives_one_file_in_llama_cpp_s_own_types(tmp_path):
    fields = {"method": None, "rank": None, "group_size": None, "scale_bits": None}
    fields |= {"engine": "llama.cpp", "size": "4.6bits"}
    dense = compressed(tmp_path / "packed", {"intermediate_size": 256}, embedding_bits=6, **fields)
    write_template(tmp_path / "template.gguf", dense)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")
    assert sorted(file.name for file in (tmp_path / "out").glob("*.gguf")) == ["model.gguf"]
    reader, found = read(tmp_path / "out" / "model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = set()
    for name, layer in in_float32(tmp_path / "packed").items():
        tensor = tensors[renamed(f"{name}.weight")]
        names.add(tensor.tensor_type.name)
        assert tensor.tensor_type.name.endswith("_K") == name.endswith("down_proj")
        assert np.array_equal(found[tensor.name], permuted(name, layer.unpacked().detach().numpy())), name
    assert "Q8_0" in names  # of the embedding
    record = read_record(tmp_path / "packed")
    stored = {layer.name: layer.bytes for layer in record.layers}
    assert all(tensors[renamed(f"{name}.weight")].n_bytes == size for name, size in stored.items())
    again = Recipe(**{name: value for name, value in record.recipe.items() if value is not None})
    assert again.resolve().to_dict() == record.recipe


def mlx_values(words, scales, biases, bits):
    """mlx.core.dequantize: codes of `bits` bits one after the other, low bits first, and code · scale + bias."""
    stream = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    codes = stream.reshape(len(words), -1, bits) @ (1 << np.arange(bits))
    group = codes.shape[1] // scales.shape[1]
    return codes * scales.repeat(group, 1) + biases.repeat(group, 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", [{"offset": True}, {"symmetric": True}])
@pytest.mark.parametrize("group", [64, None])
def test_every_grid_that_mlx_holds_is_held_to_the_bit(bits, kind, group):
    grid = Grid(bits, group, **kind)
    layer = layer_on(grid)
    tensors = pack_affine(Coded(layer, grid, 64))
    assert tensors["weight"].dtype == torch.uint32
    found = mlx_values(*(tensors[name].numpy() for name in ("weight", "scales", "biases")), bits)
    assert np.array_equal(found.astype(np.float32), layer.unpacked().detach().numpy())


@pytest.mark.parametrize(("bits", "kind"), [(3, {"symmetric": True}), (4, {"offset": True})])
def test_mlx_holds_s(bits, kind, tmp_path):
    compressed(tmp_path / "packed", bits=bits, group_size=0 if bits == 3 else 32, leave_dense=("*.k_proj",), **kind)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "mlx")
    base = load_file(tmp_path / "out" / "base" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "base" / "config.json").read_text())
    usual = config["quantization"]
    assert usual["bits"] == bits
    layers = in_float32(tmp_path / "packed")
    for name, layer in layers.items():
        words, scales, biases = (base[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        assert (words.dtype, scales.dtype) == (torch.uint32, torch.bfloat16)
        form = usual.get(name, usual)
        assert (scales.shape[1] * form["group_size"], form["bits"]) == (layer.in_features, bits)
        values = mlx_values(words.numpy(), scales.float().numpy(), biases.float().numpy(), bits)
        assert np.array_equal(values.astype(np.float32), layer.unpacked().detach().numpy()), name
    assert "model.layers.0.self_attn.k_proj.scales" not in base
    adapter = load_file(tmp_path / "out" / "adapters.safetensors")
    parameters = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_parameters"]
    assert parameters == {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": sorted(layers)}
    for name, layer in layers.items():
        u, v = layer.factors()
        assert torch.equal(adapter[f"{name}.lora_a"].float(), v.T), name
        assert torch.equal(adapter[f"{name}.lora_b"].float(), u.T), name


def codes_in_int32(words, bits, count):
    """compressed_tensors' unpack_from_int32 since 0.18, along the last axis, without its shift to signed numbers."""
    every_bit = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")
    places = every_bit[:, : count * bits].reshape(len(words), count, bits)
    return (places * 2 ** np.arange(bits)).sum(-1)


def compressed_tensors_values(tensors, bits):
    """(code − zero) · scale, as compressed-tensors reads the tensors of a layer; a symmetric grid stores no zeros."""
    out, width = tensors["weight_shape"].tolist()
    scale = tensors["weight_scale"].float().numpy()
    codes = codes_in_int32(tensors["weight_packed"].numpy(), bits, width)
    zeros = np.full(scale.shape, 2 ** (bits - 1))
    if "weight_zero_point" in tensors:
        zeros = codes_in_int32(tensors["weight_zero_point"].T.numpy(), bits, out).T
    times = width // scale.shape[1]
    return ((codes - zeros.repeat(times, 1)) * scale.repeat(times, 1)).astype(np.float32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [64, None])
def test_every_grid_that_compressed_tensors_holds_is_held_to_the_bit(bits, symmetric, group):
    grid = Grid(bits, group, symmetric)
    layer = layer_on(grid)
    tensors = pack_quantized(Coded(layer, grid, group or 192))
    assert ("weight_zero_point" in tensors) == (not symmetric)
    assert np.array_equal(compressed_tensors_values(tensors, bits), layer.unpacked().detach().numpy())


def test_compressed_tensors_takes_a_model_whose_embedding_it_makes_dense(tmp_path):
    """Oracle: the values of the embedding that was compressed."""
    fields = {"method": "joint-grid", "bits": 4, "rank": 0, "offset": False, "embedding_bits": 8}
    compressed(tmp_path / "packed", **fields)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "compressed-tensors")
    base = load_file(tmp_path / "out" / "base" / "model.safetensors")
    name = "model.embed_tokens"
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").get_submodule(name).unpacked()
    assert torch.equal(base[f"{name}.weight"], before)


@pytest.mark.parametrize("to", ["compressed-tensors", "mlx"])
def test_an_export_without_an_adapter_has_a_card_beside_its_base(to, tmp_path):
    compressed(tmp_path / "packed", rank=0, offset=to == "mlx")
    hasslefree.export(tmp_path / "packed", tmp_path / "out", to)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "In `base`, a model of the quantised matrices. There are no low-rank ones." in card
    assert ("--adapter-path" in card, 'subfolder="base"' in card) == (False, to != "mlx")
    assert not (tmp_path / "out" / "adapter_config.json").exists()


@pytest.mark.parametrize(("bits", "symmetric", "group"), [(4, False, 32), (8, True, 0)])
def test_compressed_tensors_holds_s(bits, symmetric, group, tmp_path):
    fields = {"bits": bits, "symmetric": symmetric, "group_size": group, "offset": False, "leave_dense": ("*.o_proj",)}
    compressed(tmp_path / "packed", **fields)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "compressed-tensors")
    base = load_file(tmp_path / "out" / "base" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "base" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert sorted(config["ignore"]) == ["lm_head", *(f"model.layers.{i}.self_attn.o_proj" for i in (0, 1))]
    [scheme] = config["config_groups"].values()
    assert scheme["targets"] == ["Linear"]
    form = [scheme["weights"].get(key) for key in ("num_bits", "symmetric", "strategy", "group_size")]
    assert form == [bits, symmetric, *(("group", group) if group else ("channel", None))]
    for name, layer in in_float32(tmp_path / "packed").items():
        parts = {key.rpartition(".")[2]: tensor for key, tensor in base.items() if key.startswith(f"{name}.weight")}
        assert parts["weight_shape"].tolist() == [layer.out_features, layer.in_features]
        assert np.array_equal(compressed_tensors_values(parts, bits), layer.unpacked().detach().numpy()), name
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 2
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == 2 * 2 * 6


def test_what_vllm_fuses_shares_a_grid_within_a_size(tmp_path):
    """Every member of a layer of vLLM has its grid, others have theirs; the export lists them all."""
    compressed(
        tmp_path / "packed", method=None, engine="vllm", size="5.1bits", rank=0, group_size=None, scale_bits=None
    )
    specs = {layer.name: layer.spec for layer in read_record(tmp_path / "packed").layers}
    grids = {}
    for name, spec in specs.items():
        grids.setdefault(fused_name(name), set()).add(spec.grid)
    assert len(grids) == 2 * 4
    assert all(len(each) == 1 for each in grids.values())
    assert len(set.union(*grids.values())) > 1
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out" / "base" / "config.json").read_text())["quantization_config"]
    bits = {}
    for group in config["config_groups"].values():
        bits |= dict.fromkeys(group["targets"], group["weights"]["num_bits"])
    assert bits == {name: spec.grid.bits for name, spec in specs.items()}
    for line in kernels_in_vllm(tmp_path / "out" / "base").splitlines():
        width, kernels = int(line.split()[0]), line.partition(": ")[2]
        assert kernels == vllm_kernels(width, False)
        bits = {name: found for name, found in bits.items() if found != width}
    assert not bits


def test_what_vllm_fuses_is_refused_if_it_differs(tmp_path):
    with pytest.raises(ModelError, match=r"layers.0.self_attn.q_proj \(excluded by the user\), .*none") as refused:
        compressed(tmp_path / "never", method=None, engine="vllm", leave_dense=("*.q_proj",), scale_bits=None)
    assert "layers.0.self_attn.v_proj (quantised)" in str(refused.value)
    compressed(tmp_path / "packed", bits=4, offset=False, leave_dense=("*.up_proj",))
    message = r"mlp.up_proj \(dense\), .*mlp.gate_proj \(int4 .*\); compress again .*engine='vllm', or export"
    with pytest.raises(ModelError, match=message):
        hasslefree.export(tmp_path / "packed", tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()


def test_what_a_format_cannot_hold_is_refused_before_anything_is_written(work, tmp_path):
    root, _ = work
    out, template = tmp_path / "out", root / "template.gguf"
    compressed(tmp_path / "sparse", method="eora", group_size=None)
    compressed(tmp_path / "pruned", pattern="2:4", offset=False)
    compressed(tmp_path / "narrow", changes={"intermediate_size": 80}, group_size=16)
    for packed, to, message in [
        (
            root / "packed",
            "compressed-tensors",
            "cannot hold int4 in groups of 32, with offsets exactly .*llama.cpp.*; compress again",
        ),
        (
            tmp_path / "sparse",
            "gguf",
            "its S is not quantised; compress again with method='joint-grid' and engine='llama.cpp'",
        ),
        (tmp_path / "pruned", "mlx", "pattern 2:4 saves nothing"),
        (tmp_path / "narrow", "mlx", r"down_proj: its 80 inputs are not a multiple of 32|groups of 16"),
    ]:
        with pytest.raises(ModelError, match=message):
            hasslefree.export(packed, out, to, template=template if to == "gguf" else None)
    with pytest.raises(OutputError, match="template= is for to='gguf'"):
        hasslefree.export(root / "packed", out, "mlx", template=template)
    with pytest.raises(OutputError, match="converter= is for to='gguf'"):
        hasslefree.export(root / "packed", out, "mlx", converter="convert.py")
    with pytest.raises(ModelError, match="dense model was given from memory .* with template="):
        hasslefree.export(root / "packed", out, "gguf", converter=__file__)
    assert not out.exists()


def changed(dense, name, change):
    return dense | {name: change(dense[name])}


BAD = {
    "another model": (lambda d: {n: torch.randn_like(t) for n, t in d.items()}, {}, "is of another model: none of its"),
    "another layer": (
        lambda d: changed(d, "model.layers.1.mlp.up_proj.weight", lambda t: t.flip(1)), {},
        "is clearly model.layers.1.mlp.up",
    ),
    "other rows": (
        lambda d: changed(d, "model.layers.1.mlp.up_proj.weight", lambda t: t[[0, 0, *range(2, len(t))]]), {},
        "has other values than model.layers.1.mlp.up_proj|is clearly model.layers.1.mlp.up_proj",
    ),
    "other embeddings": (
        lambda d: changed(d, "model.embed_tokens.weight", lambda t: t * 1.1), {},
        "token_embd.weight has other values than model.embed_tokens.weight",
    ),
    "slightly other embeddings": (
        lambda d: changed(d, "model.embed_tokens.weight", lambda t: t * (1 + 2**-7)), {},
        "token_embd.weight has other values than model.embed_tokens.weight",
    ),
    "other gains": (
        lambda d: changed(d, "model.layers.0.input_layernorm.weight", lambda t: t * (1 + 2**-7)), {},
        "is clearly model.layers.0.input_layernorm.weight",
    ),
    "another size": (
        lambda d: {n: t[..., :32].contiguous() for n, t in d.items()}, {},
        "has 0 matrices of 64×64, and the model has [46]",
    ),
    "one layer less": (
        lambda d: d, {"leave": ["model.layers.1.mlp.down_proj.weight"]}, "has 1 matrices of 64×96, and the model has 2",
    ),
    "quantised": (lambda d: d, {"kind": "Q8_0"}, "is quantised already: .* has the type Q8_0"),
    "in parts": (lambda d: d, {"split.count": 2}, "is one of several parts"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_template_of_something_else_is_refused(case, work, tmp_path):
    root, dense = work
    change, options, message = BAD[case]
    write_template(tmp_path / "bad.gguf", change(dense), **options)
    with pytest.raises(ModelError, match=message):
        hasslefree.export(root / "packed", tmp_path / "out", "gguf", template=tmp_path / "bad.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_template_that_is_no_gguf_file(work, tmp_path, monkeypatch):
    root, _ = work
    whole = (root / "template.gguf").read_bytes()
    parts = struct.pack("<4sIQQQ11sIQ1s", b"GGUF", 3, 0, 1, 11, b"split.count", 8, 1, b"x")  # a word, and no number
    contents = {"empty": b"", "text": b"a text of a few words", "short": whole[: len(whole) // 2], "parts": parts}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
            read_template(tmp_path / name)
    with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
        read_template(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
        read_template(tmp_path / "pipe")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r'not installed: pip install "hasslefree\[gguf\]"'):
        hasslefree.export(root / "packed", tmp_path / "out", "gguf", template=root / "template.gguf")


def test_a_scale_that_float16_does_not_hold_is_refused(work, tmp_path):
    dense = work[1]
    small = {n: t * 2.0**-20 if "down_proj" in n else t for n, t in dense.items()}
    model = build("llama", torch.bfloat16, **WIDE)
    model.load_state_dict(small)
    fields = {"method": "lq-lora", "rank": 2, "group_size": 32, "offset": True, "scale_bits": 16}
    hasslefree.compress(model, tmp_path / "packed", Recipe(**fields), segments=segments())
    write_template(tmp_path / "template.gguf", small)
    with pytest.raises(
        ModelError,
        match=r"down_proj has quantisation scales or offsets that are too small or too large for GGUF's float16",
    ):
        hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")


def test_trained_norms_take_the_place_of_the_template_s(work):
    root, dense = work
    template = read_template(root / "template.gguf")
    name = "model.layers.1.input_layernorm.weight"
    gains = dense[name].float() * 1.05
    found = find_vector(template, name, "blk.1.", gains, trained=True)
    assert found.keys() == {"blk.1.attn_norm.weight"}
    assert torch.equal(found["blk.1.attn_norm.weight"], gains)
    shifted = find_vector(template, name, "blk.1.", dense[name].float() - 1 + 1e-4, trained=True)
    torch.testing.assert_close(shifted["blk.1.attn_norm.weight"], dense[name].float() + 1e-4)
    assert find_vector(template, name, "blk.1.", dense[name], trained=False) == {}
    assert find_vector(template, name, "blk.1.", dense[name].float() - 1, trained=False) == {}
    for values, trained in ((2 * gains, True), (gains, False)):
        with pytest.raises(ModelError, match="none of its tensors is clearly"):
            find_vector(template, name, "blk.1.", values, trained)


def test_rows_are_found_in_any_order():
    generator = torch.Generator().manual_seed(0)
    theirs = torch.randn(300, 64, generator=generator)
    order = torch.randperm(300, generator=generator)
    noise = 0.3 * torch.randn(300, 64, generator=generator)
    ours = torch.empty_like(theirs)
    ours[order] = theirs + noise
    assert torch.equal(row_order(ours, theirs), order)
    assert torch.equal(row_order(theirs + noise, theirs), torch.arange(300))
    twice = theirs.clone()
    twice[1] = twice[0]
    assert row_order(ours, twice) is None
    ours[order[7]] = 0.3 * theirs[7] + 0.6 * torch.randn(64, generator=generator)  # as with two bits
    assert (ours[order[7]] - theirs[7]).square().sum() > 0.6 * theirs[7].square().sum()
    assert torch.equal(row_order(ours, theirs), order)
    assert row_order(ours + 1.5 * torch.randn(300, 64, generator=generator), theirs) is None
    assert torch.equal(nearest_rows(theirs, ours), order)
