"""Tensors that transformers does not load are neither lost nor changed."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from tests.tiny_models import NO_TOKENIZER, build, logits, segments, tensors_of

# A layer that predicts a further token, as GLM-4 MoE and DeepSeek have it after their last block.
NEXT_TOKEN = {
    "model.layers.2.eh_proj.weight": torch.randn(32, 64).bfloat16(),
    "model.layers.2.mlp.experts.0.gate_proj.weight": torch.randn(24, 32).bfloat16(),
    "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(4),
    "mtp.fc.weight": torch.randn(32, 32),
}


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_layers_for_further_tokens_are_copied(family, tmp_path):
    """Oracle: the file of the model."""
    build(family, torch.bfloat16).save_pretrained(tmp_path / "dense")
    tensors = tensors_of(tmp_path / "dense")
    save_file(tensors | NEXT_TOKEN, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    hasslefree.compress(
        tmp_path / "dense", tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments(), tokenizer=NO_TOKENIZER
    )
    hasslefree.export(tmp_path / "out", tmp_path / "plain", "dense")
    assert tensors_of(tmp_path / "plain").keys() == tensors.keys() | NEXT_TOKEN.keys()
    for folder in ("out", "plain"):
        stored = tensors_of(tmp_path / folder)
        for name, tensor in NEXT_TOKEN.items():
            assert stored[name].dtype == tensor.dtype
            assert torch.equal(stored[name], tensor)
    packed, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "plain"))
    torch.testing.assert_close(logits(plain, segments()), logits(packed, segments()), rtol=0.1, atol=0.02)
