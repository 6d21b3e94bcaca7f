"""How large a model of any family is, in closed form from its description alone. Needs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from phalanx.config.families import Sizes, find_family
from phalanx.config.model import Model
from phalanx.config.section import MAX_PARAMETERS
from phalanx.errors import ConfigError


def sizes_of(model: Model) -> Sizes:
    """Return what says how large a model of the family of `model` is."""
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
