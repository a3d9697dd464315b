"""Loading a model: its dtype, and the length of its segments."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError
from hasslefree.models.load import load_config, load_model, resolve_device, resolve_seqlen
from hasslefree.models.tokenizer import load_tokenizer
from tests.hub import Repository
from tests.tiny_models import NO_TOKENIZER, build, segments


@pytest.mark.parametrize(("asked", "found"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_the_dtype_asked_for_is_the_one_that_is_loaded_and_saved(asked, found, tmp_path):
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    assert load_model(str(tmp_path / "model"), asked, "cpu").dtype == found
    recipe = Recipe(method="wanda", dtype=asked)
    hasslefree.compress(
        tmp_path / "model", tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER, device="cpu"
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == found


@pytest.mark.parametrize(
    ("most", "asked", "expected"), [(64, None, 64), (4096, None, 2048), (64, 64, 64), (64, 10, 10), (4096, 4000, 4000)]
)
def test_the_segment_length(most, asked, expected):
    """2048 where nothing is said, or what the model takes if that is less; every length up to the most may be asked."""
    assert resolve_seqlen(build("llama", max_position_embeddings=most), asked) == expected
    with pytest.raises(ModelError, match=f"at most {most} tokens at once, but seqlen is {most + 1}"):
        resolve_seqlen(build("llama", max_position_embeddings=most), most + 1)


def test_a_limit_of_minus_one_is_none():
    model = build("llama")
    model.config.max_position_embeddings = -1  # as XLNet has it
    assert resolve_seqlen(model, 4096) == 4096
    assert resolve_seqlen(model, None) == 2048


def test_a_checkpoint_that_lacks_a_tensor_is_not_filled_with_noise(tmp_path):
    build("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 tensors of a LlamaForCausalLM: model\.layers\.1\.mlp\.up_proj"):
        load_model(str(tmp_path), device="cpu")


def test_a_model_of_another_quantisation_is_refused_before_it_is_loaded(tmp_path):
    model = build("llama")
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    model.config.save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="already quantised or compressed"):
        hasslefree.compress(str(tmp_path / "model"), tmp_path / "out", Recipe(method="wanda"), segments=segments())


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99", "gpu"])
def test_devices_that_are_not_there(device):
    with pytest.raises(ModelError, match=device):
        resolve_device(device)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "README.md").write_text("read me")
    with pytest.raises(ModelError, match="README.md is a file; give the folder of a model"):
        load_model(str(tmp_path / "README.md"))


def test_a_gguf_file_is_to_be_converted_first():
    with pytest.raises(ModelError, match=r"GGUF file; .*from_pretrained\('some', gguf_file='model.gguf'\)"):
        load_model("some/model.gguf", device="cpu")


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_a_folder_that_is_not_there_is_named(load, tmp_path):
    with pytest.raises(ModelError, match="the model folder .*/nowhere does not exist"):
        load(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
@pytest.mark.parametrize("token", [None, "hf_ada"])
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("meta/gated", "'meta/gated' is gated: accept its licence at https://huggingface.co/meta/gated, then run `hf"),
        ("bob/secret", "'bob/secret' is neither a local folder nor a model that you can see .*private, run `hf auth"),
        ("meta/lama", "'meta/lama' is neither .* check the spelling;"),
        ("lama", "'lama' is neither .* check the spelling;"),
        ("a lama", "'a lama' is no folder here, .* must use alphanumeric chars"),
        ("meta/down", "couldn't connect to .* check name and network"),
    ],
)
def test_a_model_of_the_hub_that_cannot_be_read(load, token, name, sentence, hub, monkeypatch):
    hub.repositories["meta/gated"] = Repository({"config.json": b"{}"}, gated=True)
    hub.repositories["bob/secret"] = Repository({"config.json": b"{}"}, private=True)
    hub.fails["meta/down"] = 503
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError, match=sentence) as caught:
        load(name)
    assert len(str(caught.value)) < 240
