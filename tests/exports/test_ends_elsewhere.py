"""Where a compressed embedding and head go: in codes to llama.cpp and MLX, dense to the others."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hasslefree
from tests.exports.test_codes_kept import compressed, in_float32, mlx_values, read, renamed, write_template

tied_or_not = pytest.mark.parametrize("tied", [True, False])


def folder_of(folder, tied, **fields):
    """The dense tensors, and the names of the ends."""
    dense = compressed(folder, {"tie_word_embeddings": tied}, embedding_bits=4, **fields)
    return dense, ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]


@tied_or_not
def test_mlx_holds_the_codes(tied, tmp_path):
    _, names = folder_of(tmp_path / "packed", tied, bits=8)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "mlx")
    base = load_file(tmp_path / "out" / "base" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "base" / "config.json").read_text())
    layers = in_float32(tmp_path / "packed")
    for name in names:
        words, scales, biases = (base[f"{name}.{part}"] for part in ("weight", "scales", "biases"))
        values = mlx_values(words.numpy(), scales.float().numpy(), biases.float().numpy(), 4)
        assert np.array_equal(values.astype(np.float32), layers[name].unpacked().detach().numpy())
        assert config["quantization"][name] == {"group_size": 32, "bits": 4}
    assert ("lm_head.weight" in base) != tied


@tied_or_not
def test_llama_cpp_holds_the_codes(tied, tmp_path):
    dense, names = folder_of(tmp_path / "packed", tied)
    write_template(tmp_path / "template.gguf", dense)
    hasslefree.export(tmp_path / "packed", tmp_path / "out", "gguf", template=tmp_path / "template.gguf")
    reader, found = read(tmp_path / "out" / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    layers = in_float32(tmp_path / "packed")
    for name in names:
        theirs = renamed(f"{name}.weight")
        assert kinds[theirs] == "Q4_1"
        assert np.array_equal(found[theirs], layers[name].unpacked().detach().numpy())


@tied_or_not
def test_compressed_tensors_and_peft_hold_their_values(tied, tmp_path):
    _, names = folder_of(tmp_path / "packed", tied, symmetric=True)
    layers = in_float32(tmp_path / "packed")
    for kind in ("compressed-tensors", "peft"):
        hasslefree.export(tmp_path / "packed", tmp_path / kind, kind)
        base = load_file(tmp_path / kind / "base" / "model.safetensors")
        for name in names:
            assert torch.equal(base[f"{name}.weight"], layers[name].unpacked().bfloat16())
        assert not any(name.startswith(("model.embed_tokens.weight_", "lm_head.weight_")) for name in base)
