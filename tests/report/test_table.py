"""Tables as text and as Markdown: widths, columns that give way, and lines that fit."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.report.table import Column, write_markdown_table, write_text_table

Row = dict[str, Any]
ROWS: list[Row] = [{"name": "a", "size": 1, "words": "one two three"}, {"name": "long", "size": 12345, "words": ""}]
NAME: Column[Row] = Column("name", lambda row: row["name"], "left")
SIZE: Column[Row] = Column("size", lambda row: row["size"])
WORDS: Column[Row] = Column("words", lambda row: row["words"], "left")


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert write_text_table([NAME, SIZE, WORDS], ROWS, indent="  ") == [
        "  name   size  words",
        "  a         1  one two three",
        "  long  12345",
    ]
    assert write_text_table([SIZE], ROWS, heads=False) == ["    1", "12345"]


def test_a_table_without_rows_has_its_heads() -> None:
    assert write_text_table([NAME, SIZE], []) == ["name  size"]


def test_rows_may_be_numbered() -> None:
    assert write_text_table([NAME], ROWS, numbered=True) == ["   name", "1  a", "2  long"]


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (None, "name  exact  size  rare"),
        (23, "name  exact  size  rare"),
        (22, "name  exact  size"),
        (16, "name  short"),
        (3, "name  short"),
    ],
)
def test_columns_that_matter_least_give_way_first(width: int | None, heads: str) -> None:
    columns: list[Column[Row]] = [
        NAME,
        Column("exact", lambda row: "x", gives_way=1, narrow=Column("short", lambda row: "x")),
        Column("size", lambda row: "1", gives_way=1),
        Column("rare", lambda row: "x", gives_way=2),
    ]
    assert write_text_table(columns, ROWS, width=width)[0].split() == heads.split()


def test_the_last_column_is_folded_below_itself() -> None:
    rows: list[Row] = [{"name": "a", "words": "one two three four five six seven eight nine ten"}]
    lines = write_text_table([NAME, WORDS], rows, width=30, folded=True)
    assert max(map(len, lines)) <= 30 and len(lines) > 2
    assert all(line.startswith("      ") for line in lines[2:])
    assert " ".join(" ".join(lines[1:]).split()) == "a one two three four five six seven eight nine ten"


def test_markdown_says_on_which_side_numbers_stand() -> None:
    assert list(write_markdown_table([NAME, SIZE], ROWS)) == [
        "| name | size |",
        "| --- | ---: |",
        "| a | 1 |",
        "| long | 12345 |",
    ]


def test_a_page_knows_the_classes_of_a_cell() -> None:
    column: Column[Row] = Column("size", lambda row: row["size"], style=lambda row: "big" if row["size"] > 9 else "")
    assert [column.classes(row) for row in ROWS] == ["right", "right big"]
