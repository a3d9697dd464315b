"""Read texts from local files, and from data sets in local folders."""

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hasslefree.errors import CalibrationError, UnknownNameError

# The messages of a conversation, each with a role and a content.
Conversation = list[dict[str, str]]
Document = str | Conversation
# Short documents that are read as one.
Joined = tuple[Document, ...]
_SLICE = re.compile(r"(?P<path>.+)\[(?P<rows>[^\[\]/]*)\]")
_ROWS = re.compile(r"(\d{0,18}):(\d{0,18})")
TEXTS = (".txt", ".raw")
# Files of rows that are read here.
LINES = (".jsonl", ".json")
CSV = ".csv"
# Files of rows that `datasets` reads, with its name for the format.
TABLES = {".parquet": "parquet", ".arrow": "arrow"}
FORMATS = (*TEXTS, *LINES, CSV, *TABLES)
# The maximum length of a cell in characters: the default of csv is too short for documents.
LONGEST_CELL = 1 << 30
# The split. The mode keeps datasets from reusing the table of another file with the same name and
# modification time.
SPLIT: dict[str, Any] = {"split": "train", "download_mode": "reuse_cache_if_exists"}
# Names of files that are part of a data set or describe one.
_OF_DATA_SET = re.compile(
    r"(train|test|valid|validation|dev|eval)([-._ 0-9].*)?|dataset_.*|state", re.IGNORECASE
)
# The fields of a question and of its answer, in data sets for fine-tuning.
QUESTIONS = ("instruction", "prompt", "question")
ANSWERS = ("output", "completion", "response", "answer")
# Follows a question.
INPUT = "input"
CONVERSATIONS = ("messages", "conversations")
# All fields that hold a document or a part of it.
FIELDS = {"text", *CONVERSATIONS, *QUESTIONS, *ANSWERS}
# The names of roles in `conversations`, with those in `messages`.
ROLES = {"human": "user", "gpt": "assistant"}


def local_documents(name: str, known: Sequence[str]) -> list[Document]:
    """Read the documents of a local file or data set.

    A .txt file is one document. The other formats have one document per row (`document_of`): .jsonl
    and .json (a list, or one object per line), both also with .gz, .parquet, .arrow and .csv. A
    folder holds files of one of these formats, or a data set of `datasets`, of which the train
    split is read. NAME[START:STOP] selects rows.
    """
    path = Path(name)
    match = None if path.exists() else _SLICE.fullmatch(name)
    chosen = slice(None)
    if match:
        path = Path(match["path"])
        chosen = row_slice(match["rows"], path)
    kind = kind_of(path)
    is_folder = bool(name) and path.is_dir()
    if not is_folder and kind not in FORMATS:
        formats = ", ".join(sorted(FORMATS))
        raise UnknownNameError(
            "text", name, [*known, f"a file ({formats})", "a folder of datasets"]
        )
    if not path.exists():
        raise CalibrationError(f"the text file {path} does not exist; check its path")
    if match and kind in TEXTS and not is_folder:
        raise CalibrationError(f"{path} is one document, without rows; leave out [{match['rows']}]")
    rows = folder_documents(path) if is_folder else file_documents(path)
    documents = list(islice(rows, chosen.start, chosen.stop))
    if all(isinstance(document, str) and not document.strip() for document in documents):
        raise CalibrationError(f"the text {name} is empty; give another file, or other rows of it")
    return documents


def kind_of(path: Path) -> str:
    """The suffix of a file that gives its format, without .gz."""
    if path.suffix.lower() == ".gz":
        path = path.with_suffix("")
    return path.suffix.lower()


def file_documents(path: Path) -> Iterator[Document]:
    """The documents of a file."""
    kind = kind_of(path)
    if kind in TABLES:
        return row_documents(path, table_rows(path, kind))
    if kind == CSV:
        return row_documents(path, csv_rows(path))
    text = read_text(path)
    if kind in LINES:
        return json_documents(path, text)
    return iter([text])


def folder_documents(path: Path) -> Iterator[Document]:
    """The documents of a folder of files, in the order of their names, or of a data set.

    A plain folder is not given to `datasets`, which takes a name such as training.txt for that of a
    split and ignores the other files.
    """
    files = [file for file in sorted(path.iterdir()) if not file.name.startswith(".")]
    kinds = {kind_of(file) for file in files}
    is_flat = all(file.is_file() for file in files)
    is_data_set = any(_OF_DATA_SET.fullmatch(file.stem) for file in files)
    is_of_one_kind = len(kinds) == 1 and kinds <= set(FORMATS)
    if is_flat and is_of_one_kind and not is_data_set:
        return chain.from_iterable(map(file_documents, files))
    return row_documents(path, folder_rows(path))


def row_slice(rows: str, path: Path) -> slice:
    """Parse START:STOP. path: the file, for the error message."""
    match = _ROWS.fullmatch(rows)
    if match is None:
        raise CalibrationError(
            f"[{rows}] does not name rows of {path}; give row numbers from 0, such as [:700] or"
            " [700:900]"
        )
    start, stop = match.groups()
    return slice(int(start or 0), int(stop) if stop else None)


