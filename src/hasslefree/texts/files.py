"""Texts in local files, and in data sets in local folders."""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hasslefree.errors import CalibrationError, UnknownNameError

# A text, or the messages of a conversation, each with a role and a content.
Document = str | list[dict[str, str]]
# Documents that are joined, because they are short.
Joined = tuple[Document, ...]
_SLICE = re.compile(r"(?P<path>.+)\[(?P<start>\d{0,18}):(?P<stop>\d{0,18})\]")
TEXTS = (".txt", ".raw")
# Files of rows that are read here, and those that `datasets` reads, with its name of the format.
LINES = (".jsonl", ".json")
TABLES = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
# The fields of a question and of its answer, in data sets for fine-tuning.
QUESTIONS = ("instruction", "prompt", "question")
ANSWERS = ("output", "completion", "response", "answer")
# Names of roles in conversations of `from` and `value`.
ROLES = {"human": "user", "gpt": "assistant"}


def local_documents(name: str, known: Sequence[str]) -> list[Document]:
    """Read the documents of a local file or data set.

    A .txt file is one document. Other files have a document per row: see `document_of`. They are
    .jsonl or .json (a list, or an object per line), both also as .gz, .parquet, .csv, or a folder
    of `datasets`, whose train split is taken. NAME[START:STOP] names some of the rows.
    """
    match = _SLICE.fullmatch(name)
    path = Path(match["path"] if match else name)
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    kind = plain.suffix.lower()
    is_table = path.is_dir() or kind in TABLES
    if not is_table and kind not in TEXTS + LINES:
        formats = ", ".join(sorted([*TEXTS, *LINES, *TABLES]))
        raise UnknownNameError(
            "text", name, [*known, f"a file ({formats})", "a folder of datasets"]
        )
    if not path.exists():
        raise CalibrationError(f"the text file {path} does not exist; check its path")
    if is_table:
        documents = list(row_documents(path, table_rows(path, kind)))
    else:
        opened = gzip.open if plain != path else open
        try:
            with opened(path, "rt", encoding="utf-8-sig") as file:
                text: str = file.read()
        except UnicodeDecodeError as error:
            raise CalibrationError(f"{path} is not UTF-8 text: {error}; convert it") from None
        except (OSError, EOFError) as error:
            raise CalibrationError(f"{path} cannot be read: {error}; copy it again") from None
        documents = list(json_documents(path, text)) if kind in LINES else [text]
    if match:
        start = int(match["start"] or 0)
        stop = int(match["stop"] or len(documents))
        documents = documents[start:stop]
    if all(isinstance(document, str) and not document.strip() for document in documents):
        raise CalibrationError(f"the text file {name} is empty; give another")
    return documents


def table_rows(path: Path, kind: str) -> Iterable[Any]:
    """The rows of a file in a format of `TABLES`, or of a data set in a folder."""
    import datasets

    loaded: Any
    try:
        if not path.is_dir():
            return datasets.load_dataset(TABLES[kind], data_files=str(path), split="train")
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(str(path))
            return loaded["train"] if isinstance(loaded, dict) else loaded
        return datasets.load_dataset(str(path), split="train")
    except Exception as error:  # whatever the reader of the format may raise
        cause = str(error).strip().split("\n")[0]
        raise CalibrationError(f"{path} cannot be read by datasets: {cause}; convert it") from error


def row_documents(path: Path, rows: Iterable[Any]) -> Iterator[Document]:
    for number, row in enumerate(rows, 1):
        yield document_of(row, f"{path}, row {number}")


def json_documents(path: Path, text: str) -> Iterator[Document]:
    """The documents of the rows of a JSON list, or of those in the lines of a text."""
    if text.lstrip().startswith("["):
        yield from row_documents(path, parsed(text, f"{path}, line 1"))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield document_of(parsed(line, where), where)


def parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise no_document(where) from None


def no_document(where: str) -> CalibrationError:
    return CalibrationError(
        f'{where}: expected a JSON object with a string field "text", a list "messages" of objects'
        ' with "role" and "content", or "instruction" and "output", without lone surrogates'
    )


def document_of(row: Any, where: str) -> Document:
    """The document of a row: its text, or its conversation.

    A row has the field `text`; `messages` with `role` and `content`, or `conversations` with `from`
    and `value`; or one of `QUESTIONS` (and `input`, which belongs to it) with one of `ANSWERS`.

    Args:
        where: the row, for the error.

    Raises:
        CalibrationError: it has none of these, or they are no strings that can be encoded.
    """
    try:
        if "text" in row:
            row["text"].encode()
            document: Document = row["text"]
            return document
        for name in ("messages", "conversations"):
            if name in row:
                return conversation(row[name])
        question = row[next(name for name in QUESTIONS if name in row)]
        answer = row[next(name for name in ANSWERS if name in row)]
        if isinstance(question, list):  # both are messages
            return conversation([*question, *answer])
        if row.get("input"):
            question += f"\n\n{row['input']}"
        return conversation(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        raise no_document(where) from None


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The roles and contents of messages, which must be strings that can be encoded."""
    kept: list[dict[str, str]] = []
    for message in messages:
        content = message["content"] if "content" in message else message["value"]
        role = message["role"] if "role" in message else message["from"]
        content.encode()
        role.encode()
        kept.append({"role": ROLES.get(role, role), "content": content})
    if not kept:
        raise ValueError("no messages")
    return kept
