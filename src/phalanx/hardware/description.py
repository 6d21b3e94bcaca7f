"""What every part of a machine's description shares: refusing what it does not know, and the kinds of text in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, StringConstraints

Text = Annotated[str, StringConstraints(min_length=1)]
OneLine = Annotated[str, StringConstraints(pattern=r"^[^\r\n]+$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]


class Part(BaseModel):
    """A part of a description: unknown fields and silent conversions are refused, values cannot change."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
