"""Plain JSON: written so that it comes back exactly as it went in, and read without trusting who wrote it."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

from phalanx.errors import CheckpointError

MAX_STATE_BYTES = 1 << 24
MAX_NESTED = 200_000
"""Objects and lists in a state, or in any short text. They are what makes JSON slow to read: many fit in few bytes."""
MAX_DEPTH = 64


def render_state(state: dict[str, Any]) -> bytes:
    """Return the text of state.json. Raises CheckpointError naming the first value that JSON would lose or change."""
    if not isinstance(state, dict):
        raise CheckpointError(f"state is a {type(state).__name__}; a dict is expected")
    _check_value(state, "state", 0)
    text = json.dumps(state, indent=1, allow_nan=False).encode() + b"\n"
    # What a reader would refuse must not be written: the run would find out only when it resumes.
    if len(text) > MAX_STATE_BYTES:
        raise CheckpointError(
            f"state is {len(text)} bytes of JSON, more than {MAX_STATE_BYTES}; save large data as tensors"
        )
    if (nested := count_nested(text)) > MAX_NESTED:
        raise CheckpointError(f"state has {nested:,} objects and lists, more than {MAX_NESTED:,}; save tensors")
    return text


def _check_value(value: Any, where: str, depth: int) -> None:
    """Refuse what is not a JSON value; `where` names it as the user would write it."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"{where}: nested more than {MAX_DEPTH} deep, or contains itself")
    if isinstance(value, dict):
        for key, entry in value.items():
            if type(key) is not str:
                raise CheckpointError(f"{where}: key {key!r} is a {type(key).__name__}; JSON keys are strings")
            _check_value(entry, f"{where}.{key}", depth + 1)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            _check_value(entry, f"{where}[{index}]", depth + 1)
    elif type(value) is float and not math.isfinite(value):
        raise CheckpointError(f"{where}={value} is not a finite number; JSON has no word for it")
    # By exact type: json.dumps writes subclasses, such as NumPy's float64, which come back as plain numbers.
    elif value is not None and type(value) not in (str, int, float, bool):
        raise CheckpointError(f"{where} is a {type(value).__name__}; use dict, list, str, int, float, bool or None")


def parse_json(text: bytes, *, max_nested: int) -> Any:
    """Return the JSON value that `text` holds. Raises ValueError for anything else, also for a repeated key and for NaN.

    max_nested: objects and lists it may have; counted in the text, so that nothing is built of a text with more.
    """
    nested = count_nested(text)
    if nested > max_nested:
        raise ValueError(f"{nested:,} objects and lists, more than the {max_nested:,} it may have")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None


def count_nested(text: bytes) -> int:
    """Return the most objects and lists that JSON `text` can hold: brackets within strings count as well."""
    return text.count(b"{") + text.count(b"[")


def max_nested_of_table(text: bytes | bytearray) -> int:
    """Return the objects and lists that a manifest or header of this length may have.

    Each of its lines says far more than brackets, so a text of little else is not a table of contents.
    """
    return max(MAX_NESTED, len(text) // 8)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last of two equal keys, other readers the first: such a text has no one meaning.
    unique = dict(pairs)
    if len(unique) != len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {repeated[:80]!r} appears twice")
    return unique


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
