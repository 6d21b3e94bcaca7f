"""The model families there are: what each is called, what its run files are, and where its code is.

A family is found by the name in `model.family`: our own three, those that installed packages offer as entry points of
`phalanx.families`, and those that a program gives to `phalanx.register`. A descriptor imports no torch, so that run files
are read and checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from phalanx.config.model import Model
from phalanx.config.schema import Run
from phalanx.config.section import MAX_PARAMETERS
from phalanx.errors import ConfigError
from phalanx.extensions import Registry


class Sizes(Protocol):
    """How large a model of a family is, from its description alone. `model` is a model of that family."""

    def parameter_count(self, model: Any) -> int:
        """Return the number of trainable parameters."""

    def matmul_parameters(self, model: Any) -> int:
        """Return the number of parameters that multiply every position."""

    def in_words(self, model: Any) -> str:
        """Return the shape for a person."""


@dataclass(frozen=True)
class Family:
    """A model family, before any run of it is bound. Needs no torch."""

    name: str
    """Value of `model.family` in run files."""
    run: type[Run]
    """The kind of run: a subclass of `Run` whose `model` and `data` have the family's own types."""
    bound: str | type
    """The class of bound models, a `phalanx.families.family.BoundModel`; "module:Class" is imported when a run is bound."""
    checked: str | None = None
    """A base of that class which needs no torch, "module:Class", a `phalanx.families.family.DataModel`: with it run files
    are checked in a moment. None where there is no such base; the whole class then takes its place."""
    sizes: str = "phalanx.families.blocks.bound"
    """The module that says how large its models are (see `Sizes`); by default counted on the modules of a `BlockNetwork`."""

    presets: Path | None = None
    """Folder of its presets, one YAML file each; None where it has none."""
    recipes: Path | None = None
    """Folder of its recipes, run files that are found by name; None where it has none."""
    start: Path | None = None
    """YAML file that `phalanx init` begins its run files with (`config.starting_run`); None where it begins none."""

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
    built_in={name: f"phalanx.families.{name}.config:FAMILY" for name in BUILT_IN},
    accepts=lambda item: isinstance(item, Family),
    expected="a phalanx.Family",
)
DEFAULT_FAMILY = "language"
"""Of a run file that names neither family nor preset."""


def find_family(name: str) -> Family:
    """Return the family called `name`. Raises ConfigError naming the known ones where there is none."""
    return FAMILIES.get(name, "model.family")


def sizes_of(model: Model) -> Sizes:
    """Return the functions that say how large `model` is, by its family."""
    return cast("Sizes", import_module(find_family(model.family).sizes))


def check_parameter_count(model: Model) -> None:
    """Raise ConfigError for a model with more parameters than any computer holds, before anything is built for it."""
    sizes = sizes_of(model)
    count = sizes.parameter_count(model)
    if count > MAX_PARAMETERS:
        raise ConfigError(
            f"model: {count:,} parameters ({sizes.in_words(model)}) are more than {MAX_PARAMETERS:,}, the most that can "
            f"be planned or trained; lower one of these"
        )
