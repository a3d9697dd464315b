"""What OUT and its exports keep of the original folder: files of the tokenizer, keys and ties of the configuration."""

import dataclasses
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL
from hasslefree.errors import ModelError
from hasslefree.models.names import folder_of
from tests.hub import Repository
from tests.tiny_models import NO_TOKENIZER, ROTARY, build, logits, segments

QUICK = Recipe(pattern="2:4", rank=2, method="eora")


def configuration(folder):
    return json.loads((folder / "config.json").read_text())


def released(folder, **changes):
    """Change keys of a config.json; None removes one."""
    content = {key: value for key, value in (configuration(folder) | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))


def test_every_file_of_the_tokenizer_is_copied(tmp_path):
    shutil.copytree(MODEL, tmp_path / "dense")
    given = {"tokenizer.model": b"sentencepiece", "vocab.txt": b"a\nb\n", "preprocessor_config.json": b"{}"}
    for name, content in given.items():
        (tmp_path / "dense" / name).write_bytes(content)
    (tmp_path / "dense" / "notes.txt").write_text("private")
    blocks = ("*.0.*", "*.1.*", "*.2.*")  # one of four, to save time
    recipe = Recipe(rank=0, method="wanda", leave_dense=blocks, calibration=str(CALIBRATION), samples=2, seqlen=32)
    hasslefree.compress(str(tmp_path / "dense"), tmp_path / "out", recipe)
    hasslefree.export(tmp_path / "out", tmp_path / "export", "dense")
    for folder in ("out", "export"):
        found = {name: (tmp_path / folder / name).read_bytes() for name in given}
        assert found == given
        assert not (tmp_path / folder / "notes.txt").exists()


SERVED = {
    "preprocessor_config.json": b"{}",
    "tokenizer.model": b"sentencepiece",
    "README.md": b"---\nlicense: mit\n---\n",
}


@pytest.mark.parametrize("listed", [True, False], ids=["online", "without a connection at the end"])
def test_a_name_on_the_hub_keeps_as_much_as_a_folder(listed, tmp_path, hub):
    """Oracle: the files of the repository."""
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    hub.repositories["ada/base"] = Repository(files | SERVED)
    folder = Path(huggingface_hub.snapshot_download("ada/base"))
    if not listed:
        hub.fails["api/models"] = 503
    blocks = ("*.0.*", "*.1.*", "*.2.*")
    recipe = Recipe(rank=0, method="wanda", leave_dense=blocks, calibration=str(CALIBRATION), samples=2, seqlen=32)
    hasslefree.compress("ada/base", tmp_path / "out", recipe)
    assert folder_of("ada/base") == folder
    for name in ("preprocessor_config.json", "tokenizer.model"):
        assert (tmp_path / "out" / name).read_bytes() == SERVED[name]
    assert "license: mit" in (tmp_path / "out" / "README.md").read_text()


def test_a_setting_that_transformers_refuses_to_save_does_not_lose_the_work(tmp_path):
    model = build("llama")
    model.config.top_k = 5
    model.config.transformers_weights = "model.safetensors"  # OUT has shards
    hasslefree.compress(model, tmp_path / "out", QUICK, segments=segments())
    assert configuration(tmp_path / "out")["top_k"] == 5
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 2


def test_keys_that_transformers_renames_stay(tmp_path):
    """Oracle: a released config.json of Qwen3-MoE says num_experts, and what mlx-lm reads is that."""
    build("qwen3_moe").save_pretrained(tmp_path / "dense")
    experts = AutoConfig.from_pretrained(tmp_path / "dense").num_experts
    released(tmp_path / "dense", num_experts=experts, num_local_experts=None)
    hasslefree.compress(str(tmp_path / "dense"), tmp_path / "out", QUICK, segments=segments(), tokenizer=NO_TOKENIZER)
    hasslefree.export(tmp_path / "out", tmp_path / "export", "dense")
    for folder in ("out", "export"):
        content = configuration(tmp_path / folder)
        assert content["num_experts"] == experts
        assert "num_local_experts" not in content
        assert AutoConfig.from_pretrained(tmp_path / folder).num_experts == experts


