"""Named model shapes: one YAML file each in `presets/`, with where its figures come from.

A preset lies below the run file: it fills the fields of `model` that the file does not give.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

from phalanx.config.document import Value, parse_document
from phalanx.config.families import DEFAULT_FAMILY, find_family
from phalanx.config.model import Model

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
        """The least and the largest count that rounds to the printed digits."""
        digits = self.parameters.rstrip("KMBT")
        unit = _UNITS[self.parameters[len(digits) :]]
        printed = Decimal(digits)
        half = Decimal(1).scaleb(int(printed.as_tuple().exponent)) / 2
        return float((printed - half) * unit), float((printed + half) * unit)


@dataclass(frozen=True)
class Preset:
    """A named model shape."""

    name: str
    about: str
    source: str
    """Where the figures come from."""
    sequence_length: int
    """Positions a sample in the published runs: tokens of text, or patches of a field."""
    fields: dict[str, Value]
    """Fields of the run file's `model` section."""
    published: tuple[PublishedCount, ...]

    @property
    def named_size(self) -> float | None:
        """Parameters that the name speaks of, as 113e9 of orbit-113b; None where it speaks of none."""
        found = re.search(r"-([0-9.]+)([kmbt])$", self.name)
        return None if found is None else float(found[1]) * _UNITS[found[2].upper()]

    @property
    def family(self) -> str:
        """The family of the model."""
        return str(self.fields.get("family", DEFAULT_FAMILY))

    def model(self, **changes: Any) -> Model:
        """The shape, as its family describes one, with single fields changed."""
        return find_family(self.family).model.model_validate({**self.fields, "preset": self.name, **changes})


@cache
def preset_names() -> tuple[str, ...]:
    """All presets, families together and small before large."""
    files = resources.files("phalanx.config").joinpath("presets").iterdir()
    names = [file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")]
    return tuple(sorted(names, key=_family_and_size))


@cache
def load_preset(name: str) -> Preset:
    """The preset `name`, which must be one of `preset_names()`."""
    text = resources.files("phalanx.config").joinpath("presets", f"{name}.yaml").read_text("utf-8")
    found: Any = parse_document(text, f"{name}.yaml").value
    published = (PublishedCount(row["parameters"], row["counts"], row.get("variant", {})) for row in found["published"])
    return Preset(name, found["about"], found["source"], found["sequence_length"], found["model"], tuple(published))


def _family_and_size(name: str) -> tuple[str, float, str]:
    """Sorting key: `mpt-125m` comes before `mpt-1b`."""
    match = re.fullmatch(r"(.+)-([0-9.]+)([kmbt])", name)
    if match is None:
        return name, 0.0, ""
    family, size, unit = match.groups()
    return family, float(size) * _UNITS[unit.upper()], name
