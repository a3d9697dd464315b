"""Continuations of prompts. Oracle, but for errors: transformers' own `generate`, called here without a stream."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hasslefree.demo.run import MODEL
from hasslefree.errors import BudgetError, PromptError
from hasslefree.evaluation.continuation import Continuation, Sampling, Writer
from tests.tiny_models import build, number_tokenizer

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