# By hand: how the released configurations spell what transformers 5 writes by other names, and fields it drops.
RELEASED = {
    "qwen3_moe": (
        {"num_local_experts": "num_experts", "dtype": "torch_dtype"},
        {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2, "rope_theta": 1e6,
         "rope_scaling": None, "transformers_version": "4.51.0"},
    ),
    "llama": (
        {"dtype": "torch_dtype"},
        {"rope_theta": 5e5, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
         "original_max_position_embeddings": 32, "rope_type": "llama3"}, "a field of somebody": [1, 2]},
    ),
}  # fmt: skip


def released_as(family, folder):
    """A folder whose configuration is spelled as in a release of the family."""
    settings = ROTARY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 8}
    config = AutoConfig.for_model(family, **(settings if family == "qwen3_moe" else ROTARY))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    names, fields = RELEASED[family]
    written = configuration(folder)
    del written["rope_parameters"]
    original = {names.get(name, name): value for name, value in written.items()} | fields
    (folder / "config.json").write_text(json.dumps(original))
    return original


@pytest.mark.parametrize("family", RELEASED)
def test_the_configuration_keeps_the_keys_and_values_of_the_original(family, tmp_path):
    original = released_as(family, tmp_path / "base")
    hasslefree.compress(str(tmp_path / "base"), tmp_path / "out", QUICK, segments=segments(), tokenizer=NO_TOKENIZER)
    hasslefree.export(tmp_path / "out", tmp_path / "dense")
    for folder in ("out", "dense"):
        found = configuration(tmp_path / folder)
        kept = {name: found.get(name, "missing") for name in original if name != "transformers_version"}
        assert kept == {name: value for name, value in original.items() if name != "transformers_version"}, folder
    expected = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), segments())
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(dense, segments()), expected, rtol=1e-5, atol=1e-6)


def test_what_was_changed_is_not_put_back(tmp_path):
    released_as("llama", tmp_path / "base")
    recipe = dataclasses.replace(QUICK, dtype="bfloat16")
    hasslefree.compress(str(tmp_path / "base"), tmp_path / "out", recipe, segments=segments(), tokenizer=NO_TOKENIZER)
    assert configuration(tmp_path / "out")["torch_dtype"] == configuration(tmp_path / "out")["dtype"] == "bfloat16"


def test_a_head_of_its_own_is_not_called_tied(tmp_path):
    """Oracle: the logits of the head that the checkpoint holds."""
    model = build("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "dense")
    released(tmp_path / "dense", tie_word_embeddings=True)
    hasslefree.compress(str(tmp_path / "dense"), tmp_path / "out", QUICK, segments=segments(), tokenizer=NO_TOKENIZER)
    hasslefree.export(tmp_path / "out", tmp_path / "export", "dense")
    for folder in ("out", "export"):
        assert configuration(tmp_path / folder)["tie_word_embeddings"] is False
        head = AutoModelForCausalLM.from_pretrained(tmp_path / folder).get_output_embeddings().weight
        assert head.equal(model.lm_head.weight.to(head.dtype))


def test_a_tied_head_stays_tied(tmp_path):
    build("llama", tie_word_embeddings=True).save_pretrained(tmp_path / "dense")
    hasslefree.compress(str(tmp_path / "dense"), tmp_path / "out", QUICK, segments=segments(), tokenizer=NO_TOKENIZER)
    assert configuration(tmp_path / "out")["tie_word_embeddings"] is True


@pytest.mark.parametrize("merged", [False, True])
def test_a_model_from_memory_is_not_compared_with_its_name(merged, tmp_path):
    from hasslefree.evaluation.continuation import dense_original

    build("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    given = model if merged else str(tmp_path / "base")
    if merged:
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight += 1
    hasslefree.compress(given, tmp_path / "out", QUICK, segments=segments(), tokenizer=None if merged else NO_TOKENIZER)
    if merged:
        with pytest.raises(ModelError, match="given from memory"):
            dense_original(tmp_path / "out")
    else:
        assert dense_original(tmp_path / "out") == tmp_path / "base"
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("its model was given from memory" in card) == merged
