"""Loading a model: its dtype, and the length of its segments."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError, WriteError
from hasslefree.models.load import (
    load_config,
    load_model,
    load_on_disk,
    load_shapes,
    loading,
    resolve_device,
    resolve_seqlen,
)
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.planning.setup import setup_of
from hasslefree.planning.tables import plan_summary
from tests.hub import Repository
from tests.tiny_models import NO_TOKENIZER, build, segments, tensors_of


@pytest.mark.parametrize(("asked", "found"), [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_the_dtype_asked_for_is_the_one_that_is_loaded_and_saved(asked, found, tmp_path):
    build("llama", torch.bfloat16).save_pretrained(tmp_path / "model")
    assert load_model(str(tmp_path / "model"), asked, "cpu").dtype == found
    recipe = Recipe(method="wanda", dtype=asked)
    hasslefree.compress(
        tmp_path / "model", tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER, device="cpu"
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == found


@pytest.mark.parametrize(("stored", "said"), [(torch.bfloat16, "float32"), (torch.float32, "bfloat16")])
def test_a_config_that_says_another_dtype_than_the_weights_have(stored, said, tmp_path, caplog):
    """Oracle for the bytes before: the tensors of the model's file."""
    folder = tmp_path / "model"
    build("llama", stored).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": said}))
    kept = str(stored).removeprefix("torch.")
    for dtype, warned in (("auto", True), (kept, False)):
        caplog.clear()
        report = hasslefree.compress(
            folder, tmp_path / "out", Recipe(method="wanda", dtype=dtype), segments=segments(), tokenizer=NO_TOKENIZER,
            device="cpu", overwrite=True,
        )  # fmt: skip
        message = f"stored in {stored}, but config.json says torch.{said}, .* the dtype {kept} takes them"
        assert bool(re.search(message, caplog.text)) == warned
    before = sum(tensor.nbytes for tensor in tensors_of(folder).values())
    assert report.dense_bytes + report.other_bytes == before


def without_dtype(folder):
    build("llama", torch.bfloat16).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_config_without_a_dtype_has_that_of_the_weights(tmp_path):
    without_dtype(tmp_path)
    assert load_model(str(tmp_path), device="cpu").dtype == torch.bfloat16
    assert load_shapes(str(tmp_path)).dtype == torch.bfloat16
    stored, _ = in_fp8(tensors_of(tmp_path))
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load_shapes(str(tmp_path)).dtype.itemsize > 1


def test_too_little_memory_is_no_damaged_file():
    """A RuntimeError of torch on a CPU. The command line has a sentence for it."""
    short = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes")
    with pytest.raises(RuntimeError) as caught, loading("the model could not be loaded", "download it again"):
        raise short
    assert caught.value is short


