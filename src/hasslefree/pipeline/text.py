"""The calibration text of a run: which texts it is of, its segments, and more of the same."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hasslefree.errors import CalibrationError, HasslefreeError
from hasslefree.models.load import check_ids, resolve_seqlen
from hasslefree.models.tokenizer import begin_with, encode_document, surrounding_tokens, written
from hasslefree.models.walk import Walk
from hasslefree.pipeline.self_text import check_writer, whole_model, written_segments
from hasslefree.progress import HELD_OUT_TEXT, REFERENCE_TEXT, TEXT, Phases
from hasslefree.recipe.fields import Fields
from hasslefree.texts.files import Document, Joined
from hasslefree.texts.segments import disjoint_segments, draw_segments, joined
from hasslefree.texts.shares import MIXED, counts_of, shares_of
from hasslefree.texts.sources import SELF, calibration_documents

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Texts:
    """The texts of a run.

    Args:
        shares: of the segments, by the name of each text; together 1.
        documents: of each text but that which the model writes itself.
        left_out: the texts of `mixed` that could not be read, and why.
    """

    shares: dict[str, float]
    documents: dict[str, Sequence[Any]]
    left_out: dict[str, str] = field(default_factory=dict)

    def tokens(self, segments: Tensor) -> dict[str, int]:
        """The tokens of each text in calibration segments (samples, seqlen)."""
        samples, seqlen = segments.shape
        return {name: count * seqlen for name, count in counts_of(self.shares, samples).items()}


def read_texts(
    model: PreTrainedModel, tokenizer: Any, recipe: Fields, device: torch.device
) -> Texts:
    """Read the texts of a recipe.

    A text of `mixed` that cannot be had is left out with a warning, and the others have its share.

    Args:
        device: where the model writes its own text.

    Raises:
        HasslefreeError: a text that the recipe names cannot be had, or none of `mixed`.
    """
    seqlen = resolve_seqlen(model, recipe.seqlen)
    shares = shares_of(recipe.calibration)
    documents: dict[str, Sequence[Any]] = {}
    left_out: dict[str, str] = {}
    for name in shares:
        try:
            if name == SELF:
                check_writer(model, tokenizer, device)
            else:
                documents[name] = calibration_documents(name, seqlen)
                written(tokenizer, documents[name][0])
        except HasslefreeError as error:
            if recipe.calibration != MIXED:
                raise
            left_out[name] = str(error)
            logger.warning("the calibration has no text of the kind %r: %s", name, error)
    kept = {name: share for name, share in shares.items() if name not in left_out}
    if not kept:
        raise CalibrationError("none of the texts of 'mixed' can be had; give a text file")
    total = sum(kept.values())
    return Texts({name: share / total for name, share in kept.items()}, documents, left_out)


def draw(
    model: PreTrainedModel,
    tokenizer: Any,
    recipe: Fields,
    texts: Texts | None = None,
    phases: Phases | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Draw the calibration segments.

    Args:
        recipe: says how many there are, and how they begin.
        texts: what `read_texts` read; None to read them now.
        phases: in which the segments are counted.
        device: where the model writes its own text, if its weights are on the disk.

    Returns:
        Token ids (samples, seqlen), int64; segments of several texts are mixed.

    Raises:
        CalibrationError: a text is too short.
        ModelError: a token is outside the model's vocabulary.
    """
    seqlen = resolve_seqlen(model, recipe.seqlen)
    device = device or model.device
    texts = texts or read_texts(model, tokenizer, recipe, device)
    with (phases or Phases()).phase(TEXT, recipe.samples, "segments") as phase:

        def encoded(document: Document | Joined) -> Tensor:
            tokens = encode_document(tokenizer, document)
            if len(tokens) >= seqlen:
                phase.advance()
            return tokens

        def segments_of(name: str, count: int) -> Tensor:
            if name == SELF:
                whole = whole_model(model, device)
                return written_segments(whole, tokenizer, count, seqlen, recipe.seed, phase.advance)
            try:
                segments = long_enough(
                    texts, name, tokenizer, encoded, (count, seqlen, recipe.seed)
                )
            except CalibrationError as error:
                if len(texts.shares) == 1:
                    raise
                share = f"{texts.shares[name]:.0%} of the calibration"
                raise error.within(f"text {name}, {share}") from None
            return begin_with(segments, first_tokens(tokenizer, recipe))

        segments = mixed(texts, recipe.samples, recipe.seed, segments_of)
    check_ids(model, segments, tokenizer)
    for name, tokens in texts.tokens(segments).items():
        if not tokens:
            logger.warning(
                "the calibration reads nothing of %s: %.3g %% of %d samples are less than one;"
                " use more samples",
                name,
                100 * texts.shares[name],
                recipe.samples,
            )
    return segments


