"""Named model shapes: one YAML file each in the folder `presets` of its family, with where its figures come from.

A preset lies below the run file: it fills the fields of `model` that the file does not give. Recipes are whole run files,
found by name as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from phalanx.config.document import Value, parse_document
from phalanx.config.families import BUILT_IN, FAMILIES, find_family
from phalanx.config.model import Model
from phalanx.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class PublishedCount:
    """A parameter count as its source prints it, and what that source counted."""

    parameters: str
    """As printed: "6.6589B"."""
    counts: str
    """What is counted, in words."""
    variant: dict[str, Any]
    """Fields of the model in which the counted one differs from the preset."""

    def bounds(self) -> tuple[float, float]:
        """Return the least and the largest count that rounds to the printed digits."""
        digits = self.parameters.rstrip("KMBT")
        unit = _UNITS[self.parameters[len(digits) :]]
        printed = Decimal(digits)
        half = Decimal(1).scaleb(int(printed.as_tuple().exponent)) / 2
        return float((printed - half) * unit), float((printed + half) * unit)


@dataclass(frozen=True)
class Preset:
    """A named model shape."""

    name: str
    family: str
    about: str
    source: str
    """Where the figures come from."""
    sequence_length: int
    """Positions a sample in the published runs: tokens of text, or patches of a field."""
    fields: dict[str, Value]
    """Fields of the run file's `model` section, as the file gives them; the family may be left out."""
    published: tuple[PublishedCount, ...]

    @property
    def named_size(self) -> float | None:
        """Parameters that the name states, as 113e9 of orbit-113b; None where it states none."""
        found = re.search(r"-([0-9.]+)([kmbt])$", self.name)
        return None if found is None else float(found[1]) * _UNITS[found[2].upper()]

    def model(self, **changes: Any) -> Model:
        """Return the shape, as its family describes one, with single fields changed."""
        kind = find_family(self.family).model
        return kind.model_validate({"family": self.family, **self.fields, "preset": self.name, **changes})


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets of all families, series together and small before large."""
    names = {file.stem for family in _families_with_presets() for file in _preset_files(family)}
    return tuple(sorted(names, key=_series_and_size))


def load_preset(name: str) -> Preset:
    """Read the preset `name`. Raises ConfigError where there is none."""
    preset = find_preset(name)
    if preset is None:
        raise ConfigError(f"model.preset={name}: no such preset; phalanx config list shows them")
    return preset


def find_preset(name: str) -> Preset | None:
    """Read the preset `name`; None where there is none."""
    for family in _families_with_presets():
        for file in _preset_files(family):
            # Compared with what is there, not joined to the folder: a name from a run file may hold "..".
            if file.stem == name:
                return _read_preset(file, family)
    return None


def find_recipe(name: str) -> Path | None:
    """Return the run file of the recipe `name`; None where there is none."""
    return next((file for file in _recipe_files() if file.stem == name), None)


def recipe_names() -> tuple[str, ...]:
    """Return the names of all recipes of all families, series together and small before large."""
    return tuple(sorted((file.stem for file in _recipe_files()), key=_series_and_size))


def describe_recipe(name: str) -> str:
    """Return a description of the recipe `name`: the first line of its file, a comment.

    Raises KeyError where there is none of that name.
    """
    file = find_recipe(name)
    if file is None:
        raise KeyError(name)
    first = file.read_text("utf-8").partition("\n")[0]
    return first.removeprefix("#").strip().removesuffix(".")


def _recipe_files() -> Iterator[Path]:
    # One after the other: what other packages offer is imported only where none of ours is meant.
    for family in _families_with_presets():
        folder = find_family(family).recipes
        yield from [] if folder is None else sorted(folder.glob("*.yaml"))


def _families_with_presets() -> list[str]:
    """Return our own families first: their presets are found without importing what other packages offer."""
    return [*BUILT_IN, *(name for name in FAMILIES.names() if name not in BUILT_IN)]


def _preset_files(family: str) -> list[Path]:
    folder = find_family(family).presets
    return [] if folder is None else sorted(folder.glob("*.yaml"))


@cache
def _read_preset(file: Path, family: str) -> Preset:
    found: Any = parse_document(file.read_text("utf-8"), file.name).value
    published = (PublishedCount(row["parameters"], row["counts"], row.get("variant", {})) for row in found["published"])
    return Preset(
        name=file.stem,
        family=family,
        about=found["about"],
        source=found["source"],
        sequence_length=found["sequence_length"],
        fields=found["model"],
        published=tuple(published),
    )


def _series_and_size(name: str) -> tuple[str, float, str]:
    """Return the key to sort by: `mpt-125m` comes before `mpt-1b`."""
    match = re.fullmatch(r"(.+)-([0-9.]+)([kmbt])", name)
    if match is None:
        return name, 0.0, ""
    series, size, unit = match.groups()
    return series, float(size) * _UNITS[unit.upper()], name
