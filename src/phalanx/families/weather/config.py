"""The run file of the weather family: its model and data sections, and what of them does not fit together.

Pure description, without torch. The defaults of the model are ClimaX as published (Nguyen et al. 2023, arXiv:2301.10343);
whatever departs from it is an option that is off. What the values of the data section do stands in `data/`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from phalanx.config.families import Family
from phalanx.config.model import BlockModel
from phalanx.config.problems import Problem
from phalanx.config.schema import Run
from phalanx.config.section import (
    HiddenWidth,
    Hours,
    Layers,
    NonNegativeInt,
    PathText,
    PositiveInt,
    Section,
    Width,
    Words,
    first_repeated,
)

Latitude = Annotated[float, Field(ge=-90.0, le=90.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]


def _tuple_from_list(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_tuple_from_list), Field(min_length=1)]
Numbers = Annotated[tuple[PositiveFloat, ...], BeforeValidator(_tuple_from_list), Field(min_length=1)]
States = Annotated[int, Field(ge=1, le=64)]
Forcing = Literal["insolation", "cos_local_time", "sin_local_time", "cos_julian_day", "sin_julian_day"]
"""Fields that are known for every time, under the names of anemoi-datasets; see `data.forcings`."""


_SAME_BOUNDS = 0.01
"""Degrees by which grids of one model may end apart: files round the latitudes of their rows."""


class ModelGrid(Section):
    """A grid beside the model's own, on which some of the data lie: its patches have the same edge."""

    name: Annotated[str, Field(min_length=1)]
    """Name that sources of the data call it by."""
    n_lat: Width
    """Rows of the grid."""
    n_lon: Width
    """Columns of the grid."""
    first_latitude: Latitude | None = None
    """Latitude of the first row's points in degrees; null, with last_latitude, is a grid whose cells span the globe."""
    last_latitude: Latitude | None = None
    """Latitude of the last row's points in degrees."""


