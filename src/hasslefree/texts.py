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
    """What of a text the perplexity is taken of; two figures compare only where all of this is the
    same.

    Args:
        joiner: between two documents. documents, windows: how many, from the first on; None for
            all.
        remainder: score the last window too where the tokens do not fill it.
        special_tokens: let the tokenizer put its own (<bos>, say) before the whole text, once.
    """

    joiner: str = "\n\n"
    documents: int | None = None
    windows: int | None = None
    remainder: bool = True
    special_tokens: bool = True


@dataclass(frozen=True)
class HubText:
    """Where the documents of a public text are, for calibration and for evaluation, and how it is
    evaluated.
    """

    calibration: dict[str, Any]
    evaluation: dict[str, Any]
    field: str
    protocol: Protocol


# A longer text is cut into pieces of this many characters before it is tokenised: a tokenizer takes
# seconds and 200 MB for a million. At 128 a token, a piece of a document for calibration also has
# the tokens of a segment.
PIECE, WIDEST = 1 << 18, 128
# Bytes of a text file, which is held in memory.
MOST_BYTES = 10**9
# Text counts as repeated if this many consecutive tokens are, or half a window; and the base of
# their hash.
RUN, MULTIPLIER = 32, 6364136223846793005
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
    """The documents of a hub name or a local file. Line-based texts (wikitext2, ptb) are one
    document.

    Each piece of a document of more than `PIECE` characters is a document. seqlen: of the segments.
    """
    if name == "c4":  # it has no such documents
        return _from_hub(name, HUB_TEXTS[name].calibration)
    text = HUB_TEXTS.get(name)
    documents = (
        [text.protocol.joiner.join(_from_hub(name, text.calibration))] if text else _local(name)
    )
    return [
        piece for document in documents for piece in pieces(document, max(PIECE, WIDEST * seqlen))
    ]


def pieces(text: str, size: int) -> Iterator[str]:
    """A text in pieces of `size` characters; the text itself if it has no more, or none."""
    return (text[start : start + size] for start in range(0, len(text) or 1, size))


def evaluation_protocol(name: str) -> Protocol:
    """How the perplexity of this text is taken: as published for a hub name, all of it for a local
    file.
    """
    return HUB_TEXTS[name].protocol if name in HUB_TEXTS else Protocol()


def evaluation_text(name: str) -> str:
    """One text to compute the perplexity of: the documents of a hub name or a local file,
    joined.
    """
    protocol = evaluation_protocol(name)
    documents = _from_hub(name, HUB_TEXTS[name].evaluation) if name in HUB_TEXTS else _local(name)
    return protocol.joiner.join(documents[: protocol.documents])


def check_text(name: str) -> None:
    """Raise where a calibration text is neither a known name nor a local file that is not empty."""
    if name not in (SELF, *HUB_TEXTS):
        _local(name)


def _from_hub(name: str, split: dict[str, Any]) -> Any:
    import datasets

    try:
        return datasets.load_dataset(**split)[HUB_TEXTS[name].field]
    except Exception as error:  # whatever the network, the hub and the reader of the file may raise
        cause = (
            "no connection"
            if isinstance(error, ConnectionError)
            else f"{type(error).__name__}: {error}"
        )
        raise CalibrationError(
            f"the text {name!r} could not be downloaded from the hub ({cause}); give a local .txt"
            " or .jsonl file, or, to compress, let the model write the text"
            f" ({option('calibration', 'self')})"
        ) from error


def _local(name: str) -> list[str]:
    """A .txt file is one document; a .jsonl file one per line, in the field `text`;
    FILE.jsonl[START:STOP]: some.
    """
    match = _SLICE.fullmatch(name)
    path = Path(match["path"] if match else name)
    if path.suffix not in (".txt", ".jsonl", ".raw"):
        raise UnknownNameError("text", name, [*HUB_TEXTS, "a .txt file", "a .jsonl file"])
    if not path.is_file():
        raise CalibrationError(f"the text file {path} does not exist; check its path")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CalibrationError(
                f"{path} is larger than {MOST_BYTES:,} bytes; use a part of the text"
            )
        with path.open(encoding="utf-8-sig") as lines:
            documents = (
                list(_parse_jsonl(path, lines)) if path.suffix == ".jsonl" else [lines.read()]
            )
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text: {error}; convert it") from None
    if match:
        documents = documents[
            int(match["start"] or 0) : int(match["stop"]) if match["stop"] else None
        ]
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
        except UnicodeEncodeError:
            raise CalibrationError(
                f"{path}, line {number}: the text contains a lone surrogate, which is not valid"
                " Unicode; remove it"
            ) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise CalibrationError(
                f'{path}, line {number}: expected a JSON object with a string field "text"'
            ) from None
        yield document


def in_turn(
    documents: Sequence[str], order: Tensor, encode: Encode, seqlen: int
) -> Iterator[Tensor]:
    """The tokens of documents in this order, up to `MOST_SHORT` in a row that have fewer than
    `seqlen`: int64 each.
    """
    short = 0
    for index in order.tolist():
        tokens = torch.as_tensor(encode(documents[index]), dtype=torch.int64)
        short = short + 1 if len(tokens) < seqlen else 0
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
    order, length = (
        torch.randperm(len(documents), generator=generator).flip(0),
        min(RUN, max(seqlen // 2, 1)),
    )
    seen = runs(
        torch.empty(0, seqlen, dtype=torch.int64) if used is None else used, length
    ).unique()
    for tokens in in_turn(
        documents, order if used is None else order.roll(len(order) // 2), encode, seqlen
    ):
        start = int(torch.randint(len(tokens) % seqlen + 1, (), generator=generator))
        if len(tokens) < seqlen:
            continue
        repeated = torch.isin(runs(tokens, length), seen)
        while start + seqlen <= len(tokens):
            repeats = repeated[start : start + seqlen - length + 1].nonzero()
            if not len(repeats):
                windows.append(tokens[start : start + seqlen])
            start += int(repeats[-1]) + 1 if len(repeats) else seqlen
        if len(windows) >= most:
            break
    chosen = torch.randperm(len(windows), generator=generator)[:most].tolist()
    return (
        torch.stack([windows[i] for i in chosen])
        if chosen
        else torch.empty(0, seqlen, dtype=torch.int64)
    )


def runs(tokens: Tensor, length: int) -> Tensor:
    """A hash of every `length` consecutive tokens: (…, tokens) → (…, tokens − length + 1),
    int64.
    """
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
    longest = tried = 0
    for tokens in in_turn(
        documents, torch.randperm(len(documents), generator=generator), encode, seqlen
    ):
        longest, tried = max(longest, len(tokens)), tried + 1
        if len(tokens) >= seqlen:
            long.append(tokens)
            windows.append(window(tokens))
        if len(windows) == samples:
            break
    if not long:
        remedy = (
            f"longer documents or {option('seqlen', longest)}"
            if longest >= SHORTEST
            else "longer documents"
        )
        raise CalibrationError(
            f"no document of the calibration text has {seqlen} tokens: the longest of {tried} has"
            f" {longest}; use {remedy}"
        )
    have = sum(map(len, long))
    if len(windows) < samples and have < samples * seqlen:
        raise CalibrationError(
            f"the calibration text is too short: {samples} samples × {seqlen} = {samples * seqlen}"
            f" tokens are needed, and its documents of at least {seqlen} tokens have {have} in"
            f" total; use {option('samples', have // seqlen)}, a smaller {option('seqlen')} or a"
            " longer text"
        )
    while len(windows) < samples:
        windows.append(window(long[int(torch.randint(len(long), (), generator=generator))]))
    return torch.stack(windows)
