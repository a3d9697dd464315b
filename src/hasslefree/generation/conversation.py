"""A conversation with one model, through its chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from hasslefree.errors import PromptError
from hasslefree.generation.compared import ComparedModel
from hasslefree.generation.sample import Continuation, Sampling, check_prompt, continue_prompt, prompt_ids


@dataclass
class Conversation:
    """The conversation so far. Without a chat template, each message is continued on its own.

    Args:
        messages: in the form of chat templates: {"role", "content"} each, alternately of the user and the assistant.
    """

    compared: ComparedModel
    sampling: Sampling
    messages: list[dict[str, str]] = field(default_factory=list)

    @property
    def has_template(self) -> bool:
        return self.compared.tokenizer.chat_template is not None

    def answer(self, message: str, write: Callable[[str], None]) -> Continuation:
        """The model's answer, which becomes part of the conversation.

        The oldest exchanges are dropped where they exceed the model's context.

        Args:
            write: called with each piece of the answer as soon as it is generated.

        Raises:
            PromptError: the message alone is too long; the conversation stays as it was.
        """
        asked = {"role": "user", "content": message}
        kept, prompt = self.fitting([*self.messages, asked])
        tokenizer = self.compared.tokenizer
        found = continue_prompt(self.compared.model, tokenizer, prompt, self.sampling, write)
        if self.has_template:
            self.messages = [*kept, {"role": "assistant", "content": found.text}]
        return found

    def fitting(self, messages: list[dict[str, str]]) -> tuple[list[dict[str, str]], Tensor]:
        """The newest messages that fit into the model's context, from a question on; and their token ids (1, length).

        Raises:
            PromptError: there is no room for the last message.
        """
        while True:
            prompt = self.prompt(messages)
            try:
                check_prompt(self.compared.model, prompt, self.sampling)
            except PromptError:
                if len(messages) == 1:
                    raise
                messages = messages[2:]
            else:
                return messages, prompt

    def prompt(self, messages: list[dict[str, str]]) -> Tensor:
        """The token ids (1, length) that the model continues."""
        tokenizer = self.compared.tokenizer
        if not self.has_template:
            return prompt_ids(tokenizer, messages[-1]["content"])
        made = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids: Tensor = made["input_ids"]
        return ids
