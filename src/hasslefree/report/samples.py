"""The same prompts continued greedily by compressed models and by their dense ones, to be read side
by side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasslefree.evaluation.continuation import Continuation, Sampling, Writer, dense_original


@dataclass(frozen=True)
class Text:
    """What one model wrote: the beginning that the other model wrote too, and the rest from the
    first token apart.
    """

    same: str
    rest: str


@dataclass(frozen=True)
class Sample:
    """One prompt. dense: None where there is no dense model. tokens: that both models wrote before
    they differ.
    """

    prompt: str
    compressed: Text
    dense: Text | None = None
    tokens: int = 0

    @property
    def same(self) -> bool:
        """Both models wrote the same text to its end."""
        return self.dense is not None and not self.dense.rest and not self.compressed.rest


@dataclass(frozen=True)
class Samples:
    """All prompts of one folder. remark: a sentence that says why there is no dense model, where
    one was looked for.
    """

    samples: tuple[Sample, ...]
    remark: str | None = None


def sample_folders(
    folders: Iterable[Path],
    prompts: Sequence[str],
    dense: str | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> list[Samples]:
    """Let the model of each folder and its dense model continue the prompts.

    One model is in memory at a time.

    Args:
        dense: the dense model of all folders; None for the one that each folder names, if it is on
            this machine; "none" for none.
        options: those of `load_model`.
    """
    sampling = Sampling(max_new_tokens)
    by_model: dict[str, list[Continuation]] = {}
    samples: list[Samples] = []
    for folder in folders:
        name = dense
        remark = None
        if dense is None:
            name, remark = dense_original(folder)
        compressed, tokenizer = write(str(folder), prompts, sampling, options)
        if name is None or name == "none":
            alone = []
            for prompt, one in zip(prompts, compressed, strict=True):
                alone.append(Sample(prompt, Text(one.text, "")))
            samples.append(Samples(tuple(alone), remark))
            continue
        if name not in by_model:
            by_model[name], _ = write(name, prompts, sampling, options)
        both = []
        for prompt, one, other in zip(prompts, compressed, by_model[name], strict=True):
            both.append(sample(tokenizer, prompt, one, other))
        samples.append(Samples(tuple(both)))
    return samples


def write(
    name: str, prompts: Iterable[str], sampling: Sampling, options: dict[str, Any]
) -> tuple[list[Continuation], Any]:
    """Continue each prompt with a model, which is not kept; return its tokenizer too."""
    writer = Writer.load(name, **options)
    return [writer.write(prompt, sampling) for prompt in prompts], writer.tokenizer


def sample(
    tokenizer: Any,
    prompt: str,
    compressed: Continuation,
    dense: Continuation,
) -> Sample:
    """Part both texts at the first token that differs."""
    tokens = shared(compressed.tokens, dense.tokens)
    start = tokenizer.decode(compressed.tokens[:tokens], skip_special_tokens=True)
    return Sample(prompt, parted(compressed.text, start), parted(dense.text, start), tokens)


def parted(text: str, start: str) -> Text:
    """Part a text after its common beginning with `start`.

    A character may be of several tokens: without the last of them, it is decoded as another one.
    """
    same = shared(start, text)
    return Text(text[:same], text[same:])


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the elements that two sequences have in common at their beginning."""
    count = 0
    for first, second in zip(one, other, strict=False):
        if first != second:
            break
        count += 1
    return count
