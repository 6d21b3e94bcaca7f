"""What sections of a run file are made of: their base class, and the types of numbers and texts that many fields share.

Each type has its bounds. Upper bounds lie far beyond any real model, data set or machine: they keep arithmetic on a run file
small, and no slip of the keyboard asks for more memory than any computer has.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A section of the run file: unknown fields and silent type conversions are refused, values cannot change."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Words:
    """Stands in `Annotated[...]` beside a type that tells too little: what a field may be, as it follows "must be"."""

    text: str


MAX_PARAMETERS = 10**15
"""Parameters of a model. The largest models trained have some 10**13."""
MAX_BATCH_SAMPLES = 10**9
"""Samples of a global batch."""
MAX_VOCABULARY = 10**8
"""Entries of a vocabulary. The largest in use have some 10**6."""
_PATH_BYTES = 4096
_NAME_BYTES = 255
"""Limits of Linux on a path and on each name in it."""

PositiveInt = Annotated[int, Field(ge=1, le=10**12)]
"""Something that is counted and never allocated at once: steps, tokens."""
NonNegativeInt = Annotated[int, Field(ge=0, le=10**12)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Width = Annotated[int, Field(ge=1, le=10**6)]
"""Channels, heads, points of a grid along one direction."""
HiddenWidth = Annotated[int, Field(ge=1, le=10**7)]
Vocabulary = Annotated[int, Field(ge=1, le=MAX_VOCABULARY)]
Positions = Annotated[int, Field(ge=1, le=10**9)]
Ranks = Annotated[int, Field(ge=1, le=10**7)]
Samples = Annotated[int, Field(ge=1, le=MAX_BATCH_SAMPLES)]
Hours = Annotated[int, Field(ge=1, le=10**6)]
"""A little more than a century."""
Seconds = Annotated[float, Field(gt=0.0, le=1e9)]
"""Up to some 30 years."""
GiB = Annotated[float, Field(gt=0.0, le=1e9)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
_MAX_WHOLE = 10**18
"""Size of a whole number among values of any type; sums of two of them fit 64 bits."""


def _fits_64_bits(value: Scalar) -> Scalar:
    if isinstance(value, int) and abs(value) > _MAX_WHOLE:
        raise ValueError(f"{value} is too large; whole numbers reach from -{_MAX_WHOLE:,} to {_MAX_WHOLE:,}")
    return value


Number = Annotated[int | float, AfterValidator(_fits_64_bits)]
Scalar = Annotated[bool | int | float | str | None, AfterValidator(_fits_64_bits)]


def first_repeated(names: Iterable[str]) -> str | None:
    """Return the first name that was there before, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _usable_path(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path cannot hold the character NUL")
    if len(os.fsencode(text)) > _PATH_BYTES:
        raise ValueError(f"a path of {len(os.fsencode(text)):,} bytes; at most {_PATH_BYTES:,} can be opened")
    longest = max((len(os.fsencode(part)) for part in text.split("/")), default=0)
    if longest > _NAME_BYTES:
        raise ValueError(f"a name of {longest:,} bytes in a path; at most {_NAME_BYTES} can be opened")
    return text


PathText = Annotated[str, AfterValidator(_usable_path)]
"""A path that the operating system can be asked for."""
