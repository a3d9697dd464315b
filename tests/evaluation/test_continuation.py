"""Continuations of prompts. Oracle, but for errors: transformers' own `generate`, called here without a stream."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hasslefree
from hasslefree import Recipe
from hasslefree.demo.run import MODEL
from hasslefree.errors import BudgetError, ModelError, PromptError
from hasslefree.evaluation.continuation import Continuation, Sampling, Writer, decoded_bytes, loaded_bytes
from hasslefree.models.load import load_model
from hasslefree.packed.linear import compressed_layers
from tests.tiny_models import build, number_tokenizer, segments

PROMPTS = ["Return the number of items", "class", "A dictionary maps keys\nto values: ü"]


@pytest.fixture(scope="module", params=["dense", "compressed"])
def writer(request, out):
    folder = MODEL if request.param == "dense" else out
    return Writer(str(folder), AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_that_of_transformers_token_for_token(writer, prompt):
    model, tokenizer = writer.model, writer.tokenizer
    pieces = []
    found = writer.write(prompt, Sampling(32), pieces.append)
    given = tokenizer(prompt, return_tensors="pt")
    whole = model.generate(**given, max_new_tokens=32, do_sample=False)
    expected = whole[0, given["input_ids"].shape[1] :]
    assert found.tokens == tuple(expected.tolist())
    assert found.text == "".join(pieces) == tokenizer.decode(expected, skip_special_tokens=True)
    assert len(pieces) > 3, "written in one piece"


def test_greedy_whatever_the_generation_config_says(writer):
    model = writer.model
    expected = writer.write(PROMPTS[0], Sampling(16)).tokens
    kept = model.generation_config
    try:
        model.generation_config = type(kept)(**kept.to_dict() | {"do_sample": True, "temperature": 9.0, "top_p": 0.9})
        assert writer.write(PROMPTS[0], Sampling(16)).tokens == expected
    finally:
        model.generation_config = kept


def test_draws_are_those_of_transformers_after_the_same_seed(writer):
    model, tokenizer = writer.model, writer.tokenizer
    ids = tokenizer(PROMPTS[0], return_tensors="pt")["input_ids"]
    found = [writer.write(ids, Sampling(16, 1.5, seed)).tokens for seed in (3, 3, 4)]
    torch.manual_seed(3)
    whole = model.generate(ids, max_new_tokens=16, do_sample=True, temperature=1.5)
    assert found[0] == found[1] == tuple(whole[0, ids.shape[1] :].tolist())
    assert found[0] != found[2]


def test_the_speed_leaves_the_first_token_out():
    """Oracle: by hand. Four tokens follow the first one in two seconds."""
    assert Continuation("", (1, 2, 3, 4, 5), 2.0).tokens_per_second == 2.0
    assert Continuation("", (1,), 0.0).tokens_per_second is None


def test_wrong_prompts_and_options(writer):
    for ids, new_tokens, message in [
        (torch.zeros(1, 0, dtype=torch.long), 4, "the prompt is empty"),
        (
            torch.zeros(1, 500, dtype=torch.long),
            13,
            "has 500 tokens and 13 new ones may follow, but the model takes at most 512",
        ),
    ]:
        with pytest.raises(PromptError) as error:
            writer.write(ids, Sampling(new_tokens))
        assert message in str(error.value)
    for wrong in ({"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}):
        with pytest.raises(BudgetError, match=next(iter(wrong))):
            Sampling(**wrong)


def test_a_prompt_is_not_ended():
    """Oracle: a tokenizer that puts nothing after a text."""
    model = build("llama")
    closing, open_ended = number_tokenizer("<s> $A </s>"), number_tokenizer("<s> $A")
    texts = [Writer("m", model, tokenizer).write("5 6 7", Sampling(8)).tokens for tokenizer in (closing, open_ended)]
    assert texts[0] == texts[1]


def test_a_token_that_the_embedding_lacks_is_named():
    """Chat templates write tokens that were added to the tokenizer alone."""
    tokenizer = number_tokenizer()
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    with pytest.raises(
        ModelError, match=r"token id 64, '<\|im_start\|>', is outside the model's vocabulary \(0 to 63\)"
    ):
        Writer("m", build("llama"), tokenizer).write("<|im_start|> 5", Sampling(4))


SEARCHES = [
    {"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 2}, {"penalty_alpha": 0.6, "top_k": 4},
    {"prompt_lookup_num_tokens": 3}, {"num_beams": 4, "force_words_ids": [[5]]}, {"max_time": 1e-6},
]  # fmt: skip


@pytest.mark.parametrize("asked", SEARCHES)
def test_another_search_is_left_out_with_a_warning(asked, tmp_path, caplog):
    """Oracle: the same model without these settings."""
    model = build("llama")
    model.save_pretrained(tmp_path)
    number_tokenizer().save_pretrained(tmp_path)
    expected = Writer.load(str(tmp_path), device="cpu").write("5 6 7", Sampling(8)).tokens
    assert not caplog.records
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | asked))
    writer = Writer.load(str(tmp_path), device="cpu")
    assert writer.write("5 6 7", Sampling(8)).tokens == expected
    assert all(f"without the {name} " in caplog.text for name in asked if name != "top_k")


def test_stop_strings_of_the_model_end_a_text(writer, monkeypatch):
    """Oracle: the first tokens whose text has one of them."""
    whole = writer.write(PROMPTS[0], Sampling(32))
    stop = whole.text.split()[4]
    monkeypatch.setattr(writer.model.generation_config, "stop_strings", [stop])
    texts = [writer.tokenizer.decode(whole.tokens[:count]) for count in range(33)]
    expected = next(count for count, text in enumerate(texts) if stop in text)
    assert writer.write(PROMPTS[0], Sampling(32)).tokens == whole.tokens[:expected]


def test_the_memory_of_an_entropy_coded_model_is_not_underestimated(tmp_path):
    """Oracle: what the loaded model holds. Its codes are decoded."""
    recipe = Recipe(bits=4, rank=0, coding="entropy", effort="fast", check=False)
    hasslefree.compress(build("llama"), tmp_path / "out", recipe, segments=segments())
    model = load_model(str(tmp_path / "out"))
    model(segments()[:1])
    held = model.get_memory_footprint() + sum(layer.held_bytes for layer in compressed_layers(model).values())
    expected = loaded_bytes(tmp_path / "out", "auto") + decoded_bytes(model.config)
    assert expected == pytest.approx(held, rel=1e-3)
