"""The texts of a run: calibration segments, and more of the same text for training and checks.

One of the texts may be written by the dense model itself, so that nothing must be downloaded. Its
tokens are sampled from the model's predictions at temperature 1, without truncation (arXiv
2410.17711), after the token that begins texts. A chat model starts from the part of its template
before a question, and writes both the question and the answer (arXiv 2406.08464).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hasslefree.core.products import fast_products
from hasslefree.errors import CalibrationError, HasslefreeError, MemoryShortError, option
from hasslefree.models.calls import replaced
from hasslefree.models.load import check_ids, load_model, resolve_seqlen
from hasslefree.models.tokenizer import (
    begin_with,
    encode,
    encode_document,
    surrounding_tokens,
    written,
)
from hasslefree.models.unloaded import is_on_disk
from hasslefree.planning.machine import free_memory
from hasslefree.progress import HELD_OUT_TEXT, REFERENCE_TEXT, TEXT, Phase, Phases
from hasslefree.recipe.fields import Fields
from hasslefree.texts.files import Document, Joined
from hasslefree.texts.segments import disjoint_segments, draw_segments, joined
from hasslefree.texts.shares import MIXED, counts_of, shares_of
from hasslefree.texts.sources import SELF, calibration_documents
from hasslefree.units import size

logger = logging.getLogger(__name__)

# Number of segments that the model writes at a time.
BATCH = 32
# Smallest share of written tokens that must differ from the most frequent one.
VARIED = 0.25


@dataclass(frozen=True)
class Texts:
    """The texts of a run, as a model reads them.

    Args:
        recipe: the number of calibration segments, their length and their first token.
        device: where the model writes its own text, if its weights are on the disk.
        shares: the share of each text in the segments, by name; the sum is 1.
        documents: of each text, by name, except the one that the model writes.
        left_out: the texts of `mixed` that could not be read, with the reasons.
    """

    model: PreTrainedModel
    tokenizer: Any
    recipe: Fields
    device: torch.device
    shares: dict[str, float]
    documents: dict[str, Sequence[Any]]
    left_out: dict[str, str]

    @property
    def seqlen(self) -> int:
        """The number of tokens in a segment."""
        return resolve_seqlen(self.model, self.recipe.seqlen)

    @property
    def first_tokens(self) -> list[int]:
        """The token ids at the beginning of every segment; often none."""
        if not self.recipe.first_token:
            return []
        first, _ = surrounding_tokens(self.tokenizer)
        return first

    def tokens(self, segments: Tensor) -> dict[str, int]:
        """The number of tokens of each text in calibration segments (samples, seqlen), by name."""
        samples, seqlen = segments.shape
        return {name: count * seqlen for name, count in counts_of(self.shares, samples).items()}

    def draw(self, phases: Phases | None = None) -> Tensor:
        """Draw the calibration segments.

        Args:
            phases: counts the segments.

        Returns:
            Token ids (samples, seqlen), int64; segments of several texts are mixed.

        Raises:
            CalibrationError: a text is too short.
            ModelError: a token is outside the model's vocabulary.
        """
        recipe = self.recipe
        with (phases or Phases()).phase(TEXT, recipe.samples, "segments") as phase:

            def encoded(document: Document | Joined) -> Tensor:
                tokens = encode_document(self.tokenizer, document)
                if len(tokens) >= self.seqlen:
                    phase.advance()
                return tokens

            def segments_of(name: str, count: int) -> Tensor:
                if name == SELF:
                    return self.own_text(count, recipe.seed, phase)
                try:
                    segments = self.long_enough(name, count, encoded)
                except CalibrationError as error:
                    if len(self.shares) == 1:
                        raise
                    share = f"{self.shares[name]:.0%} of the calibration"
                    raise error.within(f"text {name}, {share}") from None
                return begin_with(segments, self.first_tokens)

            segments = self.mixed(recipe.samples, segments_of)
        for name, tokens in self.tokens(segments).items():
            if not tokens:
                logger.warning(
                    "the calibration reads nothing of %s: %.3g %% of %d samples are less than one;"
                    " use more samples",
                    name,
                    100 * self.shares[name],
                    recipe.samples,
                )
        return segments

    def long_enough(self, name: str, count: int, encoded: Callable[[Any], Tensor]) -> Tensor:
        """Draw segments of a text. If its documents are too short, join them first.

        The joined documents replace the original ones, so that training reads them too.

        Args:
            encoded: gives the token ids of a document.

        Returns:
            Token ids (count, seqlen), int64.

        Raises:
            CalibrationError: the text is too short as a whole.
        """
        documents = self.documents[name]
        amount = (count, self.seqlen, self.recipe.seed, self.shares[name])
        try:
            return draw_segments(documents, encoded, *amount)
        except CalibrationError:
            if len(documents) < 2:
                raise
        tokens_of = partial(encode_document, self.tokenizer)
        groups = joined(documents, tokens_of, self.seqlen)
        segments = draw_segments(groups, tokens_of, *amount)
        self.documents[name] = groups
        logger.info(
            "the documents of %s are short: about %d of them are joined for a segment",
            name,
            len(groups[0]),
        )
        return segments

    def more(self, phases: Phases, count: int, used: Tensor | None = None) -> Tensor:
        """Read more of the texts beyond the calibration segments, in the same shares.

        Args:
            phases: counts the segments.
            used: all segments read so far, (samples, seqlen), to read held-out text; None to read
                training text.

        Returns:
            Token ids (`count` or fewer, seqlen), int64.

        Raises:
            ModelError: a token is outside the model's vocabulary.
        """

        def segments_of(name: str, count: int) -> Tensor:
            if name == SELF:
                seed = self.recipe.seed + (1 if used is None else 2)
                return self.own_text(count, seed % 2**63, phase)
            return self.another_part(self.documents[name], count, used)

        name = REFERENCE_TEXT if used is None else HELD_OUT_TEXT
        with phases.phase(name, count, "segments") as phase:
            return self.mixed(count, segments_of)

    def another_part(
        self, documents: Sequence[Document | Joined], count: int, used: Tensor | None
    ) -> Tensor:
        """Read segments that overlap neither each other nor the used ones.

        Arguments and result are those of `more`.
        """
        tokens_of = partial(encode_document, self.tokenizer)
        segments = disjoint_segments(
            documents, tokens_of, count, self.seqlen, self.recipe.seed, used
        )
        return begin_with(segments, self.first_tokens)

    def own_text(self, count: int, seed: int, phase: Phase) -> Tensor:
        """Let the model write segments, (count, seqlen) int64. phase: counts them."""
        model = whole_model(self.model, self.device)
        return written_segments(model, self.tokenizer, count, self.seqlen, seed, phase.advance)

    def mixed(self, count: int, segments_of: Callable[[str, int], Tensor]) -> Tensor:
        """Mix segments of all texts in their shares, so that any first ones are from all texts.

        Of a text with n segments, each of n equal parts of the result gets one, at a random place.

        Args:
            segments_of: gives n segments of a text or fewer, (n, seqlen), for its name and n.

        Raises:
            ModelError: a token is outside the model's vocabulary.
        """
        counts = counts_of(self.shares, count)
        parts = [segments_of(name, number) for name, number in counts.items() if number]
        generator = torch.Generator().manual_seed(self.recipe.seed)
        places: list[Tensor] = []
        for part in parts:
            jitter = torch.rand(len(part), generator=generator, dtype=torch.float64)
            places.append((torch.arange(len(part)) + jitter) / max(len(part), 1))
        segments = torch.cat(parts)[torch.cat(places).argsort(stable=True)]
        check_ids(self.model, segments, self.tokenizer)
        return segments


def read_texts(
    model: PreTrainedModel, tokenizer: Any, recipe: Fields, device: torch.device
) -> Texts:
    """Read the texts of a recipe.

    A text of `mixed` that cannot be read is left out with a warning, and the others share its part.

    Args:
        device: where the model writes its own text.

    Raises:
        HasslefreeError: a text that the recipe names cannot be read, or none of `mixed` can.
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
        raise CalibrationError("none of the texts of 'mixed' can be read; give a text file")
    total = sum(kept.values())
    kept = {name: share / total for name, share in kept.items()}
    return Texts(model, tokenizer, recipe, device, kept, documents, left_out)


