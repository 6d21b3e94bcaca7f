"""No input gives anything but a `Run` or a `ConfigError` of short lines, in bounded memory."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.run_text import RUN
from phalanx.config.document import MAX_BYTES, parse_document
from phalanx.config.families import BUILT_IN, find_family
from phalanx.config.fields import all_fields, run_sections
from phalanx.config.load import dump_run, load_run, parse_run
from phalanx.errors import ConfigError
from phalanx.families.language.config import LanguageRun

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {"language": "quickstart.yaml", "weather": "climax-small.yaml", "materials": "materials-three-sources.yaml"}
MOST_MEMORY = 200 * 2**20
"""Bytes that reading a run file, of 256 KiB at most, may take."""
FIELD_NAMES = [name.replace(".N.", ".0.") for name in all_fields(LanguageRun)]
SECTION_NAMES = [section.name for section in run_sections(LanguageRun)]

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
        for section in run_sections(LanguageRun)
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
    field = data.draw(
        st.sampled_from([field for field in all_fields(LanguageRun).values() if field.name.count(".") == 1])
    )
    tree.setdefault(field.parent, {})[field.leaf] = data.draw(values)
    load(yaml.dump(tree))


HOSTILE = (
    *(10**exponent for exponent in (4, 7, 9, 12, 15, 18, 19, 25)),
    -(10**18),
    10**25 + 1,
    1e308,
    5e-324,
    "0" * 100_000,
    "a/" * 5000,
    "a\0b",
    "\x1b[31mred",
    "(" * 5000,
    [1] * 3000,
    [f"v{number}" for number in range(3000)],
    {f"k{number}": number for number in range(3000)},
    {"first": 1, "last": 10**6, "step": 1},
    {"first": 1, "last": 10**18, "step": 1},
    {"low": 1, "high": 10**25},
)


@contextmanager
def bounded_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("family", BUILT_IN)
@settings(quick, max_examples=30)
@given(st.data())
def test_hostile_values_at_any_field(family: str, data: st.DataObject) -> None:
    tree: Any = parse_document((EXAMPLES / FILES[family]).read_text(), FILES[family]).value
    field = data.draw(st.sampled_from(list(all_fields(find_family(family).run).values())))
    node = tree
    *parents, leaf = field.name.replace(".NAME", ".some").split(".")
    for part in parents:
        if part == "N":
            node = node[0] if isinstance(node, list) and isinstance(node[0], dict) else {}
        else:
            node[part] = node.get(part) or {}
            node = node[part]
        if not isinstance(node, dict | list):
            node = {}
    if isinstance(node, dict):
        node[leaf] = data.draw(st.sampled_from(HOSTILE))
    text = json.dumps(tree)
    with bounded_memory():
        load(text)


BOMBS = {
    "aliases": "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\nc: &c [*b, *b, *b, *b]\n",
    "depth": "model: " + "[" * 100_000,
    "depth of mappings": "".join("  " * depth + f"k{depth}:\n" for depth in range(400)),
    "more than a run file holds": "# comment\n" * MAX_BYTES,
    "names": "".join(f"k{number}: 1\n" for number in range(5000)),
    "nothing but brackets": "]" * 200_000,
    "merge keys": "a: {<<: {b: 1}}\n",
    "a long name": "k" * 200_000 + ": 1\n",
    "quotes": '"' * 200_000,
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_bombs(text: str) -> None:
    with bounded_memory(), pytest.raises(ConfigError) as caught:
        parse_run(text, "run.yaml")
    assert all(len(line) < 500 for line in str(caught.value).splitlines())


def test_no_more_of_a_file_is_read_than_a_run_file_has(tmp_path: Path) -> None:
    with (tmp_path / "huge.yaml").open("wb") as file:
        file.truncate(10**9)
    with bounded_memory(), pytest.raises(ConfigError, match="larger than 256 KiB"):
        load_run(tmp_path / "huge.yaml")
