"""Compare the predictions of the dense and the compressed model on held-out text: more of the
calibration's text, and code of Python's library, which every machine has.
"""

import logging
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hasslefree.checkpoint.record import HeldOut, HeldOutRecord, kl_record
from hasslefree.core.predictions import Comparison
from hasslefree.errors import CheckpointError, HasslefreeError, ModelError
from hasslefree.models.activations import Activations
from hasslefree.models.calibrate import run_block
from hasslefree.models.walk import Visit, Walk
from hasslefree.pipeline.preflight import check_segments
from hasslefree.pipeline.text import Texts
from hasslefree.planning.schedule import HELD_OUT_ROWS, segments_held_out
from hasslefree.progress import CHECK, Phase
from hasslefree.texts.python import PYTHON, library_documents

logger = logging.getLogger(__name__)

# Segments of code are drawn from this many times as many, so that they come from several modules.
SPREAD = 8


class Check:
    """Held-out text that runs through both models during the walk that compresses, so that no block
    is read again.

    Every process runs all segments, one at a time: the perplexities depend on the weights alone.

    Args:
        segments: of the calibration's text, then of code, (samples, tokens).
        of_code: the number of segments of code.
    """

    compressed: Activations

    def __init__(self, walk: Walk, segments: Tensor, of_code: int):
        self.walk = walk
        self.segments = segments
        self.of_code = of_code
        self.dense = walk.entering(segments)

    @classmethod
    def of(cls, walk: Walk, texts: Texts, used: Tensor) -> Self | None:
        """Hold out a part of the texts of a run.

        Args:
            used: the segments that calibration and training read, (samples, tokens).

        Returns:
            None, with a warning, if the text contains nothing else.
        """
        segments = texts.more(walk.phases, segments_held_out(texts.seqlen), used)
        if not len(segments):
            logger.warning(
                "no perplexity is measured: the calibration text is too short, or repeats itself"
                " too much, to hold some of it out"
            )
            return None
        of_code = code_segments(texts, len(segments), used)
        segments = torch.cat([segments, of_code])
        check_segments(walk.model, segments)
        return cls(walk, segments.to(walk.weights.device), len(of_code))

    def enter_again(self) -> None:
        """Start the text in the compressed model, at the embedding."""
        self.compressed = self.walk.entering(self.segments)

    def following(self, visits: Iterator[Visit]) -> Iterator[Visit]:
        """Yield the visits; run the text through each block before and after its compression."""
        for visit in visits:
            run_block(visit.block, self.walk.calls[visit.index], self.dense)
            yield visit
            run_block(visit.block, self.walk.calls[visit.index], self.compressed)

    def run_again(self) -> None:
        """Run the text through the blocks of the compressed model, which are all in memory."""
        self.enter_again()
        for block, call in zip(self.walk.blocks.modules, self.walk.calls, strict=True):
            run_block(block, call, self.compressed)

    def measure(self) -> HeldOut:
        """Compare the predictions of both models, after the last block.

        Returns:
            An empty result, with a warning, for a model without an output head.
        """
        count = len(self.segments)
        of_text = count - self.of_code
        walk = self.walk
        code = None
        try:
            with walk.phases.phase(CHECK, count, "segments") as phase:
                text = self.compare(range(of_text), phase)
                if self.of_code:
                    code = self.compare(range(of_text, count), phase)
        except CheckpointError:
            raise
        except ModelError:
            logger.warning(
                "no perplexity is measured: %s has no output head", type(walk.model).__name__
            )
            return HeldOut()
        return HeldOut(text, code)

    @torch.no_grad()
    def compare(self, indices: range, phase: Phase) -> HeldOutRecord:
        """Compare the predictions for some segments. phase: counts the segments."""
        dense_loss = 0.0
        compressed_loss = 0.0
        comparison = Comparison()
        with self.walk.head(dense=True):
            for index in indices:
                segment = self.segments[index]
                for first in range(0, len(segment) - 1, HELD_OUT_ROWS):
                    labels = segment[first + 1 : first + 1 + HELD_OUT_ROWS]
                    dense = self.logits(self.dense, index, first)
                    with self.walk.head(dense=False):
                        compressed = self.logits(self.compressed, index, first)
                    dense_loss += F.cross_entropy(dense, labels, reduction="sum").item()
                    compressed_loss += F.cross_entropy(compressed, labels, reduction="sum").item()
                    comparison.add(dense, compressed)
                phase.advance()
        predicted = len(indices) * (self.segments.shape[1] - 1)
        return HeldOutRecord(
            dense=perplexity(dense_loss / predicted),
            compressed=perplexity(compressed_loss / predicted),
            segments=len(indices),
            kl=kl_record(comparison),
        )

    def logits(self, run: Activations, index: int, first: int) -> Tensor:
        """The predictions after some tokens of a segment, but the last: (tokens, vocabulary).

        Args:
            run: the outputs of the last block.
            index: of the segment.
            first: of the at most `HELD_OUT_ROWS` tokens.
        """
        rows = slice(first, first + HELD_OUT_ROWS)
        tokens = self.segments[index, rows]
        logits = self.walk.logits(tokens, run[index][:, rows])
        return logits[: self.segments.shape[1] - 1 - first].float()


def code_segments(texts: Texts, count: int, used: Tensor) -> Tensor:
    """Draw segments of modules of Python's library, (count or fewer, seqlen) int64.

    There are none, with a warning, if they cannot be read; and none if most of the calibration text
    is from other modules of the library.

    Args:
        used: as for `Check.of`; texts of code may contain modules of the library.
    """
    nothing = used.new_empty(0, texts.seqlen)
    if texts.shares.get(PYTHON, 0) > 0.5:
        return nothing
    try:
        documents = library_documents(held_out=True)
        many = texts.another_part(documents, SPREAD * count, used)
    except HasslefreeError as error:
        logger.warning("no perplexity is measured on code: %s", error)
        return nothing
    return many[:count]


def perplexity(loss: float) -> float | None:
    """exp of a mean negative log-likelihood; None if it is not finite."""
    value = torch.tensor(loss, dtype=torch.float64).exp()
    return value.item() if value.isfinite() else None
