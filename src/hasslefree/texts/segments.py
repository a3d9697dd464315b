"""Draw segments of tokens from the documents of a text."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hasslefree.errors import CalibrationError, option
from hasslefree.texts.files import Document, Joined

# Returns the token ids of a document.
Encode = Callable[[Any], Sequence[int] | Tensor]
# Text counts as repeated if this many consecutive tokens are repeated, or half a window.
RUN = 32
# The base of the hash of consecutive tokens.
MULTIPLIER = 6364136223846793005
# After this many consecutive documents without a segment, the search ends: a tokenizer takes a
# minute for a million short documents.
MOST_SHORT = 1 << 16
# Short documents are joined into groups of JOINED segments on average. About JUDGED documents are
# tokenised to estimate the average length.
JOINED = 2
JUDGED = 256
# The shortest segment that an error proposes: fewer tokens say little about a layer's inputs.
SHORTEST = 32


def in_turn(
    documents: Sequence[Document | Joined], order: Tensor, encode: Encode, seqlen: int
) -> Iterator[Tensor]:
    """Yield the tokens of documents in this order, int64 (tokens).

    Stop after `MOST_SHORT` consecutive documents with fewer than `seqlen` tokens.
    """
    short = 0
    for index in order.tolist():
        tokens = torch.as_tensor(encode(documents[index]), dtype=torch.int64)
        short += 1
        if len(tokens) >= seqlen:
            short = 0
        yield tokens
        if short == MOST_SHORT:
            return


def disjoint_segments(
    documents: Sequence[Document | Joined],
    encode: Encode,
    most: int,
    seqlen: int,
    seed: int,
    used: Tensor | None = None,
) -> Tensor:
    """Draw up to `most` windows of random documents that do not overlap, in random order.

    With the same seed, the documents that `draw_segments` takes first come last.

    Args:
        used: token ids (samples, seqlen) that no window may repeat. If given, the documents in the
            middle of the order of `draw_segments` come first.

    Returns:
        (windows, seqlen) int64; no rows if no document is long enough.
    """
    generator = torch.Generator().manual_seed(seed)
    windows: list[Tensor] = []
    order = torch.randperm(len(documents), generator=generator).flip(0)
    length = min(RUN, max(seqlen // 2, 1))
    nothing = torch.empty(0, seqlen, dtype=torch.int64)
    if used is None:
        used = nothing
    else:
        order = order.roll(len(order) // 2)
    seen = runs(used, length).unique()
    for tokens in in_turn(documents, order, encode, seqlen):
        start = int(torch.randint(len(tokens) % seqlen + 1, (), generator=generator))
        if len(tokens) < seqlen:
            continue
        repeated = torch.isin(runs(tokens, length), seen)
        while start + seqlen <= len(tokens):
            repeats = repeated[start : start + seqlen - length + 1].nonzero()
            if len(repeats):
                start += int(repeats[-1]) + 1
            else:
                windows.append(tokens[start : start + seqlen])
                start += seqlen
        if len(windows) >= most:
            break
    chosen = torch.randperm(len(windows), generator=generator)[:most].tolist()
    if not chosen:
        return nothing
    return torch.stack([windows[i] for i in chosen])


def runs(tokens: Tensor, length: int) -> Tensor:
    """Hash every `length` consecutive tokens: (…, tokens) → (…, tokens − length + 1), int64."""
    hashes = torch.zeros_like(tokens[..., length - 1 :])
    for offset in range(length):
        hashes = hashes * MULTIPLIER + tokens[..., offset : offset + hashes.shape[-1]]
    return hashes


def draw_segments(
    documents: Sequence[Document | Joined],
    encode: Encode,
    samples: int,
    seqlen: int,
    seed: int,
    share: float = 1.0,
) -> Tensor:
    """Draw random windows of random documents that are long enough, as SparseGPT does (arXiv
    2301.00774).

    Documents are visited in random order, one window each. If there are fewer long documents than
    samples, a document gives several windows; the text must have as many tokens as the segments.

    Args:
        share: this text's share of all samples, for the error message.

    Returns:
        (samples, seqlen) int64.
    """
    generator = torch.Generator().manual_seed(seed)

    def window(tokens: Tensor) -> Tensor:
        start = int(torch.randint(len(tokens) - seqlen + 1, (), generator=generator))
        return tokens[start : start + seqlen]

    windows: list[Tensor] = []
    long: list[Tensor] = []
    lengths: list[int] = []
    order = torch.randperm(len(documents), generator=generator)
    for tokens in in_turn(documents, order, encode, seqlen):
        lengths.append(len(tokens))
        if len(tokens) >= seqlen:
            long.append(tokens)
            windows.append(window(tokens))
        if len(windows) == samples:
            break
    _check_length(lengths, samples, seqlen, share)
    while len(windows) < samples:
        index = int(torch.randint(len(long), (), generator=generator))
        windows.append(window(long[index]))
    return torch.stack(windows)


def joined(documents: Sequence[Document], encode: Encode, seqlen: int) -> list[Joined]:
    """Group consecutive documents; a group has the tokens of about `JOINED` segments."""
    few = documents[:: len(documents) // JUDGED + 1]
    tokens = sum(len(encode(document)) for document in few)
    count = math.ceil(JOINED * seqlen * len(few) / max(tokens, 1))
    return [tuple(documents[i : i + count]) for i in range(0, len(documents), count)]


def _check_length(
    lengths: list[int],
    samples: int,
    seqlen: int,
    share: float,
) -> None:
    """Raise a CalibrationError if a text is too short for its segments.

    Args:
        lengths: the number of tokens of each document that was read.
        share: as for `draw_segments`.
    """
    longest = max(lengths, default=0)
    if longest < seqlen:
        remedy = "longer documents"
        if longest >= SHORTEST:
            remedy += f" or {option('seqlen', longest)}"
        raise CalibrationError(
            f"no document of the calibration text has {seqlen} tokens: the longest of"
            f" {len(lengths)} has {longest}; use {remedy}"
        )
    long = [length for length in lengths if length >= seqlen]
    have = sum(long)
    if len(long) < samples and have < samples * seqlen:
        raise CalibrationError(
            f"the calibration text is too short: {samples} samples × {seqlen} = {samples * seqlen}"
            f" tokens are needed, and its documents of at least {seqlen} tokens have {have} in"
            f" total; use {option('samples', int(have // seqlen / share))}, a smaller"
            f" {option('seqlen')} or a longer text"
        )
