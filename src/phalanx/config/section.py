"""What all sections of a run file share."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the run file: unknown fields and silent type conversions are refused, values cannot change."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Words:
    """Stands in `Annotated[...]` beside a type that tells too little: what a field may be, as it follows "must be"."""

    text: str
