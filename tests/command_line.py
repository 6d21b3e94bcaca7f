"""What a test gets from calling the program in this process; see the fixture `call` of `tests/cli`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Exit code, and what was written."""

    code: int
    out: str
    err: str
    """Without the line that names a page."""
    page: str = ""
    """Page of the guides that an error names."""


Call = Callable[..., Outcome]
