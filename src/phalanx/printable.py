"""Making text that others chose fit to print: names of files, fields, samples, messages of libraries."""

from __future__ import annotations

import re

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but line ends and tabs, marks that turn the direction of text around, and halves of characters, which
have no bytes."""


def printable(text: str) -> str:
    r"""Return `text` with all characters that act on a terminal or page, in place of being shown, written out as in \x1b."""
    return _UNPRINTABLE.sub(_written_out, text)


def _written_out(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
