"""Cells of a table of measured runs: numbers, devices and number formats.

Cells may be blank. A row whose cells hold what they should not cannot be used, which is not an error of the table.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from phalanx.errors import DataError

Precision = Literal["bf16", "fp16", "fp32", "fp8-tensor", "fp8-row", "fp8-row-experts", "fp8-block", "mxfp8"]

COLUMNS = (
    *("row_id", "group", "system", "framework", "status", "gpu", "n_gpus"),
    *("model", "family", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"),
    *("tp", "pp", "vpp", "dp", "cp", "zero_stage", "sharding", "mbs", "gbs", "grad_accum", "precision", "recompute"),
    *("tokens_per_s_per_gpu", "step_time_s", "samples_per_s", "mem_per_gpu", "mem_unit"),
)
"""Columns that are read; the header holds them in any order, with others beside them."""

_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?|[-+]?(nan|inf|infinity)", re.IGNORECASE | re.ASCII)
_LARGEST_COUNT = 10**8
"""No count of a run is larger; the elements of a tensor with two of them are still a number."""


class Unusable(Exception):
    """Why a row cannot be used, in one sentence."""


@dataclass
class Row:
    """One row: blank cells are not there, and what had to be assumed is collected."""

    line: int
    cells: Mapping[str, str]
    assumed: list[str] = field(default_factory=list)
    """What the row does not state and was filled in, a few words each."""

    def text(self, column: str) -> str:
        """Return the words of a cell, "" where it is blank."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """Return a positive number, or None where the cell is blank or holds words instead.

        "51200?" is 51200, assumed. Raises Unusable for a number that cannot be: zero, negative, infinite or not a number.
        """
        text = self.text(column)
        if not _NUMBER.fullmatch(text.removesuffix("?")):
            return None
        value = float(text.removesuffix("?"))
        if not (math.isfinite(value) and value > 0):
            raise self._wrong(column, "not a positive number")
        if text.endswith("?"):
            self.assumed.append(f"{column}={text.removesuffix('?')}")
        return value

    def whole(self, column: str) -> int | None:
        """Return a positive whole number, or None.

        Raises Unusable as `number` does, and for one not whole or beyond any run.
        """
        value = self.number(column)
        if value is not None and value != int(value):
            raise self._wrong(column, "not whole")
        if value is not None and value > _LARGEST_COUNT:
            raise self._wrong(column, f"more than {_LARGEST_COUNT:,}")
        return None if value is None else int(value)

    def _wrong(self, column: str, what: str) -> Unusable:
        return Unusable(
            f"line {self.line}, column {column}: {self.text(column)} is {what}; correct it, or leave the cell blank where "
            "the figure is not known"
        )

    def wholes(self, *columns: str) -> list[int]:
        """Return the whole numbers of these columns. Raises Unusable naming those that are blank or hold words."""
        found = {column: self.whole(column) for column in columns}
        words = [f"{column} as '{self.text(column)}'" for column, value in found.items() if value is None]
        blank = [column for column, value in found.items() if value is None and not self.text(column)]
        if blank:
            raise Unusable(f"the source does not state {', '.join(blank)}")
        if words:
            raise Unusable(f"the source gives {', '.join(words)}, not one number")
        return [value for value in found.values() if value is not None]


def read_rows(path: Path, columns: Sequence[str] = COLUMNS) -> Iterator[Row]:
    """Read the rows of a table whose header holds `columns`. Raises DataError as `runs.read_runs` does."""
    try:
        # Spreadsheets put a mark before the header, and rows of empty cells behind the last one.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            missing = [column for column in columns if column not in header]
            if missing:
                raise DataError(f"{path}: the header lacks {', '.join(missing)}")
            seen: set[str] = set()
            for cells in reader:
                if not any(map(str.strip, cells)):
                    continue
                if len(cells) != len(header):
                    raise DataError(f"{path}, line {reader.line_num}: {len(cells)} cells under {len(header)} columns")
                filled = {column: cell.strip() for column, cell in zip(header, cells, strict=True) if cell.strip()}
                row = Row(reader.line_num, filled)
                name = row.text("row_id")
                if not name or name in seen:
                    found = f"row_id '{name}' stands twice" if name else "row_id is blank"
                    raise DataError(f"{path}, line {reader.line_num}: {found}; give every row a name of its own")
                seen.add(name)
                yield row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read as a table of measured runs: {error}") from error


_DEVICES = (
    ("mi355x", "MI355X"),
    ("mi325x", "MI325X"),
    ("mi300x", "MI300X"),
    ("mi250x", "MI250X GCD"),
    ("mi250", "MI250 GCD"),
    ("gb300", "GB300"),
    ("gb200", "GB200"),
    ("gh200", "GH200"),
    ("b300", "B300"),
    ("b200", "B200"),
    ("h200", "H200"),
    # An H100 of its own: slower memory, and run at 500 W. What fits it does not fit the usual one.
    ("h100-9", "H100-96GB-HBM2e"),
    ("h100", "H100 SXM"),
    ("a100-40", "A100-40GB"),
    ("a100", "A100-80GB"),
    ("v100", "V100"),
)
"""Our name of a device by what its lower-case name in a table begins with; the first that fits."""
_SEVERAL = re.compile(r"/| and |,")


def device_of(row: Row) -> tuple[str, int]:
    """Return our name of the row's device, and how many of them the row counts as one: two for modules of two GCDs.

    Raises Unusable where no single known device is named, or it is not said what the row counts.
    """
    stated = row.text("gpu")
    name = next((name for start, name in _DEVICES if stated.lower().startswith(start)), None)
    if not stated or name is None or _SEVERAL.search(stated.split("(")[0]):
        raise Unusable(f"the device '{stated}' is not one that is known" if stated else "the source names no device")
    if stated.lower() == "a100":
        row.assumed.append("80 GB a device")
    unit = row.text("gpu_unit").lower()
    # A module of two GCDs counts as one device in some tables and as two in others.
    if name.startswith("MI250") and not unit and not stated.lower().endswith("gcd"):
        raise Unusable("it is not said whether figures are for modules or for GCDs")
    return name, 2 if unit.startswith("module") else 1


def precision_of(row: Row) -> Precision:
    """Return the number format of the arithmetic. Raises Unusable for integers and 4 bits, and where none is stated.

    8-bit floating point with no more words is taken for one scale a tensor, which most programs have.
    """
    stated = row.text("precision").lower()
    if re.search(r"fp4|float4|int8", stated):
        raise Unusable(f"it computes in a format that no recipe has ({row.text('precision')})")
    for recipe in ("mxfp8", "fp8-row", "fp8-block"):
        if recipe in stated:
            return recipe
    if re.search(r"fp8|float8", stated):
        return "fp8-tensor"
    for precision in ("bf16", "fp16", "fp32"):
        if precision in stated:
            return precision
    raise Unusable("the source does not state the number format" if not stated else f"unknown number format '{stated}'")


def replicas_of(row: Row, data_ranks: int) -> int:
    """Return the copies of the whole (sharded) model among the data-parallel ranks: of `shard 8 x replicate 4` four.

    Raises Unusable where shards and replicas are not the data-parallel ranks.
    """
    words = re.search(r"shard (\d+) x replicate (\d+)|fsdp (\d+) x ddp (\d+)", row.text("sharding").lower())
    if not words:
        return 1
    shards, replicas = (int(number) for number in words.groups() if number)
    # Where words and numbers of a row disagree, neither can be trusted.
    if shards * replicas != data_ranks:
        raise Unusable(f"{shards} shards x {replicas} replicas are not the {data_ranks} data-parallel ranks stated")
    return replicas
