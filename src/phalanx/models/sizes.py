"""How large a model of any family is, in closed form from its description alone. Needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from phalanx.config.model import Model


class Sizes(Protocol):
    """A family's module `models.<family>.sizes`. `model` is a model of that family."""

    def parameter_count(self, model: Any) -> int:
        """All trainable parameters."""

    def matmul_parameters(self, model: Any) -> int:
        """Parameters that multiply every position."""

    def in_words(self, model: Any) -> str:
        """The shape for a person."""


def sizes_of(model: Model) -> Sizes:
    """The module of `model`'s family."""
    sizes: Any = import_module(f"phalanx.models.{model.family}.sizes")
    return sizes  # type: ignore[no-any-return]
