"""The data section of a weather run: shorthands, defaults, and what is refused before any file is opened."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from phalanx.config.fields import all_fields
from phalanx.config.schema import Run
from phalanx.families.weather.config import FieldData


class _FieldRun(Run):
    """A run on fields."""

    data: FieldData


def parse(**changes: Any) -> FieldData:
    """A section as a run file gives it, some fields changed."""
    values = {
        "sources": ["era5"],
        "inputs": ["z500", "t850"],
        "lead_hours": 72,
        "splits": {"train": {"first": 1979, "last": "2015-12-31 18:00"}},
        **changes,
    }
    return FieldData.model_validate_json(json.dumps(values))


def test_shorthands_and_defaults() -> None:
    data = parse(sources=["era5", {"path": "cmip", "names": ["z500 = zg500"]}])
    assert [source.path for source in data.sources] == ["era5", "cmip"]
    name = data.sources[1].names[0]
    assert (name.name, name.stored_as, name.scale, name.offset) == ("z500", "zg500", 1.0, 0.0)
    assert data.target_variables == ["z500", "t850"]
    assert data.splits.train.first == "1979"
    assert (data.missing, data.gaps, data.check_units) == ("skip", "refuse", True)


@pytest.mark.parametrize(
    ("lead", "hours"), [(72, [72]), ([72, 24, 24], [24, 72]), ({"first": 6, "last": 24, "step": 6}, [6, 12, 18, 24])]
)
def test_lead_times_include_the_last(lead: object, hours: list[int]) -> None:
    assert parse(lead_hours=lead).leads == hours


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lead_hours": {"first": 6, "last": 20, "step": 6}}, "last=20 is not first=6 plus a multiple of step=6"),
        ({"lead_hours": 0}, "greater than or equal to 1"),
        ({"inputs": ["z500", "z500"]}, "inputs names z500 twice"),
        ({"inputs": ["z500"], "static": ["z500"]}, "inputs names z500 twice"),
        ({"outputs": ["u10", "u10"]}, "outputs names u10 twice"),
        ({"splits": {"train": {"first": "1.1.1979", "last": "2015"}}}, "match pattern"),
        ({"splits": {"train": {"first": "step -1", "last": "step 4"}}}, "match pattern"),
        ({"history": 0}, "greater than or equal to 1"),
        ({"forcings": ["sunshine"]}, "Input should be 'insolation'"),
        ({"sources": []}, "at least 1 item"),
    ],
)
def test_mistakes_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse(**changes)


def test_every_field_is_described_in_the_table_of_fields() -> None:
    fields = {name: field for name, field in all_fields(_FieldRun).items() if name.startswith("data.")}
    assert {"data.sources.N.names.N.stored_as", "data.splits.train.first", "data.lead_hours.step"} <= fields.keys()
    assert all(field.description for field in fields.values())
    assert fields["data.missing"].choices == ("skip", "refuse", "mask")
