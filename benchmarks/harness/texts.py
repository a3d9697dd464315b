"""The texts that models are measured on, each of another kind.

| kind | text | licence |
|---|---|---|
| wikitext2 | encyclopedia: WikiText-2 raw, test split | CC BY-SA |
| ptb | news of 1989: Penn Treebank, Mikolov's test split | LDC, research use |
| c4 | web: C4 en, the documents from 700 on of a sample whose first 700 are for calibration | ODC-BY |
| code | modules of Python's standard library, which every machine has | PSF |
| conversation | questions and answers of PIQA's validation split, in the model's own chat template | AFL 3.0 |
| german | the German manual pages man(1) of man-db and xz(1) of XZ Utils | GPL, public domain |

On a command line a text is KIND=PATH, or the kind alone for those that a machine has; the folder of texts, in which
`PLACES` names the others, stands for all. A hub name or a file, which has no kind, is read as `hasslefree evaluate`
reads it. The package's text `python` holds some of the modules of `code`: rows that are calibrated on it have seen it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from hasslefree.models.tokenizer import encode, rendered, written
from hasslefree.texts.sources import evaluation_documents, evaluation_protocol

# Where each kind lies in the folder of texts; None for those that a machine has.
PLACES: dict[str, str | None] = {
    "wikitext2": "wikitext2/wiki.test.raw",
    "ptb": "ptb/ptb.test.txt",
    "c4": "c4/c4_sample.jsonl[700:]",
    "code": None,
    "conversation": "tasks/piqa.validation.jsonl",
    "german": None,
}
MODULES = (
    "argparse", "calendar", "configparser", "difflib", "doctest",
    "fractions", "ipaddress", "mailbox", "smtplib", "statistics",
)  # fmt: skip
PAGES = ("man1/man.1", "man1/xz.1")
# Characters that are left out at the beginning of each file, which has its licence and summary, and
# those that are taken after them.
HEAD = 4000
MODULE, PAGE = 8000, 28_000
# Questions and answers of a conversation.
TURNS = 8


def code(folder: str, _tokenizer: Any) -> str:
    """An excerpt of each module. folder: of the library; empty for that of this interpreter."""
    library = Path(folder or sysconfig.get_paths()["stdlib"])
    texts = [(library / f"{module}.py").read_text(encoding="utf-8") for module in MODULES]
    return "\n\n".join(text[HEAD : HEAD + MODULE] for text in texts)


def conversation(path: str, tokenizer: Any) -> str:
    """Conversations of `TURNS` questions each, which a user asks and the right answer follows."""
    if tokenizer.chat_template is None:
        raise SystemExit(f"{tokenizer.name_or_path} has no chat template: leave out the text `conversation`")
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    chats = []
    for start in range(0, len(rows), TURNS):
        messages = []
        for row in rows[start : start + TURNS]:
            answer = row["sol2"] if row["label"] else row["sol1"]
            messages.append({"role": "user", "content": row["goal"]})
            messages.append({"role": "assistant", "content": answer})
        chats.append(rendered(tokenizer, messages))
    return "".join(chats)


def german(folder: str, _tokenizer: Any) -> str:
    """An excerpt of each manual page. folder: of the German pages; empty for that of the system."""
    root = Path(folder or "/usr/share/man/de")
    texts = []
    for page in PAGES:
        found = next(iter(sorted(root.glob(f"{page}*"))), None)
        if found is None:
            raise SystemExit(
                f"{root} has no {page}: install the German manual pages of man-db and XZ Utils, or give their folder "
                "(german=FOLDER)"
            )
        raw = found.read_bytes()
        plain = without_macros((gzip.decompress(raw) if found.suffix == ".gz" else raw).decode())
        texts.append(plain[HEAD : HEAD + PAGE])
    return "\n\n".join(texts)


def without_macros(page: str) -> str:
    """The text of a manual page in the language of roff, without its fonts and macros."""
    lines = []
    for line in page.splitlines():
        macro = re.match(r"\.(\w+)\s*(.*)", line)
        if macro and macro[1] in ("SH", "SS"):
            lines.append(f"\n{macro[2]}")
        elif macro and macro[1] in ("B", "I", "BR", "IR", "RB", "RI", "BI", "IB"):
            separator = " " if len(macro[1]) == 1 else ""
            lines.append(separator.join(macro[2].replace('"', "").split()))
        elif macro and macro[1] in ("PP", "TP", "IP"):
            lines.append("")
        elif not line.startswith((".", "'")):
            lines.append(line)
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\[&|/%:]", "", "\n".join(lines)).replace("\\-", "-")
    text = re.sub(r"\\(\(..|\[[^]]*\]|\*\(..|\*.)", "", text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\\[ ~]", " ", text))


READERS: dict[str, Callable[[str, Any], str]] = {"code": code, "conversation": conversation, "german": german}


def listed(given: list[str]) -> tuple[str, ...]:
    """The texts of a command line; a folder stands for all kinds."""
    if len(given) != 1 or not Path(given[0]).is_dir():
        return tuple(given)
    return tuple(kind if place is None else f"{kind}={given[0]}/{place}" for kind, place in PLACES.items())


def name(text: str) -> str:
    """The kind of a text, or the name of its file: the paths of the machine are not committed."""
    kind = text.partition("=")[0]
    return kind if kind in PLACES else Path(text).name


def read(text: str, tokenizer: Any) -> str:
    """A text of some kind, or of a hub name or file."""
    kind, _, path = text.partition("=")
    if kind in READERS:
        return READERS[kind](path, tokenizer)
    name_or_path = path if kind in PLACES else text
    documents = evaluation_documents(name_or_path)
    return evaluation_protocol(name_or_path).joiner.join(written(tokenizer, document) for document in documents)


def tokens(text: str, tokenizer: Any, most: int) -> Tensor:
    """The first tokens of a text of some kind, with the token that the tokenizer puts before a text. (tokens,), int64

    The chat template puts its own.
    """
    return encode(tokenizer, read(text, tokenizer), most, special_tokens=name(text) != "conversation")


def digest(text: str, tokenizer: Any) -> str:
    """The first digits of SHA-256 of a text: what a machine has may be another version."""
    return hashlib.sha256(read(text, tokenizer).encode()).hexdigest()[:12]
