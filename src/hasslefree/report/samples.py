"""Prompts continued greedily by compressed and dense models, to be compared side by side."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasslefree.errors import ModelError
from hasslefree.evaluation.continuation import ORIGINAL, Sampling, Writer, dense_original


@dataclass(frozen=True)
class Sample:
    """A prompt and its continuations. dense: None if there is no dense model."""

    prompt: str
    compressed: str
    dense: str | None = None

    @property
    def same(self) -> int:
        """The length of the common beginning of both texts."""
        if self.dense is None:
            return len(self.compressed)
        length = 0
        for one, other in zip(self.compressed, self.dense, strict=False):
            if one != other:
                break
            length += 1
        return length


@dataclass(frozen=True)
class Samples:
    """The samples of a folder. remark: the reason if the dense model was not found."""

    samples: tuple[Sample, ...]
    remark: str | None = None


def sample_folders(
    folders: Iterable[Path],
    prompts: Sequence[str],
    dense: str | None = None,
    max_new_tokens: int = 64,
    **options: Any,
) -> list[Samples]:
    """Continue the prompts with the model of each folder and with its dense model.

    One model is in memory at a time.

    Args:
        dense: the dense model of all folders; None or "original" for the one that each folder
            names, if it is on this machine; "none" for none.
        options: keyword arguments of `load_model`.
    """
    sampling = Sampling(max_new_tokens)

    @functools.cache
    def texts_of(model: str) -> list[str]:
        writer = Writer.load(model, **options)
        return [writer.write(prompt, sampling).text for prompt in prompts]

    samples: list[Samples] = []
    for folder in folders:
        name = ORIGINAL if dense is None else dense
        remark = None
        if name == ORIGINAL:
            try:
                name = str(dense_original(folder))
            except ModelError as error:
                name = "none"
                remark = str(error)
        texts = [texts_of(str(folder))]
        if name != "none":
            texts.append(texts_of(name))
        rows = zip(prompts, *texts, strict=True)
        samples.append(Samples(tuple(Sample(*row) for row in rows), remark))
    return samples
