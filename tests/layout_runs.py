"""Small run files for tests of layouts: a model whose heads, layers and positions share out over many numbers of ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from phalanx.config.load import parse_run
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun
from phalanx.families.registry import bind
from phalanx.layout.resolve import resolve_layout

Fields = dict[str, Any]

SECTIONS: dict[str, Fields] = {
    "model": {
        "n_layers": 4,
        "d_model": 32,
        "n_heads": 8,
        "n_kv_heads": 4,
        "d_ff": 64,
        "vocab_size": 61,
        "max_positions": 64,
    },
    "data": {"sources": ["nowhere"], "sequence_length": 32},
    "layout": {"global_batch": 64, "microbatch": 1},
    "optimizer": {"lr": 0.01},
    "training": {"steps": 1},
    "cluster": {},
}


def run_with(changes: Fields | None = None, **layout: Any) -> LanguageRun:
    """The run with these fields of `layout`, and with `section.field` changes elsewhere."""
    sections = {name: dict(fields) for name, fields in SECTIONS.items()}
    sections["layout"] |= layout
    for name, value in (changes or {}).items():
        section, field = name.split(".")
        sections[section][field] = value
    return LanguageRun.model_validate_json(json.dumps(sections))


def run_from_words(run: LanguageRun, words: list[str]) -> LanguageRun:
    """What the command line makes of `run` with these overrides."""
    return parse_run(yaml.safe_dump(run.model_dump(mode="json", exclude_none=True)), "run.yaml", words)


def refusal(run: LanguageRun, world: int, devices_per_node: int | None = None) -> list[str]:
    """The lines of the error that `run` meets on `world` ranks."""
    with pytest.raises(ConfigError) as caught:
        resolve_layout(bind(run), world, devices_per_node)
    return str(caught.value).splitlines()
