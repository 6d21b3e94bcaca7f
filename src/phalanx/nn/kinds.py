"""The kinds of parameter that an optimizer may treat differently."""

from __future__ import annotations

from typing import Literal

ParameterKind = Literal["norm", "bias", "embedding", "matrix"]
