"""Texts in local files."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hasslefree.errors import CalibrationError, UnknownNameError

# A text, or the messages of a conversation, each with a role and a content.
Document = str | list[dict[str, str]]
_SLICE = re.compile(r"(?P<path>.+\.jsonl)\[(?P<start>\d{0,18}):(?P<stop>\d{0,18})\]")


def local_documents(name: str, known: Sequence[str]) -> list[Document]:
    """Read the documents of a local file.

    A .txt file is one document. A .jsonl file holds one per line, in the field `text`, or a
    conversation in the field `messages`; FILE.jsonl[START:STOP] names some of its lines.
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
                documents: list[Document] = list(_parse_jsonl(path, lines))
            else:
                documents = [lines.read()]
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text: {error}; convert it") from None
    if match:
        start = int(match["start"] or 0)
        stop = int(match["stop"] or len(documents))
        documents = documents[start:stop]
    if all(isinstance(document, str) and not document.strip() for document in documents):
        raise CalibrationError(f"the text file {name} is empty; give another")
    return documents


def _parse_jsonl(path: Path, lines: Iterable[str]) -> Iterator[Document]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if "messages" in row and "text" not in row:
                document: Document = conversation(row["messages"])
            else:
                document = row["text"]
                row["text"].encode()
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise CalibrationError(
                f'{path}, line {number}: expected a JSON object with a string field "text", or'
                ' a list "messages" of objects with "role" and "content", without lone surrogates'
            ) from None
        yield document


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The roles and contents of messages, which must be strings that can be encoded."""
    kept: list[dict[str, str]] = []
    for message in messages:
        message["content"].encode()
        message["role"].encode()
        kept.append({"role": message["role"], "content": message["content"]})
    if not kept:
        raise ValueError("no messages")
    return kept
