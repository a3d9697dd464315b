"""Texts by name or local path: their documents, and how their perplexity is measured."""

from collections.abc import Sequence
from itertools import chain, islice

from hasslefree.texts.files import Document, local_documents
from hasslefree.texts.hub import FEW, HUB_TEXTS, Protocol, documents_on_hub
from hasslefree.texts.python import PYTHON, library_documents
from hasslefree.texts.shares import MIXED, shares_of

# The calibration text that the model generates (`pipeline.text`).
SELF = "self"
# The named texts for evaluation.
MEASURED = (*HUB_TEXTS, PYTHON)
# The named texts for calibration.
KNOWN = (SELF, MIXED, *MEASURED)
# Longer texts are cut into pieces of this many characters before they are tokenised: a tokenizer
# takes seconds and 200 MB for a million characters.
PIECE = 1 << 18
# An upper bound of the characters per token. A piece of a document for calibration has at least
# this many for each token of a segment.
WIDEST = 128


def calibration_documents(name: str, seqlen: int = 0) -> Sequence[Document]:
    """Read the documents of a named text or a local file.

    Line-based texts (wikitext2, ptb) are one document. Documents of more than `PIECE` characters
    are cut into pieces, each of which counts as a document, except in texts of the hub with many
    documents. Documents without a word, such as the empty rows of many data sets, are left out.

    Args:
        seqlen: the number of tokens in a segment, for which a piece must be long enough.
    """
    if name in HUB_TEXTS:
        text = HUB_TEXTS[name]
        rows = documents_on_hub(name, text.calibration)
        if not text.lines:
            return rows
        documents: Sequence[Document] = [text.protocol.joiner.join(rows)]
    elif name == PYTHON:
        documents = library_documents(held_out=False)
    else:
        documents = local_documents(name, KNOWN)
    size = max(PIECE, WIDEST * seqlen)
    pieces: list[Document] = []
    for document in documents:
        if not isinstance(document, str):
            pieces.append(document)
            continue
        for start in range(0, len(document), size):
            piece = document[start : start + size]
            if piece.strip():
                pieces.append(piece)
    return pieces


def evaluation_protocol(name: str) -> Protocol:
    """The protocol of a text: the published one for a text of the hub; local files are scored as a
    whole.
    """
    if name in HUB_TEXTS:
        return HUB_TEXTS[name].protocol
    if name == PYTHON:
        return FEW
    return Protocol()


def evaluation_documents(name: str) -> Sequence[Document]:
    """Read the documents of a text to evaluate on."""
    if name == PYTHON:
        return library_documents(held_out=True)
    if name not in HUB_TEXTS:
        return local_documents(name, MEASURED)
    text = HUB_TEXTS[name]
    files = text.evaluation.get("data_files")
    if isinstance(files, list):  # one file per language
        parts = [documents_on_hub(name, text.evaluation | {"data_files": file}) for file in files]
        alternating = chain.from_iterable(zip(*parts, strict=False))
        return list(islice(alternating, text.protocol.documents))
    documents: Sequence[Document] = documents_on_hub(name, text.evaluation)
    return documents[: text.protocol.documents]


def check_text(name: str, known: Sequence[str] = MEASURED) -> None:
    """Raise an error unless a text is a known name, or a local file that is not empty."""
    if name not in known:
        local_documents(name, known)


def check_calibration(calibration: str | Sequence[str]) -> None:
    """Check the texts of a recipe and their shares.

    Raises:
        HasslefreeError: a text is unknown, missing or empty, or the shares do not add up to 100 %.
    """
    for name in shares_of(calibration):
        known = KNOWN if name == calibration else (SELF, *MEASURED)  # `mixed` takes no share
        check_text(name, known)
