"""The `data` section of a run file for gridded fields in time: weather and climate.

Pure description: which stores, which variables, which times. What the values do stands in `data.fields`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from phalanx.config.bounds import Hours, NonNegativeInt, PathText, first_repeated
from phalanx.config.section import Section, Words

_MOMENT = r"^(step \d+|\d{4}(-\d{2}(-\d{2}([ T]\d{2}(:\d{2})?)?)?)?)$"
_RENAMED = re.compile(r"\s*([^\s=]+)\s*=\s*([^\s=]+)\s*")


def _moment_text(value: object) -> object:
    """A year, which YAML reads as a number, as text."""
    return f"{value:04}" if isinstance(value, int) and not isinstance(value, bool) else value


def _name_from_text(value: object) -> object:
    match = _RENAMED.fullmatch(value) if isinstance(value, str) else None
    return {"name": match[1], "stored_as": match[2]} if match else value


def _source_from_path(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


Moment = Annotated[
    Annotated[str, Field(pattern=_MOMENT)],
    BeforeValidator(_moment_text),
    Words('a date as in 2015, 2015-12, 2015-12-31 or "2015-12-31 18:00", or a time step as in "step 479"'),
]


class Period(Section):
    """A stretch of time, both ends included. A date that leaves out its month, day or hour stands for all of it."""

    first: Moment
    """First date, or time step of the source (the first is step 0)."""
    last: Moment
    """Last date or time step."""


class Splits(Section):
    """Which times are for what. Input and target of a sample both lie in one split."""

    train: Period
    """Times the model, the normalisation and the climatology learn from."""
    validation: Period | None = None
    """Times scored during training."""
    test: Period | None = None
    """Times scored once, at the end."""


class LeadRange(Section):
    """Lead times at equal distances."""

    first: Hours
    """Shortest lead time in hours."""
    last: Hours
    """Longest lead time in hours; drawn as often as the others."""
    step: Hours
    """Hours between lead times."""

    @model_validator(mode="after")
    def _ordered(self) -> LeadRange:
        if self.last < self.first or (self.last - self.first) % self.step:
            raise ValueError(f"last={self.last} is not first={self.first} plus a multiple of step={self.step}")
        return self


class FieldName(Section):
    """What a variable of the run is called in one source, and how its numbers become those of the run."""

    name: str
    """Its name in the run."""
    stored_as: str
    """Its name in the files; a trailing number is a pressure level in hPa where the files have a level dimension."""
    scale: float = 1.0
    """Factor on the stored numbers: 9.80665 makes geopotential of geopotential height."""
    offset: float = 0.0
    """Added after the factor: 273.15 makes kelvin of degrees Celsius."""


class FieldSource(Section):
    """One store of fields and its share of the training samples."""

    path: PathText
    """A folder made by `phalanx data prepare-fields`, a netCDF file, a zarr store, a folder or pattern of such, or a
    folder of ClimaX shards."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of the samples drawn from this source, relative to the other sources' weights."""
    names: Annotated[
        list[Annotated[FieldName, BeforeValidator(_name_from_text)]],
        Words('a list, each "name in the run=name in the files" or a mapping with name, stored_as, scale and offset'),
    ] = Field(default=[])
    """Variables whose names or units differ in this source."""
    static_path: PathText | None = None
    """File of the static fields, where they lie apart; null looks for them beside the variables."""
    time_dim: str | None = None
    """Name of the time dimension, where it is not one of the usual."""
    time_units: str | None = None
    """What the numbers of the time dimension count, as in "hours since 1996-01-05"; null takes the file's word."""
    calendar: str | None = None
    """Calendar of those numbers, as in standard, noleap or 360_day; null takes the file's word."""
    step_hours: Hours | None = None
    """Hours between frames of ClimaX shards, which do not say; null works it out from the frames in a year."""


class FieldData(Section):
    """Fields a weather or climate model is trained on."""

    sources: Annotated[
        list[Annotated[FieldSource, BeforeValidator(_source_from_path)]],
        Field(min_length=1),
        Words("a list of at least one, each a path or a mapping with path and weight"),
    ]
    """Where the fields come from; a plain path stands for a source of weight 1. All have the run's variables and grid."""
    inputs: Annotated[list[str], Field(min_length=1)]
    """Variables the model reads, as in z500 (z at the 500 hPa level) or 2m_temperature."""
    outputs: Annotated[list[str], Field(min_length=1)] | None = None
    """Variables it predicts; null predicts the inputs."""
    static: list[str] = Field(default=[])
    """Fields without time that the model reads too, after the inputs: orography, land-sea mask."""
    history: Literal[1] = 1
    """Times the model reads for one sample."""
    lead_hours: Annotated[
        Hours | Annotated[list[Hours], Field(min_length=1)] | LeadRange,
        Words("hours, a list of hours, or a mapping with first, last and step"),
    ]
    """Hours from input to target; of several, each sample draws one at random."""
    rollout_hours: Hours | None = None
    """Lead time of one step of a roll-out, for fine-tuning: every lead time is then made of such steps, each starting from
    the one before, and the last one learns; null predicts every lead time in one step."""
    splits: Splits
    """Which times are for what."""
    gap_hours: NonNegativeInt | None = None
    """Hours that must lie between two splits; null asks for the longest lead time."""
    time_tolerance_hours: Annotated[float, Field(ge=0.0)] = 0.0
    """How far a target may lie from its lead time; monthly means need it, as months differ in length."""
    statistics: PathText | None = None
    """File of means and standard deviations to normalise by, as of the run a model was pre-trained in; null takes those of
    the whole training split."""
    climatology: Period | None = None
    """Times the climatology is the mean of; null takes the training split."""
    climatology_days: Annotated[int, Field(ge=1, le=183)] = 61
    """Days of the year that each day of the climatology is averaged over, itself in the middle."""
    gaps: Literal["refuse", "skip"] = "refuse"
    """What a hole in the time axis does: end the run, or only leave out the samples that would need it."""
    missing: Literal["skip", "refuse", "mask"] = "skip"
    """What a frame with more missing points than usual does: leave out its samples (their number is logged), end the run,
    or train on the points that are there. Points that never have a value are masked in any case."""
    check_units: bool = True
    """Whether files, sources and statistics that differ as if in other units or upside down are refused."""
    cache_mb: NonNegativeInt = 512
    """Memory for pieces of compressed files that were read, in MB."""
    prefetch: Annotated[int, Field(ge=0, le=64)] = 2
    """Batches read ahead in the background; 0 reads in the training loop."""

    @model_validator(mode="after")
    def _distinct(self) -> FieldData:
        for field, names in (("inputs", [*self.inputs, *self.static]), ("outputs", self.target_variables)):
            twice = first_repeated(names)
            if twice is not None:
                raise ValueError(f"{field} names {twice} twice")
        return self

    @property
    def target_variables(self) -> list[str]:
        """Variables predicted, the default resolved."""
        return self.inputs if self.outputs is None else self.outputs

    @property
    def leads(self) -> list[int]:
        """The lead times in hours, ascending."""
        if isinstance(self.lead_hours, LeadRange):
            return list(range(self.lead_hours.first, self.lead_hours.last + 1, self.lead_hours.step))
        return [self.lead_hours] if isinstance(self.lead_hours, int) else sorted(set(self.lead_hours))
