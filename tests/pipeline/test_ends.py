"""Embedding and head are compressed with the layers, and their folder is used like any other."""

import json

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import hasslefree
from hasslefree import Recipe
from hasslefree.checkpoint.inspect import inspect_folder
from hasslefree.errors import ModelError, RecipeError
from hasslefree.packed.embedding import PackedEmbedding, TiedHead
from tests.tiny_models import NO_TOKENIZER, build, gram_of, logits, segments, tensors_of

FAST = {"bits": 4, "rank": 0, "embedding_bits": 4, "effort": "fast", "scale_bits": 16}
tied_or_not = pytest.mark.parametrize("tied", [True, False])


def compressed(folder, tied=True, dtype=torch.float32, **fields):
    """The record and the model in memory after a compression."""
    model = build("llama", dtype, tie_word_embeddings=tied)
    return hasslefree.compress(model, folder, Recipe(**FAST | fields), segments=segments()), model


@tied_or_not
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_a_folder_gives_the_predictions_of_its_dense_export(family, tied, tmp_path):
    """Oracle: the unpacked matrices in transformers' own modules. The model in memory is the one in the folder."""
    model = build(family, tie_word_embeddings=tied)
    hasslefree.compress(model, tmp_path / "out", Recipe(**FAST), segments=segments())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(loaded.get_input_embeddings(), PackedEmbedding)
    assert isinstance(loaded.get_output_embeddings(), TiedHead) == tied
    found = logits(loaded, segments())
    assert torch.equal(found, logits(model, segments()))
    hasslefree.export(tmp_path / "out", tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(found, logits(dense, segments()), rtol=1e-5, atol=1e-6)
    weights = dense.get_input_embeddings().weight, dense.get_output_embeddings().weight
    assert (weights[0] is weights[1]) == tied
    loaded.tie_weights()
    loaded.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(found, logits(again, segments()))


@tied_or_not
def test_the_file_holds_each_matrix_once_in_its_bits(tied, tmp_path):
    """Oracle: 64 rows of 32 codes of 4 bits, and a scale and an offset of 4 bytes in each row."""
    record, _ = compressed(tmp_path / "out", tied)
    tensors = tensors_of(tmp_path / "out")
    ends = {layer.name: layer for layer in record.layers if "layers" not in layer.name}
    assert set(ends) == ({"model.embed_tokens"} if tied else {"model.embed_tokens", "lm_head"})
    assert not {"model.embed_tokens.weight", "lm_head.weight"} & set(tensors)
    for name, layer in ends.items():
        stored = sum(tensor.nbytes for full, tensor in tensors.items() if full.startswith(f"{name}."))
        assert stored == layer.bytes == 64 * (16 + 4 + 4)
        assert layer.dense_bytes == 64 * 32 * 4
    sizes = inspect_folder(tmp_path / "out")
    assert sizes.bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert sizes.other_bytes == record.other_bytes


def test_the_head_is_fitted_to_its_inputs_in_the_dense_model(tmp_path):
    """Oracle: the Gram of whole forward passes, and the errors in float64; H = I for the embedding."""
    record, _ = compressed(tmp_path / "out", tied=False)
    dense = build("llama", tie_word_embeddings=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    grams = {
        "lm_head": gram_of(dense, "lm_head", segments()).matrix.double(),
        "model.embed_tokens": torch.eye(32, dtype=torch.float64),
    }
    errors = {layer.name: layer.relative_error for layer in record.layers}
    for name, gram in grams.items():
        weight = dense.get_submodule(name).weight.detach().double()
        residual = weight - loaded.get_submodule(name).unpacked().detach().double()
        expected = torch.trace(residual @ gram @ residual.T) / torch.trace(weight @ gram @ weight.T)
        assert errors[name] == pytest.approx(expected.item(), rel=1e-3)


@tied_or_not
def test_training_aims_at_the_predictions_of_the_dense_model(tied, tmp_path):
    """Oracle: KL(dense ‖ compressed) of whole passes on the first segment, before any training on the other three."""
    record, _ = compressed(tmp_path / "trained", tied, match_predictions=48, embedding_bits=2)
    compressed(tmp_path / "fitted", tied, embedding_bits=2)
    dense = F.log_softmax(logits(build("llama", tie_word_embeddings=tied), segments()[:1]).double(), -1)
    fitted = AutoModelForCausalLM.from_pretrained(tmp_path / "fitted")
    rounded = F.log_softmax(logits(fitted, segments()[:1]).double(), -1)
    divergence = (dense.exp() * (dense - rounded)).sum(-1).mean().item()
    assert record.predictions["before"] == pytest.approx(divergence, rel=0.01)
    assert record.predictions["after"] <= record.predictions["before"]


@tied_or_not
def test_a_model_from_the_disk_gives_the_same_bytes(tied, tmp_path):
    compressed(tmp_path / "one", tied, torch.bfloat16, match_predictions=32)
    build("llama", torch.bfloat16, tie_word_embeddings=tied).save_pretrained(tmp_path / "dense")
    recipe = Recipe(**FAST | {"match_predictions": 32})
    name = str(tmp_path / "dense")
    hasslefree.compress(name, tmp_path / "two", recipe, tokenizer=NO_TOKENIZER, segments=segments())
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_with_two_matrices_that_claims_to_be_tied(tmp_path):
    """transformers and we take the matrices as two."""
    model = build("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "dense")
    config = tmp_path / "dense" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    name = str(tmp_path / "dense")
    hasslefree.compress(name, tmp_path / "out", Recipe(**FAST), tokenizer=NO_TOKENIZER, segments=segments())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not isinstance(loaded.get_output_embeddings(), TiedHead)
    assert not torch.equal(loaded.get_input_embeddings().unpacked(), loaded.get_output_embeddings().unpacked())


def test_an_interrupted_run_ends_with_the_same_bytes(tmp_path, monkeypatch):
    compressed(tmp_path / "whole")
    from hasslefree.pipeline import block

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(block, "compress_block", stop)
        with pytest.raises(KeyboardInterrupt):
            compressed(tmp_path / "out")
    model = build("llama", tie_word_embeddings=True)
    hasslefree.compress(model, tmp_path / "out", Recipe(**FAST), segments=segments(), resume=True)
    whole, resumed = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert torch.equal(
        logits(model, segments()), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), segments())
    )


@pytest.mark.parametrize("glob", ["lm_head", "model.embed_tokens"])
def test_either_name_leaves_a_tied_pair_dense(glob, tmp_path):
    record, _ = compressed(tmp_path / "out", leave_dense=(glob,))
    assert "model.embed_tokens.weight" in tensors_of(tmp_path / "out")
    assert record.dense == ()


def test_an_untied_head_stays_dense_by_itself(tmp_path):
    compressed(tmp_path / "out", tied=False, leave_dense=("lm_head",))
    tensors = tensors_of(tmp_path / "out")
    assert "lm_head.weight" in tensors
    assert "model.embed_tokens.weight_packed" in tensors


def test_an_embedding_of_which_only_a_part_is_looked_up_stays_dense(tmp_path):
    class Halved(torch.nn.Embedding):
        def forward(self, ids):
            return super().forward(ids) / 2

    model = build("llama")
    model.model.embed_tokens.__class__ = Halved
    record = hasslefree.compress(model, tmp_path / "out", Recipe(**FAST), segments=segments())
    assert "model.embed_tokens" in record.dense


def test_scaled_rows_in_half_precision_are_those_of_the_dense_export(tmp_path):
    """Oracle: transformers, which rounds the scale to the dtype of the rows."""
    model = build("gemma3_text", torch.bfloat16)
    hasslefree.compress(model, tmp_path / "out", Recipe(**FAST), segments=segments())
    hasslefree.export(tmp_path / "out", tmp_path / "dense")
    ids = torch.arange(64)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").get_input_embeddings()
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense").get_input_embeddings()
    assert loaded.scale not in (1, torch.tensor(loaded.scale).bfloat16().item())
    assert torch.equal(loaded(ids), dense(ids))


def test_a_matrix_that_others_share_stays_dense(tmp_path, caplog):
    model = build("llama", tie_word_embeddings=True)
    model.all_tied_weights_keys["model.extra.weight"] = "model.embed_tokens.weight"
    from hasslefree.models.ends import find_ends

    [end] = find_ends(model)
    assert end.obstacle == "model.extra share it"


def test_a_size_of_the_vocabulary_changes_only_to_itself(tmp_path):
    compressed(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.resize_token_embeddings(64) is loaded.get_input_embeddings()
    with pytest.raises(TypeError, match="PackedEmbedding"):
        loaded.resize_token_embeddings(70)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"embedding_bits": 7}, "embedding_bits must be one of 2, 3, 4, 5, 6, 8, got 7"),
        ({"engine": "vllm"}, "vllm keeps embedding and head dense: leave out embedding_bits"),
        ({"engine": "llama.cpp", "embedding_bits": 6}, "embedding and head: llama.cpp cannot hold int6"),
    ],
)
def test_bits_that_cannot_be_are_refused(fields, message):
    with pytest.raises(RecipeError, match=message):
        Recipe(rank=0, **{"embedding_bits": 4} | fields).resolve(with_text=False)