def whole_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return the model, or, if its weights are on the disk, a copy with all weights in memory."""
    if not is_on_disk(model):
        return model
    check_memory(model, device)
    own_code = type(model).__module__.startswith("transformers_modules")
    return load_model(
        model.config._name_or_path, str(model.dtype).removeprefix("torch."), str(device), own_code
    )


def check_writer(model: PreTrainedModel, tokenizer: Any, device: torch.device) -> None:
    """Check that a model can write its own text; errors are those of `beginning` and
    `check_memory`.
    """
    check_ids(model, torch.tensor(beginning(tokenizer)), tokenizer)
    if is_on_disk(model):
        check_memory(model, device)


def check_memory(model: PreTrainedModel, device: torch.device) -> None:
    """Raise a MemoryShortError if a copy of a model does not fit in memory."""
    need = sum(parameter.nbytes for parameter in model.parameters())
    free = free_memory(device)
    if need > free:
        raise MemoryShortError(
            "to write its own calibration text, the model must be in memory as a whole:"
            f" {size(need)} of {size(free)} available on {device}; give a text"
            f" ({option('calibration', 'FILE')})"
        )


def written_segments(
    model: PreTrainedModel,
    tokenizer: Any,
    count: int,
    seqlen: int,
    seed: int,
    advance: Callable[[int], None] = lambda written: None,
) -> Tensor:
    """Let a model in memory write segments.

    Args:
        advance: called after each batch, with the number of its segments.

    Returns:
        Token ids (count, seqlen), int64.

    Raises:
        CalibrationError: the tokenizer has no token that begins a text, or the model repeats one
            token.
    """
    start = beginning(tokenizer)[: seqlen - 1]
    segments: list[Tensor] = []
    embeddings: Any = model.get_input_embeddings()
    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=seqlen - len(start),
        # No token ends a segment: after the end of a text, another one begins.
        eos_token_id=embeddings.num_embeddings,
        pad_token_id=start[0],
    )
    # Plain samples: without this, generate() would take penalties, suppressed tokens and beams from
    # the model's generation_config.json.
    plain = replaced(model, "generation_config", GenerationConfig())
    with plain, torch.random.fork_rng(), torch.no_grad(), fast_products(model):
        torch.manual_seed(seed)
        for first in range(0, count, BATCH):
            prompts = torch.tensor([start] * min(BATCH, count - first), device=model.device)
            generate: Any = model.generate
            text = generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=settings
            )
            segments.append(text.cpu())
            check_variety(text[:, len(start) :], tokenizer)
            advance(len(text))
    return torch.cat(segments)


def beginning(tokenizer: Any) -> list[int]:
    """The token ids that a written text begins with: those that the tokenizer adds come first."""
    first, _ = surrounding_tokens(tokenizer)
    if tokenizer.chat_template is not None:
        mark = "QUESTION"
        text = written(tokenizer, [{"role": "user", "content": mark}]).partition(mark)[0]
        ids: list[int] = encode(tokenizer, text, special_tokens=False).tolist()
        if ids[: len(first)] != first:  # not every template writes them
            ids = first + ids
        if ids:
            return ids
    if first:
        return first
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return [token]
    raise CalibrationError(
        "the tokenizer has no token that begins or ends a text, so the model cannot write its own"
        f" calibration text; give one ({option('calibration', 'FILE')})"
    )


def check_variety(tokens: Tensor, tokenizer: Any) -> None:
    """Raise a CalibrationError if nearly all tokens of a text are the same."""
    most = tokens.flatten().mode().values
    share = float((tokens == most).float().mean())
    if share > 1 - VARIED:
        raise CalibrationError(
            f"the model writes little but {tokenizer.decode([int(most)])!r} ({share:.0%} of its"
            " tokens), which says nothing about its layers; give a text"
            f" ({option('calibration', 'FILE')})"
        )
