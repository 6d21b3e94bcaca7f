"""The YAML reader: what plain scalars mean, where values stand, and what it refuses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from phalanx.config.document import MAX_BYTES, Document, parse_document, parse_value, plain_scalar, show_value
from phalanx.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2.5E+3", -2500.0),
        ("12", 12),
        ("-1", -1),
        ("524_288", 524288),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
        (".inf", ".inf"),
        ("1e999", "1e999"),
        ("1_", "1_"),
        ("9" * 5000, "9" * 5000),
        ("bf16", "bf16"),
    ],
)
def test_plain_scalars(text: str, value: object) -> None:
    found = plain_scalar(text)
    assert found == value and type(found) is type(value)


def test_quoted_scalars_are_text() -> None:
    assert parse_value("['3', \"true\", 3]") == ["3", "true", 3]


def test_lines_of_values() -> None:
    document = parse_document("a:\n  b: 1\n  c:\n  - x\n  - y: 2\n", "f.yaml")
    assert document.value == {"a": {"b": 1, "c": ["x", {"y": 2}]}}
    lines = document.lines
    assert lines[("a",)] == 1 and lines[("a", "b")] == 2 and lines[("a", "c")] == 3
    assert lines[("a", "c", 0)] == 4 and lines[("a", "c", 1, "y")] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "a is given twice, first on line 1 (f.yaml:3)"),
        ("a:\n  b: 1\n  b: 1", "a.b is given twice, first on line 2 (f.yaml:3)"),
        (
            "a: &x 1\nb: *x",
            "anchors and aliases (&name, *name) are not read in run files; write the value out (f.yaml:1)",
        ),
        ("a: !!int 3", "tags (tag:yaml.org,2002:int) are not read in run files (f.yaml:1)"),
        ("a: !!python/object/apply:os.system [x]", "tags (tag:yaml.org,2002:python/object/apply:os.system)"),
        ("a: 1\n---\nb: 2", "a run file holds one document, here a second one begins (f.yaml:2)"),
        ("? [1]\n: 2", "a field name must be plain text (f.yaml:1)"),
        (
            "a: [1",
            "not valid YAML: expected ',' or ']', but got '<stream end>' while parsing a flow sequence (f.yaml:1)",
        ),
        (
            "a:\n\tb: 1",
            "found character '\\t' that cannot start any token while scanning for the next token (f.yaml:2)",
        ),
        ("a: \x01", "special characters are not allowed"),
        ('a: "\\ud800"', "half of a surrogate pair is not text (f.yaml:1)"),
        ("[" * 5000, "nested more than 20 deep (f.yaml:1)"),
        ("- " * 5000, "nested more than 20 deep (f.yaml:1)"),
        ("x" * (MAX_BYTES + 1), "larger than 256 KiB, which no run file is (f.yaml)"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, "f.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_alias_bomb_is_refused_at_its_first_anchor() -> None:
    bomb = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    with pytest.raises(ConfigError, match=r"anchors and aliases .* \(bomb:1\)"):
        parse_document(bomb, "bomb")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        ("3", '"3"'),
        ("bf16", "bf16"),
        ([1, {"a": "x"}], "[1, {a: x}]"),
        ((0.9, 0.95), "[0.9, 0.95]"),
        ("a\x1b[31m", r"'a\x1b[31m'"),
        ("x" * 100, "x" * 57 + "..."),
    ],
)
def test_shown_values(value: object, shown: str) -> None:
    assert show_value(value) == shown


def test_no_more_of_a_value_is_written_than_is_shown() -> None:
    written = []

    class Item:
        def __str__(self) -> str:
            written.append(self)
            return "item"

    assert show_value([Item()] * 100_000, width=20) == "[item, item, item..."
    assert len(written) < 10


def test_libyaml_reads_what_the_other_parser_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run files of all kinds, and pieces of them with a character more, or with others in place of some."""
    draw = random.Random(0)
    texts = [file.read_text() for file in sorted(Path(__file__).parents[2].glob("examples/*.yaml"))]
    for text in [text[:300] for text in texts] * 20:
        place = draw.randrange(len(text))
        mark = draw.choice(" \n\t:-#'\"[]{},&*!|>%@`?\\\r\x00\x85\u2028\ufeff\ud800é1")
        texts.append(text[:place] + mark + text[place + draw.randint(0, 2) :])
    found = [_read(text) for text in texts]
    monkeypatch.setattr(yaml, "__with_libyaml__", False)
    assert found == [_read(text) for text in texts]
    assert sum(isinstance(one, Document) for one in found) > len(found) / 3


def _read(text: str) -> Document | str:
    try:
        return parse_document(text, "run.yaml")
    except ConfigError as error:
        return str(error)