def test_a_name_that_is_nowhere_is_refused():
    with pytest.raises(ModelError, match="neither embedding nor head"):
        hasslefree.compress(build("llama"), "/tmp/never", Recipe(rank=2, leave_dense=("head",)), segments=segments())


def test_a_size_counts_the_weights_of_both(tmp_path):
    """Oracle: the bytes of the tensors."""
    fields = {"size": "8bits", "bits": None, "rank": None, "group_size": 16, "allocate": "error"}
    record, _ = compressed(tmp_path / "out", dtype=torch.bfloat16, **fields)
    tensors = tensors_of(tmp_path / "out")
    stored = sum(tensor.nbytes for tensor in tensors.values()) - record.other_bytes
    assert 7.5 < 8 * stored / record.dense_parameters <= 8
    assert record.dense_parameters == sum(layer.dense_bytes for layer in record.layers) / 2


def test_a_given_rank_may_make_a_narrow_matrix_larger_than_dense(tmp_path):
    """k_proj of 32×64 with rank 28. Oracle: the bytes of the tensors."""
    model = build("llama", torch.bfloat16, hidden_size=64, intermediate_size=512, num_hidden_layers=1)
    record = hasslefree.compress(
        model, tmp_path / "out", Recipe(size="12bits", rank=28, effort="fast"), segments=segments()
    )
    layers = [layer for layer in record.layers if "layers" in layer.name]
    assert {layer.spec.rank for layer in layers} == {28}
    assert any(layer.bytes > layer.dense_bytes for layer in layers)
    stored = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "out").values()) - record.other_bytes
    assert 8 * stored / record.dense_parameters <= 12