class WeatherModel(BlockModel):
    """One Vision Transformer over gridded fields. Presets (`model.preset`) fill every field but a few."""

    family: Literal["weather"] = "weather"
    """Model family."""
    n_layers: Layers
    """Transformer blocks."""
    d_model: Width
    """Width of a token."""
    n_heads: Width
    """Attention heads, of the blocks and of the variable aggregation."""
    d_ff: HiddenWidth | None = None
    """Hidden width of the MLP; null means 4 * d_model."""
    n_lat: Width
    """Rows of the grid."""
    n_lon: Width
    """Columns of the grid."""
    patch_size: Width
    """Edge of a square patch in grid points. Where it does not divide n_lat or n_lon, the last row or column is repeated
    to whole patches, and what is predicted there is left out."""
    first_latitude: Latitude | None = None
    """Latitude of the first row's points in degrees; null, with last_latitude, is a grid whose cells span the globe."""
    last_latitude: Latitude | None = None
    """Latitude of the last row's points in degrees."""
    grids: Annotated[
        tuple[ModelGrid, ...], BeforeValidator(_tuple_from_list), Words("a list of mappings with name, n_lat and n_lon")
    ] = ()
    """Further grids, each with a name for data.sources.N.grid. The same parameters compute on all of them: the table of
    learned positions is that of the grid above, and interpolated for others."""
    variables: Names
    """Variables the model has parameters for; pressure levels as in temperature_850 (hPa)."""
    inputs: Names | None = None
    """Variables it reads, in the order of the fields; null means all."""
    outputs: Names | None = None
    """Variables it predicts, in the order of the targets; null means all."""
    history: States = 1
    """States of the inputs that it reads, the newest and those before it; the patch embedding has weights for each."""
    aggregation: Literal["flat", "hierarchical"] = "flat"
    """How a location's variables become tokens: one attention over all of them, or one over groups and one over those."""
    aggregation_groups: Width = 1
    """Groups of consecutive inputs that hierarchical aggregation first makes one token each."""
    aggregation_queries: Width = 1
    """Tokens a location keeps after aggregation."""
    decoder_depth: Annotated[int, Field(ge=0, le=10_000)] = 2
    """Hidden layers of the head."""
    absent_inputs: Literal["mean", "masked"] = "mean"
    """What the aggregation makes of a variable that a sample lacks, whose field is at the mean throughout: a token of that
    field, or none, so that the others share the attention."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before the product."""
    norm_eps: PositiveFloat = 1e-5
    """Term under the square root of the normalisation."""
    position_embedding: Literal["learned", "fourier"] = "learned"
    """A learned table for one grid, or features of each patch's place and area on the sphere."""
    lead_embedding: Literal["linear", "fourier"] = "linear"
    """Lead time as one number (hours / 100), or as waves of many lengths."""
    level_embedding: Literal["none", "fourier"] = "none"
    """Whether tokens of pressure-level variables also carry waves of the pressure."""
    prediction: Literal["state", "change"] = "state"
    """What the head gives: the fields themselves, or their change since the inputs (then outputs are among inputs)."""
    change_scales: Numbers | None = None
    """Size of a typical change of each output, in the units of the (normalised) fields; null means 1."""
    latitude_weights: Literal["cos", "area"] = "cos"
    """Weights of the loss: cosine of the latitude, or exact areas of the cells."""
    loss_weights: Numbers | None = None
    """Weight of each output in the loss; null means 1."""
    loss: Literal["mse", "crps"] = "mse"
    """Loss of one forecast, its squared error, or of an ensemble of members: the almost fair continuous ranked probability
    score (AIFS-CRPS, arXiv:2412.15832)."""
    members: Annotated[int, Field(ge=1, le=64)] = 1
    """Members that are forecast of each sample in training, each a row of the micro-batch; with loss=crps 2 or more."""
    noise_channels: Annotated[int, Field(ge=0, le=1024)] = 0
    """Random numbers of each token, by which the norms of all blocks scale and shift: what makes members differ. 0 has none,
    with loss=crps 1 or more."""
    crps_alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """Share of the fair score in loss=crps: 1 is the fair one, to which two equal members hide what the others do; 0 that of
    the members' empirical distribution."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Dropout on the embedding and on both residual branches."""
    drop_path: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Chance that a sample skips a residual branch of the last block; it grows linearly from 0 in the first."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of initial weights."""

    @model_validator(mode="after")
    def _shape_fits(self) -> WeatherModel:
        if self.d_model % self.n_heads:
            raise ValueError(f"n_heads={self.n_heads} does not divide d_model={self.d_model}; change one")
        if self.patch_size > min(self.n_lat, self.n_lon):
            raise ValueError(
                f"patch_size={self.patch_size} is more than n_lat={self.n_lat} or n_lon={self.n_lon}; a patch lies "
                "within the grid"
            )
        if self.position_embedding == "learned" and self.d_model % 4:
            raise ValueError(
                f"learned positions start from waves and need a multiple of 4 as d_model, not {self.d_model}"
            )
        if self.d_model % 2:
            raise ValueError(f"variable embeddings start from waves and need an even d_model, not {self.d_model}")
        return self

    @model_validator(mode="after")
    def _latitudes_fit(self) -> WeatherModel:
        if (self.first_latitude is None) != (self.last_latitude is None):
            raise ValueError("give both first_latitude and last_latitude, or neither")
        if self.first_latitude is not None and self.first_latitude == self.last_latitude:
            raise ValueError(f"first_latitude and last_latitude are both {self.first_latitude}; rows must differ")
        if self.first_latitude is not None and self.n_lat == 1:
            raise ValueError("n_lat=1 leaves the height of a row unknown; leave out first_latitude and last_latitude")
        if self.position_embedding == "fourier" and self.first_latitude is not None and self.last_latitude is not None:
            # Cells reach half a row beyond the outer points, whose latitudes are rounded in files.
            half = abs(self.last_latitude - self.first_latitude) / (self.n_lat - 1) / 2
            south, north = sorted((self.first_latitude, self.last_latitude))
            if south - half > -89.999 or north + half < 89.999:
                raise ValueError(
                    "position_embedding=fourier places patches on the whole globe, and rows from "
                    f"{self.first_latitude} to {self.last_latitude} degrees do not span it; use learned"
                )
        return self

    @model_validator(mode="after")
    def _grids_fit(self) -> WeatherModel:
        _no_repeats("grids", tuple(grid.name for grid in self.grids))
        for grid in self.grids:
            try:
                other = self._with_grid(grid)
            except ValidationError as error:
                # As the same fields of the model are refused.
                raise ValueError(
                    f"grids, {grid.name}: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
                ) from None
            mine, theirs = self.latitude_bounds, other.latitude_bounds
            if max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) > _SAME_BOUNDS:
                raise ValueError(
                    f"grids, {grid.name}: its rows span {theirs[0]:g} to {theirs[1]:g} degrees, those of the model "
                    f"{mine[0]:g} to {mine[1]:g}; places of one model lie on one part of the globe, in one order"
                )
        return self

    def with_grids(self, grids: Sequence[ModelGrid]) -> WeatherModel:
        """Return the model with these further grids alone, checked. Raises ValidationError."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, "grids": tuple(grids)})

    def _with_grid(self, grid: ModelGrid) -> WeatherModel:
        """Return the model with this grid in the place of its own, checked. Raises ValidationError."""
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).model_validate({**fields, **grid.model_dump(exclude={"name"}), "grids": ()})

    @model_validator(mode="after")
    def _variables_fit(self) -> WeatherModel:
        _no_repeats("variables", self.variables)
        for field, names in (("inputs", self.input_names), ("outputs", self.output_names)):
            _no_repeats(field, names)
            _all_among(field, names, "variables", self.variables)
        if self.prediction == "change":
            _all_among(
                "outputs", self.output_names, "inputs", self.input_names, " (prediction=change adds to the inputs)"
            )
        for field, numbers in (("change_scales", self.change_scales), ("loss_weights", self.loss_weights)):
            if numbers is not None and len(numbers) != len(self.output_names):
                raise ValueError(
                    f"{field} has {len(numbers)} numbers for {len(self.output_names)} outputs; give one each"
                )
        if self.prediction == "state" and self.change_scales is not None:
            raise ValueError("change_scales has no effect with prediction=state; set it to null")
        return self

    @model_validator(mode="after")
    def _members_fit(self) -> WeatherModel:
        if self.loss == "crps":
            if self.members == 1:
                raise ValueError("loss=crps compares members of an ensemble and members is 1; give 2 or more")
            if not self.noise_channels:
                raise ValueError("loss=crps needs noise, without which members are equal; give noise_channels, 4 say")
            return self
        for field in ("members", "noise_channels", "crps_alpha"):
            default = type(self).model_fields[field].default
            if getattr(self, field) != default:
                raise ValueError(
                    f"{field}={getattr(self, field)} is for ensembles and loss is mse; give loss=crps, or {field}={default}"
                )
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> WeatherModel:
        if self.aggregation == "flat" and self.aggregation_groups > 1:
            raise ValueError(
                f"aggregation_groups={self.aggregation_groups} has no effect with aggregation=flat; use hierarchical"
            )
        if self.aggregation_groups > len(self.input_names):
            raise ValueError(
                f"aggregation_groups={self.aggregation_groups} is more than the {len(self.input_names)} inputs; "
                "each group needs one"
            )
        return self

    @property
    def ff_size(self) -> int:
        """Return the hidden width of the MLP, the default resolved."""
        return self.d_ff or 4 * self.d_model

    @property
    def head_size(self) -> int:
        """Return the width of one head."""
        return self.d_model // self.n_heads

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the variables read, the default resolved."""
        return self.inputs or self.variables

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the variables predicted, the default resolved."""
        return self.outputs or self.variables

    @property
    def patch_rows(self) -> int:
        """Return the rows of patches; the last one may reach beyond the grid."""
        return -(-self.n_lat // self.patch_size)

    @property
    def patch_columns(self) -> int:
        """Return the columns of patches; the last one may reach beyond the grid."""
        return -(-self.n_lon // self.patch_size)

    @property
    def n_locations(self) -> int:
        """Return the number of patches of the grid."""
        return self.patch_rows * self.patch_columns

    @property
    def n_tokens(self) -> int:
        """Return the tokens of a sample between blocks: `aggregation_queries` a patch."""
        return self.n_locations * self.aggregation_queries

    @property
    def latitude_bounds(self) -> tuple[float, float]:
        """Return the latitudes at which the cells of the first and of the last row end, in degrees; at most the poles."""
        if self.first_latitude is None or self.last_latitude is None:
            return -90.0, 90.0
        half = (self.last_latitude - self.first_latitude) / (self.n_lat - 1) / 2
        first, last = self.first_latitude - half, self.last_latitude + half
        return min(max(first, -90.0), 90.0), min(max(last, -90.0), 90.0)

    def on_grid(self, grid: ModelGrid | None) -> WeatherModel:
        """Return what describes the model's fields, patches and tokens on `grid`; None means its own.

        Its parameters are those of the model: a learned table of positions keeps the model's own grid.
        """
        if grid is None:
            return self
        if grid not in self._on_grids:
            self._on_grids[grid] = self._with_grid(grid)
        return self._on_grids[grid]

    @cached_property
    def _on_grids(self) -> dict[ModelGrid, WeatherModel]:
        return {}

    def grid_named(self, name: str | None) -> ModelGrid | None:
        """Return one of the further grids by its name, None for None, which is the model's own. Raises KeyError."""
        return None if name is None else {grid.name: grid for grid in self.grids}[name]

    @property
    def rows_per_sample(self) -> int:
        """Return the rows of a micro-batch that the blocks compute for each sample: its members."""
        return self.members

    @property
    def random_drops(self) -> bool:
        """Return whether a training step leaves anything out at random."""
        return self.dropout > 0.0 or self.drop_path > 0.0


