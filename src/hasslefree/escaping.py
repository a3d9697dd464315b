"""Escape text from untrusted folders, so that terminals, logs and pages show it as plain text."""

import re
from typing import Any

# Control characters; characters that reorder text, have no width, or end a line; and halves of
# surrogate pairs. Joiners remain between letters that are not ASCII: Persian, the scripts of India
# and emoji need them.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
)


def escaped(text: str, keep: str = "") -> str:
    r"""The text with control and invisible characters written out, such as \x1b. keep: characters
    to leave, such as "\n\t" in a text of many lines.
    """
    return _HIDDEN.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def escaped_within(content: Any) -> Any:
    """Parsed JSON with every text `escaped`, also the keys of dicts."""
    if isinstance(content, dict):
        return {escaped_within(name): escaped_within(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [escaped_within(value) for value in content]
    if isinstance(content, str):
        return escaped(content, "\n\t")
    return content
