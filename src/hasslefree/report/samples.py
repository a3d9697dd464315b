"""The same prompts continued greedily by compressed models and by their dense ones, to be read side
by side.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
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
    **how: Any,
) -> list[Samples]:
    """Let the model of each folder and its dense model continue the prompts. One model is in memory
    at a time.

    dense: for all folders; None for what each folder names, if it is on this machine; "none" for
    none. how: of `load_model`.
    """
    sampling, by_model, samples = Sampling(max_new_tokens), dict[str, list[Continuation]](), []
    for folder in folders:
        name, remark = dense_original(folder) if dense is None else (dense, None)
        compressed, tokenizer = write(str(folder), prompts, sampling, how)
        if name is None or name == "none":
            texts = (Text(continuation.text, "") for continuation in compressed)
            samples.append(Samples(tuple(map(Sample, prompts, texts)), remark))
            continue
        if name not in by_model:
            by_model[name], _ = write(name, prompts, sampling, how)
        samples.append(
            Samples(tuple(map(partial(sample, tokenizer), prompts, compressed, by_model[name])))
        )
    return samples


def write(
    name: str, prompts: Iterable[str], sampling: Sampling, how: dict[str, Any]
) -> tuple[list[Continuation], Any]:
    """What a model writes after each prompt, and its tokenizer; the model is not kept."""
    writer = Writer.load(name, **how)
    return [writer.write(prompt, sampling) for prompt in prompts], writer.tokenizer


def sample(tokenizer: Any, prompt: str, compressed: Continuation, dense: Continuation) -> Sample:
    """Both texts, parted at the first token that differs."""
    tokens = shared(compressed.tokens, dense.tokens)
    start = tokenizer.decode(compressed.tokens[:tokens], skip_special_tokens=True)

    def parted(text: str) -> Text:
        # A character may be of several tokens: without the last of them, it is decoded as another
        # one.
        same = shared(start, text)
        return Text(text[:same], text[same:])

    return Sample(prompt, parted(compressed.text), parted(dense.text), tokens)


def shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many elements two sequences have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
