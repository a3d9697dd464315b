"""Texts by hub name or local path, and calibration segments drawn from them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasslefree.errors import CalibrationError, UnknownNameError, option

# The token ids of a text.
Encode = Callable[[str], Sequence[int] | Tensor]
# The calibration text that the model writes itself (`run.self_text`).
SELF = "self"
_SLICE = re.compile(r"(?P<path>.+\.jsonl)\[(?P<start>\d{0,18}):(?P<stop>\d{0,18})\]")


@dataclass(frozen=True)
class Protocol:
    """The part of a text that is scored; two perplexities compare only if all of this is the same.

    Args:
        joiner: the text between two documents.
        documents: the number of documents, from the first on; None for all.
        windows: the number of windows, from the first on; None for all.
        remainder: also score the last window if the tokens do not fill it.
        special_tokens: let the tokenizer put its own (<bos>, say) before the whole text, once.
    """

    joiner: str = "\n\n"
    documents: int | None = None
    windows: int | None = None
    remainder: bool = True
    special_tokens: bool = True


@dataclass(frozen=True)
class HubText:
    """A public text on the hub.

    Args:
        calibration, evaluation: the arguments of `datasets.load_dataset` for each use.
        field: the field of a row that holds the text.
        protocol: how the perplexity is measured.
    """

    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    field: str
    protocol: Protocol


# A longer text is cut into pieces of this many characters before it is tokenised: a tokenizer takes
# seconds and 200 MB for a million. At 128 a token, a piece of a document for calibration also has
# the tokens of a segment.
PIECE = 1 << 18
WIDEST = 128
# Text counts as repeated if this many consecutive tokens are, or half a window; and the base of
# their hash.
RUN = 32
MULTIPLIER = 6364136223846793005
# Documents in a row without a segment, after which no more are looked at: a tokenizer takes a
# minute for a million.
MOST_SHORT = 1 << 16
# The shortest segment that an error proposes: fewer tokens say little about a layer's inputs.
SHORTEST = 32
_PTB = "hf://datasets/ptb-text-only/ptb_text_only@refs%2Fconvert%2Fparquet/penn_treebank/{}/0000.parquet"

# The texts and protocols of SparseGPT's experiments (arXiv 2301.00774), which the paper's public
# code shares: whole windows alone; of C4 the first shard for calibration, and 256 windows of its
# first 1,100 validation documents.
HUB_TEXTS = {
    "c4": HubText(
        {
            "path": "allenai/c4",
            "data_files": "en/c4-train.00000-of-01024.json.gz",
            "split": "train",
        },
        {
            "path": "allenai/c4",
            "data_files": "en/c4-validation.00000-of-00008.json.gz",
            "split": "train",
        },
        field="text",
        protocol=Protocol(joiner=" ", documents=1100, windows=256, remainder=False),
    ),
    "wikitext2": HubText(
        {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "train"},
        {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1", "split": "test"},
        field="text",
        protocol=Protocol(remainder=False),
    ),
    "ptb": HubText(
        {"path": "parquet", "data_files": _PTB.format("train"), "split": "train"},
        {"path": "parquet", "data_files": _PTB.format("test"), "split": "train"},
        field="sentence",
        protocol=Protocol(joiner=" ", remainder=False),
    ),
}


def calibration_documents(name: str, seqlen: int = 0) -> Sequence[str]:
    """Read the documents of a hub name or a local file.

    Line-based texts (wikitext2, ptb) are one document. Each piece of a document of more than
    `PIECE` characters counts as a document.

    Args:
        seqlen: tokens in a segment, which a piece must hold.
    """
    if name == "c4":  # it has no such documents
        return _from_hub(name, HUB_TEXTS[name].calibration)
    if name in HUB_TEXTS:
        text = HUB_TEXTS[name]
        documents = [text.protocol.joiner.join(_from_hub(name, text.calibration))]
    else:
        documents = _local(name)
    size = max(PIECE, WIDEST * seqlen)
    pieces: list[str] = []
    for document in documents:
        for start in range(0, len(document) or 1, size):
            pieces.append(document[start : start + size])
    return pieces


def evaluation_protocol(name: str) -> Protocol:
    """The protocol of a text: the published one for a hub name, all of a local file."""
    if name in HUB_TEXTS:
        return HUB_TEXTS[name].protocol
    return Protocol()


def evaluation_text(name: str) -> str:
    """Read the text to evaluate on: the joined documents of a hub name or a local file."""
    protocol = evaluation_protocol(name)
    if name not in HUB_TEXTS:
        return protocol.joiner.join(_local(name))
    documents = _from_hub(name, HUB_TEXTS[name].evaluation)
    return protocol.joiner.join(documents[: protocol.documents])


def check_text(name: str, known: Sequence[str] = (SELF, *HUB_TEXTS)) -> None:
    """Raise an error unless a text is one of the known names, or a local file that is not empty."""
    if name not in known:
        _local(name, known)


def _from_hub(name: str, split: dict[str, Any]) -> Any:
    import datasets

    try:
        return datasets.load_dataset(**split)[HUB_TEXTS[name].field]
    except Exception as error:  # whatever the network, the hub and the reader of the file may raise
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, ConnectionError):
            cause = "no connection"
        raise CalibrationError(
            f"the text {name!r} could not be downloaded from the hub ({cause}); give a local .txt"
            " or .jsonl file, or, to compress, let the model write the text"
            f" ({option('calibration', 'self')})"
        ) from error


def _local(name: str, known: Sequence[str] = tuple(HUB_TEXTS)) -> list[str]:
    """Read the documents of a local file.

    A .txt file is one document. A .jsonl file holds one per line, in the field `text`;
    FILE.jsonl[START:STOP] names some of its lines.
    """
    match = _SLICE.fullmatch(name)
    path = Path(match["path"] if match else name)
    if path.suffix not in (".txt", ".jsonl", ".raw"):
        raise UnknownNameError("text", name, [*known, "a .txt file", "a .jsonl file"])
    if not path.is_file():
        raise CalibrationError(f"the text file {path} does not exist; check its path")
    try:
        with path.open(encoding="utf-8-sig") as lines:
            if path.suffix == ".jsonl":
                documents = list(_parse_jsonl(path, lines))
            else:
                documents = [lines.read()]
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text: {error}; convert it") from None
    if match:
        start = int(match["start"] or 0)
        stop = int(match["stop"] or len(documents))
        documents = documents[start:stop]
    if not any(document.strip() for document in documents):
        raise CalibrationError(f"the text file {name} is empty; give another")
    return documents


def _parse_jsonl(path: Path, lines: Iterable[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)["text"]
            document.encode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise CalibrationError(
                f'{path}, line {number}: expected a JSON object with a string field "text",'
                " without lone surrogates"
            ) from None
        yield document


def in_turn(
    documents: Sequence[str], order: Tensor, encode: Encode, seqlen: int
) -> Iterator[Tensor]:
    """Yield the tokens of documents in this order, int64 (tokens).

    It ends after `MOST_SHORT` documents in a row that have fewer tokens than `seqlen`.
    """
    short = 0
    for index in order.tolist():
        tokens = torch.as_tensor(encode(documents[index]), dtype=torch.int64)
        if len(tokens) < seqlen:
            short += 1
        else:
            short = 0
        yield tokens
        if short == MOST_SHORT:
            return


def disjoint_segments(
    documents: Sequence[str],
    encode: Encode,
    most: int,
    seqlen: int,
    seed: int,
    used: Tensor | None = None,
) -> Tensor:
    """Windows of random documents that do not overlap, in random order: `most`, or all that there
    are.

    With the same seed, the documents that `draw_segments` takes first come last.

    Args:
        used: token ids (samples, seqlen) that no window may repeat. The first documents are then
            those halfway between the documents that `draw_segments` takes first and last.

    Returns:
        (windows, seqlen) int64; no rows where no document is long enough.
    """
    generator = torch.Generator().manual_seed(seed)
    windows: list[Tensor] = []
    order = torch.randperm(len(documents), generator=generator).flip(0)
    length = min(RUN, max(seqlen // 2, 1))
    nothing = torch.empty(0, seqlen, dtype=torch.int64)
    if used is None:
        seen = runs(nothing, length)
    else:
        seen = runs(used, length).unique()
        order = order.roll(len(order) // 2)
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
    documents: Sequence[str], encode: Encode, samples: int, seqlen: int, seed: int
) -> Tensor:
    """Random windows of random documents that are long enough, as SparseGPT draws them (arXiv
    2301.00774).

    Documents are visited in random order, one window each; a text with fewer long documents than
    samples gives several windows a document, but never more tokens than it has.

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
    _check_length(lengths, samples, seqlen)
    while len(windows) < samples:
        windows.append(window(long[int(torch.randint(len(long), (), generator=generator))]))
    return torch.stack(windows)


def _check_length(
    lengths: list[int],
    samples: int,
    seqlen: int,
) -> None:
    """Raise a CalibrationError if a text is too short for its segments.

    Args:
        lengths: the tokens of each document that was read.
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
            f" total; use {option('samples', have // seqlen)}, a smaller {option('seqlen')} or a"
            " longer text"
        )