def read_text(path: Path) -> str:
    """Read a UTF-8 text file, which may be compressed with gzip."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{path} is not UTF-8 text: {error}; convert it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise CalibrationError(f"{path} cannot be read: {error}; copy it again") from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of `datasets` about a file or a folder into a CalibrationError."""
    try:
        yield
    except Exception as error:  # whatever the reader of the format may raise
        cause = str(error).strip().split("\n")[0]
        raise CalibrationError(f"{path} cannot be read by datasets: {cause}; convert it") from error


def table_rows(path: Path, kind: str) -> Iterable[Any]:
    """The rows of a file in a format of `TABLES`."""
    import datasets

    files = glob.escape(str(path.resolve()))
    with reading(path):
        loaded = datasets.load_dataset(TABLES[kind], data_files=files, **SPLIT)
    return with_text(path, loaded)


def csv_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows below the header. All cells are strings, even if empty, a number or "null"."""
    csv.field_size_limit(LONGEST_CELL)
    try:
        yield from csv.DictReader(io.StringIO(read_text(path)))
    except csv.Error as error:
        raise CalibrationError(f"{path} is not a table in CSV: {error}; convert it") from None


def folder_rows(path: Path) -> Iterable[Any]:
    """The rows of the train split of a data set in a folder."""
    import datasets

    folder = str(path.resolve())
    loaded: Any
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        with reading(path):
            loaded = datasets.load_from_disk(folder)
        if not isinstance(loaded, dict):
            return with_text(path, loaded)
        if "train" not in loaded:
            splits = " or ".join(str(path / name) for name in loaded)
            raise CalibrationError(f"{path} has no split named train; give {splits}")
        return with_text(path, loaded["train"])
    if glob.has_magic(folder):
        raise CalibrationError(
            f"the path {folder} contains *, ? or [, which datasets takes for a pattern; rename it"
        )
    with reading(path):
        loaded = datasets.load_dataset(folder, **SPLIT)
        if loaded.info.builder_name == "text":  # of each file, not of each line
            loaded = datasets.load_dataset(folder, sample_by="document", **SPLIT)
    return with_text(path, loaded)


def with_text(path: Path, rows: Any) -> Any:
    """The rows of a data set without columns that hold no document: `datasets` would decode images
    and sound.

    Raises:
        CalibrationError: no column holds a document.
    """
    if len(rows) and FIELDS.isdisjoint(rows.column_names):
        raise no_document(f"{path}, row 1")
    kept = [name for name in rows.column_names if name in FIELDS or name == INPUT]
    return rows.select_columns(kept)


def row_documents(path: Path, rows: Iterable[Any]) -> Iterator[Document]:
    for number, row in enumerate(rows, 1):
        yield document_of(row, f"{path}, row {number}")


def json_documents(path: Path, text: str) -> Iterator[Document]:
    """The documents in a JSON list, or in a text with one JSON object per line."""
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
        f'{where}: expected an object with a string "text", a list "messages" of objects with'
        ' strings "role" and "content", or strings "instruction" and "output", without lone'
        " surrogates"
    )


def document_of(row: Any, where: str) -> Document:
    """The document of a row: a text or a conversation.

    A row has the field `text`; or `messages` with `role` and `content`; or `conversations` with
    `from` and `value`; or one of `QUESTIONS`, possibly followed by `input`, and one of `ANSWERS`.
    Fields that are null or an empty list are ignored, since all rows of a table have the same
    fields. If only such fields hold documents, the document is empty.

    Args:
        where: the row, for the error message.

    Raises:
        CalibrationError: no field holds a document, or its text is not a string that can be
            encoded.
    """
    try:
        empty = {name for name, value in row.items() if value is None or value == []}
        row = {name: value for name, value in row.items() if name not in empty}
        if "text" in row:
            row["text"].encode()
            return row["text"]
        for name in CONVERSATIONS:
            if name in row:
                return conversation(row[name])
        question = next((row[name] for name in QUESTIONS if name in row), None)
        answer = next((row[name] for name in ANSWERS if name in row), None)
        if question is None or answer is None:
            if empty.isdisjoint(FIELDS):
                raise LookupError("no field of a document")
            return ""
        if isinstance(question, list):  # both are messages
            return conversation([*question, *answer])
        if row.get(INPUT):
            question += "\n\n" + row[INPUT]
        return conversation(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        raise no_document(where) from None


def conversation(messages: list[dict[str, Any]]) -> Conversation:
    """The roles and contents of messages. Raises an error if one is not an encodable string."""
    kept: Conversation = []
    for message in messages:
        content = message["content"] if "content" in message else message["value"]
        role = message["role"] if "role" in message else message["from"]
        content.encode()
        role.encode()
        kept.append({"role": ROLES.get(role, role), "content": content})
    if not kept:
        raise ValueError("no messages")
    return kept
