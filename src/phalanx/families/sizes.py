"""How large a model of any family is, in closed form from its description alone. Needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

from phalanx.config.bounds import MAX_PARAMETERS
from phalanx.config.model import Model
from phalanx.errors import ConfigError


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
    sizes: Any = import_module(f"phalanx.families.{model.family}.sizes")
    return sizes  # type: ignore[no-any-return]


def check_parameter_count(model: Model) -> None:
    """Raise ConfigError for a model with more parameters than any computer holds, before anything is built for it."""
    sizes = sizes_of(model)
    count = sizes.parameter_count(model)
    if count > MAX_PARAMETERS:
        raise ConfigError(
            f"model: {count:,} parameters ({sizes.in_words(model)}) are more than {MAX_PARAMETERS:,}, the most that can "
            f"be planned or trained; lower one of these"
        )
