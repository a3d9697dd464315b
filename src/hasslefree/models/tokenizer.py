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

# The date in texts, which Llama's templates write where there is no clock; and where a template
# writes that of today.
DAY = date(2024, 7, 26)
_TODAY = re.compile(r"""strftime_now\((?P<quote>['"])(?P<format>.*?)(?P=quote)\)""")
# A tokenizer of characters or of sequences may know one of them only.
SHORT_TEXTS = ("1", "a", "A")


def tokenizing(name: str) -> AbstractContextManager[None]:
    """`loading` for the tokenizer of a model."""
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
        most: return the first tokens only, at most this number. Not much more text is tokenised.
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
    """The token ids that a tokenizer puts before and after every text by itself, often none.

    They are what the tokenizer does, whatever its settings are called: `add_bos_token`, a template
    of its post-processor, or a class of its own.
    """
    for text in SHORT_TEXTS:
        bare = encode(tokenizer, text, special_tokens=False).tolist()
        if not bare:  # it drops characters that it does not know
            continue
        whole = encode(tokenizer, text).tolist()
        for start in range(len(whole)):
            end = start + len(bare)
            if whole[start:end] == bare:
                return whole[:start], whole[end:]
    return [], []


def begin_with(segments: Tensor, first: list[int]) -> Tensor:
    """Put the first tokens of texts in place of the first tokens of each segment.

    Args:
        segments: token ids (samples, seqlen), which stay as they are.
    """
    begun = segments.clone()
    begun[:, : len(first)] = torch.tensor(first, dtype=segments.dtype)
    return begun


def written(tokenizer: Any, document: Document) -> str:
    """A document as text: a conversation in the chat template of the tokenizer.

    Without a template its messages are paragraphs. A template that writes the date writes that of
    `DAY`: the same run has the same text tomorrow, when it may be resumed.
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

    Documents that are joined have the token that ends texts between them, as the tokenizer or the
    text puts it there, or as we do, but for conversations in a template.
    """
    if not isinstance(document, tuple):
        text = written(tokenizer, document)
        return encode(tokenizer, text, special_tokens=not is_begun(tokenizer, document, text))
    end = tokenizer.eos_token_id
    _, last = surrounding_tokens(tokenizer)
    parts: list[Tensor] = []
    for row in document:
        tokens = encode_document(tokenizer, row)
        parts.append(tokens)
        is_ended = last or is_rendered(tokenizer, row) or tokens[-1:].tolist() == [end]
        if end is not None and not is_ended:
            parts.append(torch.tensor([end]))
    return torch.cat(parts)


def is_begun(tokenizer: Any, document: Document, text: str) -> bool:
    """Say whether the text of a document has its special tokens: a chat template writes them, and
    rows that were rendered before begin with the first one.
    """
    first = getattr(tokenizer, "bos_token", None)  # the tokenizer may be any function
    return is_rendered(tokenizer, document) or bool(first and text.startswith(first))


def is_rendered(tokenizer: Any, document: Document) -> bool:
    """Say whether a chat template writes a document, with its special tokens."""
    return not isinstance(document, str) and tokenizer.chat_template is not None


def rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """Render messages by the chat template of a tokenizer. options: of `apply_chat_template`."""
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    what = f"the chat template of {tokenizer.name_or_path} cannot write messages of {roles}"
    with loading(what, "give other messages, or correct or remove it"):
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