def test_a_plan_needs_no_weights(tmp_path):
    """The files may be pointers of Git LFS, which are downloaded later."""
    without_dtype(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    setup = setup_of(str(tmp_path), Recipe(rank=2), torch.device("cpu"), "device")
    assert plan_summary(setup)["problem"] is None


def test_weights_are_looked_for_where_they_were_loaded_from(tmp_path, monkeypatch):
    """transformers may take them from another folder of the hub's cache than the configuration."""
    build("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setattr("hasslefree.models.load.folder_of", lambda name: tmp_path / "configuration")
    loaded = load_on_disk(str(tmp_path / "model"), "auto", tmp_path / "scratch")
    assert Path(loaded.name_or_path) == tmp_path / "model"


def test_a_disk_that_is_too_small_for_converted_weights(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("transformers.core_model_loading.offload_weight", write)
    build("qwen3_moe").save_pretrained(tmp_path / "model")
    with pytest.raises(WriteError, match=f"the disk of {tmp_path}.* is full: weights .* free some space"):
        load_on_disk(str(tmp_path / "model"), "auto", tmp_path / "scratch")


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
    with pytest.raises(ModelError, match=r"already quantised or compressed \(gptq\); start from"):
        hasslefree.compress(str(tmp_path / "model"), tmp_path / "out", Recipe(method="wanda"), segments=segments())


def in_fp8(tensors, block=16):
    """Weights of layers as DeepSeek-V3 stores them: float8 in square blocks, each with a scale. And their values."""
    stored, values = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            blocks = weight.float().unflatten(1, (-1, block)).unflatten(0, (-1, block))
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            codes = (blocks / scales).to(torch.float8_e4m3fn)
            stored[name] = codes.view(weight.shape)
            stored[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
            values[name] = (codes.float() * scales).view(weight.shape).bfloat16()
    return stored, values


def in_mxfp4(tensors):
    """Experts as gpt-oss stores them: two codes of 4 bits a byte, and an exponent per 32 inputs. And their values."""
    stored, values = dict(tensors), dict(tensors)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    for name, weight in tensors.items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            count, width, out = weight.shape
            codes = torch.randint(16, (count, out, width // 32, 32))
            exponents = torch.randint(120, 124, (count, out, width // 32))
            del stored[name]
            stored[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
            stored[f"{name}_scales"] = exponents.to(torch.uint8)
            rows = table[codes] * torch.exp2(exponents[..., None] - 127.0)
            values[name] = rows.flatten(2).mT.bfloat16()
    return stored, values


ORIGINALS = {
    "fp8": ("llama", in_fp8, {"activation_scheme": "dynamic", "weight_block_size": [16, 16], "fmt": "e4m3"}),
    "mxfp4": ("gpt_oss", in_mxfp4, {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}),
}


@pytest.mark.parametrize("method", ORIGINALS)
def test_an_original_that_is_quantised_is_dequantised(method, tmp_path):
    """Oracle: by hand, the values of the codes. What is not compressed is stored so, without the scales."""
    family, quantised, settings = ORIGINALS[method]
    dense = ("*.k_proj", "*.experts.*") if family == "gpt_oss" else ("*.k_proj",)
    build(family, torch.bfloat16, hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "dense")
    stored, values = quantised(tensors_of(tmp_path / "dense"))
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        tmp_path / "dense" / "model.safetensors",
        metadata={"format": "pt"},
    )
    file = tmp_path / "dense" / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": {"quant_method": method} | settings}
    file.write_text(json.dumps(config))
    loaded = load_model(str(tmp_path / "dense"), device="cpu").state_dict()
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())
    recipe = Recipe(method="wanda", pattern="2:4", leave_dense=dense)
    hasslefree.compress(
        tmp_path / "dense", tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER, device="cpu"
    )
    out = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    kept = {name for name in values if name in out.state_dict()}
    assert any("k_proj" in name for name in kept)
    assert all(torch.equal(out.state_dict()[name], values[name]) for name in kept)
    assert not any(name.endswith(("scale_inv", "_blocks", "_scales")) for name in tensors_of(tmp_path / "out"))
    hasslefree.export(tmp_path / "out", tmp_path / "plain", "dense")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())


def test_an_empty_quantization_config_is_none(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {}}))
    recipe = Recipe(rank=2, method="eora")
    hasslefree.compress(tmp_path / "model", tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER)
    hasslefree.export(tmp_path / "out", tmp_path / "plain", "dense")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert getattr(loaded.config, "quantization_config", None) is None
    compressed = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    torch.testing.assert_close(loaded(ids).logits, compressed(ids).logits)


@pytest.mark.parametrize("device", ["meta", "mps", "cuda:99", "gpu"])
def test_devices_that_are_not_there(device):
    with pytest.raises(ModelError, match=device):
        resolve_device(device)


def test_a_default_gpu_that_does_not_work_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ModelError, match="device 'cuda' cannot be used"):
        resolve_device(None)


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
        ("a lama", "'a lama' is neither a local folder nor a name on the hub, which is USER/NAME"),
        ("meta/gguf", "'meta/gguf' has no config.json on the hub"),
        ("meta/down", "the hub failed with status 503 when asked for 'meta/down'; try again later"),
    ],
)
def test_a_model_of_the_hub_that_cannot_be_read(load, token, name, sentence, hub, monkeypatch):
    hub.repositories["meta/gated"] = Repository({"config.json": b"{}"}, gated=True)
    hub.repositories["bob/secret"] = Repository({"config.json": b"{}"}, private=True)
    hub.repositories["meta/gguf"] = Repository({"model.gguf": b"GGUF"})
    hub.fails["meta/down"] = 503
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", pytest.fail)  # before it asks again
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelError, match=sentence) as caught:
        load(name)
    assert len(str(caught.value)) < 240


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_without_a_connection_the_hub_is_asked_once(load, hub, monkeypatch):
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:1/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", pytest.fail)
    with pytest.raises(ModelError, match="'meta/lama' is neither .* there is no connection to the hub; give a folder"):
        load("meta/lama")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="'meta/lama' is neither .* HF_HUB_OFFLINE is set"):
        load("meta/lama")
