"""No key of a `config.json` is ignored: each is known to change nothing, changes the decoder, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import CheckpointError
from phalanx.families.language.huggingface.architecture import Architecture
from phalanx.families.language.huggingface.find_architecture import ARCHITECTURES, read_config
from small_transformers import CONFIGS, huggingface_config

BY_TYPE = {architecture.model_type: architecture for architecture in ARCHITECTURES}
NAMES = list(CONFIGS)


def saved(name: str, **changes: object) -> dict[str, Any]:
    """The `config.json` that transformers writes for a small model."""
    config = huggingface_config(name, **changes)
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values | {"architectures": [BY_TYPE[config.model_type].name]}


def architecture_of(name: str) -> Architecture:
    return BY_TYPE[huggingface_config(name).model_type]


def test_every_architecture_has_a_small_model() -> None:
    assert sorted(BY_TYPE) == sorted(huggingface_config(name).model_type for name in CONFIGS)


def other_values(value: object) -> list[object]:
    """Values of the same kind that differ, and one of another kind."""
    if isinstance(value, bool):
        return [not value, "unheard-of"]
    if isinstance(value, int):
        return [value + 1, 2 * value, "unheard-of"]
    if isinstance(value, float):
        return [value / 2 + 0.1, "unheard-of"]
    if isinstance(value, dict):
        # What else transformers writes into inner objects is as harmless there as outside.
        mapped = value.items() if "rope_type" in value else ()
        nested = [{**value, key: other} for key, inner in mapped for other in other_values(inner)]
        return [*nested, {**value, "unheard-of": 1}]
    if isinstance(value, list):
        return [[*value, *(value[:1] or [0])], ["unheard-of", *value[1:]]]
    return [7, 0.5, True, "unheard-of", ["unheard-of"], {"unheard-of": 1}]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_transformers_writes_is_mapped_refused_or_known_to_change_nothing(name: str) -> None:
    values = saved(name)
    found, model = read_config(values, "config.json")
    seen = 0
    for key in sorted(values.keys() - found.config.irrelevant - {"architectures", "model_type"}):
        for other in other_values(values[key]):
            try:
                _, changed = read_config({**values, key: other}, "config.json")
            except CheckpointError as refusal:
                seen += 1
                # A rule between two keys, or a size of the decoder, may be named in its place.
                named = (key, "n_heads", "head size", "model.experts", "model.latent")
                assert any(word in str(refusal) for word in named), (key, other, str(refusal))
            else:
                assert changed != model, f"{key}={other!r} is ignored"
    assert seen > len(values.keys() - found.config.irrelevant) // 2


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(key=st.text(min_size=1), value=st.one_of(st.integers(min_value=1), st.just(True), st.text(min_size=1)))
def test_keys_that_nobody_knows_are_refused(name: str, key: str, value: object) -> None:
    values = saved(name)
    fields = architecture_of(name).config
    if key in values or key in fields.irrelevant or key in fields.model_fields:
        return
    with pytest.raises(CheckpointError) as refused:
        read_config({**values, key: value}, "config.json")
    assert f"{key}={value!r} has no counterpart in the decoder: what it changes is not known" in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_left_out_has_the_default_of_transformers(name: str) -> None:
    """What a file leaves out is read as transformers reads it, so nothing that is on by default is missed."""
    kind, _ = CONFIGS[name]
    defaults = json.loads(kind().to_json_string(use_diff=False))
    fields = architecture_of(name).config.model_fields
    compared = 0
    for key, field in fields.items():
        if field.is_required() or key not in defaults or isinstance(defaults[key], dict | list):
            continue
        expected = defaults[key]
        # Null is resolved to what it stands for by both.
        if field.default is not None and expected is not None:
            compared += 1
            assert field.default == expected, key
    assert compared >= 3
