"""The model families there are: what each is called, what its run files are, and where its code is.

A family is found by the name in `model.family`: our own three, those that installed packages offer as entry points of
`phalanx.families`, and those that a program gives to `phalanx.register`. A descriptor imports no torch, so that run files
are read and checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from phalanx.config.model import Model
from phalanx.config.schema import Run
from phalanx.extensions import Registry


class Sizes(Protocol):
    """How large a model of a family is, from its description alone. `model` is a model of that family."""

    def parameter_count(self, model: Any) -> int:
        """All trainable parameters."""

    def matmul_parameters(self, model: Any) -> int:
        """Parameters that multiply every position."""

    def in_words(self, model: Any) -> str:
        """The shape for a person."""


@dataclass(frozen=True)
class Family:
    """A model family, before any run of it is bound. Needs no torch."""

    name: str
    """As `model.family` of a run file says it."""
    run: type[Run]
    """The kind of run: a subclass of `Run` whose `model` and `data` have the family's own types."""
    bound: str | type
    """The class of bound models, a `phalanx.families.family.BoundModel`; "module:Class" is imported when a run is bound."""
    sizes: str = "phalanx.families.blocks.sizes"
    """The module that says how large its models are (see `Sizes`); by default counted on the modules of a `BlockNetwork`."""

    @property
    def model(self) -> type[Model]:
        """The type of the `model` section."""
        kind = self.run.model_fields["model"].annotation
        assert isinstance(kind, type) and issubclass(kind, Model)
        return kind


BUILT_IN = ("language", "weather", "materials")
"""Families of Phalanx itself."""
FAMILIES: Registry[Family] = Registry(
    "phalanx.families",
    built_in={name: f"phalanx.families.{name}.family:FAMILY" for name in BUILT_IN},
    accepts=lambda item: isinstance(item, Family),
    expected="a phalanx.Family",
)
DEFAULT_FAMILY = "language"
"""Of a run file that names neither family nor preset."""


def find_family(name: str) -> Family:
    """Return the family called `name`. Raises ConfigError naming the known ones where there is none."""
    return FAMILIES.get(name, "model.family")