def _no_repeats(field: str, names: tuple[str, ...]) -> None:
    repeated = first_repeated(names)
    if repeated is not None:
        raise ValueError(f"{field} names {repeated} more than once; name each variable once")


def _all_among(field: str, names: tuple[str, ...], other: str, known: tuple[str, ...], why: str = "") -> None:
    there = frozenset(known)
    unknown = next((name for name in names if name not in there), None)
    if unknown is not None:
        raise ValueError(f"{field} names {unknown}, which is not among {other}{why}; add it there or leave it out")


_MOMENT = r"^(step \d+|\d{4}(-\d{2}(-\d{2}([ T]\d{2}(:\d{2})?)?)?)?)$"
_RENAMED = re.compile(r"\s*([^\s=]+)\s*=\s*([^\s=]+)\s*")


def _name_from_text(value: object) -> object:
    match = _RENAMED.fullmatch(value) if isinstance(value, str) else None
    return {"name": match[1], "stored_as": match[2]} if match else value


Moment = Annotated[
    Annotated[str, Field(pattern=_MOMENT)],
    # YAML reads a year as a number.
    BeforeValidator(lambda value: f"{value:04}" if isinstance(value, int) and not isinstance(value, bool) else value),
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
        over = (self.last - self.first) % self.step
        if self.last < self.first or over:
            nearest = f"; take last={self.last - over}" if self.last > self.first else ""
            raise ValueError(f"last={self.last} is not first={self.first} plus a multiple of step={self.step}{nearest}")
        return self


class RolloutSteps(Section):
    """How many steps the roll-outs have that are trained through; they grow by one at a time."""

    first: Annotated[int, Field(ge=1, le=1000)]
    """Steps at the beginning of training."""
    last: Annotated[int, Field(ge=1, le=1000)]
    """Most steps."""
    every: PositiveInt
    """Optimizer steps after which roll-outs get one step longer."""

    @model_validator(mode="after")
    def _ordered(self) -> RolloutSteps:
        if self.last < self.first:
            raise ValueError(f"last={self.last} is less than first={self.first}; roll-outs grow, so give first <= last")
        return self

    def of_step(self, step: int) -> int:
        """Return the steps of the roll-outs of optimizer step `step`, counted from 1."""
        return min(self.last, self.first + (step - 1) // self.every)

    def shares(self, steps: int) -> dict[int, float]:
        """Return the lengths of the roll-outs of the first `steps` optimizer steps, each with its share of these steps."""
        # The lengths before the last one take `every` optimizer steps each.
        begins = [min(steps, number * self.every) for number in range(self.last - self.first + 1)]
        ends = [*begins[1:], steps]
        counts = {
            self.first + number: end - begin for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
        }
        return {length: count / steps for length, count in counts.items() if count}


def _constant_steps(value: object) -> object:
    constant = isinstance(value, int) and not isinstance(value, bool)
    return {"first": value, "last": value, "every": 1} if constant else value


class FieldName(Section):
    """What a variable of the run is called in one source, and how its numbers become those of the run."""

    name: str
    """Name of the field in the run."""
    stored_as: str
    """Name of the field in the files; a trailing number is a level in hPa where the files have a level dimension."""
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
    variables: Annotated[list[str], Field(min_length=1)] | None = None
    """Variables of the run that this source has, at least one that is read and one that is predicted; null means all. Of
    the others nothing is learnt from it."""
    grid: str | None = None
    """Name of the grid, among model.grids, that its fields lie on; null is the model's own."""
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
        list[
            Annotated[FieldSource, BeforeValidator(lambda value: {"path": value} if isinstance(value, str) else value)]
        ],
        Field(min_length=1),
        Words("a list of at least one, each a path or a mapping with path and weight"),
    ]
    """Where the fields come from; a plain path stands for a source of weight 1. Each has some of the run's variables, on the
    model's grid or on one of model.grids; an optimizer step takes its samples from sources of one grid."""
    inputs: Annotated[list[str], Field(min_length=1)]
    """Variables the model reads, as in z500 (z at the 500 hPa level) or 2m_temperature."""
    outputs: Annotated[list[str], Field(min_length=1)] | None = None
    """Variables it predicts; null predicts the inputs."""
    static: list[str] = Field(default=[])
    """Fields without time that the model reads too, after the inputs: orography, land-sea mask."""
    forcings: list[Forcing] = Field(default=[])
    """Fields that the model reads too, after the static ones, computed for the time that is predicted: insolation at the
    top of the atmosphere, cosine and sine of the local solar time, and of the time of year."""
    history: States = 1
    """States of the inputs that the model reads for one sample, the newest and those before it."""
    history_hours: Hours | None = None
    """Hours between these states; null means rollout_hours, without it the shortest lead time."""
    lead_hours: Annotated[
        Hours | Annotated[list[Hours], Field(min_length=1)] | LeadRange,
        Words("hours, a list of hours, or a mapping with first, last and step"),
    ]
    """Hours from input to target; of several, each sample draws one at random."""
    rollout_hours: Hours | None = None
    """Lead time of one step of a roll-out, for fine-tuning: every lead time is then made of such steps, each starting from
    the one before, and the last one learns; null predicts every lead time in one step."""
    rollout_steps: Annotated[
        Annotated[RolloutSteps, BeforeValidator(_constant_steps)] | None,
        Words("steps, or a mapping with first, last and every"),
    ] = None
    """Steps of rollout_hours through which roll-outs are trained: all of them are scored, and gradients flow back through
    all. null lets the last step alone learn."""
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
    climatology_weights: Literal["equal", "linear"] = "equal"
    """Weights of these days: equal, or falling linearly from the middle to 0 at both ends, as WeatherBench 2 has them."""
    dry_thresholds: dict[str, Annotated[float, Field(ge=0.0)]] = Field(default={})
    """Predicted variables that are amounts of precipitation, each with the amount in its own unit up to which a time is dry
    (0.25 mm in WeatherBench 2): SEEPS is scored of them."""
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
        computed = next((name for name in self.target_variables if name in self.forcings), None)
        if computed is not None:
            raise ValueError(
                f"forcings names {computed}, which is among inputs or outputs; it is computed, so leave it out of these"
            )
        read = [*self.inputs, *self.static, *self.forcings]
        for field, names in (("inputs", read), ("outputs", self.target_variables)):
            twice = first_repeated(names)
            if twice is not None:
                raise ValueError(f"{field} names {twice} twice")
        _all_among(
            "dry_thresholds", tuple(self.dry_thresholds), "the predicted variables", tuple(self.target_variables)
        )
        return self

    @model_validator(mode="after")
    def _history_fits(self) -> FieldData:
        if self.history == 1 and self.history_hours is not None:
            raise ValueError(f"history_hours={self.history_hours} has no effect with history=1; set it to null")
        if self.history > 1 and self.rollout_hours is not None and self.state_hours != self.rollout_hours:
            raise ValueError(
                f"history_hours={self.history_hours} differs from rollout_hours={self.rollout_hours}, after which a "
                "roll-out reads its own forecast as the newest state; set history_hours to null"
            )
        if self.rollout_steps is not None and self.rollout_hours is None:
            raise ValueError("rollout_steps has no effect without rollout_hours; give the hours of one step")
        return self

    @model_validator(mode="after")
    def _sources_have_variables(self) -> FieldData:
        wanted = list(dict.fromkeys([*self.inputs, *self.target_variables]))
        for source in self.sources:
            if source.variables is None:
                continue
            _no_repeats(f"variables of {source.path}", tuple(source.variables))
            _all_among(f"variables of {source.path}", tuple(source.variables), "inputs and outputs", tuple(wanted))
            for field, names in (("inputs", self.inputs), ("outputs", self.target_variables)):
                if not set(names) & set(source.variables):
                    raise ValueError(f"source {source.path} has none of the {field}, so nothing can be learnt from it")
        if all(source.variables is not None for source in self.sources):
            had = {name for source in self.sources for name in source.variables or ()}
            _all_among("inputs and outputs", tuple(wanted), "the variables of any source", tuple(had))
        return self

    @property
    def target_variables(self) -> list[str]:
        """Return the variables predicted, the default resolved."""
        return self.inputs if self.outputs is None else self.outputs

    @property
    def state_hours(self) -> int:
        """Return the hours between two states that the model reads, the default resolved."""
        return self.history_hours or self.rollout_hours or min(self.leads)

    @property
    def steps_to_leads(self) -> int:
        """Return the steps of a roll-out to the longest lead time; 1 without roll-outs."""
        return 1 if self.rollout_hours is None else max(self.leads) // self.rollout_hours

    @property
    def leads(self) -> list[int]:
        """Return the lead times in hours, ascending."""
        if isinstance(self.lead_hours, LeadRange):
            return list(range(self.lead_hours.first, self.lead_hours.last + 1, self.lead_hours.step))
        # Ascending, as the columns of windows are.
        return [self.lead_hours] if isinstance(self.lead_hours, int) else sorted(set(self.lead_hours))


class WeatherRun(Run):
    """A run that trains a weather model."""

    model: WeatherModel
    data: FieldData

    def find_problems(self) -> Iterator[Problem]:
        """See `Run`."""
        model, data = self.model, self.data
        # The model knows fields by their places alone: the data must name its variables in its order.
        pairs = (
            (
                "inputs",
                "data.inputs, data.static and data.forcings",
                [*data.inputs, *data.static, *data.forcings],
                "model.inputs",
                model.input_names,
            ),
            ("outputs", "data.outputs", data.target_variables, "model.outputs", model.output_names),
        )
        for field, what, given, where, wanted in pairs:
            if given == list(wanted):
                continue
            place = next(
                (place for place, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b),
                min(len(given), len(wanted)),
            )
            mine, theirs = (names[place] if place < len(names) else "nothing more" for names in (given, wanted))
            yield Problem(
                ("data", field),
                f"{what} do not name the {len(wanted)} variables of {where} in their order: number {place + 1} is {mine} in "
                f"the data and {theirs} in the model",
                f"data.{field} in the order of {where}, with files' own names under data.sources",
            )
        yield from self._find_unknown_grids()
        if data.history != model.history:
            yield Problem(
                ("data", "history"),
                f"data.history={data.history} states are given to a model that reads model.history={model.history}",
                f"data.history={model.history} model.history={model.history}",
            )
        step = data.rollout_hours
        if step is not None:
            path, stated = ("data", "rollout_hours"), f"data.rollout_hours={step}"
            # A roll-out takes as many whole steps as its lead time has.
            odd = [lead for lead in data.leads if lead % step]
            if odd:
                fix = f"data.rollout_hours={math.gcd(*data.leads)}"
                yield Problem(path, f"{stated} does not divide the lead time {odd[0]}", fix)
            # The second step reads what the first one predicts.
            unpredicted = [name for name in data.inputs if name not in data.target_variables]
            if unpredicted:
                yield Problem(
                    path, f"{stated} needs all inputs predicted, but {unpredicted[0]} is not among data.outputs"
                )
            if self.layout.pp != 1:
                what = f"{stated} starts steps from forecasts, which layout.pp={self.layout.pp} has on other ranks"
                yield Problem(path, what, "layout.pp=1")
        if self.training.attention in ("flex", "flash4"):
            yield Problem(
                ("training", "attention"),
                f"training.attention={self.training.attention} is for causal attention, which model.family=weather has not",
                "training.attention=auto",
            )

    def _find_unknown_grids(self) -> Iterator[Problem]:
        known = [grid.name for grid in self.model.grids]
        for number, source in enumerate(self.data.sources):
            if source.grid is not None and source.grid not in known:
                there = ", ".join(known) or "none"
                yield Problem(
                    ("data", "sources", number, "grid"),
                    f"source {source.path} lies on grid {source.grid}, which model.grids does not name; it names {there}",
                    "one of these, or null for the model's own grid",
                )

    @property
    def grid_weights(self) -> dict[ModelGrid | None, float]:
        """Return the grids that sources lie on, in the order of the sources, with the sum of their sources' weights."""
        found: dict[ModelGrid | None, float] = {}
        for source in self.data.sources:
            grid = self.model.grid_named(source.grid)
            found[grid] = found.get(grid, 0.0) + source.weight
        return found

    @property
    def largest_grid(self) -> ModelGrid | None:
        """Return that of the grids in use whose samples have the most tokens."""
        return max(self.grid_weights, key=lambda grid: self.model.on_grid(grid).n_tokens)

    @property
    def largest_model(self) -> WeatherModel:
        """Return the model on `largest_grid`."""
        return self.model.on_grid(self.largest_grid)

    @property
    def data_names(self) -> list[str]:
        """See `Run`."""
        return [source.path for source in self.data.sources]


FAMILY = Family(
    name="weather",
    run=WeatherRun,
    bound="phalanx.families.weather.bound:BoundWeather",
    sizes="phalanx.families.weather.sizes",
    presets=Path(__file__).with_name("presets"),
    start=Path(__file__).with_name("start.yaml"),
)
"""The weather family as run files know it."""
