"""What the language family declares about its parameters, as data: how they begin and what kind each is."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Literal

from phalanx.config.model import LanguageModel
from phalanx.models.initial import InitRule

ParameterKind = Literal["norm", "bias", "embedding", "matrix"]

_KINDS: tuple[tuple[str, ParameterKind], ...] = (
    ("*norm.weight", "norm"),
    ("*.bias", "bias"),
    ("embedding.*", "embedding"),
    ("*", "matrix"),
)


def parameter_kind(name: str) -> ParameterKind:
    """The kind of the decoder's parameter `name`; the first matching row of the table decides."""
    return next(kind for pattern, kind in _KINDS if fnmatchcase(name, pattern))


def initial_rules(config: LanguageModel) -> list[tuple[str, InitRule]]:
    """Initial values by parameter name, first match wins.

    Matrices start normal with `init_std`; the two that write to the residual stream with 1/sqrt(2 n_layers) of it, so that
    the stream's variance does not grow with depth (GPT-2, Radford et al. 2019, section 2.3).
    """
    residual = config.init_std / math.sqrt(2 * config.n_layers)
    return [
        ("*norm.weight", InitRule.constant(1.0)),
        ("*.bias", InitRule.constant(0.0)),
        ("*.attention.output.weight", InitRule.normal(residual)),
        ("*.mlp.down.weight", InitRule.normal(residual)),
        ("*", InitRule.normal(config.init_std)),
    ]
