"""Making text that others chose fit to print: names of files, fields, samples, messages of libraries."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line ends and tabs, marks that turn the direction of text around, and halves of characters, which
have no bytes."""


def printable(text: str) -> str:
    """Return `text` with symbols (U+2400 on) or codes in place of characters that act on a terminal or page."""
    return _UNPRINTABLE.sub(_symbol, text)


def _symbol(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}"
