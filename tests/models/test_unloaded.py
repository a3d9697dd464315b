"""Tensors that transformers does not load are neither lost nor changed."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.models.load import load_on_disk, load_shapes
from hasslefree.planning.disk import weights_on_disk
from hasslefree.planning.plan import Plan
from hasslefree.planning.setup import setup_of
from hasslefree.planning.tables import bytes_to_run
from tests.tiny_models import NO_TOKENIZER, build, logits, segments, tensors_of

# A layer that predicts a further token, as GLM-4 MoE and DeepSeek have it after their last block.
NEXT_TOKEN = {
    "model.layers.2.eh_proj.weight": torch.randn(32, 64).bfloat16(),
    "model.layers.2.mlp.experts.0.gate_proj.weight": torch.randn(24, 32).bfloat16(),
    "model.layers.2.mlp.gate.e_score_correction_bias": torch.randn(4),
    "mtp.fc.weight": torch.randn(32, 32),
}


def with_more(family, folder, more):
    """A checkpoint with tensors that transformers does not load."""
    build(family, torch.bfloat16).save_pretrained(folder)
    tensors = tensors_of(folder) | more
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_layers_for_further_tokens_are_copied(family, tmp_path):
    """Oracle: the file of the model."""
    tensors = with_more(family, tmp_path / "dense", NEXT_TOKEN)
    hasslefree.compress(
        tmp_path / "dense", tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments(), tokenizer=NO_TOKENIZER
    )
    hasslefree.export(tmp_path / "out", tmp_path / "plain", "dense")
    assert tensors_of(tmp_path / "plain").keys() == tensors.keys()
    for folder in ("out", "plain"):
        stored = tensors_of(tmp_path / folder)
        for name, tensor in NEXT_TOKEN.items():
            assert stored[name].dtype == tensor.dtype
            assert torch.equal(stored[name], tensor)
    packed, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "plain"))
    torch.testing.assert_close(logits(plain, segments()), logits(packed, segments()), rtol=0.1, atol=0.02)


def test_they_count_before_they_are_copied(tmp_path):
    """Oracle: the tensors of the file."""
    tensors = with_more("llama", tmp_path / "dense", NEXT_TOKEN)
    expected = sum(tensor.nbytes for tensor in tensors.values())
    name = str(tmp_path / "dense")
    for model in (load_shapes(name), load_on_disk(name, "auto", tmp_path / "scratch")):
        assert weights_on_disk(model, Plan([])) == expected
    setup = setup_of(name, Recipe(rank=2), torch.device("cpu"), "device")
    added = sum(tensor.nbytes for tensor in NEXT_TOKEN.values())
    assert bytes_to_run(setup) == weights_on_disk(setup.model, setup.plan) - added, "nothing loads them"


def test_codes_without_their_format_are_left_out(tmp_path, caplog):
    weight = torch.randn(32, 32)
    codes = {"mtp.fc.weight": weight.to(torch.float8_e4m3fn), "mtp.fc.weight_scale_inv": torch.ones(1, 1)}
    with_more("llama", tmp_path / "dense", codes | {"mtp.norm.weight": torch.ones(32)})
    recipe = Recipe(rank=2, method="eora")
    hasslefree.compress(tmp_path / "dense", tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER)
    assert {name for name in tensors_of(tmp_path / "out") if name.startswith("mtp")} == {"mtp.norm.weight"}
    assert "left out, because they are quantised: mtp.fc.weight (1), mtp.fc.weight_scale_inv (1)" in caplog.text


def test_an_export_without_them_says_so(tmp_path, caplog):
    with_more("llama", tmp_path / "dense", NEXT_TOKEN)
    recipe = Recipe(rank=2, method="eora")
    hasslefree.compress(tmp_path / "dense", tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER)
    caplog.clear()
    hasslefree.export(tmp_path / "out", tmp_path / "peft", "peft")
    assert "left out of peft" in caplog.text
    assert "mtp.fc.weight (1)" in caplog.text
