"""A tokenizer and its chat template, which may come from a stranger: loaded and used within
limits.
"""

import math
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from jinja2.sandbox import SandboxedEnvironment
from torch import Tensor
from transformers import AutoTokenizer

from hasslefree.errors import CheckpointError
from hasslefree.models.calls import replaced
from hasslefree.models.load import check_name, loading, no_model
from hasslefree.texts import PIECE, WIDEST, pieces

# Characters that a tokenizer gets at once: more than the published texts for perplexity have.
WHOLE = 1 << 22
# Characters that a tokenizer may put in the place of one, bytes of the tokens that it adds, and
# letters in a word.
MOST_GROWTH, MOST_ADDED, MOST_LETTERS = 256, 1 << 16, 1 << 14
# Seconds of the processor and bytes for a chat template, and bits of a number in it.
TEMPLATE_SECONDS, TEMPLATE_BYTES, MOST_BITS = 10, 1 << 30, 1 << 14


@contextmanager
def tokenizing(name: str) -> Iterator[None]:
    """`loading` for a tokenizer, within which nothing is shown of what its Rust code prints about a
    panic.
    """
    remedy = "if its files are missing or damaged, copy them from the original model"
    with (
        loading(f"the tokenizer of {name!r} cannot be used", remedy),
        open(os.devnull, "w") as nothing,
    ):
        shown = (
            None if sys.stderr is None else os.dup(2)
        )  # without it, another file may have its number
        try:
            if shown is not None:
                os.dup2(nothing.fileno(), 2)
            yield
        finally:
            if shown is not None:
                os.dup2(shown, 2)
                os.close(shown)


@contextmanager
def bounded(seconds: int, room: int) -> Iterator[None]:
    """Within it, on Linux, more time of the processor or more bytes of new memory are a
    ValueError.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield
        return
    import resource

    def stop(*_: Any) -> None:
        raise ValueError(f"it takes more than {seconds} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + room
    before = signal.signal(signal.SIGVTALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        resource.setrlimit(
            resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(soft, most), hard)
        )
        yield
    except MemoryError:
        raise ValueError(f"it takes more than {room:,} bytes") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer that belongs to a model."""
    check_name(name)
    try:
        with tokenizing(name):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
            check_growth(getattr(tokenizer, "backend_tokenizer", None))
    except CheckpointError as error:
        if Path(name).is_dir() or not isinstance(error.__cause__, Exception):
            raise
        raise no_model(name, error.__cause__) from error
    return tokenizer


def check_growth(backend: Any) -> None:
    """Raise a ValueError if a tokenizer of the library tokenizers makes much more of a text than
    its length.
    """
    for part in filter(None, (getattr(backend, name, None) for name in ("normalizer", "decoder"))):
        texts = re.findall(rb'"(?:content|prepend)":"((?:[^"\\]|\\.)*)"', part.__getstate__())
        if math.prod(max(len(text), 1) for text in texts) > MOST_GROWTH:
            raise ValueError(f"it replaces characters by more than {MOST_GROWTH} each")
    added = getattr(backend, "post_processor", None)
    if added is not None and len(added.__getstate__()) > MOST_ADDED:
        raise ValueError("it adds too many tokens to a text")
    if getattr(getattr(backend, "model", None), "max_input_chars_per_word", 0) > MOST_LETTERS:
        raise ValueError(f"it takes words of more than {MOST_LETTERS:,} letters")


def encode(
    tokenizer: Any, text: str, most: int | None = None, special_tokens: bool = True
) -> Tensor:
    """Token ids of a text: (tokens,) int64. most: the first ones alone. special_tokens: as by
    default, once.

    A text of more than 4 million characters is tokenised in pieces, so that time and memory stay in
    proportion to it.
    """
    size, ids = WHOLE if most is None else min(WHOLE, PIECE + 4 * WIDEST * most), list[Tensor]()
    for piece in pieces(text, size):
        how = {} if special_tokens and not ids else {"add_special_tokens": False}
        with tokenizing(getattr(tokenizer, "name_or_path", "")):
            ids.append(torch.tensor(tokenizer(piece, verbose=False, **how)["input_ids"]).long())
        if most is not None and sum(map(len, ids)) >= most:
            break
    return torch.cat(ids)[:most]


def rendered(tokenizer: Any, messages: list[dict[str, str]], **how: Any) -> str:
    """The text that the chat template of a tokenizer makes of messages."""
    what = f"the chat template of {tokenizer.name_or_path} cannot be used"
    # A signal does not interrupt the product of two numbers.
    operators = SandboxedEnvironment.default_binop_table | {"**": math.pow, "*": product}
    with (
        loading(what, "correct it or remove it"),
        bounded(TEMPLATE_SECONDS, TEMPLATE_BYTES),
        replaced(SandboxedEnvironment, "intercepted_binops", frozenset({"*", "**"})),
        replaced(SandboxedEnvironment, "default_binop_table", operators),
    ):
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **how)
        return text


def product(one: Any, other: Any) -> Any:
    """Of two numbers, or of a text and a number. Raises a ValueError for numbers of thousands of
    digits.
    """
    if (
        isinstance(one, int)
        and isinstance(other, int)
        and one.bit_length() + other.bit_length() > MOST_BITS
    ):
        raise ValueError(f"it takes more than {MOST_BITS:,} bits for a number")
    return one * other
