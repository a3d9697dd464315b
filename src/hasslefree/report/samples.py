"""The same prompts continued greedily by compressed models and by their dense ones, to be read side
by side.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasslefree.errors import ModelError
from hasslefree.evaluation.continuation import ORIGINAL, Sampling, Writer, dense_original


@dataclass(frozen=True)
class Sample:
    """One prompt and what the models wrote. dense: None where there is no dense model."""

    prompt: str
    compressed: str
    dense: str | None = None

    @property
    def same(self) -> int:
        """The number of characters that both texts begin with."""
        if self.dense is None:
            return len(self.compressed)
        pairs = zip(self.compressed, self.dense, strict=False)
        return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


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
        dense: the dense model of all folders; None or "original" for the one that each folder
            names, if it is on this machine; "none" for none.
        options: those of `load_model`.
    """
    sampling = Sampling(max_new_tokens)

    @functools.cache
    def texts_of(model: str) -> list[str]:
        writer = Writer.load(model, **options)
        return [writer.write(prompt, sampling).text for prompt in prompts]

    samples: list[Samples] = []
    for folder in folders:
        name = None if dense == ORIGINAL else dense
        remark = None
        if name is None:
            try:
                name = str(dense_original(folder))
            except ModelError as error:
                remark = str(error)
        texts: list[list[str]] = [texts_of(str(folder))]
        if name is not None and name != "none":
            texts.append(texts_of(name))
        rows = zip(prompts, *texts, strict=True)
        samples.append(Samples(tuple(Sample(*row) for row in rows), remark))
    return samples
