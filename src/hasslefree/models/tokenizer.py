"""Load a tokenizer, and tokenise texts and chats with it."""

import re
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils.import_utils import is_sentencepiece_available

from hasslefree.errors import CheckpointError
from hasslefree.models.load import loading, no_model
from hasslefree.models.names import check_name
from hasslefree.texts.files import Document, Joined
from hasslefree.texts.sources import PIECE, WIDEST

# The date in rendered texts: the one that Llama's templates write if there is no clock.
DAY = date(2024, 7, 26)
# Where a template writes today's date.
_TODAY = re.compile(r"""strftime_now\((?P<quote>['"])(?P<format>.*?)(?P=quote)\)""")
# A tokenizer of single characters or of biological sequences may know only one of them.
SHORT_TEXTS = ("1", "a", "A")


def tokenizing(name: str) -> AbstractContextManager[None]:
    """Convert errors about the tokenizer of a model, as `loading` does."""
    remedy = "if its files are missing or damaged, copy them from the original model"
    return loading(f"the tokenizer of {name!r} cannot be used", remedy)


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model.

    Args:
        name: a folder, or a name on the hub.
        trust_remote_code: run code that comes with the model.

    Raises:
        ModelError: there is no such model.
        CheckpointError: the files of the tokenizer are missing or damaged.
    """
    check_name(name)
    try:
        with tokenizing(name):
            return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        if "tiktoken" in error.message and not is_sentencepiece_available():
            # transformers tries tiktoken last, and its error hides the first one.
            raise CheckpointError(
                f"the tokenizer of {name!r} is a tokenizer.model, which needs a package: `pip"
                " install sentencepiece protobuf`, or tiktoken if it is of that kind"
            ) from error
        if Path(name).is_dir() or not isinstance(error.__cause__, Exception):
            raise
        raise no_model(name, error.__cause__) from error


def encode(
    tokenizer: Any, text: str, most: int | None = None, special_tokens: bool = True
) -> Tensor:
    """Tokenise a text.

    Args:
        most: number of tokens to return at most; text far beyond them is not tokenised.
        special_tokens: add the special tokens that the tokenizer adds by default.

    Returns:
        The token ids: (tokens,) int64.
    """
    if most is not None:
        text = text[: PIECE + WIDEST * most]
    with tokenizing(getattr(tokenizer, "name_or_path", "")):
        ids = tokenizer(text, verbose=False, add_special_tokens=special_tokens)["input_ids"]
    return torch.tensor(ids).long()[:most]


def surrounding_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the token ids that a tokenizer puts before and after every text, often none.

    They are found by tokenising a short text, since they depend on settings of many kinds:
    `add_bos_token`, a template of the post-processor, or the code of the tokenizer.
    """
    for text in SHORT_TEXTS:
        bare = encode(tokenizer, text, special_tokens=False).tolist()
        if not bare:  # the tokenizer drops unknown characters
            continue
        whole = encode(tokenizer, text).tolist()
        for start in range(len(whole)):
            end = start + len(bare)
            if whole[start:end] == bare:
                return whole[:start], whole[end:]
    return [], []


def begin_with(segments: Tensor, first: list[int]) -> Tensor:
    """Return segments whose first tokens are replaced by the first tokens of texts.

    Args:
        segments: token ids (samples, seqlen), which are not changed.
    """
    begun = segments.clone()
    begun[:, : len(first)] = torch.tensor(first, dtype=segments.dtype)
    return begun


def written(tokenizer: Any, document: Document) -> str:
    """Return a document as text; a conversation is rendered by the tokenizer's chat template.

    Without a template, its messages are paragraphs. A template that writes the date writes `DAY`,
    so that a run that is resumed on another day has the same text.
    """
    if isinstance(document, str):
        return document
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in document)
    if "strftime_now" not in str(tokenizer.chat_template):
        return rendered(tokenizer, document)
    template = _TODAY.sub(
        lambda match: repr(DAY.strftime(match["format"])), tokenizer.get_chat_template()
    )
    return rendered(tokenizer, document, chat_template=template)


def encode_document(tokenizer: Any, document: Document | Joined) -> Tensor:
    """Tokenise a document: (tokens,) int64.

    Joined documents are separated by the token that ends texts. It is added unless the tokenizer,
    the text or a chat template has ended the document.
    """
    if not isinstance(document, tuple):
        text = written(tokenizer, document)
        return encode(tokenizer, text, special_tokens=not is_begun(tokenizer, document, text))
    end = tokenizer.eos_token_id
    _, last = surrounding_tokens(tokenizer)
    endings = {end, *last}
    parts: list[Tensor] = []
    for row in document:
        tokens = encode_document(tokenizer, row)
        parts.append(tokens)
        has_ending = not endings.isdisjoint(tokens[-1:].tolist())
        if end is not None and not has_ending and not is_rendered(tokenizer, row):
            parts.append(torch.tensor([end]))
    return torch.cat(parts)


def is_begun(tokenizer: Any, document: Document, text: str) -> bool:
    """Return True if the text of a document has special tokens: if a chat template writes them, or
    if the text, rendered earlier, begins with the first one.
    """
    first = getattr(tokenizer, "bos_token", None)  # the tokenizer may be any function
    return is_rendered(tokenizer, document) or bool(first and text.startswith(first))


def is_rendered(tokenizer: Any, document: Document) -> bool:
    """Return True if a chat template renders a document, with special tokens."""
    return not isinstance(document, str) and tokenizer.chat_template is not None


def rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """Render messages by a tokenizer's chat template. options: for `apply_chat_template`."""
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    what = f"the chat template of {tokenizer.name_or_path} cannot write messages of {roles}"
    with loading(what, "give other messages, or correct or remove it"):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
