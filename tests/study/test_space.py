"""Conditions that ask for more than a condition should: each ends in a message that names it, in bounded memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.errors import ConfigError
from phalanx.study.space import condition_holds

COLUMNS = {
    "tp": np.asarray([1, 2]),
    "schedule": np.asarray(["gpipe", "1f1b"]),
    "knob": np.asarray([None, "on"], object),
    "unset": np.asarray([None, 3], object),
}
BEYOND = "goes beyond 4,611,686,018,427,387,904"
TEXT = "arithmetic is for numbers, and this has text or a list in it"
REFUSED = {
    "'a' * 10000000000 == 'b'": TEXT,
    "'a' * 10**10 == 'b'": TEXT,
    "[1] * 10000000000 == 1": TEXT,
    "schedule * 1000000000 == 'b'": TEXT,
    "knob * 1000000000 == 'b'": TEXT,
    "'%99999999999d' % 5 == '5'": TEXT,
    "-'a' == 1": TEXT,
    "not " * 400 + "True": "operations nested more than 50 deep",
    "+".join(["1"] * 900) + " == 2": "operations nested more than 50 deep",
    "+".join(["1"] * 20_000) + " == 2": "40,004 characters; a condition has at most 2,000",
    "(" * 900 + "1" + ")" * 900: "is not a condition: too many nested parentheses",
    "1" + "0" * 400 + " == tp": BEYOND,
    "tp" + " * 1000000000" * 3 + " > 1": BEYOND,
    "1000000000 * 1000000000 * 1000000000 > tp": BEYOND,
    "tp == 9223372036854775808": BEYOND,
    "tp // 0 == 1": "division by zero",
    "[1, 2] == tp": "a list stands behind in",
    "tp in [[1]]": "a list stands behind in",
    "[tp]": "is a value, not a condition",
    "unset * 2 > 1": "cannot be computed",
}


@pytest.mark.parametrize(("condition", "message"), REFUSED.items(), ids=lambda text: text[:30])
def test_conditions_beyond_the_bounds(condition: str, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError) as caught:
            condition_holds(condition, COLUMNS, 2)
        assert tracemalloc.get_traced_memory()[1] < 20 * 2**20
    finally:
        tracemalloc.stop()
    told = str(caught.value)
    assert message in told
    assert condition[:20] in told
    assert len(told) < 2500


def test_whole_numbers_never_wrap_around() -> None:
    assert condition_holds("tp * 1000000000 * 1000000000 > 1000000000000000000", COLUMNS, 2).tolist() == [False, True]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text(alphabet="tp()[]+-*/%<>=! 019.'\",notandorine", max_size=60) | st.text(max_size=40))
def test_any_text_is_a_condition_or_an_error(text: str) -> None:
    try:
        found = condition_holds(text, COLUMNS, 2)
    except ConfigError:
        return
    assert found.shape == (2,) and found.dtype == np.bool_
