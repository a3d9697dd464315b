"""Conversations through a chat template. Oracle: the text of the prompt, written out by hand."""

import pytest

from hasslefree.errors import PromptError
from hasslefree.generation.compared import load_compared_model
from hasslefree.generation.conversation import Conversation
from hasslefree.generation.sample import Sampling, continue_prompt, prompt_ids


@pytest.fixture(scope="module")
def compared(with_template):
    return load_compared_model("compressed", str(with_template), device="cpu")


def expected_answer(compared, text, sampling):
    ids = prompt_ids(compared.tokenizer, text)
    return continue_prompt(compared.model, compared.tokenizer, ids, sampling, len).text


def test_an_answer_continues_the_whole_conversation(compared):
    conversation = Conversation(compared, Sampling(8))
    first = conversation.answer("Hello", len).text
    assert first == expected_answer(compared, "<user>Hello\n<assistant>", Sampling(8))
    second = conversation.answer("And?", len).text
    spoken = f"<user>Hello\n<assistant>{first}\n<user>And?\n<assistant>"
    assert second == expected_answer(compared, spoken, Sampling(8))
    assert [each["content"] for each in conversation.messages] == ["Hello", first, "And?", second]


def test_the_oldest_exchange_is_forgotten_where_the_model_has_no_room(compared):
    conversation = Conversation(compared, Sampling(8))
    conversation.answer("many " * 150, len)
    found = conversation.answer("words " * 150, len).text
    assert found == expected_answer(compared, f"<user>{'words ' * 150}\n<assistant>", Sampling(8))
    assert len(conversation.messages) == 2
    with pytest.raises(PromptError, match="takes at most 512"):
        conversation.answer("words " * 600, len)
    assert len(conversation.messages) == 2, "a message without an answer was kept"


def test_without_a_template_every_message_is_continued_by_itself(out):
    conversation = Conversation(load_compared_model("compressed", str(out), device="cpu"), Sampling(8))
    first = conversation.answer("Return the", len).text
    conversation.answer("class", len)
    assert conversation.answer("Return the", len).text == first
    assert first == expected_answer(conversation.compared, "Return the", Sampling(8))
