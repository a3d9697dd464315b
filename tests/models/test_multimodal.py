"""Multimodal models: the text decoder is compressed, and everything else is as it was."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import hasslefree
from hasslefree import Recipe
from hasslefree.errors import ModelError
from hasslefree.exports.export import export
from hasslefree.models.blocks import find_blocks, other_modalities
from hasslefree.models.load import load_model
from tests.exports.test_codes_kept import write_template
from tests.tiny_models import NO_TOKENIZER, ROTARY, logits, segments, tensors_of

VISION = {
    "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
TEXT = ROTARY | {"head_dim": 8}
# Of each, the configuration; all have more parameters in the tower than in the decoder.
MODELS = {
    "gemma3": {"text_config": TEXT | {"sliding_window": 8}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "llama4": {
        "text_config": TEXT
        | {"num_local_experts": 4, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "bos_token_id": 1},
        "vision_config": VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
    },
}  # fmt: skip
models = pytest.mark.parametrize("family", MODELS)


def made(family):
    """A model with its tower, the same at every call."""
    config = AutoConfig.for_model(family, **MODELS[family])
    model = AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():  # also those that a fresh model leaves empty
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1 + ("norm" in name)
    return model


@pytest.fixture
def folder(family, tmp_path):
    """The model on disk, with the file of a processor."""
    made(family).save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "preprocessor_config.json").write_text('{"size": 28}')
    return tmp_path / "dense"


@models
def test_only_the_text_decoder_is_compressed(family, folder, tmp_path):
    """Oracle: the tensors of the dense model; and the logits of the model in memory."""
    dense = made(family)
    blocks = find_blocks(dense)
    beside = other_modalities(dense, blocks)
    assert "language_model" in blocks.name
    assert beside
    assert not any("language_model" in name or "head" in name for name in beside)
    out = tmp_path / "out"
    report = hasslefree.compress(
        folder, out, Recipe(rank=2, method="eora"), segments=segments(), tokenizer=NO_TOKENIZER
    )
    assert list(report.towers) == beside
    assert all(layer.name.startswith(f"{blocks.name}.") for layer in report.layers)
    before, after = dense.state_dict(), tensors_of(out)
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith(tuple(beside)))
    assert json.loads((out / "preprocessor_config.json").read_text()) == {"size": 28}
    card = (out / "README.md").read_text()
    assert "AutoModelForMultimodalLM.from_pretrained" in card
    assert "calibrated on text alone" in card

    hasslefree.compress(dense, tmp_path / "memory", Recipe(rank=2, method="eora"), segments=segments())
    for loaded in (AutoModelForImageTextToText.from_pretrained(out), load_model(str(out), device="cpu")):
        assert type(loaded) is type(dense)
        assert torch.equal(logits(loaded, segments()), logits(dense, segments()))
    generated = loaded.generate(segments(1), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 19)
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, segments()), logits(dense, segments()))


@models
def test_the_dense_export_is_a_model_of_its_class(family, folder, tmp_path):
    out = tmp_path / "out"
    hasslefree.compress(folder, out, Recipe(rank=2, method="eora"), segments=segments(), tokenizer=NO_TOKENIZER)
    export(out, tmp_path / "plain", "dense")
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "plain")
    assert type(plain) is type(made(family))
    compressed = AutoModelForImageTextToText.from_pretrained(out)
    torch.testing.assert_close(logits(plain, segments()), logits(compressed, segments()), rtol=1e-4, atol=1e-5)
    assert (tmp_path / "plain" / "preprocessor_config.json").exists()
    assert "AutoModelForMultimodalLM" in (tmp_path / "plain" / "README.md").read_text()


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_a_model_from_memory_is_saved_by_transformers(family, folder, tmp_path):
    """Its configuration names the layers as the tensors are named."""
    model = AutoModelForImageTextToText.from_pretrained(folder)
    hasslefree.compress(model, tmp_path / "out", Recipe(rank=2, method="eora"), segments=segments())
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForImageTextToText.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, segments()), logits(model, segments()))


ON_GRID = Recipe(
    method="lq-lora", rank=2, bits=4, group_size=32, scale_bits=16, offset=True, leave_dense=("*.down_proj",)
)


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_the_names_in_an_mlx_export_are_those_of_its_tensors(family, folder, tmp_path):
    """mlx-lm leaves out what it does not find, without an error."""
    hasslefree.compress(folder, tmp_path / "out", ON_GRID, segments=segments(), tokenizer=NO_TOKENIZER)
    export(tmp_path / "out", tmp_path / "mlx", "mlx")
    stored = tensors_of(tmp_path / "mlx" / "base")
    parameters = json.loads((tmp_path / "mlx" / "adapter_config.json").read_text())["lora_parameters"]
    assert parameters["keys"]
    assert all(f"{name}.scales" in stored for name in parameters["keys"])
    adapter = load_file(tmp_path / "mlx" / "adapters.safetensors")
    assert {name.rpartition(".")[0] for name in adapter} == set(parameters["keys"])


@pytest.mark.parametrize("family", ["llava"])
def test_the_gguf_export_is_of_the_decoder(family, folder, tmp_path):
    """llama.cpp's converter writes what sees into a file of its own. Oracle: the gguf package."""
    gguf = pytest.importorskip("gguf")
    hasslefree.compress(folder, tmp_path / "out", ON_GRID, segments=segments(), tokenizer=NO_TOKENIZER)
    text = "model.language_model."
    dense = {name.replace(text, "model."): tensor for name, tensor in made(family).state_dict().items()
             if name.startswith((text, "lm_head"))}  # fmt: skip
    template = write_template(tmp_path / "template.gguf", dense)
    export(tmp_path / "out", tmp_path / "gguf", "gguf", template=template)
    names = {tensor.name for tensor in gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").tensors}
    assert names == {tensor.name for tensor in gguf.GGUFReader(template).tensors}


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_the_narrow_export_has_a_narrow_decoder(family, folder, tmp_path):
    """Oracle: the logits of the compressed model."""
    others = tuple(f"*.{name}_proj" for name in ("q", "k", "v", "gate", "up"))
    recipe = Recipe(pattern="structured", sparsity=0.5, method="osscar", leave_dense=others)
    hasslefree.compress(folder, tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER)
    export(tmp_path / "out", tmp_path / "narrow", "narrow")
    narrow = AutoModelForImageTextToText.from_pretrained(tmp_path / "narrow")
    compressed = AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(narrow, segments()), logits(compressed, segments()), rtol=1e-4, atol=1e-5)
    assert narrow.config.text_config.intermediate_size == TEXT["intermediate_size"] // 2
    assert narrow.config.vision_config.intermediate_size == VISION["intermediate_size"]


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("florence2", "florence2 model, which is not a decoder"),
        ("t5", "t5 model, which is not a decoder"),
        ("blip-2", "Blip2ForConditionalGeneration, which needs more inputs than text"),
    ],
)
def test_what_does_not_run_on_text_alone_is_refused(family, message, tmp_path):
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        hasslefree.compress(tmp_path, tmp_path / "out", Recipe(rank=2))


def test_the_text_model_alone_is_loaded_where_the_configuration_names_it(tmp_path):
    """Llama 4 has a class for text alone too: a folder of it has no tower."""
    config = AutoConfig.for_model("llama4", **MODELS["llama4"]).text_config
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    assert other_modalities(loaded, find_blocks(loaded)) == []
