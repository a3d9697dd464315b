"""Texts by hub name or local path: their documents, and how their perplexity is measured."""

from collections.abc import Sequence

from hasslefree.texts.files import local_documents
from hasslefree.texts.hub import HUB_TEXTS, Protocol, documents_on_hub

# The calibration text that the model writes itself (`pipeline.self_text`).
SELF = "self"
# A longer text is cut into pieces of this many characters before it is tokenised: a tokenizer takes
# seconds and 200 MB for a million. At 128 a token, a piece of a document for calibration also has
# the tokens of a segment.
PIECE = 1 << 18
WIDEST = 128


def calibration_documents(name: str, seqlen: int = 0) -> Sequence[str]:
    """Read the documents of a hub name or a local file.

    Line-based texts (wikitext2, ptb) are one document. Each piece of a document of more than
    `PIECE` characters counts as a document.

    Args:
        seqlen: tokens in a segment, which a piece must hold.
    """
    if name == "c4":  # it has no such documents
        return documents_on_hub(name, HUB_TEXTS[name].calibration)
    if name in HUB_TEXTS:
        text = HUB_TEXTS[name]
        documents = [text.protocol.joiner.join(documents_on_hub(name, text.calibration))]
    else:
        documents = local_documents(name, tuple(HUB_TEXTS))
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
        return protocol.joiner.join(local_documents(name, tuple(HUB_TEXTS)))
    documents = documents_on_hub(name, HUB_TEXTS[name].evaluation)
    return protocol.joiner.join(documents[: protocol.documents])


def check_text(name: str, known: Sequence[str] = (SELF, *HUB_TEXTS)) -> None:
    """Raise an error unless a text is one of the known names, or a local file that is not empty."""
    if name not in known:
        local_documents(name, known)
