"""No input gives anything but a `Run` or a `ConfigError` of short lines."""

from typing import Any

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.run_text import RUN
from phalanx.config.fields import all_fields, sections
from phalanx.config.load import dump_run, parse_run
from phalanx.errors import ConfigError

FIELD_NAMES = [name.replace(".N.", ".0.") for name in all_fields()]
SECTION_NAMES = [section.name for section in sections()]

words = st.sampled_from(
    ["auto", "null", "true", "no", "bf16", "gpt2", "mpt-125m", "524288 tokens", ".inf", "1e999", "~", "-1", "0"]
)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(FIELD_NAMES + SECTION_NAMES) | st.text(max_size=12)
written = values.map(
    lambda value: yaml.dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
)
overrides = st.lists(
    st.builds("{}={}".format, names, written | st.text(max_size=20)) | st.text(max_size=20), max_size=4
)

quick = settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def load(text: str, *changes: str) -> None:
    try:
        run = parse_run(text, "run.yaml", changes)
    except ConfigError as error:
        assert str(error).strip()
        assert all(len(line) < 500 for line in str(error).splitlines())
        return
    assert parse_run(dump_run(run), "dump") == run


@quick
@given(overrides)
def test_any_overrides(changes: list[str]) -> None:
    load(RUN, *changes)


@quick
@given(st.text(max_size=200) | st.text(alphabet="ab:-[]{}&*!|>'\"#%@\n ", max_size=80))
def test_any_text(text: str) -> None:
    load(text)
    load(RUN + text)


def run_trees() -> st.SearchStrategy[dict[str, Any]]:
    section_values = {
        section.name: st.dictionaries(st.sampled_from([field.leaf for field in section.fields]), values, max_size=4)
        | values
        for section in sections()
    }
    return st.fixed_dictionaries({}, optional=section_values)


@quick
@given(run_trees())
def test_any_tree(tree: dict[str, Any]) -> None:
    load(yaml.dump(tree, allow_unicode=True))


@quick
@given(st.data())
def test_sound_file_with_one_field_replaced(data: st.DataObject) -> None:
    tree = yaml.safe_load(RUN)
    field = data.draw(st.sampled_from([field for field in all_fields().values() if field.name.count(".") == 1]))
    tree.setdefault(field.parent, {})[field.leaf] = data.draw(values)
    load(yaml.dump(tree))
