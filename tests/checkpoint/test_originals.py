"""What OUT and its exports keep of the original folder: files of the tokenizer, keys and ties of the configuration."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import CALIBRATION, MODEL
from tests.tiny_models import NO_TOKENIZER, build, segments

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
    recipe = Recipe(rank=2, method="eora", calibration=str(CALIBRATION), samples=2, seqlen=32)
    hasslefree.compress(str(tmp_path / "dense"), tmp_path / "out", recipe)
    hasslefree.export(tmp_path / "out", tmp_path / "export", "dense")
    for folder in ("out", "export"):
        found = {name: (tmp_path / folder / name).read_bytes() for name in given}
        assert found == given
        assert not (tmp_path / folder / "notes.txt").exists()


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
    dense, remark = dense_original(tmp_path / "out")
    assert (dense is None) == merged
    assert ("given from memory" in (remark or "")) == merged
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("its model was given from memory" in card) == merged
