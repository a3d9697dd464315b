"""Conversations through a chat template. Oracle: the text of the prompt, written out by hand."""

import pytest

from hasslefree.cli.generate import answer
from hasslefree.errors import PromptError
from hasslefree.evaluation.continuation import Sampling, Writer


def test_an_answer_continues_the_whole_conversation(with_template):
    writer, history = Writer.load(str(with_template), device="cpu"), []
    first = answer(writer, history, "Hello", Sampling(8)).text
    assert first == writer.write("<user>Hello\n<assistant>", Sampling(8)).text
    second = answer(writer, history, "And?", Sampling(8)).text
    spoken = f"<user>Hello\n<assistant>{first}\n<user>And?\n<assistant>"
    assert second == writer.write(spoken, Sampling(8)).text
    assert [message["content"] for message in history] == ["Hello", first, "And?", second]


def test_a_conversation_that_is_too_long_says_what_to_do(with_template):
    writer, history = Writer.load(str(with_template), device="cpu"), []
    with pytest.raises(PromptError, match="the prompt has .*takes at most 512"):
        answer(writer, history, "words " * 600, Sampling(8))
    assert not history, "a message without an answer was kept"
    answer(writer, history, "many " * 150, Sampling(8))
    with pytest.raises(PromptError, match=r"start `hasslefree chat` again for a new one: .*takes at most 512"):
        answer(writer, history, "words " * 150, Sampling(8))
    assert len(history) == 2


def test_without_a_template_every_message_is_continued_by_itself(out):
    writer, history = Writer.load(str(out), device="cpu"), []
    first = answer(writer, history, "Return the", Sampling(8)).text
    answer(writer, history, "class", Sampling(8))
    assert answer(writer, history, "Return the", Sampling(8)).text == first
    assert first == writer.write("Return the", Sampling(8)).text
