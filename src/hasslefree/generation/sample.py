"""Let a model continue a prompt, and measure how fast it writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.streamers import TextStreamer

from hasslefree.errors import PromptError, RecipeError, option
from hasslefree.models.load import most_positions


@dataclass(frozen=True)
class Sampling:
    """How a text is continued.

    Args:
        max_new_tokens: the maximum length; the model may end the text earlier.
        temperature: 0 takes the most probable token each time; above 0, tokens are drawn at this temperature, with the
            model's own top_k and top_p.
        seed: of the draws.

    Raises:
        RecipeError: fewer than 1 token, or a negative temperature.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RecipeError(f"{option('max_new_tokens')} must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise RecipeError(f"{option('temperature')} must be a finite number, 0 or more, got {self.temperature}")

    @property
    def arguments(self) -> dict[str, Any]:
        """For `generate` of transformers."""
        drawn = {"do_sample": True, "temperature": self.temperature}
        greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
        return {"max_new_tokens": self.max_new_tokens, **(drawn if self.temperature else greedy)}


@dataclass(frozen=True)
class Continuation:
    """The text that a model generated. tokens: their ids. seconds: from the first token to the last."""

    text: str
    tokens: tuple[int, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """After the first token, so that reading the prompt does not count; None for a single token."""
        return (len(self.tokens) - 1) / self.seconds if len(self.tokens) > 1 else None


class Stream(TextStreamer):
    """Passes text on as soon as its words are complete, and records the tokens and their times."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write, self.tokens, self.times = write, list[int](), list[float]()
        self.prompt_passed = False

    def put(self, value: Tensor) -> None:
        """Takes the prompt (1, length), and then each token (1,)."""
        if self.prompt_passed:
            self.times.append(time.perf_counter())
            self.tokens += value.tolist()
        self.prompt_passed = True
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text)


def continue_prompt(
    model: PreTrainedModel, tokenizer: Any, prompt: Tensor, sampling: Sampling, write: Callable[[str], None]
) -> Continuation:
    """The model's continuation of a prompt.

    Args:
        prompt: token ids (1, length), on any device. write: called with each piece of text as soon as it is generated.

    Raises:
        PromptError: the prompt is empty, or longer, with the new tokens, than the model supports.
    """
    check_prompt(model, prompt, sampling)
    stream, ids = Stream(tokenizer, write), prompt.to(model.device)
    torch.manual_seed(sampling.seed)
    generate: Any = model.generate
    generate(ids, attention_mask=torch.ones_like(ids), streamer=stream, **sampling.arguments)
    text = tokenizer.decode(stream.tokens, skip_special_tokens=True)
    return Continuation(text, tuple(stream.tokens), stream.times[-1] - stream.times[0])


def warm_up(model: PreTrainedModel) -> None:
    """Generate two tokens: kernels are compiled, or read from their cache, when they are first called."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    generate: Any = model.generate
    generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=2, max_new_tokens=2)


def check_prompt(model: PreTrainedModel, prompt: Tensor, sampling: Sampling) -> None:
    """Raise a PromptError for a prompt without tokens, or without room for the new ones. prompt: (1, length)."""
    length, most = prompt.shape[1], most_positions(model)
    if not length:
        raise PromptError("the prompt is empty; give some text to continue")
    if most is not None and length + sampling.max_new_tokens > most:
        raise PromptError(
            f"the prompt has {length} tokens and {sampling.max_new_tokens} new ones may follow, but the model takes at "
            f"most {most} in total; shorten the prompt, or lower {option('max_new_tokens')}"
        )


def prompt_ids(tokenizer: Any, text: str) -> Tensor:
    """The token ids (1, length) of a text to continue, special tokens as the tokenizer adds them by default."""
    ids: Tensor = torch.tensor([tokenizer(text, verbose=False)["input_ids"]], dtype=torch.long)
    return ids
