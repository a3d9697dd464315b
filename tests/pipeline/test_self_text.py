"""Text that a model writes itself."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import GenerationConfig

from hasslefree import Recipe, compress
from hasslefree.demo.run import MODEL
from hasslefree.errors import CalibrationError, ModelError
from hasslefree.models.load import load_model, load_on_disk
from hasslefree.models.tokenizer import load_tokenizer
from hasslefree.pipeline.text import beginning, check_writer, whole_model, written_segments
from tests.tiny_models import build, number_tokenizer

SEQLEN = 48


@pytest.fixture(scope="module")
def model():
    return load_model(str(MODEL), "float32", "cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL))


def test_the_tokens_are_drawn_from_the_predictions(model, tokenizer):
    # −log p of a token drawn from p is the entropy of p on average; greedy choice, or a temperature, would break this.
    segments = written_segments(model, tokenizer, 40, SEQLEN, seed=0)
    assert segments.shape == (40, SEQLEN)
    start = len(beginning(tokenizer))
    with torch.no_grad():
        logarithms = F.log_softmax(model(segments).logits[:, start - 1 : -1].double(), -1)
    drawn = -logarithms.gather(-1, segments[:, start:, None]).squeeze(-1)
    entropy = -(logarithms.exp() * logarithms).sum(-1)
    deviation = (drawn - entropy).std() / math.sqrt(drawn.numel())
    assert abs((drawn - entropy).mean()) < 4 * deviation
    assert entropy.mean() > 1


def test_a_seed_names_a_text(model, tokenizer):
    state = torch.random.get_rng_state()
    one, same, other = (written_segments(model, tokenizer, 3, SEQLEN, seed) for seed in (0, 0, 1))
    assert one.equal(same)
    assert not one.equal(other)
    assert torch.random.get_rng_state().equal(state)
    assert one[:, : len(beginning(tokenizer))].tolist() == [beginning(tokenizer)] * 3


def test_settings_of_the_model_do_not_count(model, tokenizer, monkeypatch):
    """Oracle: the same model with a plain generation_config."""
    plain = written_segments(model, tokenizer, 2, SEQLEN, seed=0)
    shipped = GenerationConfig(
        repetition_penalty=5.0, suppress_tokens=[5, 6, 7], min_p=0.5, num_beams=2, stop_strings=["e"], max_time=0.001,
        no_repeat_ngram_size=1,
    )  # fmt: skip
    monkeypatch.setattr(model, "generation_config", shipped)
    assert written_segments(model, tokenizer, 2, SEQLEN, seed=0).equal(plain)
    assert model.generation_config is shipped


def test_a_chat_begins_before_the_question(tokenizer, monkeypatch):
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [end]{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert beginning(tokenizer) == tokenizer("[user] ", add_special_tokens=False)["input_ids"]


def test_a_model_that_repeats_itself(tokenizer):
    model = load_model(str(MODEL), "float32", "cpu")
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(100)  # what is read is what is written again
    with pytest.raises(CalibrationError, match="writes little but .*; give a text"):
        written_segments(model, tokenizer, 2, SEQLEN, seed=0)


def test_a_tokenizer_without_special_tokens(model):
    bare = number_tokenizer()
    bare.bos_token = bare.eos_token = None
    with pytest.raises(CalibrationError, match="no token that begins or ends a text"):
        written_segments(model, bare, 2, SEQLEN, seed=0)


def test_weights_on_the_disk_are_loaded(model, tmp_path):
    on_disk = load_on_disk(str(MODEL), "float32", tmp_path)
    whole = whole_model(on_disk, torch.device("cpu"))
    assert whole.get_input_embeddings().weight.equal(model.get_input_embeddings().weight)
    assert whole_model(model, torch.device("cpu")) is model


def test_a_compression_without_any_text(tmp_path):
    recipe = Recipe(pattern="2:4", rank=2, calibration="self", samples=4, seqlen=32, match_predictions=64, rounds=2)
    report = compress(str(MODEL), tmp_path / "out", recipe)
    assert report.predictions["tokens"] == 64
    assert report.tokens == 128


def test_a_template_with_tokens_that_the_embedding_lacks():
    """Before anything is written: this was an IndexError."""
    tokenizer = number_tokenizer()
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|> {{ m.content }} {% endfor %}"
    with pytest.raises(ModelError, match=r"token id 64, '<\|im_start\|>', is outside the model's vocabulary"):
        check_writer(build("llama"), tokenizer, torch.device("cpu"))