def long_enough(
    texts: Texts,
    name: str,
    tokenizer: Any,
    encoded: Callable[[Any], Tensor],
    size: tuple[int, int, int],
) -> Tensor:
    """Draw segments of a text; if its documents are too short for them, of its documents joined.

    Documents that were joined replace the others in `texts`: training reads them too.

    Args:
        encoded: the token ids of a document.
        size: samples, seqlen and the seed.

    Returns:
        Token ids (samples, seqlen), int64.

    Raises:
        CalibrationError: the text is too short as a whole.
    """
    documents = texts.documents[name]
    try:
        return draw_segments(documents, encoded, *size, texts.shares[name])
    except CalibrationError:
        if len(documents) < 2:
            raise
    encode = partial(encode_document, tokenizer)
    groups = joined(documents, encode, size[1])
    segments = draw_segments(groups, encode, *size, texts.shares[name])
    texts.documents[name] = groups
    logger.info(
        "the documents of %s are short: about %d of them are joined for a segment",
        name,
        len(groups[0]),
    )
    return segments


def more_text(
    walk: Walk,
    recipe: Fields,
    tokenizer: Any,
    texts: Texts,
    count: int,
    seqlen: int,
    used: Tensor | None = None,
) -> Tensor:
    """Read more of the texts than their calibration segments, in the same shares.

    Args:
        used: all segments so far, (samples, seqlen), if the text is to be held out; None for the
            text to train on.

    Returns:
        Token ids (`count` or fewer, seqlen), int64.

    Raises:
        ModelError: one is outside the model's vocabulary.
    """

    def segments_of(name: str, count: int) -> Tensor:
        if name == SELF:
            model = whole_model(walk.model, walk.weights.device)
            seed = recipe.seed + (1 if used is None else 2)
            return written_segments(model, tokenizer, count, seqlen, seed % 2**63, phase.advance)
        documents = texts.documents[name]
        return another_part(documents, tokenizer, recipe, count, seqlen, used)

    name = REFERENCE_TEXT if used is None else HELD_OUT_TEXT
    with walk.phases.phase(name, count, "segments") as phase:
        segments = mixed(texts, count, recipe.seed, segments_of)
    check_ids(walk.model, segments, tokenizer)
    return segments


def another_part(
    documents: Sequence[Document | Joined],
    tokenizer: Any,
    recipe: Fields,
    count: int,
    seqlen: int,
    used: Tensor | None,
) -> Tensor:
    """Segments of a text that overlap neither each other nor those that were used.

    Arguments and result as for `more_text`.
    """
    encode = partial(encode_document, tokenizer)
    segments = disjoint_segments(documents, encode, count, seqlen, recipe.seed, used)
    return begin_with(segments, first_tokens(tokenizer, recipe))


def mixed(texts: Texts, count: int, seed: int, segments_of: Callable[[str, int], Tensor]) -> Tensor:
    """Segments of all texts in their shares, so ordered that any first ones are of all texts.

    Of n segments of a text one comes at random into each n-th of the order.

    Args:
        segments_of: gives so many segments of the text of a name, or fewer, (n, seqlen).
    """
    counts = counts_of(texts.shares, count)
    parts = [segments_of(name, number) for name, number in counts.items() if number]
    if len(parts) == 1:
        return parts[0]
    generator = torch.Generator().manual_seed(seed)
    places: list[Tensor] = []
    for part in parts:
        jitter = torch.rand(len(part), generator=generator, dtype=torch.float64)
        places.append((torch.arange(len(part)) + jitter) / max(len(part), 1))
    return torch.cat(parts)[torch.cat(places).argsort(stable=True)]


def first_tokens(tokenizer: Any, recipe: Fields) -> list[int]:
    """The token ids that every segment of a text begins with, often none."""
    if not recipe.first_token:
        return []
    first, _ = surrounding_tokens(tokenizer)
    return first
