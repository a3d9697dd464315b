"""Load a tokenizer, and tokenise texts and chats with it."""

from contextlib import AbstractContextManager
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
    text = "1"
    bare = encode(tokenizer, text, special_tokens=False).tolist()
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

    Without a template its messages are paragraphs.
    """
    if isinstance(document, str):
        return document
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in document)
    return rendered(tokenizer, document)


def encode_document(tokenizer: Any, document: Document | Joined) -> Tensor:
    """Tokenise a document: (tokens,) int64. A chat template writes its special tokens itself.

    Documents that are joined have the token that ends texts between them, as the tokenizer puts it
    there or as we do, but for conversations in a template.
    """
    if isinstance(document, tuple):
        rows = [encode_document(tokenizer, row) for row in document]
        end = tokenizer.eos_token_id
        _, last = surrounding_tokens(tokenizer)
        if end is not None and not last and not is_rendered(tokenizer, document[0]):
            rows = [torch.cat([row, torch.tensor([end])]) for row in rows]
        return torch.cat(rows)
    special_tokens = not is_rendered(tokenizer, document)
    return encode(tokenizer, written(tokenizer, document), special_tokens=special_tokens)


def is_rendered(tokenizer: Any, document: Document) -> bool:
    """Say whether a chat template writes a document, with its special tokens."""
    return not isinstance(document, str) and tokenizer.chat_template is not None


def rendered(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """Render messages by the chat template of a tokenizer. options: of `apply_chat_template`."""
    what = f"the chat template of {tokenizer.name_or_path} cannot be used"
    with loading(what, "correct it or remove it"):
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
