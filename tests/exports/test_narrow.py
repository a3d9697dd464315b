"""Heads and neurons that OSSCAR took out are gone from the model, which is a plain one."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError
from tests.tiny_models import build, logits, segments, tensors_of

OTHERS = ("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj")


def compress(model, folder, sparsity=0.5, **changes):
    recipe = Recipe(pattern="structured", sparsity=sparsity, method="osscar", leave_dense=OTHERS)
    hasslefree.compress(model, folder, Recipe(**vars(recipe) | changes), segments=segments())
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("heads", [(4, 2), (4, 4)], ids=["grouped queries", "a key a query"])
def test_the_narrow_model_computes_what_the_compressed_one_does(heads, tmp_path):
    """Oracle: the compressed model's logits; the shapes by hand; transformers' own class, with no code of ours."""
    model = build("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1], attention_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    before, parameters = model.config.to_dict(), model.num_parameters()
    wanted = logits(compress(model, tmp_path / "out"), segments())
    hasslefree.export(tmp_path / "out", tmp_path / "narrow", "narrow")
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")
    assert type(narrow) is LlamaForCausalLM
    assert not hasattr(narrow.config, "quantization_config")
    torch.testing.assert_close(logits(narrow, segments()), wanted, rtol=1e-4, atol=1e-5)
    config = narrow.config
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads[0] // 2, heads[1] // 2)
    assert config.intermediate_size == before["intermediate_size"] // 2
    hidden, width = before["hidden_size"], config.head_dim * heads[0] // 2
    tensors = tensors_of(tmp_path / "narrow")
    layer = "model.layers.1"
    assert tensors[f"{layer}.self_attn.o_proj.weight"].shape == (hidden, width)
    assert tensors[f"{layer}.self_attn.q_proj.weight"].shape == (width, hidden)
    assert tensors[f"{layer}.self_attn.k_proj.bias"].shape == (config.head_dim * heads[1] // 2,)
    assert tensors[f"{layer}.mlp.up_proj.weight"].shape == (config.intermediate_size, hidden)
    assert narrow.num_parameters() < parameters


def test_heads_that_transformers_does_not_do_without_stay(tmp_path):
    """Six of eight heads: 64 is no multiple of six. Oracle: the compressed model's logits."""
    model = build("llama", num_attention_heads=8, num_key_value_heads=8)
    compressed = compress(model, tmp_path / "out", sparsity=0.25)
    dead = [(block.self_attn.o_proj.unpacked() == 0).all(0).view(8, -1).all(1) for block in compressed.model.layers]
    assert [int(found.sum()) for found in dead] == [2, 2]
    hasslefree.export(tmp_path / "out", tmp_path / "narrow", "narrow")
    narrow = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow")
    torch.testing.assert_close(logits(narrow, segments()), logits(compressed, segments()), rtol=1e-4, atol=1e-5)
    assert (narrow.config.num_attention_heads, narrow.config.num_key_value_heads) == (8, 8)
    assert narrow.config.intermediate_size == model.config.intermediate_size * 3 // 4


def test_a_norm_over_all_heads_cannot_be_narrow(tmp_path):
    compress(build("olmo2"), tmp_path / "out")
    with pytest.raises(ModelError, match="Olmo2ForCausalLM: .*_norm.weight depends on all heads.*use to='dense'"):
        hasslefree.export(tmp_path / "out", tmp_path / "no", "narrow")


def test_what_cannot_be_narrow_is_an_error(tmp_path):
    compress(build("llama"), tmp_path / "eora", pattern="2:4", sparsity=None, rank=2, method="eora")
    with pytest.raises(ModelError, match="nothing to remove.*method='osscar'"):
        hasslefree.export(tmp_path / "eora", tmp_path / "no", "narrow")
    hasslefree.compress(build("gpt2"), tmp_path / "gpt2", Recipe(method="wanda"), segments=segments())
    with pytest.raises(ModelError, match="by which this export finds heads and neurons; use to='dense'"):
        hasslefree.export(tmp_path / "gpt2", tmp_path / "no", "narrow")
    heads = build("llama", num_attention_heads=8, num_key_value_heads=8)
    compress(heads, tmp_path / "heads", sparsity=0.25, leave_dense=(*OTHERS, "*.down_proj"))
    with pytest.raises(ModelError, match="no attention head can be dropped"):
        hasslefree.export(tmp_path / "heads", tmp_path / "no", "narrow")
    first = (*OTHERS, "model.layers.0.*")
    compress(build("llama"), tmp_path / "one", leave_dense=first)
    with pytest.raises(
        ModelError, match="blocks keep .* heads or neurons in self_attn.o_proj, .* needs the same number"
    ):
        hasslefree.export(tmp_path / "one", tmp_path / "no", "narrow")
    assert not (tmp_path / "no").exists()


def test_losparse_is_a_lora_on_a_structured_base(tmp_path):
    """arXiv 2306.11222: a low-rank part to train on beside whole channels. Oracle: the compressed model's logits."""
    recipe = Recipe(pattern="structured", sparsity=0.5, rank=3, method="losparse")
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    wanted = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), segments())
    hasslefree.export(tmp_path / "out", tmp_path / "peft", "peft")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "peft" / "base")
    for name, weight in base.state_dict().items():
        if name.endswith("proj.weight"):
            assert int((weight != 0).any(0).sum()) <= weight.shape[1] // 2
    tuned = PeftModel.from_pretrained(base, tmp_path / "peft", is_trainable=True)
    torch.testing.assert_close(logits(tuned, segments()), wanted, rtol=1e-4, atol=1e-4)
    tuned(input_ids=segments(), labels=segments()).loss.backward()
    trained = {name for name, p in tuned.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained
    assert all("lora_" in name for name in trained)
