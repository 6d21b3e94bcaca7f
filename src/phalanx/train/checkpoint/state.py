"""The part of a checkpoint that is not tensors: plain JSON, which comes back exactly as it went in."""

from __future__ import annotations

import json
import math
from typing import Any

from phalanx.errors import CheckpointError
from phalanx.train.checkpoint.manifest import MAX_NESTED, MAX_STATE_BYTES, count_nested

MAX_DEPTH = 64


def render_state(state: dict[str, Any]) -> bytes:
    """The text of state.json. Raises CheckpointError naming the first value that JSON would lose or change."""
    if not isinstance(state, dict):
        raise CheckpointError(f"state is a {type(state).__name__}; a dict is expected")
    _check(state, "state", 0)
    text = json.dumps(state, indent=1, allow_nan=False).encode() + b"\n"
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"state is {len(text)} bytes of JSON, more than {MAX_STATE_BYTES}; save large data as tensors"
        )
    if (nested := count_nested(text)) > MAX_NESTED:
        raise CheckpointError(f"state has {nested:,} objects and lists, more than {MAX_NESTED:,}; save tensors")
    return text


def _check(value: Any, where: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where}: nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, dict):
        for key, entry in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{where}: key {key!r} is a {type(key).__name__}; JSON keys are strings")
            _check(entry, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check(entry, f"{where}[{index}]", depth + 1)
    elif type(value) is float and not math.isfinite(value):
        raise CheckpointError(f"{where}={value} is not a finite number; JSON has no word for it")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(f"{where} is a {type(value).__name__}; use dict, list, str, int, float, bool or None")
