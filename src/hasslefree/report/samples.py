"""The same prompts continued greedily by compressed models and by their dense ones, to be read side by side."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from hasslefree.evaluation.continuation import Continuation, Sampling, Writer, dense_original


@dataclass(frozen=True)
class Text:
    """What one model wrote: the beginning that the other model wrote too, and the rest from the first token apart."""

    same: str
    rest: str


@dataclass(frozen=True)
class Sample:
    """One prompt. dense: None where there is no dense model. tokens: that both models wrote before they differ."""

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
    """All prompts of one folder. remark: a sentence that says why there is no dense model, where one was looked for."""

    samples: tuple[Sample, ...]
    remark: str | None = None


@dataclass(frozen=True)
class Written:
    """What one model wrote after one prompt."""

    continuation: Continuation
    tokenizer: Any

    def split(self, tokens: int) -> Text:
        """The text in two parts, the first of so many tokens."""
        text = self.continuation.text
        start = self.tokenizer.decode(self.continuation.tokens[:tokens], skip_special_tokens=True)
        # A character may be of several tokens: without the last of them, it is decoded as another one.
        same = shared(start, text)
        return Text(text[:same], text[same:])


def sample_folders(
    folders: Iterable[Path], prompts: Sequence[str], dense: str | None = None, max_new_tokens: int = 64, **how: Any
) -> list[Samples]:
    """Let the model of each folder and its dense model continue the prompts. One model is in memory at a time.

    dense: the dense model of all folders; None for the one that each folder names, if it is on this machine; "none" for
    none. how: the device and trust_remote_code of `load_model`.
    """
    sampling, by_model, samples = Sampling(max_new_tokens), dict[str, list[Written]](), []
    for folder in folders:
        name, remark = dense_original(folder) if dense is None else (dense, None)
        compressed = write(Writer.load(str(folder), **how), prompts, sampling)
        if name is None or name == "none":
            texts = (Text(written.continuation.text, "") for written in compressed)
            samples.append(Samples(tuple(map(Sample, prompts, texts)), remark))
            continue
        if name not in by_model:
            by_model[name] = write(Writer.load(name, **how), prompts, sampling)
        samples.append(Samples(tuple(map(sample, prompts, compressed, by_model[name]))))
    return samples


def write(writer: Writer, prompts: Iterable[str], sampling: Sampling) -> list[Written]:
    return [Written(writer.write(prompt, sampling), writer.tokenizer) for prompt in prompts]


def sample(prompt: str, compressed: Written, dense: Written) -> Sample:
    """Both texts, parted at the first token that differs."""
    tokens = shared(compressed.continuation.tokens, dense.continuation.tokens)
    return Sample(prompt, compressed.split(tokens), dense.split(tokens), tokens)


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two sequences have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
