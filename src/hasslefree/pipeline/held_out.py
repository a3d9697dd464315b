"""The perplexity of the dense and of the compressed model on text that neither calibration nor
training has read.
"""

import logging
import math
from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.checkpoint.record import HeldOutRecord
from hasslefree.distributed import ALONE
from hasslefree.errors import ModelError
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import run_block
from hasslefree.models.precision import computing
from hasslefree.models.probe import logits_of
from hasslefree.models.walk import Visit, Walk
from hasslefree.pipeline.inputs import check_segments, more_text
from hasslefree.progress import CHECK
from hasslefree.recipe.fields import Fields

logger = logging.getLogger(__name__)

# Held-out tokens, and the most segments; tokens whose predictions are in memory at a time.
TOKENS, SEGMENTS, ROWS = 4096, 32, 256


def segments_held_out(seqlen: int) -> int:
    """How many segments are held out, if the text has as many."""
    return min(math.ceil(TOKENS / seqlen), SEGMENTS)


class Check:
    """Held-out text on its way through both models, in the walk that compresses: no block is read
    for it again.

    Every process runs all segments, (samples, tokens), one at a time: the perplexities depend on
    the weights alone.
    """

    def __init__(self, walk: Walk, segments: Tensor):
        self.walk, self.segments = walk, segments
        self.dense = walk.entering(segments)
        self.compressed = self.dense.copy()

    @classmethod
    def of(cls, walk: Walk, recipe: Fields, tokenizer: Any, used: Tensor) -> Self | None:
        """The check of a compression; None, with a warning, if its text has nothing but `used`,
        (samples, tokens).
        """
        seqlen = used.shape[1]
        text = more_text(walk, recipe, tokenizer, segments_held_out(seqlen), seqlen, used)
        if not len(text):
            logger.warning(
                "no perplexity is measured: the calibration text is too short to hold some of"
                " it out"
            )
            return None
        check_segments(walk.model, text, ALONE)
        return cls(walk, text.to(walk.weights.device))

    def following(self, visits: Iterator[Visit]) -> Iterator[Visit]:
        """The same visits; the text runs through each block before it, as it is dense, and after
        it.
        """
        for visit in visits:
            run_block(visit.block, self.walk.calls[visit.index], self.dense)
            yield visit
            run_block(visit.block, self.walk.calls[visit.index], self.compressed)

    def run_again(self) -> None:
        """Run the text through the compressed model as it is now, all of it in memory."""
        self.compressed = self.walk.entering(self.segments)
        for block, call in zip(self.walk.blocks.modules, self.walk.calls, strict=True):
            run_block(block, call, self.compressed)

    def measure(self) -> HeldOutRecord | None:
        """Both perplexities, once the text has left the last block; None, with a warning, for a
        model without head.
        """
        walk = self.walk
        try:
            with walk.outside(), computing(walk.model, walk.outer(), unpack=False), torch.no_grad():
                runs = walk.phases.counted(CHECK, (self.dense, self.compressed), 2, "models")
                dense, compressed = map(self.perplexity, runs)
        except ModelError:
            logger.warning(
                "no perplexity is measured: %s has no output head", type(walk.model).__name__
            )
            return None
        return HeldOutRecord(dense=dense, compressed=compressed, segments=len(self.segments))

    def perplexity(self, run: Activations) -> float | None:
        """exp of the mean negative log-likelihood of a token, by what has left the last block; None
        if not finite.
        """
        walk, total = self.walk, 0.0
        for index, segment in enumerate(self.segments):
            states = run[index]
            for first in range(0, len(segment) - 1, ROWS):
                rows, labels = slice(first, first + ROWS), segment[first + 1 : first + 1 + ROWS]
                logits = logits_of(
                    walk.model, walk.blocks, walk.calls, segment[rows], states[:, rows]
                )[: len(labels)]
                total += F.cross_entropy(logits.float(), labels, reduction="sum").item()
        mean = torch.tensor(
            total / (self.segments.numel() - len(self.segments)), dtype=torch.float64
        )
        return mean.exp().item() if mean.exp().isfinite() else None
